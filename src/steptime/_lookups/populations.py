"""`Population`: a distribution over tables, from which a model's tables are drawn.

The public statistics (`calibration`) are totals over all tables of a file. That rows and pooling factors are log-normal,
that exponents are uniform and shifts log-normal, and that only rows and pooling factors go together, is our assumption;
only what these give in total was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from steptime._lookups.generators import Generator, key_of

FEWEST_ROWS, MOST_ROWS = 100, 50_000_000

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Population:
    """Tables of one kind of recommender; all skews are `zipf`."""

    name: str
    mean_pooling: float
    pooling_sigma: float  # of ln(pooling factor)
    rows_median: float
    rows_sigma: float  # of ln(rows)
    rows_by_pooling: float  # ln(rows) gains so much for each ln(pooling factor over its median)
    alpha_low: float
    alpha_high: float
    shift_median: float
    shift_sigma: float  # of ln(shift)

    def table(self, quantiles: Sequence[float], seed: int = 0) -> Generator:
        """The table at four quantiles in (0, 1): of pooling factor, rows, exponent and shift."""
        deviates = [_NORMAL.inv_cdf(min(max(quantile, 1e-6), 1 - 1e-6)) for quantile in quantiles]
        longer = self.pooling_sigma * deviates[0]
        pooling = self.mean_pooling * math.exp(longer - self.pooling_sigma**2 / 2)
        rows = self.rows_median * math.exp(self.rows_sigma * deviates[1] + self.rows_by_pooling * longer)
        return Generator(
            rows=round(min(max(rows, FEWEST_ROWS), MOST_ROWS)),
            pooling=round(pooling, 3),
            kind="zipf",
            alpha=round(self.alpha_low + (self.alpha_high - self.alpha_low) * quantiles[2], 4),
            shift=round(self.shift_median * math.exp(self.shift_sigma * deviates[3]), 4),
            seed=seed,
        )

    def tables(self, count: int) -> tuple[Generator, ...]:
        """So many tables spread evenly over the population: a Latin hypercube, each axis in an order of its own."""
        orders = [sorted(range(count), key=lambda i, axis=axis: key_of(axis, i)) for axis in range(4)]  # type: ignore[misc]
        return tuple(self.table([(order[i] + 0.5) / count for order in orders], seed=i) for i in range(count))


# Fitted by `calibration.fit` to the totals of facebookresearch/dlrm_datasets (MIT), locality_stats_2021.txt (file _0) and
# locality_stats_2022.txt (file _0), `pooling_sigma` held: totals say little of it. docs/lookups.md says how well they agree.
PRODUCTION_2021 = Population(
    name="production_2021",
    mean_pooling=8.566,
    pooling_sigma=1.3,
    rows_median=103_000,
    rows_sigma=0.8316,
    rows_by_pooling=0.2291,
    alpha_low=0.4521,
    alpha_high=1.351,
    shift_median=22.97,
    shift_sigma=1.016,
)
PRODUCTION_2022 = Population(
    name="production_2022",
    mean_pooling=13.95,
    pooling_sigma=1.3,
    rows_median=132_300,
    rows_sigma=1.017,
    rows_by_pooling=0.291,
    alpha_low=0.4275,
    alpha_high=1.367,
    shift_median=31.4,
    shift_sigma=1.35,
)
