"""How far lookup statistics that were scaled to another batch, or never drawn, are from those of drawn batches.

From a batch of 4096: tables like those of production recommenders, and streams from uniform to very skewed with and without
temporal locality. Worst and median of each: distinct rows (relative), bins of the reuse histogram and hit rates of caches of
3, 10 and 30 % of the distinct rows (largest absolute difference).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steptime._lookups.estimated import expected_statistics, scaled
from steptime._lookups.generators import Generator
from steptime._lookups.populations import PRODUCTION_2021, PRODUCTION_2022
from steptime._lookups.table import Floats, TableColumns, TableStatistics, table_statistics
from steptime._models.lookups.caches import misses

BATCH = 4096
FACTORS = (1 / 16, 1 / 4, 4, 16)
PRODUCTION = [
    replace(table, seed=place) for place, table in enumerate((*PRODUCTION_2021.tables(10), *PRODUCTION_2022.tables(10)))
]
INDEPENDENT = [
    Generator(rows=rows, pooling=20.0, kind=kind, alpha=alpha)
    for rows in (50_000, 3_000_000)
    for kind, alpha in (("uniform", 1.0), ("zipf", 0.7), ("zipf", 1.1), ("zipf", 1.6), ("power", 5.0))
]
LOCAL = [
    replace(stream, locality=locality, window=window)
    for stream in INDEPENDENT
    for locality, window in ((0.3, 1000), (0.7, 200), (0.8, 4000))
]


def drawn(stream: Generator, batch: int) -> TableStatistics:
    """Statistics of indices."""
    bags = stream.bags(batch)
    return table_statistics(bags.indices, bags.offsets, stream.rows)


def errors(found: TableStatistics, true: TableStatistics) -> tuple[float, float, float]:
    """Of distinct rows, reuse bins and hit rates."""
    caches = true.unique * np.array([0.03, 0.1, 0.3])
    hits = np.abs(_hit_rates(found, caches) - _hit_rates(true, caches)).max()
    bins = np.abs(np.subtract(found.counted.reuse, true.counted.reuse)).max()
    return found.unique / true.unique - 1, float(bins), float(hits)


def _hit_rates(table: TableStatistics, caches: Floats) -> Floats:
    """Of caches of so many rows."""
    columns = TableColumns.of([table] * len(caches))
    return 1.0 - misses(columns, caches) / columns.lookups


def main() -> None:
    """Print one line per kind of stream and factor."""
    print(f"{'streams':12} {'batch':>10} {'distinct rows, %':>24} {'reuse bins':>16} {'hit rates':>16}   (median, worst)")
    for name, streams in (("production", PRODUCTION), ("independent", INDEPENDENT), ("local", LOCAL)):
        start = [drawn(stream, BATCH) for stream in streams]
        for factor in (1.0, *FACTORS):
            batch = round(BATCH * factor)
            true = start if factor == 1 else [drawn(stream, batch) for stream in streams]
            found = [
                expected_statistics(stream, BATCH) if factor == 1 else scaled(one, batch)
                for stream, one in zip(streams, start, strict=True)
            ]
            table = np.array([errors(*pair) for pair in zip(found, true, strict=True)])
            worst = table[np.abs(table[:, 0]).argmax(), 0]
            middle = np.median(np.abs(table), axis=0)
            what = "undrawn" if factor == 1 else f"x {factor:g}"
            print(
                f"{name:12} {what:>10} {100 * middle[0]:11.2f} {100 * worst:+12.1f} {middle[1]:8.3f} {table[:, 1].max():7.3f} "
                f"{middle[2]:8.3f} {table[:, 2].max():7.3f}"
            )


if __name__ == "__main__":
    main()
