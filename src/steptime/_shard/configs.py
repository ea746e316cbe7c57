"""A config file as a workload: a Transformer as it is, a DLRM with its tables placed by a plan or by a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steptime._build.config import ConfigSource, configured, read_config
from steptime._build.config_values import Overrides
from steptime._build.dlrm.config import DlrmConfig
from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.plan import TABLE_WISE, Placement, Plan
from steptime._build.dlrm.plan_files import read_plans
from steptime._build.transformer.config import Transformer
from steptime._program.workload import Workload
from steptime._shard.rules import Machine, place
from steptime.errors import InputError

# Of the published rules the one that sees rows, widths and lookups.
USUAL_RULE = "size_lookup_greedy"


def configured_in(
    source: ConfigSource,
    *,
    batch: int | None = None,
    ranks: int | None = None,
    plan: Path | None = None,
    platform_ranks: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Workload:
    """The workload of a config, with other values of its keys, on other ranks or by the plan of a file.

    A DLRM or a list of tables that says of no ranks takes all of the platform's.
    """
    return BuildConfig(source, plan, platform_ranks)(batch=batch, ranks=ranks, settings=settings)


@dataclass(frozen=True)
class BuildConfig:
    """Builds the workload of a config, with any values of its keys and on any ranks that it allows."""

    source: ConfigSource
    plan: Path | None = None
    platform_ranks: int | None = None
    batch: int | None = None
    ranks: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, *, batch: int | None = None, ranks: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> Workload:
        given = Overrides.of(self.where, batch, ranks, self.platform_ranks, settings)
        chosen = replace(
            self,
            batch=self.batch if given.batch is None else given.batch,
            ranks=self.ranks if given.ranks is None else given.ranks,
            settings={**self.settings, **given.settings},
        )
        return replace(chosen._workload(), rebuild=chosen)

    @property
    def where(self) -> str:
        """Name the config in messages."""
        return "the config" if isinstance(self.source, Mapping) else str(self.source)

    def _workload(self) -> Workload:
        config = read_config(self.source, Overrides(self.batch, self.ranks, self.platform_ranks or 1, self.settings))
        if isinstance(config, Transformer):
            if self.plan is not None:
                raise InputError(f"{self.where}: a Transformer has no tables to place; leave the plan {self.plan} out")
            return configured(config)
        if config.ranks is None:
            config = replace(config, ranks=self.platform_ranks)
        return placed(config) if self.plan is None else _by_file(config, self.plan)


def _by_file(config: DlrmConfig, file: Path) -> Workload:
    values = next(iter(read_plans(file).values()))
    plan = Plan.from_dict(values, config.model.tables, config.ranks or 1, f"{file}: the plan")
    return _noted(config, config.workload(plan))


def placed(config: DlrmConfig, ranks: int | None = None) -> Workload:
    """A DLRM with its tables on ranks: by its own plan where that is for so many, else by its rule or the usual one."""
    count = ranks or config.ranks or 1
    if config.plan is not None and count == config.ranks:
        return _noted(config, config.workload())
    moved = replace(config, ranks=count, plan=None)
    if count == 1:
        return _noted(config, moved.workload())
    constraints, rule = config.constraints or Constraints(), config.rule or USUAL_RULE
    constraints.check_ranks(count, config.model.name)
    by_rule = place(rule, config.model.tables, Machine(count))
    pinned = {name: Placement(TABLE_WISE, (rank,)) for name, rank in constraints.pinned.items()}
    plan = Plan(count, {name: pinned.get(name, by_rule.placements[name]) for name in by_rule.placements})
    why = "" if config.rule else f", as its config has no plan for {count} ranks"
    note = f"{config.model.name}: tables are placed by the rule {rule}{why}; `steptime shard` searches for a faster plan"
    return _noted(config, moved.workload(plan), note)


def _noted(config: DlrmConfig, built: Workload, *notes: str) -> Workload:
    """With what was taken for granted among the workload's warnings."""
    return replace(built, warnings=(*built.warnings, *config.notes, *(doubt.assumption for doubt in config.doubts), *notes))
