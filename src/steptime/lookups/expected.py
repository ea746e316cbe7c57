"""What a skew gives on average, without drawing: distinct rows and lookups in each bin of the reuse histogram.

A row with probability p gets a Poisson number of n independent lookups, of mean n * p; rows between two knots of a
skew are equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime.lookups.hashing import UNIFORM_BITS
from steptime.lookups.skew import knots_of
from steptime.lookups.statistics import REUSE_EDGES

Floats = npt.NDArray[np.float64]

_EXACT_UP_TO = 16
"""Beyond so many lookups of a row the Poisson distribution is close enough to Wilson and Hilferty's normal one."""


@dataclass(frozen=True, slots=True)
class ExpectedReuse:
    """Expected number of distinct rows, and of lookups that go to them, by reuse bin."""

    rows: Floats  # [17]
    lookups: Floats  # [17]


def expected_reuse(kind: str, rows: int, alpha: float, shift: float, lookups: float) -> ExpectedReuse:
    """Expectation over independent draws (no temporal locality)."""
    knots = knots_of(kind, rows, alpha, shift)
    # A piece whose rows are rarer than one in 2**36 spans more rows than uniforms: only as many can be drawn.
    alike = np.minimum(knots.row_spans, knots.uniform_spans).astype(np.float64)
    means = lookups * (knots.uniform_spans / (1 << UNIFORM_BITS)) / alike
    edges = (0, *REUSE_EDGES)
    at_most = _poisson_shares(means, edges)  # [18 - 1, knots]: share of rows with at most so many lookups
    # Of a Poisson number N of mean m, the part of the mean with N <= c is m * P(N <= c - 1).
    below = _poisson_shares(means, tuple(edge - 1 for edge in edges))
    ones = np.ones((1, len(means)))
    row_shares = np.diff(np.concatenate([at_most, ones]), axis=0)
    lookup_shares = np.diff(np.concatenate([below, ones]), axis=0)
    return ExpectedReuse(rows=row_shares @ alike, lookups=lookup_shares @ (alike * means))


def _poisson_shares(means: Floats, counts: tuple[int, ...]) -> Floats:
    """P(N <= count) for each count and mean, [counts, means]."""
    found = np.zeros((len(counts), len(means)))
    term = np.exp(-means)
    total = np.zeros_like(means)
    for number in range(_EXACT_UP_TO + 1):
        total += term
        term = term * means / (number + 1)
        for i, count in enumerate(counts):
            if count == number:
                found[i] = total
    for i, count in enumerate(counts):
        if count > _EXACT_UP_TO:
            shape = count + 1.0
            found[i] = _normal_share((1 - 1 / (9 * shape) - np.cbrt(means / shape)) * 3 * np.sqrt(shape))
    return found


def poisson_share(means: Floats, counts: Floats) -> Floats:
    """P(N <= count) for means and whole counts of shapes that broadcast."""
    mean, count = np.broadcast_arrays(means, counts)
    shape = count + 1.0
    found = _normal_share((1 - 1 / (9 * shape) - np.cbrt(mean / shape)) * 3 * np.sqrt(shape))
    few = count <= _EXACT_UP_TO
    term = np.exp(-mean[few])
    total = np.zeros_like(term)
    for number in range(_EXACT_UP_TO + 1):
        total += np.where(count[few] >= number, term, 0.0)
        term = term * mean[few] / (number + 1)
    found[few] = np.minimum(total, 1.0)
    return found


def _normal_share(deviations: Floats) -> Floats:
    """P(Z <= z) to 2e-4: Page, "Approximations to the cumulative normal function", 1977."""
    clipped = np.clip(deviations, -8, 8)
    return 1 / (1 + np.exp(-1.5976 * clipped - 0.07056 * clipped**3))
