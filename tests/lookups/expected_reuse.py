"""What a skew gives on average, without drawing: distinct rows and lookups in each bin of the reuse histogram.

A row with probability p gets a Poisson number of n independent lookups, of mean n * p; rows between two knots of a
skew are equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._lookups.generators import UNIFORM_BITS, knots_of
from steptime._lookups.mixture import poisson_shares
from steptime._lookups.statistics import REUSE_EDGES, Floats


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
    edges = np.array((0, *REUSE_EDGES), dtype=np.int64)[:, None]
    at_most = poisson_shares(means, edges)  # [18 - 1, knots]: share of rows with at most so many lookups
    # Of a Poisson number N of mean m, the part of the mean with N <= c is m * P(N <= c - 1).
    below = poisson_shares(means, edges - 1)
    ones = np.ones((1, len(means)))
    row_shares = np.diff(np.concatenate([at_most, ones]), axis=0)
    lookup_shares = np.diff(np.concatenate([below, ones]), axis=0)
    return ExpectedReuse(rows=row_shares @ alike, lookups=lookup_shares @ (alike * means))
