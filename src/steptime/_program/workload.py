"""`Workload`: the programs of all ranks of one job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from steptime._lookups.workload import WorkloadLookups
from steptime._program.program import Collective, Program
from steptime.errors import InputError

# Told after every block of a file that is read: the file's name, decompressed bytes of it read so far.
Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class UnnamedMemory:
    """Allocations of a rank that no op of its program names: tables that one kernel looks up together, and their state."""

    parameters: tuple[int, ...] = ()  # bytes
    optimizer_state: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """What a workload trains, as far as it is known; a recording knows little of it."""

    batch: int | None = None  # samples of all ranks in one step
    sequence: int | None = None  # tokens of a sample
    precision: str | None = None
    numerics: Mapping[str, str] | None = None  # what is computed, kept and exchanged -> in which precision
    parallelism: Mapping[str, int] | None = None  # kind -> how many ways it divides the job, where more than one
    parameters: int | None = None  # of the whole model
    active_parameters: int | None = None  # those that a token meets: all but those of experts that it is not sent to


class Rebuild(Protocol):
    """Makes the same job again with another global batch, on other ranks or with other values of a config's keys.

    None keeps what was.
    """

    def __call__(
        self, *, batch: int | None = None, ranks: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> Workload:
        """The changed job."""


CUT_OFF = "cut_off"
"""In a workload's `meta`: whether a file of it breaks off before its end."""


COMPILE = "compile"
"""In a workload's `meta`: the mode in which it is predicted as if `torch.compile` had compiled it."""


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
    lookups: WorkloadLookups | None = None  # what ranks look up in embedding tables
    unnamed: Mapping[int, UnnamedMemory] = field(default_factory=dict)  # by rank; a rank without any is left out
    description: Description = Description()
    rebuild: Rebuild | None = field(default=None, repr=False, compare=False)  # None: nothing else can be made from its source

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

    def __repr__(self) -> str:
        ops = sum(len(program.ops) for program in self.programs)
        return f"Workload({self.name!r}, {len(self.running)} of {self.world_size} ranks, {ops:,} ops)"

    @property
    def cut_off(self) -> bool:
        """Whether a file of it breaks off before its end: nobody knows what is missing, and times are of what is left."""
        return bool(self.meta.get(CUT_OFF))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a program of their own here."""
        return tuple(program.rank for program in self.programs)

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that run a program that is here, their own or another's."""
        return tuple(range(self.world_size)) if self.owners else self.ranks

    def varied(
        self, *, batch: int | None = None, ranks: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> Workload:
        """The same job with another global batch, on other ranks, or with other values of its config's keys (dotted)."""
        if batch is None and ranks is None and not settings:
            return self
        if self.rebuild is None:
            raise InputError(f"{self.name or 'the workload'}: {fixed(batch, ranks, settings)}")
        return self.rebuild(batch=batch, ranks=ranks, settings=settings)

    def save(self, path: str | Path) -> None:
        """Saves it: as one file where the path ends in `.json` or `.json.gz`, else as a folder with a file for every rank."""
        from steptime._program.formats import saved  # noqa: PLC0415 (the saved form knows workloads)

        saved.write(self, Path(path))

    def run_by(self, owner: int) -> tuple[int, ...]:
        """The ranks that run the program of this one, itself first where it does."""
        if not self.owners:
            return (owner,)
        return tuple(rank for rank, item in enumerate(self.owners) if item == owner)

    def members(self, rank: int, collective: Collective) -> tuple[int, ...]:
        """Who meets when this rank calls a collective of the program it runs."""
        return self._met(collective.group).get(rank, collective.ranks)

    def _met(self, group: str) -> Mapping[int, tuple[int, ...]]:
        """Per rank the set of a group that it is in."""
        known: dict[str, dict[int, tuple[int, ...]]] = vars(self).setdefault("_sets", {})
        if group not in known:
            known[group] = {rank: ranks for ranks in self.groups.get(group, ()) for rank in ranks}
        return known[group]

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks of the job without a program here."""
        present = set(self.running)
        return tuple(rank for rank in range(self.world_size) if rank not in present)


def fixed(batch: int | None, ranks: int | None, settings: Mapping[str, Any] | None = None) -> str:
    """Why a recording cannot be had with another batch, on other ranks or with other settings."""
    if settings:
        return f"{next(iter(settings))}: only a config has keys that can be set; give one"
    asked_for = f"batch {batch}" if batch is not None else f"ranks {ranks}"
    changed = "; --what-if 'batch * 2' predicts twice the samples of a recording" if batch is not None else ""
    return (
        f"{asked_for}: a recording or saved workload has the batch and the ranks it was made with; give a config or a function"
        f"{changed}"
    )
