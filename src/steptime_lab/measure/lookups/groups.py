"""Groups of lookups that each answer one question about what a lookup's time depends on, beside the broad sweep of `cases`.

Each is a name of `--only`. Seconds are of an H200, forward and backward, cold three times and warm twice: 45 ms a case, the
pace of the broad sweep (6,968 rows, 2,200 cases, in 99 s), which is mostly preparing and profiling, plus the runs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random

from steptime._lookups.generators import Generator
from steptime_lab.measure.lookups.cases import (
    DIMS,
    MOST_TABLES,
    LookupCase,
    LookupLimits,
    dims_of,
    drawn,
    fitted,
    log_uniform,
    pool_of,
    series_of,
    skewed,
)

_SMALL = 4

HALVES = ("float16", "bfloat16")

# Bytes of rows that are looked up, all equally often: from the first-level cache over the second-level one (50 MB, of which
# half is near) to memory. The last is a table of which a batch never sees much.
_TOUCHED_BYTES = (1e5, 5e6, 2e7, 3e7, 4.5e7, 4e8, 4e9)
_HOTTEST = {10_000: (10, 30, 100, 300, 1000, 3000, 8000), 60_000: (10, 100, 300, 1000, 3000, 10_000, 30_000, 58_000)}


def group_cases(name: str, seed: int, limits: LookupLimits) -> list[LookupCase]:
    """The lookups of a group that stay within limits; the same arguments give the same ones."""
    return [case for case in GROUPS[name](Random(f"{name} {seed}"), limits) if case.fits(limits)]


def small_group_cases(name: str, seed: int) -> list[LookupCase]:
    """A few lookups of a group with tables, batch and bags so small that they take a CPU milliseconds."""
    whole = LookupLimits(elements=1 << 32, lookups=30_000_000, read_bytes=3_000_000_000, outputs=1 << 27)
    cases = group_cases(name, seed, whole)
    return [_shrunk(case) for case in cases[:: len(cases) // 5][:_SMALL]]


def _shrunk(case: LookupCase) -> LookupCase:
    tables = [
        replace(table, rows=min(table.rows, 1000), pooling=min(table.pooling, 5.0), long_bag=min(table.long_bag, 50))
        for table in case.generators[:6]
    ]
    return replace(case, batch=min(case.batch, 32), dims=case.dims[:6], generators=tuple(tables))


def _step_latency(random: Random, limits: LookupLimits) -> Iterator[LookupCase]:
    """What one step of a program costs: a single table, equal bags, every footprint. 1,507 cases, 75 s."""
    del limits
    grid = product(DIMS, (61, 62, 64, 68, 72, 200), (256, 1024, 4096, 16384, 65536), _TOUCHED_BYTES)
    for index, (dim, pooling, batch, touched) in enumerate(grid):
        # Every fourth in 16 bits too: no number of values further right in the grid, nor their product, is a multiple of 4.
        for dtype in ("float32", *(HALVES if index % 4 == 0 else ())):
            rows = max(1, round(touched / dim / (4 if dtype == "float32" else 2)))
            table = Generator(rows=rows, pooling=float(pooling), seed=random.getrandbits(31))
            yield LookupCase("table_batched", "sgd", dtype, False, batch, (dim,), (table,), warm=True)


def _long_bag(random: Random, limits: LookupLimits) -> Iterator[LookupCase]:
    """One bag longer than all others, early and late: what a tail costs beside a full device. 162 cases, 8 s."""
    del limits
    grid = product(("table_batched", "embedding_bag"), (256, 2048, 16384), (64, 256, 1000), (0.0, 0.5, 1.0), (16, 64, 256))
    for name, batch, longest, place, dim in grid:
        table = Generator(rows=200_000, pooling=8.0, long_bag=longest, long_bag_at=place, seed=random.getrandbits(31))
        yield LookupCase(name, "sgd", "float32", False, batch, (dim,), (table,), warm=True)


def _table_order(random: Random, limits: LookupLimits) -> Iterator[LookupCase]:
    """The same tables in five orders: what a model that does not know their order cannot know. 200 cases, 12 s."""
    pool = pool_of(random)
    for _ in range(40):
        case = replace(drawn("table_batched", random, pool, tables=random.randint(5, 60)), dtype="float32", optimizer="sgd")
        case = fitted(case, random, limits)
        by_length = sorted(range(len(case.dims)), key=lambda i: -case.generators[i].pooling)
        orders = [list(range(len(case.dims))), by_length, by_length[::-1]]
        orders += [random.sample(by_length, len(by_length)) for _ in range(2)]
        for order in orders:
            yield replace(
                case, dims=tuple(case.dims[i] for i in order), generators=tuple(case.generators[i] for i in order), warm=True
            )


def _wide_series(random: Random, limits: LookupLimits) -> Iterator[LookupCase]:
    """Six skews of the same tables, at least 2x apart in time: short equal bags, so many bytes that memory decides.

    Uniform lookups read 0.6 to 3 GB from memory (3.8 TB/s), the most skewed ones find nearly all of it in the first-level
    caches (14.5 TB/s; both rates fitted to the broad sweep). 40 + 12 series, 312 cases, 25 s.
    """
    for place in range(52):
        batched = place < 40
        # A backward pass differs as much only where updated rows outweigh the sort: wide rows.
        dim = random.choice((64, 128, 256)) if place % 2 else 256
        batch, pooling = random.choice((16384, 32768, 65536)), float(random.randint(4 if batched else 10, 20))
        read_bytes = min(limits.read_bytes, log_uniform(random, 6e8, 2.5e9))
        wanted = read_bytes / (4 * dim * pooling * batch)
        count = min(MOST_TABLES, max(1, round(wanted))) if batched else 1
        batch = round(batch * wanted / count)
        rows = round(2.5e9 * log_uniform(random, 1, 4) / (4 * dim * count))
        tables = tuple(Generator(rows=rows, pooling=pooling, seed=random.getrandbits(31)) for _ in range(count))
        name = "table_batched" if batched else "embedding_bag"
        optimizer = "rowwise_adagrad" if batched and place % 4 == 0 else "sgd"
        case = LookupCase(name, optimizer, "float32", False, batch, (dim,) * count, tables, warm=True)
        yield from series_of(case, f"wide-{name}-{place}")


def _hot_rows(random: Random, limits: LookupLimits) -> Iterator[LookupCase]:
    """Updates that collide: the hottest row's count, alone and with others as hot. 344 cases, 20 s."""
    del limits
    kinds = [("adagrad", "float32", 1), *(("sgd", dtype, 1) for dtype in ("float32", *HALVES))]
    kinds += [("sgd", "float32", rows) for rows in (4, 16, 64)]
    for (optimizer, dtype, hot_rows), dim, (lookups, counts) in product(kinds, (16, 64, 128, 256), _HOTTEST.items()):
        for hottest in counts:
            share = hottest * hot_rows / lookups
            if share < 0.98:
                table = Generator(
                    rows=200_000, pooling=10.0, kind="hot", alpha=round(share / (1 - share), 6), shift=float(hot_rows),
                    seed=random.getrandbits(31),
                )  # fmt: skip
                yield LookupCase("embedding_bag", optimizer, dtype, False, lookups // 10, (dim,), (table,))


def _many_tables(random: Random, limits: LookupLimits) -> Iterator[LookupCase]:
    """21 to 60 tables, small batches, bags of unequal length: where the forward pass is known least. 300 cases, 16 s."""
    pool = pool_of(random)
    for _ in range(300):
        case = drawn("table_batched", random, pool, tables=random.randint(21, 60))
        case = fitted(replace(case, batch=random.choice((256, 512, 1024))), random, limits)
        tables = tuple(replace(table, lengths="geometric") for table in case.generators)
        yield replace(case, batch=min(case.batch, 1024), generators=tables)


def _half_rows(random: Random, limits: LookupLimits) -> Iterator[LookupCase]:
    """Rows of 16 bits. 200 cases, 11 s."""
    pool = pool_of(random)
    for index, name in product(range(100), ("table_batched", "embedding_bag")):
        case = replace(drawn(name, random, pool), dtype=HALVES[index % 2], optimizer="sgd")
        yield fitted(case, random, limits)


def _module_gradients(random: Random, limits: LookupLimits) -> Iterator[LookupCase]:
    """`nn.Embedding` with both kinds of gradients and `nn.EmbeddingBag` with dense ones, as their users leave them.

    A dense gradient is as large as its table, and so is the update: 1 GB at most. 448 cases, 25 s.
    """
    del limits
    for index, name in product(range(150), ("embedding_bag_dense", "embedding_dense", "embedding_sparse")):
        dim = dims_of(random, 1)[0]
        rows = round(log_uniform(random, 1e3, min(3e6, 2.5e8 / dim)))
        adagrad = index % 5 == 4
        # Adagrad with sparse gradients sums every row's in a single thread.
        lookups = log_uniform(random, 200, 6e4 if adagrad and name == "embedding_sparse" else 1e6)
        pooling = float(round(log_uniform(random, 1, 100))) if name == "embedding_bag_dense" or index % 3 else 1.0
        table = skewed(Generator(rows=rows, pooling=pooling, seed=random.getrandbits(31)), random, random.random())
        batch = max(1, round(lookups / pooling))
        dtype = HALVES[index % 2] if index % 6 == 1 else "float32"
        yield LookupCase(name, "adagrad" if adagrad else "sgd", dtype, False, batch, (dim,), (table,))


def _large_on_parts(random: Random, limits: LookupLimits) -> Iterator[LookupCase]:
    """As much as a rank of an uneven sharding looks up on its part of a GPU: few tables, cold or hot, 3 to 14 million lookups.

    64 cases, 30 s on a quarter beside parts that do the same.
    """
    del limits
    for index in range(64):
        count, dim = random.randint(1, 4), random.choice((16, 16, 32, 64))
        lookups = log_uniform(random, 3e6, 1.4e7)
        batch = random.choice((8192, 16384, 24576, 32768))
        pooling = float(max(1, round(lookups / count / batch)))
        rows = round(log_uniform(random, 4e5, 9e6 if dim < 64 else 4e6))
        tables = tuple(Generator(rows=rows, pooling=pooling, seed=random.getrandbits(31)) for _ in range(count))
        if index % 2:
            tables = tuple(skewed(table, random, random.random()) for table in tables)
        yield LookupCase(
            "table_batched", ("sgd", "rowwise_adagrad")[index // 2 % 2], "float32", False, batch, (dim,) * count, tables
        )


GROUPS: dict[str, Callable[[Random, LookupLimits], Iterator[LookupCase]]] = {
    "step_latency": _step_latency,
    "long_bag": _long_bag,
    "table_order": _table_order,
    "wide_series": _wide_series,
    "hot_rows": _hot_rows,
    "many_tables": _many_tables,
    "half_rows": _half_rows,
    "module_gradients": _module_gradients,
    "large_on_parts": _large_on_parts,
}
"""What `--only` may name beside the implementations of the broad sweep."""
