"""A variant as a config file: the values of its file with what was changed in place."""

from __future__ import annotations

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
    config = read_config(build.path, overrides)
    if isinstance(config, Transformer):
        return config.to_dict()
    if build.path.suffix == ".csv":
        raise InputError(f"{build.path}: a list of tables has no keys to write; copy the command instead")
    read = read_toml(build.path) if build.path.suffix == ".toml" else read_json(build.path, "a DLRM config")
    if not isinstance(read, dict):
        raise InputError(f"{build.path}: a list of tables has no keys to write; copy the command instead")
    values = applied(read, build.settings, dlrm_keys(), str(build.path))
    for key, value in (("batch", build.batch), ("ranks", build.ranks)):
        if value is not None:
            values[key] = value
    if build.plan is not None:
        values["plan"] = str(build.plan.resolve())
    elif build.ranks is not None:
        values.pop("plan", None)  # it was for other ranks
    return values
