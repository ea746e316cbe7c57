"""Poisson numbers of lookups: shares of rows that have at most so many, and shares in the bins of a spectrum.

A spectrum has hundreds of bins, of which a row's number can be in a few around its mean; only these are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.spectrum import EDGES, Floats, Integers

_EXACT_UP_TO = 16
"""Beyond so many lookups of a row the Poisson distribution is close enough to Wilson and Hilferty's normal one."""

_SURE = 8.0
"""So many deviations from the mean a normal share is 0 or 1 to the last digit."""

_NO_ROWS = 1e-16
"""A share of rows below this comes from rounding."""

_ENDS = np.append(0.0, EDGES.astype(np.float64))  # [bins + 1]: of bin b the lower and the upper end are at b and b + 1

_MANY = _ENDS[_ENDS > _EXACT_UP_TO]
_MOST_ABOVE = (_MANY + 1) * (1 - 1 / (9 * (_MANY + 1)) - _SURE / (3 * np.sqrt(_MANY + 1))).clip(0.0) ** 3
_LEAST_BELOW = (_MANY + 1) * (1 - 1 / (9 * (_MANY + 1)) + _SURE / (3 * np.sqrt(_MANY + 1))) ** 3
"""Means up to the former surely give at most `_MANY`, means from the latter on surely more: where the normal deviation is
`_SURE`. Both ascend."""

_FEW = np.arange(1.0, _EXACT_UP_TO + 1)[:, None]
_MEAN_FACTORS = np.append(0.0, 3 * (_MANY + 1) ** (1 / 6))
_MEAN_OFFSETS = np.append(0.0, 3 * np.sqrt(_MANY + 1) * (1 - 1 / (9 * (_MANY + 1))))
"""At `_EXACT_UP_TO` (not by these) and at `_MANY`: the normal deviation is the latter less the former times the mean's root."""


@dataclass(frozen=True, slots=True)
class Binned:
    """Of each group of rows the shares in bins, where there are any: `shares[i]` of group `groups[i]` are in bin `bins[i]`."""

    bins: Integers
    groups: Integers
    shares: Floats

    def matrix(self, groups: int) -> Floats:
        """The same with its zeros, [bins, groups]."""
        result = np.zeros((len(EDGES), groups))
        result[self.bins, self.groups] = self.shares
        return result

    def rows(self, rows: Floats) -> Floats:
        """How many rows are in each bin, with so many in each group, [bins]."""
        result: npt.NDArray[Any] = np.bincount(self.bins, weights=self.shares * rows[self.groups], minlength=len(EDGES))
        return result


def poisson_shares(means: Floats, counts: Integers) -> Floats:
    """P(N <= count) for each count and mean, [counts, means]; 0 for counts below 0."""
    result = np.zeros((len(counts), len(means)))
    few = (counts >= 0) & (counts <= _EXACT_UP_TO)
    result[few] = _few_shares(means)[counts[few]]
    many = counts > _EXACT_UP_TO
    result[many] = _many_shares(means[None, :], counts[many, None].astype(np.float64))
    return result


def binned(means: Floats, least: Floats) -> Binned:
    """Shares of rows in the bins of `EDGES`, whose numbers of lookups are `least` and a Poisson number of these means more."""
    lows, highs = _near(means, least)
    widths = highs - lows + 1
    stops = np.cumsum(widths)
    groups = np.repeat(np.arange(len(means)), widths)
    ends = np.arange(len(groups)) + np.repeat(lows - (stops - widths), widths)
    counts = np.floor(_ENDS[ends] - least[groups])
    at_most = np.zeros(len(groups))
    few = np.flatnonzero((counts >= 0) & (counts <= _EXACT_UP_TO))
    at_most[few] = _few_shares(means)[counts[few].astype(np.intp), groups[few]]
    many = np.flatnonzero(counts > _EXACT_UP_TO)
    at_most[many] = _many_shares(means[groups[many]], counts[many])
    shares = np.maximum(np.diff(at_most), 0.0)  # the two formulas do not quite meet
    same = np.flatnonzero((groups[1:] == groups[:-1]) & (shares > 0))
    return Binned(ends[same], groups[same], shares[same])


def rows_in_bins(means: Floats, rows: Floats) -> Floats:
    """How many rows are in each bin of `EDGES`, with so many in each group, whose lookups have these Poisson means, [bins]."""
    result = np.zeros(len(EDGES))
    low = np.flatnonzero(means < _LEAST_BELOW[0])
    powers, none = np.cumprod(means[low] / _FEW, axis=0), np.exp(-means[low])
    result[:_EXACT_UP_TO] = powers @ (none * rows[low])
    few = np.zeros(len(means))  # P(N <= _EXACT_UP_TO)
    few[low] = none * (1 + powers.sum(axis=0))
    high = np.flatnonzero(means > _MOST_ABOVE[0])
    if len(high):
        result[_EXACT_UP_TO:] += _rows_of_many(means[high], rows[high], few[high])
    result[result < _NO_ROWS * result.sum()] = 0.0
    return result


def _rows_of_many(means: Floats, rows: Floats, few: Floats) -> Floats:
    """The same beyond `_EXACT_UP_TO` lookups; `few` are the shares with at most so many."""
    firsts = np.searchsorted(_LEAST_BELOW, means, side="right")
    lasts = np.minimum(np.searchsorted(_MOST_ABOVE, means) + 1, len(_MANY))
    widths = lasts - firsts + 1
    stops = np.cumsum(widths)
    starts = stops - widths
    ends = np.arange(stops[-1]) + np.repeat(firsts - starts, widths)
    deviations = _MEAN_OFFSETS[ends] - _MEAN_FACTORS[ends] * np.repeat(np.cbrt(means), widths)
    at_most = _normal_share(deviations)
    at_most[starts] = np.where(firsts == 0, few, 0.0)
    at_most[stops - 1] = 1.0
    gained = np.maximum(np.diff(at_most), 0.0) * np.repeat(rows, widths)[1:]  # the two formulas do not quite meet
    gained[stops[:-1] - 1] = 0.0  # from one group to the next
    result: npt.NDArray[Any] = np.bincount(ends[:-1], weights=gained, minlength=len(_MANY))
    return result


def _near(means: Floats, least: Floats) -> tuple[Integers, Integers]:
    """Of each group of rows a first end that has none of them below it and a last one that has all, as places in `_ENDS`."""
    below = np.append(-1.0, _MANY)[np.searchsorted(_LEAST_BELOW, means, side="right")]
    above = np.append(_MANY, np.inf)[np.searchsorted(_MOST_ABOVE, means)]
    lows = np.searchsorted(_ENDS, least + below, side="right") - 1
    return np.maximum(lows, 0), np.minimum(np.searchsorted(_ENDS, least + above), len(_ENDS) - 1)


def _few_shares(means: Floats) -> Floats:
    """P(N <= count) for counts from 0 to `_EXACT_UP_TO`, [counts, means]."""
    terms = np.empty((_EXACT_UP_TO + 1, len(means)))
    terms[0] = np.exp(-means)
    for number in range(1, _EXACT_UP_TO + 1):
        terms[number] = terms[number - 1] * means / number
    return np.minimum(np.cumsum(terms, axis=0), 1.0)


def _many_shares(means: Floats, counts: Floats) -> Floats:
    """P(N <= count) by Wilson and Hilferty, for means and counts of shapes that broadcast."""
    shapes = counts + 1.0
    return _normal_share((1 - 1 / (9 * shapes) - np.cbrt(means / shapes)) * 3 * np.sqrt(shapes))


def _normal_share(deviations: Floats) -> Floats:
    """P(Z <= z) to 2e-4: Page, "Approximations to the cumulative normal function", 1977."""
    clipped = np.clip(deviations, -_SURE, _SURE)
    return 1 / (1 + np.exp(-1.5976 * clipped - 0.07056 * (clipped * clipped * clipped)))
