"""`Task`: a model whose tables are to be divided over ranks, and what a plan must respect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from steptime._build.dlrm.model import Dlrm, Table
from steptime._shard.plan.kind_names import KINDS, TABLE_WISE, USUAL_KINDS
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Constraints:
    """What every plan must respect. Without `memory_bytes` a rank has what its device has."""

    memory_bytes: int | None = None  # of one rank
    pinned: Mapping[str, int] = field(default_factory=dict)  # table -> rank, whole
    kinds: tuple[str, ...] = USUAL_KINDS  # allowed for tables that `kinds_of` does not name
    kinds_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def allowed(self, table: str) -> tuple[str, ...]:
        """Kinds that a table may be divided by; a pinned one stays whole."""
        return (TABLE_WISE,) if table in self.pinned else self.kinds_of.get(table, self.kinds)


@dataclass(frozen=True, slots=True)
class Doubt:
    """A value that the input left open: what was taken, and the model if it were otherwise."""

    said: str
    otherwise: str
    model: Dlrm


@dataclass(frozen=True, slots=True)
class Task:
    """A model on so many ranks."""

    model: Dlrm
    ranks: int
    constraints: Constraints = field(default_factory=Constraints)
    notes: tuple[str, ...] = ()  # what was taken for granted
    doubts: tuple[Doubt, ...] = ()

    def __post_init__(self) -> None:
        where = self.model.name
        if self.ranks < 1 or self.model.batch % self.ranks:
            raise InputError(
                f"{where}: a batch of {self.model.batch} cannot be split evenly over {self.ranks} ranks; "
                "give a multiple of the ranks, or other ranks"
            )
        _check_names(self)
        for name, rank in self.constraints.pinned.items():
            if not 0 <= rank < self.ranks:
                raise InputError(f"{where}: table {name!r} is pinned to rank {rank}; expected 0 to {self.ranks - 1}")

    @property
    def tables(self) -> tuple[Table, ...]:
        """The model's."""
        return self.model.tables

    def on(self, ranks: int) -> Task:
        """The same on other ranks."""
        return replace(self, ranks=ranks)

    def allowed(self, place: int) -> tuple[str, ...]:
        """Kinds for the table in this place; vectors that interact by `dot` come whole, for nothing else is modelled."""
        found = self.constraints.allowed(self.tables[place].name)
        return found if self.model.interaction != "dot" else tuple(kind for kind in found if kind == TABLE_WISE)


def _check_names(task: Task) -> None:
    """Every table once; constraints are of tables that are there and kinds that exist."""
    seen: set[str] = set()
    for table in task.tables:
        if table.name in seen:
            raise InputError(f"{task.model.name}: table {table.name!r} is there twice; expected every name once")
        seen.add(table.name)
    given = task.constraints
    for what, names in (("pinned", given.pinned), ("kinds_of", given.kinds_of)):
        odd = next((name for name in names if name not in seen), None)
        if odd is not None:
            raise InputError(f"{task.model.name}, constraints.{what}: {odd!r} is no table of the task")
    for kinds in (given.kinds, *given.kinds_of.values()):
        odd = next((kind for kind in kinds if kind not in KINDS), None)
        if odd is not None or not kinds:
            raise InputError(f"{task.model.name}, constraints: kind {odd!r}; expected one or more of {', '.join(KINDS)}")
    for name in given.pinned:
        if TABLE_WISE not in given.kinds_of.get(name, (TABLE_WISE,)):
            raise InputError(f"{task.model.name}: table {name!r} is pinned and may not be {TABLE_WISE}; drop one of the two")
    if task.model.interaction == "dot":
        odd = next((table.name for place, table in enumerate(task.tables) if not task.allowed(place)), None)
        if odd is not None:
            raise InputError(
                f'{task.model.name}: table {odd!r} may not be {TABLE_WISE}, and interaction "dot" is modelled for whole tables '
                'only; allow it, or interaction = "cat"'
            )
