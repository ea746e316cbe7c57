"""`read_config`: a model from a `.toml` file, of whichever kind it says it is; `configured`: its workload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from steptime._build.config_values import Values, read_toml
from steptime._build.dlrm.model import KIND as DLRM
from steptime._build.dlrm.config import DlrmConfig, dlrm_of
from steptime._build.transformer.build import build
from steptime._build.transformer.config import KIND as TRANSFORMER
from steptime._build.transformer.config import Transformer, read_transformer
from steptime._program.workload import Workload
from steptime.errors import InputError

Config = DlrmConfig | Transformer


def read_config(path: Path) -> Config:
    """The model in a file. One that does not say what it is, is a DLRM if it has tables and a Transformer if it has layers."""
    values = read_toml(path)
    evident = DLRM if "tables" in values else TRANSFORMER if "layers" in values else ""
    if "kind" not in values and not evident:
        raise InputError(f'{path}: \'kind\' is missing; expected kind = "{DLRM}" or kind = "{TRANSFORMER}"')
    kind = Values(values, str(path)).choice("kind", (DLRM, TRANSFORMER), evident)
    return dlrm_of(values, str(path), path.parent) if kind == DLRM else read_transformer(path)


def configured(config: Config, plan: Mapping[str, int] | None = None) -> Workload:
    """The workload of a model; a plan says where a DLRM's tables go and goes before the config's own."""
    if isinstance(config, DlrmConfig):
        return config.workload(plan)
    if plan is not None:
        raise InputError(f"{config.title}: a plan of tables was given, and a {TRANSFORMER} has none; leave it out")
    return build(config)

