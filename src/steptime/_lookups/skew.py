"""How unevenly rows are looked up: the share of lookups below a row, as a formula and as integer knots to sample from.

For a uniform u in [0, 1), E rows, exponent a (`alpha`) and shift q, the row before scattering is

- uniform: floor(E * u)
- power:   floor(E * u^a)
- zipf:    floor((q^(1-a) + u * ((E+q)^(1-a) - q^(1-a)))^(1/(1-a)) - q), and for a = 1 its limit, floor(q * (1 + E/q)^u - q)
- hot:     one of q rows for u < a/(1+a), all equally likely, else one of the others: a is the odds of a hot row
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steptime._lookups.hashing import UNIFORM_BITS

_SINGLE_ROWS = 256
"""So many of the hottest rows have a knot each; further out knots are spaced by a constant ratio."""

_RATIO = 1.02
"""A linear piece this long misses the density of any kind above by well under the noise of a batch."""


@dataclass(frozen=True, slots=True)
class Knots:
    """Inverse of the share of lookups below a row, linear between knots; uniforms and rows are integers."""

    uniforms: npt.NDArray[np.int64]  # [k] ascending, the first is 0
    rows: npt.NDArray[np.int64]  # [k] the row at each
    uniform_spans: npt.NDArray[np.int64]  # [k] to the next knot; positive
    row_spans: npt.NDArray[np.int64]  # [k]


def _uniform_share(part: float, rows: int, alpha: float, shift: float) -> float:
    del alpha, shift
    return part / rows


def _power_share(part: float, rows: int, alpha: float, shift: float) -> float:
    del shift
    return math.pow(part / rows, 1 / alpha)


def _zipf_share(part: float, rows: int, alpha: float, shift: float) -> float:
    if abs(alpha - 1) < 1e-9:
        return math.log1p(part / shift) / math.log1p(rows / shift)
    exponent = 1 - alpha
    return math.expm1(exponent * math.log1p(part / shift)) / math.expm1(exponent * math.log1p(rows / shift))


def _hot_share(part: float, rows: int, alpha: float, shift: float) -> float:
    hot = min(shift, rows)
    below, above = min(part, hot) / hot, max(part - hot, 0.0) / (rows - hot) if rows > hot else 0.0
    chance = alpha / (1 + alpha) if rows > hot else 1.0
    return chance * below + (1 - chance) * above


SHARES: dict[str, Callable[[float, int, float, float], float]] = {
    "uniform": _uniform_share,
    "power": _power_share,
    "zipf": _zipf_share,
    "hot": _hot_share,
}
"""kind -> share of lookups that go to rows below a given one (rank order, hottest first)."""


@lru_cache(maxsize=1024)
def knots_of(kind: str, rows: int, alpha: float, shift: float) -> Knots:
    """The knots to sample a kind from."""
    share = SHARES[kind]
    scale = 1 << UNIFORM_BITS
    edges = _row_edges(rows)
    # Python's own pow and log: numpy's differ in the last place from one CPU to the next.
    uniforms = np.array([round(scale * share(edge, rows, alpha, shift)) for edge in edges], dtype=np.int64)
    positions = np.array(edges, dtype=np.int64)
    uniforms[0], uniforms[-1] = 0, scale
    used = np.flatnonzero(np.diff(uniforms) > 0)
    return Knots(
        uniforms=np.ascontiguousarray(uniforms[used]),
        rows=np.ascontiguousarray(positions[used]),
        uniform_spans=np.diff(uniforms)[used],
        row_spans=np.diff(positions)[used],
    )


def _row_edges(rows: int) -> list[int]:
    edges = list(range(min(rows, _SINGLE_ROWS) + 1))
    while edges[-1] < rows:
        edges.append(min(rows, math.ceil(edges[-1] * _RATIO)))
    return edges
