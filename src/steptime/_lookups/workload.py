"""What the ranks of a workload look up in one iteration after the other, so that a step's time is a distribution.

`StepLookups` are the statistics of every table in every iteration, `RankLookups` those of a rank with how it looks them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from steptime._lookups import saved
from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics, table_statistics
from steptime.errors import InputError

SCHEMA_VERSION = 1

TABLE_BATCHED, EMBEDDING_BAG, FBGEMM = "table_batched", "embedding_bag", "fbgemm"
# `nn.EmbeddingBag` (sparse and dense gradients), `nn.Embedding` (the same), and all tables of a rank in one launch: by the
# project's own kernels, or by FBGEMM's split table-batched embeddings.
IMPLEMENTATIONS = (TABLE_BATCHED, EMBEDDING_BAG, "embedding_bag_dense", "embedding_sparse", "embedding_dense", FBGEMM)
TOGETHER = (TABLE_BATCHED, FBGEMM)
"""Those that look up all tables of a rank in one launch."""

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
OPTIMIZERS = ("none", "sgd", "adagrad", "rowwise_adagrad", "adam")
STATE_PER_WEIGHT = {"adagrad": 1, "adam": 2}
"""Numbers that an optimiser keeps for every weight; row-wise Adagrad keeps one for every row, SGD none."""

STATE_BYTES = 4
"""Of each, whatever the type of the rows."""

# Each row of 8-bit weights has a scale and a bias (FBGEMM, fbgemm_gpu/split_table_batched_embeddings_ops_common.py,
# INT8_EMB_ROW_DIM_OFFSET).
_OF_ROW_BYTES = {"int8": 8}
DENSE = "dense"
"""In place of an optimiser: the backward pass leaves a gradient of all rows, and ops of the program update them."""


def row_bytes(dim: int, dtype: str) -> int:
    """Bytes of a row of so many elements."""
    return dim * ITEM_BYTES[dtype] + _OF_ROW_BYTES.get(dtype, 0)


def state_bytes(rows: int, dim: int, optimizer: str) -> int:
    """Of an optimiser's state for a table."""
    per_row = 1 if optimizer == "rowwise_adagrad" else STATE_PER_WEIGHT.get(optimizer, 0) * dim
    return STATE_BYTES * rows * per_row


_Made = TypeVar("_Made")
_TEXTS = ("implementation", "optimizer", "dtype")
_FIELDS = {*_TEXTS, "weighted", "steps"}
_THEN = "then"


@dataclass(frozen=True, slots=True)
class StepLookups:
    """Statistics of the same tables, in the same order, in one iteration after the other."""

    steps: tuple[tuple[TableStatistics, ...], ...]  # [iterations][tables]

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError("Step lookups: no iteration; expected at least one.")
        expected = _tables(self.steps[0])
        names = [name for name, _, _ in expected]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise InputError(f"Step lookups: table {double} is there twice; expected every name once.")
        for index, step in enumerate(self.steps):
            result = _tables(step)
            if result != expected:
                odd = next(
                    (pair for pair in zip(result, expected, strict=False) if pair[0] != pair[1]), (len(result), len(expected))
                )
                raise InputError(f"Step lookups: iteration {index} has the table {odd[0]} where iteration 0 has {odd[1]}.")
            if len({table.batch for table in step}) > 1:
                batches = sorted({table.batch for table in step})
                raise InputError(
                    f"Step lookups: iteration {index} has tables of batch {batches[0]} and {batches[-1]}; expected one."
                )

    @property
    def tables(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(table.table for table in self.steps[0])

    @property
    def iterations(self) -> int:
        """How many there are."""
        return len(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"schema_version": SCHEMA_VERSION, "steps": [[saved.to_dict(table) for table in step] for step in self.steps]}

    @classmethod
    def from_dict(cls, values: Any, where: str = "Step lookups") -> StepLookups:
        """What `to_dict` gave; `where` is said in errors."""
        if not isinstance(values, dict) or set(values) != {"schema_version", "steps"}:
            raise InputError(f"{where}: expected a JSON object with schema_version and steps.")
        if values["schema_version"] != SCHEMA_VERSION:
            raise InputError(f"{where}: schema_version is {values['schema_version']!r}; this release reads {SCHEMA_VERSION}.")
        steps = values["steps"]
        if not isinstance(steps, list) or not all(isinstance(step, list) for step in steps):
            raise InputError(f"{where}: steps are not lists of tables; expected one list for every iteration.")
        return cls(
            tuple(
                tuple(saved.from_dict(table, f"{where}, iteration {i}, table {t}") for t, table in enumerate(step))
                for i, step in enumerate(steps)
            )
        )


@dataclass(frozen=True, slots=True)
class RankLookups:
    """The lookups of one rank: how they are done, and the statistics of its tables in every iteration."""

    implementation: str
    optimizer: str  # that updates the rows; `DENSE` where ops of the program do
    steps: StepLookups
    dtype: str = "float32"  # of the rows
    weighted: bool = False  # per-sample weights
    then: tuple[RankLookups, ...] = ()  # further lookups of the same step, after these

    def __post_init__(self) -> None:
        if not self.steps.tables:
            raise InputError("Lookups of a rank: no table; expected at least one.")
        choices = (
            ("implementation", self.implementation, IMPLEMENTATIONS),
            ("optimizer", self.optimizer, (*OPTIMIZERS[1:], DENSE)),
            ("dtype", self.dtype, tuple(ITEM_BYTES)),
        )
        for name, value, expected in choices:
            if value not in expected:
                raise InputError(f"Lookups of a rank: {name} is {value!r}; expected {expected}.")


@dataclass(frozen=True, slots=True)
class WorkloadLookups:
    """Which rank looks up what. Iteration i is the same step of the job on every rank."""

    ranks: Mapping[int, RankLookups]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise InputError("Lookups of a workload: no rank; expected at least one.")
        first, *others = sorted(self.ranks)
        for rank in others:
            result, expected = (self.ranks[item].steps.iterations for item in (rank, first))
            if result != expected:
                raise InputError(
                    f"Lookups of a workload: rank {rank} has {result} iterations where rank {first} has {expected}; "
                    "expected the same iterations of every rank."
                )

    @property
    def iterations(self) -> int:
        """How many there are."""
        return next(iter(self.ranks.values())).steps.iterations

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ranks = [{"rank": rank, **_plain(lookups)} for rank, lookups in sorted(self.ranks.items())]
        return {"schema_version": SCHEMA_VERSION, "ranks": ranks}

    @classmethod
    def from_dict(cls, values: Any, where: str = "Lookups of a workload") -> WorkloadLookups:
        """What `to_dict` gave; `where` is said in errors."""
        if not isinstance(values, dict) or set(values) != {"schema_version", "ranks"}:
            raise InputError(f"{where}: expected a JSON object with schema_version and ranks.")
        version = values["schema_version"]
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise InputError(f"{where}: schema_version is {version!r}; this release reads {SCHEMA_VERSION}.")
        if not isinstance(values["ranks"], list):
            raise InputError(
                f"{where}: ranks is {type(values['ranks']).__name__}; expected a list of objects, one for every rank."
            )
        result: dict[int, RankLookups] = {}
        for index, entry in enumerate(values["ranks"]):
            rank, lookups = _rank(entry, f"{where}, ranks[{index}]", where)
            if rank in result:
                raise InputError(f"{where}, ranks[{index}]: rank {rank} is there twice; expected every rank once.")
            result[rank] = lookups
        return _placed(where, lambda: cls(result))

    def save(self, path: Path) -> None:
        """Writes JSON; compressed where the name ends in .gz."""
        saved.write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> WorkloadLookups:
        """What `save` wrote."""
        return cls.from_dict(saved.read_json(path), str(path))


def _rank(values: Any, place: str, file: str) -> tuple[int, RankLookups]:
    """One rank's entry; from where its rank is known, errors say the rank instead of its place in the list."""
    if not isinstance(values, dict):
        raise InputError(f"{place}: {type(values).__name__} found; expected a JSON object of one rank's lookups.")
    if "rank" not in values:
        raise InputError(f"{place}: 'rank' is missing; expected {sorted({'rank', *_FIELDS})}.")
    rank = values["rank"]
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise InputError(f"{place}: rank is {rank!r}; expected a whole number of 0 or more.")
    return rank, _lookups({key: value for key, value in values.items() if key != "rank"}, place, f"{file}, rank {rank}")


def _lookups(values: Any, place: str, where: str) -> RankLookups:
    then = values.get(_THEN, []) if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(then, list):
        raise InputError(f"{where}: expected JSON objects, and a list of further ones under {_THEN!r}.")
    named = set(values) - {_THEN}
    if named != _FIELDS:
        odd = sorted(named ^ _FIELDS)[0]
        raise InputError(f"{place}: {odd!r} is {'missing' if odd in _FIELDS else 'unknown'}; expected {sorted(_FIELDS)}.")
    odd = next((name for name in _TEXTS if not isinstance(values[name], str)), None)
    if odd is not None:
        raise InputError(f"{where}: {odd} is {values[odd]!r}; expected a name.")
    if not isinstance(values["weighted"], bool):
        raise InputError(f"{where}: weighted is {values['weighted']!r}; expected true or false.")
    steps = _placed(where, lambda: StepLookups.from_dict(values["steps"], where))
    given = {name: values[name] for name in (*_TEXTS, "weighted")}
    further = tuple(_lookups(group, place, where) for group in then)
    return _placed(where, lambda: RankLookups(steps=steps, then=further, **given))


def _plain(lookups: RankLookups) -> dict[str, Any]:
    values = {
        "implementation": lookups.implementation,
        "optimizer": lookups.optimizer,
        "dtype": lookups.dtype,
        "weighted": lookups.weighted,
        "steps": lookups.steps.to_dict(),
    }
    return {**values, _THEN: [_plain(group) for group in lookups.then]} if lookups.then else values


def _placed(where: str, made: Callable[[], _Made]) -> _Made:
    """What is made, or an error that begins with the place in the file: types know what is wrong, not where it stood."""
    try:
        return made()
    except InputError as error:
        text = str(error)
        raise InputError(text if text.startswith(where) else f"{where}: {text}") from None


def _tables(step: Sequence[TableStatistics]) -> list[tuple[str, int, int]]:
    return [(table.table, table.rows, table.dim) for table in step]


def drawn_steps(generators: Sequence[Generator], dims: Sequence[int], batch: int, iterations: int) -> StepLookups:
    """Statistics of what generators draw, iteration by iteration; tables are named by their place."""
    if len(generators) != len(dims):
        raise InputError(f"Step lookups: {len(generators)} generators and {len(dims)} dims; expected one dim for every table.")
    steps = []
    for iteration in range(iterations):
        drawn = (generator.bags(batch, iteration) for generator in generators)
        tables = zip(drawn, generators, dims, strict=True)
        steps.append(
            tuple(table_statistics(bags.indices, bags.offsets, g.rows, dim, f"t{t}") for t, (bags, g, dim) in enumerate(tables))
        )
    return StepLookups(tuple(steps))
