"""Tasks on which the usual rules really differ: lookups are about half of the step or more, and tables are unequal.

Table-batched lookups, long bags, small dims (the wire carries dims, the lookup reads dims times bag length), large batches
and small dense layers. Two families: `unequal` tables, a few of them giants; and tables of `equal` load (dim times
pooling factor, nearly equal size), some uniform over millions of rows and others with little but a few thousand hot
rows, to which rules that count elements or bytes are blind.
"""

from __future__ import annotations

from functools import cache

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.generators import Generator
from steptime._shard.search.draws import HEAVY, MOST_BYTES_PER_RANK, Draws

RANKS = 4
TASKS = 40

_BATCHES = (8192, 12288, 16384, 24576, 32768)
_LOOKUPS_PER_RANK = 10e6
"""Of one step, at most: some 12 ms of a quarter H200, where a lookup forward and backward with its sort took 1.6 ns with SGD
(four times the 0.4 ns of the whole GPU, 2026-11-15)."""

_SEED = 4000


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
