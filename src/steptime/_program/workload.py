"""`Workload`: the programs of all ranks of one job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steptime._program.program import Collective, Program
from steptime.errors import InputError


@dataclass(frozen=True)
class Workload:
    """The programs of the ranks at hand, by rank. `absent` ranks exist in the job but have no program here.

    Ranks that do the same share one program: `owners` says for every rank of the job whose it runs, and is empty where each
    runs its own. Then the members of a collective are those of the owner's group for the owner alone; for the others
    `groups` has them: per name of a group, the sets of ranks that meet under it, each rank in one of them at most.
    """

    programs: tuple[Program, ...]
    world_size: int
    name: str = ""
    warnings: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    owners: tuple[int, ...] = ()
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = [program.rank for program in self.programs]
        if not ranks:
            raise InputError("a workload needs at least one program, got none")
        if sorted(set(ranks)) != ranks:
            raise InputError(f"ranks of a workload must be distinct and sorted, got {ranks}")
        if self.owners and (len(self.owners) != self.world_size or set(self.owners) != set(ranks)):
            raise InputError(
                f"owners of a workload name {len(self.owners)} ranks and the programs of {len(set(self.owners))}; "
                f"expected {self.world_size} ranks and the programs of {len(ranks)}"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a program of their own here."""
        return tuple(program.rank for program in self.programs)

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that run a program that is here, their own or another's."""
        return tuple(range(self.world_size)) if self.owners else self.ranks

    def run_by(self, owner: int) -> tuple[int, ...]:
        """The ranks that run the program of this one, itself first where it does."""
        if not self.owners:
            return (owner,)
        return tuple(rank for rank, one in enumerate(self.owners) if one == owner)

    def members(self, rank: int, collective: Collective) -> tuple[int, ...]:
        """Who meets when this rank calls a collective of the program it runs."""
        found = next((some for some in self.groups.get(collective.group, ()) if rank in some), None)
        return collective.ranks if found is None else found

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks of the job without a program here."""
        present = set(self.running)
        return tuple(rank for rank in range(self.world_size) if rank not in present)
