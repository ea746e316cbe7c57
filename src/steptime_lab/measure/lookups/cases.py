"""Which lookups are measured: one or many tables of mixed sizes, from uniform to extremely skewed, as data.

Tables come from a pool: some like those of production recommenders (`lookups.populations`), the others spread as wide as
rows, skew and locality can reasonably be.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

from steptime._lookups.generators import Generator
from steptime._lookups.populations import PRODUCTION_2021, PRODUCTION_2022
from steptime._measurements.store import key_of
from steptime_lab.measurements.sets import LOOKUPS

BATCHES = (256, 512, 1024, 2048, 4096, 8192, 16384)
DIMS = (16, 32, 64, 128, 256)
_DIM_CHANCES = (0.16, 0.24, 0.26, 0.24, 0.10)
_ODD_DIMS = (24, 48, 80, 96, 160, 192)
MOST_TABLES = 60

# Bytes of rows that one forward pass reads, repeats counted: from a few microseconds to a millisecond.
READ_BYTES = (4e6, 3e9)
_MOST_SAMPLES = 65_536
_LONGEST = 200.0
# Bags of drawn lengths can come out longer in sum than their mean says.
_DRAWN_LONGER = 1.05
# How far a batch may grow beyond what was drawn; the rest of the way bags grow.
_MOST_GROWTH = 4

# Hot rows cost PyTorch's sparse updates far more than others: SGD adds them one by one, Adagrad sums each row's gradients in a
# single thread (about half a microsecond each). Beyond these a single case can take seconds.
_SPARSE_LOOKUPS = {"sgd": 8_000_000, "adagrad": 60_000}

# Distinct sets of rows and skew: each costs a millisecond to prepare, whoever looks it up how often.
_POOL = 400
_PRODUCTION = 0.4  # share of them that are like production's
_SERIES = 0.15  # share of cases that come in a series
SERIES_LENGTH = 6


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """What one lookup may take: elements of tables, lookups, bytes of rows read, elements of the output, rows of a table."""

    elements: int
    lookups: int
    read_bytes: int
    outputs: int
    rows: int = 1 << 31


@dataclass(frozen=True, slots=True)
class LookupCase:
    """One lookup: an implementation, its tables (dim and generator each) and a batch."""

    implementation: str
    optimizer: str
    dtype: str
    weighted: bool
    batch: int
    dims: tuple[int, ...]
    generators: tuple[Generator, ...]
    series: str | None = None
    warm: bool = False  # measured warm too, whatever is drawn

    @property
    def rows(self) -> list[int]:
        """Of each table."""
        return [generator.rows for generator in self.generators]

    @property
    def lookups(self) -> float:
        """How many are expected, in all tables."""
        return self.batch * sum(generator.pooling for generator in self.generators)

    @property
    def read_bytes(self) -> float:
        """What the forward pass reads of rows, repeats counted."""
        pooled = sum(dim * generator.pooling for dim, generator in zip(self.dims, self.generators, strict=True))
        return self.batch * pooled * (4 if self.dtype == "float32" else 2)

    @property
    def elements(self) -> int:
        """Of all tables' weights."""
        return sum(dim * generator.rows for dim, generator in zip(self.dims, self.generators, strict=True))

    @property
    def outputs(self) -> int:
        """Elements of the result: a sum for every bag, or every row looked up."""
        pooled = self.implementation not in ("embedding_dense", "embedding_sparse")
        return round(self.batch if pooled else self.lookups) * sum(self.dims)

    @property
    def dense(self) -> bool:
        """Whether the gradient has all rows of the table, not only those looked up."""
        return self.implementation.endswith("_dense")

    def fits(self, limits: LookupLimits) -> bool:
        """Whether it stays within limits."""
        within = self.elements <= limits.elements and self.outputs <= limits.outputs
        return within and self.lookups <= limits.lookups and self.read_bytes <= limits.read_bytes

    def asked(self, direction: str, cache: str, share: int, others: str) -> dict[str, Any]:
        """The columns that say what was asked."""
        return {
            "implementation": self.implementation,
            "direction": direction,
            "optimizer": "none" if direction == "forward" else self.optimizer,
            "dtype": self.dtype,
            "weighted": self.weighted,
            "batch": self.batch,
            "rows": self.rows,
            "dims": list(self.dims),
            "generators": [_text(generator) for generator in self.generators],
            "cache": cache,
            "share": share,
            "others": others,
        }

    def key(self, share: int, others: str) -> str:
        """The key of its last row: where that is there, all are."""
        return key_of(LOOKUPS, self.asked("backward", "cold", share, others))

    def draw(self, what: str) -> float:
        """A number from 0 to 1 that depends on the case and on what it is drawn for alone."""
        text = f"{what}:{self.implementation}:{self.batch}:{self.dims}:{_text(self.generators[0])}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def cases_of(implementation: str, count: int, seed: int, limits: LookupLimits) -> list[LookupCase]:
    """So many lookups of one implementation; the same arguments give the same ones, and a longer list begins with a shorter."""
    random = Random(f"{implementation} {seed}")
    pool = pool_of(random)
    results: list[LookupCase] = []
    while len(results) < count:
        case = fitted(drawn(implementation, random, pool), random, limits)
        if random.random() < _SERIES / SERIES_LENGTH / (1 - _SERIES):
            results += series_of(case, f"{implementation}-{seed}-{len(results)}")
        results.append(case)
    return results[:count]


def pool_of(random: Random) -> list[Generator]:
    """Tables to draw from."""
    return [_streams(random) for _ in range(_POOL)]


def small_cases(seed: int) -> list[LookupCase]:
    """A few of each implementation, in every dtype and with every optimiser, that take a CPU milliseconds."""
    limits = LookupLimits(elements=1 << 20, lookups=4000, read_bytes=1 << 20, outputs=1 << 20, rows=3000)
    results = [*cases_of("table_batched", 5, seed, limits), *cases_of("embedding_bag", 4, seed, limits)]
    optimizers = ("sgd", "rowwise_adagrad", "sgd", "sgd", "rowwise_adagrad", "sgd", "adagrad", "sgd", "sgd")
    dtypes = ("float32", "float32", "float16", "bfloat16", "float32", "float32", "float32", "bfloat16", "float32")
    return [
        replace(case, optimizer=optimizer, dtype=dtype, weighted=index % 4 == 0)
        for index, (case, optimizer, dtype) in enumerate(zip(results, optimizers, dtypes, strict=True))
    ]


def shuffled(cases: Iterable[LookupCase], seed: int) -> list[LookupCase]:
    """In an order that depends on the cases and the seed alone."""
    return sorted(cases, key=lambda case: case.draw(f"order {seed}"))


@lru_cache(maxsize=4096)
def _text(generator: Generator) -> str:
    return generator.to_json()


def log_uniform(random: Random, low: float, high: float) -> float:
    """A number between two, every factor as likely as its inverse."""
    return math.exp(random.uniform(math.log(low), math.log(high)))


def _streams(random: Random) -> Generator:
    """Rows, skew and locality of a table of the pool; of one like production's its pooling factor too."""
    if random.random() < _PRODUCTION:
        population = random.choice((PRODUCTION_2021, PRODUCTION_2022))
        return population.table([random.random() for _ in range(4)])
    rows = round(log_uniform(random, 1e3, 5e6))
    return replace(skewed(Generator(rows=rows, pooling=1.0), random, random.random()), scatter=random.random() < 0.9)


def skewed(table: Generator, random: Random, level: float) -> Generator:
    """A table with another skew: from uniform at level 0 to nearly all lookups in a few rows at 1."""
    locality = 0.0 if random.random() < 0.55 else round(random.uniform(0.05, 0.95), 3)
    window = round(log_uniform(random, 16, 65536))
    if level < 0.15:
        return replace(table, kind="uniform", alpha=1.0, shift=1.0, locality=locality, window=window)
    strength = (level - 0.15) / 0.85
    if random.random() < 0.35:
        alpha = round(1.2 * 25**strength, 3)
        return replace(table, kind="power", alpha=alpha, shift=1.0, locality=locality, window=window)
    alpha = round(0.5 + 1.7 * strength, 3)
    shift = round(log_uniform(random, 1, max(2.0, 1e4 ** (1 - strength))), 2)
    return replace(table, kind="zipf", alpha=alpha, shift=shift, locality=locality, window=window)


def drawn(implementation: str, random: Random, pool: Sequence[Generator], tables: int = 0) -> LookupCase:
    """A lookup of tables of a pool: so many of them, or by default any number up to `MOST_TABLES`."""
    batched = implementation == "table_batched"
    uniform_count = random.randint(1, MOST_TABLES)
    count = (uniform_count if random.random() < 0.4 else round(log_uniform(random, 1, MOST_TABLES))) if batched else 1
    count = tables or count
    generators = tuple(_table(random.choice(pool), random, empty=place > 0) for place in range(count))
    dtype = random.choices(("float32", "float16", "bfloat16"), (0.86, 0.07, 0.07))[0]
    # Each mix of dtype and optimiser is a kernel to compile: 16-bit rows are updated by SGD alone.
    other = "rowwise_adagrad" if batched else "adagrad"
    adaptive = dtype == "float32" and random.random() < (0.35 if batched else 0.12)
    return LookupCase(
        implementation=implementation,
        optimizer=other if adaptive else "sgd",
        dtype=dtype,
        weighted=random.random() < 0.12,
        batch=_batch(random),
        dims=dims_of(random, count),
        generators=generators,
    )


def _batch(random: Random) -> int:
    if random.random() < 0.75:
        return random.choice(BATCHES)
    return round(log_uniform(random, BATCHES[0], BATCHES[-1]))


def dims_of(random: Random, count: int) -> tuple[int, ...]:
    """One for every table: all equal, or mixed."""
    kind = random.random()
    if kind < 0.4:
        return tuple(random.choices(DIMS, _DIM_CHANCES)) * count
    if kind < 0.5:
        return tuple(random.choices(_ODD_DIMS, k=count))
    return tuple(random.choices(DIMS, _DIM_CHANCES, k=count))


def _table(streams: Generator, random: Random, *, empty: bool) -> Generator:
    """A table of the pool with bags of its own and other draws."""
    kind = random.random()
    if kind < 0.06 and empty:
        pooling = 0.0
    elif streams.pooling != 1.0 and kind < 0.7:
        pooling = streams.pooling
    elif kind < 0.25:
        pooling = 1.0
    else:
        pooling = round(log_uniform(random, 1, _LONGEST), 2)
        pooling = float(round(pooling)) if random.random() < 0.5 else pooling
    lengths = random.choices(("fixed", "uniform", "geometric"), (0.5, 0.2, 0.3))[0]
    return replace(streams, pooling=pooling, lengths=lengths, seed=random.getrandbits(31))


def fitted(case: LookupCase, random: Random, limits: LookupLimits) -> LookupCase:
    """The case with fewer tables and rows where they do not fit, and batch and bags scaled to the size that is drawn for it."""
    case = replace(case, generators=tuple(replace(g, rows=min(g.rows, limits.rows)) for g in case.generators))
    while case.elements > limits.elements and len(case.dims) > 1:
        case = replace(case, dims=case.dims[:-1], generators=case.generators[:-1])
    if case.elements > limits.elements:
        rows = max(1, limits.elements // case.dims[0])
        case = replace(case, generators=(replace(case.generators[0], rows=rows),))
    target = min(limits.read_bytes, log_uniform(random, *READ_BYTES))
    lookups = limits.lookups
    if case.implementation == "embedding_bag":
        lookups = min(lookups, _SPARSE_LOOKUPS[case.optimizer])
    most = min(_MOST_SAMPLES, limits.outputs // sum(case.dims))
    wanted = round(case.batch * min(_MOST_GROWTH, 1 / max(case.read_bytes / target, case.lookups / lookups, 1e-9)))
    # The next batch that is usual, but for those drawn without regard to it.
    usual = next((batch for batch in BATCHES if batch >= wanted), wanted) if case.batch in BATCHES else wanted
    case = replace(case, batch=max(1, min(most, max(usual, min(BATCHES[0], case.batch)))))
    factor = 1 / max(case.read_bytes / target, case.lookups * _DRAWN_LONGER / lookups, 1e-9)
    return replace(case, generators=tuple(_with_bags(generator, factor) for generator in case.generators))


def _with_bags(table: Generator, factor: float) -> Generator:
    """Longer or shorter bags; those of one lookup stay, and none becomes longer than the longest drawn otherwise."""
    if table.pooling <= 1.0:
        return table
    pooling = min(_LONGEST, max(1.0, table.pooling * factor))
    return replace(table, pooling=float(round(pooling)) if table.pooling == round(table.pooling) else round(pooling, 2))


def series_of(case: LookupCase, name: str) -> list[LookupCase]:
    """The same tables and bags, six skews: what differs in time comes from which rows are looked up."""
    results = []
    for step in range(SERIES_LENGTH):
        level = step / (SERIES_LENGTH - 1)
        skew: dict[str, Any] = (
            {"kind": "zipf", "alpha": round(0.5 + 1.7 * level, 3)} if step else {"kind": "uniform", "alpha": 1.0}
        )
        plain = (replace(generator, shift=1.0, locality=0.0, **skew) for generator in case.generators)
        results.append(replace(case, generators=tuple(plain), series=name))
    return results
