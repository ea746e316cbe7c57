"""A variant as a config file: the values of its file with what was changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steptime._build.config import read_config
from steptime._build.config_values import Overrides, read_json, read_toml
from steptime._build.dlrm.config import keys as dlrm_keys
from steptime._build.settings import applied
from steptime._build.transformer.config import Transformer
from steptime._explore.subject import Subject, Values
from steptime._plan.files import toml_text
from steptime._shard.configs import BuildConfig
from steptime.errors import InputError


def config_text(subject: Subject, given: Values) -> str:
    """The config of a variant as TOML; how to predict it is said in its first line."""
    values = subject.checked(given)
    build = subject.built(values).rebuild
    if not isinstance(build, BuildConfig):
        raise InputError("a recording, script or function has no config; copy the command instead")
    comment = f"Predicted by: {subject.command(values)}"
    return toml_text(_values(build), comment)


def without_config(subject: Subject) -> str:
    """Why there is no config of what is explored; empty where there is one."""
    try:
        config_text(subject, {})
    except InputError as error:
        return str(error)
    return ""


def _values(build: BuildConfig) -> dict[str, Any]:
    overrides = Overrides(build.batch, build.ranks, build.platform_ranks or 1, build.settings)
    config, source = read_config(build.source, overrides), build.source
    if isinstance(config, Transformer):
        return config.to_dict()
    read: Any = source
    if isinstance(source, Path) and source.suffix != ".csv":
        read = read_toml(source) if source.suffix == ".toml" else read_json(source, "a DLRM config")
    if not isinstance(read, Mapping):
        raise InputError(f"{source}: a list of tables has no keys to write; copy the command instead")
    values = applied(read, build.settings, dlrm_keys(), build.where)
    for key, value in (("batch", build.batch), ("ranks", build.ranks)):
        if value is not None:
            values[key] = value
    if build.plan is not None:
        values["plan"] = str(build.plan.resolve())
    elif build.ranks is not None:
        values.pop("plan", None)  # it was for other ranks
    return values
