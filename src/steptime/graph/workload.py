"""`Workload`: the programs of all ranks of one job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steptime.errors import InputError
from steptime.graph.program import Program


@dataclass(frozen=True)
class Workload:
    """The programs of the ranks at hand, by rank. `absent` ranks exist in the job but have no program here."""

    programs: tuple[Program, ...]
    world_size: int
    name: str = ""
    warnings: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = [program.rank for program in self.programs]
        if not ranks:
            raise InputError("a workload needs at least one program, got none")
        if sorted(set(ranks)) != ranks:
            raise InputError(f"ranks of a workload must be distinct and sorted, got {ranks}")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a program here."""
        return tuple(program.rank for program in self.programs)

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks of the job without a program here."""
        present = set(self.ranks)
        return tuple(rank for rank in range(self.world_size) if rank not in present)
