"""`read_config`: a model from a file or a mapping, of whichever kind it is; `configured`: its workload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steptime._build.config_values import Overrides, Values, read_json, read_text, read_toml
from steptime._build.dlrm.config import DlrmConfig, dlrm_of
from steptime._build.dlrm.model import KIND as DLRM
from steptime._build.dlrm.plan import Plan
from steptime._build.dlrm.table_lists import listed_tables, torchrec_tables
from steptime._build.transformer.build import build
from steptime._build.transformer.config import KIND as TRANSFORMER
from steptime._build.transformer.config import Transformer, with_overrides
from steptime._program.workload import Workload
from steptime.errors import InputError

Config = DlrmConfig | Transformer
ConfigSource = Path | Mapping[str, Any]
"""A config's file, or its keys and values as they would stand in one."""


def read_config(source: ConfigSource, overrides: Overrides | None = None) -> Config:
    """Read a model. One that does not say its kind is a DLRM if it has tables and a Transformer if it has layers."""
    overrides = overrides or Overrides()
    if isinstance(source, Mapping):
        return _config_of(source, "the config", "config", Path(), overrides)
    if source.suffix != ".toml":
        return read_dlrm_config(source, overrides)
    return _config_of(read_toml(source), str(source), source.stem, source.parent, overrides)


def _config_of(values: Mapping[str, Any], where: str, name: str, folder: Path, overrides: Overrides) -> Config:
    evident = DLRM if "tables" in values else TRANSFORMER if "layers" in values else ""
    if "kind" not in values and not evident:
        raise InputError(f'{where}: \'kind\' is missing; expected kind = "{DLRM}" or kind = "{TRANSFORMER}"')
    if Values(values, where).choice("kind", (DLRM, TRANSFORMER), evident) == DLRM:
        return dlrm_of(values, where, folder, overrides)
    return Transformer.from_dict(with_overrides({"name": name, **values}, overrides, where), where)


def read_dlrm_config(path: Path, overrides: Overrides) -> DlrmConfig:
    """A DLRM from a `.toml` or `.json` config, a CSV of tables, or a TorchRec `EmbeddingBagCollection` as JSON."""
    if path.suffix == ".csv":
        _check_unset(path, overrides)
        return listed_tables(read_text(path, "a list of tables"), str(path), overrides)
    if path.suffix == ".toml":
        values: Any = read_toml(path)
        if values.get("kind") == TRANSFORMER or ("layers" in values and "tables" not in values):
            raise InputError(f"{path}: a {TRANSFORMER} has no tables to place; `steptime plan` searches for its layout")
        return dlrm_of(values, str(path), path.parent, overrides)
    if path.suffix != ".json":
        script = ", or `steptime predict` for a script" if path.suffix == ".py" else ""
        raise InputError(
            f"{path}: no config by its name; expected a .toml or .json config, a .csv of tables, or TorchRec's .json{script}"
        )
    values = read_json(path, "a DLRM config or a list of tables, see docs/sharding.md")
    tables = values.get("tables") if isinstance(values, dict) else values
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path}: no list of tables; expected a DLRM config, or the tables of an EmbeddingBagCollection")
    if any("num_embeddings" in table for table in tables):
        _check_unset(path, overrides)
        return torchrec_tables(tables, str(path), overrides)
    if not isinstance(values, dict):
        raise InputError(f"{path}: a list of tables without num_embeddings; expected those of an EmbeddingBagCollection")
    return dlrm_of(values, str(path), path.parent, overrides)


def _check_unset(path: Path, overrides: Overrides) -> None:
    """Refuses settings of a list of tables, which has no keys."""
    if overrides.settings:
        raise InputError(
            f"{path}: {next(iter(overrides.settings))!r} is set, and a list of tables has no keys but batch and ranks; "
            "use a config (.toml or .json)"
        )


def configured(config: Config, plan: Plan | Mapping[str, Any] | None = None) -> Workload:
    """The workload of a model; a plan says where a DLRM's tables go and goes before the config's own."""
    if isinstance(config, DlrmConfig):
        return config.workload(plan)
    if plan is not None:
        raise InputError(f"{config.title}: a plan of tables was given, and a {TRANSFORMER} has none; leave it out")
    return build(config)
