"""`Configured`: what a config gives: a workload with what its ranks look up, and the same with one thing changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from steptime._build.dlrm.step_lookups import WorkloadLookups
from steptime._program.workload import Workload


@dataclass(frozen=True, slots=True)
class UnnamedMemory:
    """Allocations of a rank that no op of its program names: tables that one kernel looks up together, and their state."""

    parameters: tuple[int, ...] = ()  # bytes
    optimizer_state: tuple[int, ...] = ()


class Rebuild(Protocol):
    """Builds the same config again with one thing changed; None keeps what was."""

    def __call__(
        self, *, batch: int | None = None, ranks: int | None = None, plan: Mapping[str, int] | None = None
    ) -> Configured:
        """The changed one."""


@dataclass(frozen=True)
class Configured:
    """A workload that was never run. `lookups` is None where nothing is looked up in tables."""

    workload: Workload
    rebuild: Rebuild
    batch: int  # global
    lookups: WorkloadLookups | None = None
    unnamed: Mapping[int, UnnamedMemory] = field(default_factory=dict)  # by rank; a rank without any is left out
    warnings: tuple[str, ...] = ()

    def with_batch(self, batch: int) -> Configured:
        """The same on another global batch."""
        return self.rebuild(batch=batch)

    def with_ranks(self, ranks: int, plan: Mapping[str, int] | None = None) -> Configured:
        """The same global batch on so many ranks; a plan says where tables go, if there are any."""
        return self.rebuild(ranks=ranks, plan=plan)
