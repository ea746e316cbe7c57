"""How fast lookup statistics are counted, on one core: million indices a second (bar: 50), and as a ratio to two floors.

Floors of the same run: a copy of the indices, and `np.bincount` of them (where an array of all rows' counts fits). The machine
may be shared: time is CPU time, the best of several runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from steptime._lookups.generators import Generator
from steptime._lookups.table import table_statistics

LOOKUPS = 16_000_000
RUNS = 4
COUNTABLE_ROWS = 64_000_000

STREAMS = {
    f"{rows:,} rows, {name}": Generator(rows=rows, pooling=pooling, **skew)  # type: ignore[arg-type]
    for rows in (1_000, 100_000, 1_000_000, 20_000_000, 1 << 31)
    for name, pooling, skew in (
        ("uniform", 16.0, {}),
        ("zipf 1.2", 16.0, {"kind": "zipf", "alpha": 1.2}),
        ("zipf 1.05, bags of one", 1.0, {"kind": "zipf", "alpha": 1.05, "shift": 10.0}),
    )
}


def best_s(action: Callable[[], object]) -> float:
    """CPU seconds of the fastest run."""
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    """Print one line per stream."""
    print(f"{'':42} {'M/s':>6} {'of a copy':>10} {'of bincount':>12}")
    slowest = np.inf
    for name, generator in STREAMS.items():
        bags = generator.bags(round(LOOKUPS / generator.pooling))
        indices, offsets, rows = bags.indices, bags.offsets, generator.rows
        own = best_s(partial(table_statistics, indices, offsets, rows))
        copy = best_s(indices.copy)
        count = best_s(partial(np.bincount, indices)) if rows <= COUNTABLE_ROWS else np.nan
        slowest = min(slowest, len(indices) / own / 1e6)
        rates = (len(indices) / own / 1e6, own / copy, own / count)
        print(f"{name:42} {rates[0]:6.0f} {rates[1]:9.1f}x {rates[2]:11.1f}x".replace("nanx", "   -"))
    print(f"slowest {slowest:.0f} million indices a second (bar 50)")


if __name__ == "__main__":
    main()
