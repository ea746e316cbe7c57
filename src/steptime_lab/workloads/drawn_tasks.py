"""Random DLRM tasks, drawn from seeds: those of the step study, and those of the sharding study.

Step tasks follow the published ones, scaled to a quarter of a large GPU: steps of 3 to 40 ms. Published: 20 tasks a platform,
for each of two populations 5 *heavy* (only tables with at least 20 lookups a sample) and then 5 *ordinary* ones (any table
with lookups); 13 * N * 0.7 to 13 * N * 1.3 tables on N ranks.

On sharding tasks the usual rules really differ: lookups are about half of the step or more, and tables are unequal.
Table-batched lookups, long bags, small dims (the wire carries dims, the lookup reads dims times bag length), large batches
and small dense layers. Two families: `unequal` tables, a few of them giants; and tables of `equal` load (dim times
pooling factor, nearly equal size), some uniform over millions of rows and others with little but a few thousand hot
rows, to which rules that count elements or bytes are blind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TypeVar

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.generators import LENGTHS, Generator
from steptime._lookups.populations import PRODUCTION_2021, PRODUCTION_2022, Population

T = TypeVar("T")

HEAVY = 20.0
"""Lookups a sample from which a table is heavy."""

MOST_BYTES_PER_RANK = 2 << 30
"""Of tables, if they were split evenly: a task that comes out larger is drawn again."""

_LOCALITIES = (0.0, 0.0, 0.1, 0.3, 0.6)

# Of step tasks.
_MOST_POOLING = 200.0  # a longer bag alone would make a step of the testbed too long
_LEAST_POOLING = 0.05
_ROWS = (1e3, 5e6)
_DIMS = (16, 32, 64, 128)

RANKS = 4
TASKS = 40

_BATCHES = (8192, 12288, 16384, 24576, 32768)
_LOOKUPS_PER_RANK = 10e6
"""Of one step, at most: some 12 ms of a quarter H200, where a lookup forward and backward with its sort took 1.6 ns with SGD
(four times the 0.4 ns of the whole GPU, 2026-11-15)."""

_SEED = 4000


class Draws:
    """Draws from one seed. Only `Random.random` is behind them: Python promises that it never changes."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def uniform(self, low: float, high: float) -> float:
        """Between two ends."""
        return low + (high - low) * self._random.random()

    def log_uniform(self, low: float, high: float) -> float:
        """Between two ends, every factor equally likely."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def count(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, values: Sequence[T]) -> T:
        """One of several."""
        return values[int(self._random.random() * len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """All of them, in any order."""
        return sorted(values, key=lambda _: self._random.random())

    def seed(self) -> int:
        """For something that draws by itself."""
        return int(self._random.random() * (1 << 31))

    def stream(self, population: Population, rows: tuple[float, float], pooling: tuple[float, float]) -> Generator:
        """Lookups of a table: pooling and skew from a population, the first within its ends; rows log-uniform."""
        drawn = population.table([self._random.random() for _ in range(4)])
        while not pooling[0] <= drawn.pooling <= pooling[1]:
            drawn = population.table([self._random.random() for _ in range(4)])
        return Generator(
            rows=round(self.log_uniform(*rows)),
            pooling=drawn.pooling,
            lengths=self.pick(LENGTHS),
            kind=drawn.kind,
            alpha=drawn.alpha,
            shift=drawn.shift,
            locality=self.pick(_LOCALITIES),
            seed=self.seed(),
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """What is chosen for a task, not drawn."""

    heavy: bool
    lookup: str = "table_batched"
    optimizer: str = "sgd"
    interaction: str = "cat"  # `dot` makes all dims equal
    loss: str = "bce"
    population: Population = PRODUCTION_2021


def step_batches(ranks: int) -> tuple[int, ...]:
    """Global batch sizes that every step task is measured at: from host-bound to GPU-bound."""
    return tuple(ranks * local for local in (256, 512, 1024, 2048))


@cache
def step_tasks(ranks: int) -> tuple[Dlrm, ...]:
    """The 20 tasks of the step study: both lookups, optimisers and interactions among heavy and ordinary ones."""
    return tuple(random_task(seed, _variant(seed), ranks) for seed in range(20))


def random_task(seed: int, variant: Variant, ranks: int) -> Dlrm:
    """The task of a seed; the same arguments always give the same task."""
    draws = Draws(seed * 1000 + ranks)
    model = _drawn(f"task{seed:02d}-{'heavy' if variant.heavy else 'ordinary'}", draws, variant, ranks)
    while sum(table.nbytes for table in model.tables) > MOST_BYTES_PER_RANK * ranks:
        model = _drawn(model.name, draws, variant, ranks)
    return model


def _variant(number: int) -> Variant:
    """Groups of five: 2021 heavy, 2021 ordinary, 2022 heavy, 2022 ordinary; the other choices alternate within."""
    group, place = divmod(number, 5)
    batched = (number + group // 2) % 2 == 0
    return Variant(
        heavy=group % 2 == 0,
        lookup="table_batched" if batched else "embedding_bag",
        optimizer="rowwise_adagrad" if place in (2, 3) else "sgd",
        interaction="dot" if place in (1, 4) else "cat",
        loss="mse" if place == 4 else "bce",
        population=PRODUCTION_2021 if group < 2 else PRODUCTION_2022,
    )


def _drawn(name: str, draws: Draws, variant: Variant, ranks: int) -> Dlrm:
    # One `nn.EmbeddingBag` per table: with the published number of them every step would be bound by its host.
    ends = (int(13 * ranks * 0.7), int(13 * ranks * 1.3) - 1) if variant.lookup == "table_batched" else (8, 20)
    count = draws.count(*ends)
    dims = [draws.pick(_DIMS)] * count if variant.interaction == "dot" else [draws.pick(_DIMS) for _ in range(count)]
    pooling = (HEAVY if variant.heavy else _LEAST_POOLING, _MOST_POOLING)
    tables = tuple(Table(f"t{i:02d}", dim, draws.stream(variant.population, _ROWS, pooling)) for i, dim in enumerate(dims))
    # The published MLPs of this model (512-1024-256-128, 1024-512-256-1), or half as wide.
    narrower = draws.pick((1, 2))
    return Dlrm(
        name=name,
        batch=step_batches(ranks)[0],
        dense_features=512,
        bottom=(1024 // narrower, 256 // narrower, dims[0] if variant.interaction == "dot" else 128),
        top=(1024 // narrower, 512 // narrower, 256 // narrower, 1),
        tables=tables,
        lookup=variant.lookup,
        optimizer=variant.optimizer,
        interaction=variant.interaction,
        loss=variant.loss,
    )


@cache
def sharding_tasks() -> tuple[Dlrm, ...]:
    """20 heavy tasks, then 20 ordinary ones; 12 of the 40 are of equal load."""
    return tuple(drawn_task(number, _SEED + number) for number in range(TASKS))


@cache
def further_tasks() -> tuple[Dlrm, ...]:
    """As many of the same kinds again, numbered on: nothing was ever chosen by looking at them."""
    return tuple(drawn_task(number, _SEED + number) for number in range(TASKS, 2 * TASKS))


def drawn_task(number: int, seed: int) -> Dlrm:
    """The task of a seed; its number says of which kind it is."""
    draws = Draws(seed)
    place = number % TASKS
    heavy = place < TASKS // 2
    equal = place % 5 in ((1, 3) if heavy else (2,))  # 8 heavy and 4 ordinary ones
    while True:
        tables = _equal(draws, heavy=heavy) if equal else _unequal(draws, heavy=heavy)
        if sum(table.nbytes for table in tables) <= MOST_BYTES_PER_RANK * RANKS:
            break
    name = f"shard{number:02d}-{'heavy' if heavy else 'ordinary'}-{'equal' if equal else 'unequal'}"
    return Dlrm(
        name=name,
        batch=_batch(tables),
        dense_features=64,
        bottom=(64, 16),
        top=(64, 1),
        tables=tables,
        lookup="table_batched",
        optimizer="rowwise_adagrad" if number % 2 else "sgd",
        interaction="cat",
    )


def _batch(tables: tuple[Table, ...]) -> int:
    """The largest batch of which the lookups of an even split take no longer than wanted."""
    per_sample = sum(table.pooling_factor for table in tables) / RANKS
    return max((batch for batch in _BATCHES if batch * per_sample <= _LOOKUPS_PER_RANK), default=_BATCHES[0])


def _unequal(draws: Draws, *, heavy: bool) -> tuple[Table, ...]:
    """Giants with long bags of wide rows among many smaller tables, in any order; sizes say nothing of lookups."""
    giants, others = draws.count(2, 5), draws.count(7, 13)
    lengths = [draws.uniform(180, 200) for _ in range(giants)]
    lengths += [draws.log_uniform(50, 195) if heavy or i % 4 else draws.log_uniform(1, HEAVY) for i in range(others)]
    dims = [32] * giants + [16] * others
    streams = [_skewed(draws, length) for length in lengths]
    return _named(draws.shuffled(list(zip(dims, streams, strict=True))))


def _skewed(draws: Draws, pooling: float) -> Generator:
    return Generator(
        rows=round(draws.log_uniform(1e4, 8e6)),
        pooling=round(pooling, 1),
        lengths=draws.pick(("fixed", "uniform", "geometric")),
        kind="zipf",
        alpha=round(draws.uniform(0.3, 1.5), 3),
        shift=round(draws.log_uniform(1, 1000), 1),
        locality=draws.pick((0.0, 0.0, 0.3)),
        seed=draws.seed(),
    )


def _equal(draws: Draws, *, heavy: bool) -> tuple[Table, ...]:
    """Equal dim times pooling factor to 3 %, sizes that say nothing; as many cold tables as ranks, the others extremely hot.

    In two tasks of three cold tables also have half the dim and twice the pooling factor: more lookups, fewer bytes to send.
    Neighbours in a model's list are often alike, so cold tables come together, at a regular distance, or anywhere.
    """
    per_rank, cold_dim = draws.pick((2, 2, 3)), draws.pick((16, 16, 32))
    order = draws.pick(("together", "regular", "anywhere"))
    step = per_rank if order == "regular" else 1
    cold = set(range(0, step * RANKS, step))
    longest = draws.uniform(180, 197)
    tables = [_of_equal_load(draws, cold_dim * longest, i in cold, cold_dim) for i in range(per_rank * RANKS)]
    if order == "anywhere":
        tables = draws.shuffled(tables)
    if not heavy:
        tables += [(16, _skewed(draws, draws.log_uniform(1, HEAVY))) for _ in range(draws.count(2, 4))]
    return _named(tables)


def _of_equal_load(draws: Draws, elements: float, cold: bool, cold_dim: int) -> tuple[int, Generator]:
    dim = cold_dim if cold else 32
    # Hot: no row alone takes more than 3 % of the lookups, so that it is the cache that is studied, not one row's queue.
    stream = Generator(
        rows=round(draws.log_uniform(2.5e6, 9e6)),
        pooling=round(elements / dim * draws.uniform(0.985, 1.015), 1),
        kind="uniform" if cold else "zipf",
        alpha=1.0 if cold else round(draws.uniform(1.6, 2.0), 3),
        shift=1.0 if cold else round(draws.log_uniform(30, 1000), 1),
        seed=draws.seed(),
    )
    return dim, stream


def _named(tables: list[tuple[int, Generator]]) -> tuple[Table, ...]:
    return tuple(Table(f"t{i:02d}", dim, stream) for i, (dim, stream) in enumerate(tables))
