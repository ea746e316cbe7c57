"""A config file as a workload: a Transformer as it is, a DLRM with its tables placed by its plan or by a rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from steptime._build.config import Config, configured, read_config
from steptime._build.dlrm.config import DlrmConfig
from steptime._build.transformer.config import Transformer
from steptime._program.workload import Workload
from steptime._shard.rules import Machine, place
from steptime.errors import InputError

# Of the published rules the one that sees rows, widths and lookups.
USUAL_RULE = "size_lookup_greedy"


def configured_in(path: Path, *, batch: int | None = None, ranks: int | None = None) -> Workload:
    """The workload of the config in a file, with another global batch or on other ranks where these are given."""
    return BuildConfig(read_config(path))(batch=batch, ranks=ranks)


@dataclass(frozen=True)
class BuildConfig:
    """Builds the workload of a config, with any global batch and on any ranks that it allows."""

    config: Config

    def __call__(self, *, batch: int | None = None, ranks: int | None = None) -> Workload:
        for name, value in (("batch", batch), ("ranks", ranks)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; expected 1 or more")
        config = self.config
        if isinstance(config, Transformer):
            return replace(configured(_changed(config, batch, ranks)), rebuild=self)
        model = config.model if batch is None else config.model.with_batch(batch)
        return replace(placed(replace(config, model=model), ranks), rebuild=self)


def placed(config: DlrmConfig, ranks: int | None = None) -> Workload:
    """A DLRM with its tables on ranks: by its own plan where that is for so many, else by its rule or the usual one."""
    count = config.ranks if ranks is None else ranks
    if config.plan is not None and count == config.ranks:
        return config.workload()
    moved = replace(config, ranks=count, plan=None)
    if count == 1:
        return moved.workload()
    rule = config.rule or USUAL_RULE
    found = moved.workload(place(rule, config.model.tables, Machine(count)).to_dict())
    why = "" if config.rule else f", as its config has no plan for {count} ranks"
    said = f"{config.model.name}: tables are placed by the rule {rule}{why}; `steptime shard` searches for a faster plan"
    return replace(found, warnings=(*found.warnings, said))


def _changed(config: Transformer, batch: int | None, ranks: int | None) -> Transformer:
    if ranks is None:
        return config if batch is None else config.with_batch(batch)
    # By way of a batch that both rank counts divide: the config as it ends up is what has to add up.
    between = config.with_batch(config.batch * ranks).with_ranks(ranks)
    return replace(config, batch=config.batch if batch is None else batch, parallel=between.parallel)
