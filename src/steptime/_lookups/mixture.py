"""`Mixture`: rows by how often lookups arrive at them, from which a batch of any size follows.

In a batch a row gets a Poisson number of arrivals; each brings one lookup and, where lookups repeat recent ones, a Poisson
number of further ones. `fitted` finds the rates from one batch: the mixture that makes its counts most likely (by expectation
maximisation; Laird, 1978), the rows that were not looked up included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.spectrum import EDGES, Footprint, Spectrum, of_bins
from steptime._lookups.statistics import Floats

_EXACT_UP_TO = 16
"""Beyond so many lookups of a row the Poisson distribution is close enough to Wilson and Hilferty's normal one."""

_CERTAIN = 8.0
"""So many deviations from the mean a normal share is 0 or 1 to the last digit."""

_NO_ROWS = 1e-16
"""A share of rows below this comes from rounding."""

_ENDS = np.append(0.0, EDGES.astype(np.float64))[:, None]  # [bins + 1, 1]: ends of bins

_FEW = np.arange(1.0, _EXACT_UP_TO + 1)[:, None]
_MANY = EDGES[_EXACT_UP_TO:].astype(np.float64)
_ROOTS = 3 * np.sqrt(_MANY + 1)
_MEAN_FACTORS = np.append(0.0, _ROOTS / np.cbrt(_MANY + 1))
_MEAN_OFFSETS = np.append(0.0, _ROOTS * (1 - 1 / (9 * (_MANY + 1))))
"""At `_EXACT_UP_TO` (not by these) and at `_MANY`: the normal deviation is the latter less the former times the mean's root."""

_MOST_ABOVE = ((_MEAN_OFFSETS[1:] - _CERTAIN).clip(0.0) / _MEAN_FACTORS[1:]) ** 3
_LEAST_BELOW = ((_MEAN_OFFSETS[1:] + _CERTAIN) / _MEAN_FACTORS[1:]) ** 3
"""Means up to the former surely give at most `_MANY`, means from the latter on surely more. Both ascend."""

_SURE = 64
"""A row with more lookups than this has the rate it shows; what chance adds is a small part of it."""

_RATES = np.concatenate([2.0 ** np.arange(-13, 3, 0.5), 2.0 ** np.arange(3, 7.3, 0.25)])
"""Lookups per batch of the rows whose rates are sought; they end above `_SURE`."""

_UNSEEN = 128
"""Rows that were not looked up count up to so many times those that were: more tell little and slow the search down. Chosen, as
the rounds below, by the errors that benchmarks/lookup_scaling.py prints."""

_ROUNDS, _PLAIN_ROUNDS = 300, 30

_MIDDLES: Floats = (np.append(0, EDGES[:-1]) + 1 + EDGES) / 2
"""Of the bins of `EDGES`: the count that stands for a bin."""

_NO_BURST = 1 + 1e-6
"""Arrivals with up to so many lookups each bring one."""

_BURSTS = (1.5, 2.2, 3.3, 5.0, 8.0)
"""Tried in this order: the smallest that explains the footprint counts."""

_NEAR = 0.005
"""As near to the footprint as this is explained."""

_SAME = 0.02
"""Half a batch whose distinct rows are foretold to this part, or to twice what chance does to them, shows no bursts."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """`rows[i]` rows at which `rates[i]` arrivals are expected in a batch, with `burst` lookups each."""

    rates: Floats
    rows: Floats
    burst: float

    def distinct(self, factors: Floats) -> Floats:
        """Distinct rows in so many times the lookups of the batch, [factors]."""
        shares = np.multiply.outer(-factors, self.rates)  # changed in place: there are many
        result: Floats = np.subtract(1, np.exp(shares, out=shares), out=shares) @ self.rows
        return result

    def half(self) -> float:
        """Distinct rows in half the batch over those in all of it."""
        half, whole = self.distinct(np.array([0.5, 1.0]))
        return float(half / whole)

    def spectrum(self, factor: float) -> Spectrum:
        """Of a batch with so many times the lookups."""
        rows = rows_in_bins(self.rates * factor, self.rows)
        if self.burst > _NO_BURST:
            some = np.flatnonzero(rows)
            rows = _after(_MIDDLES[some], self.burst) @ rows[some]
        return of_bins(rows, rows * _MIDDLES)


def counted(rates: Floats, burst: float) -> Floats:
    """For rows of these rates the share with a count in each bin of `EDGES`, [bins, rates]."""
    arrivals = shares_in_bins(poisson_shares(rates, _ENDS))
    if burst <= _NO_BURST:
        return arrivals
    met = arrivals.any(axis=1)
    return _after(_MIDDLES[met], burst) @ arrivals[met]


def _after(arrivals: Floats, burst: float) -> Floats:
    """Shares of lookup counts for each number of arrivals, [bins, numbers]."""
    most = burst * arrivals.max()
    ends = _ENDS[: np.searchsorted(EDGES, most + 2 * _CERTAIN * math.sqrt(most)) + 8]  # none has as many as the last of these
    shares = shares_in_bins(poisson_shares(arrivals * (burst - 1), np.floor(ends - arrivals)))
    return np.pad(shares, ((0, len(EDGES) - len(shares)), (0, 0)))


def fitted(spectrum: Spectrum, footprint: Footprint, rows: int) -> Mixture:
    """The mixture behind a batch's lookups in a table of so many rows.

    Bursts are as large as it takes for half the batch to have the distinct rows that its footprint says.
    """
    half = float(footprint.distinct(spectrum.total / 2)) / footprint.unique
    mixture = _of_burst(spectrum, rows, 1.0)
    low, over = 1.0, mixture.half() / half - 1  # how far the rows of half a batch are off
    if over < max(_SAME, 2 / math.sqrt(spectrum.unique)):
        return mixture
    for high in _BURSTS:
        mixture = _of_burst(spectrum, rows, high)
        under = mixture.half() / half - 1
        if 0 <= under < _NEAR:
            return mixture
        if under < 0:
            return _of_burst(spectrum, rows, low * (high / low) ** (over / (over - under)))
        low, over = high, under
    return mixture


def _of_burst(spectrum: Spectrum, rows: int, burst: float) -> Mixture:
    counts, seen = spectrum.counts, np.array(spectrum.rows)
    sure = counts > _SURE * burst
    places = np.searchsorted(EDGES, counts[~sure] * (1 - 1e-9))
    shares = counted(_RATES, burst)
    likely = np.concatenate([np.exp(-_RATES)[None, :], shares[places]])  # [1 + bins, rates]
    unseen = min(rows - seen.sum(), _UNSEEN * seen.sum())
    observed = np.append(max(0.0, unseen), seen[~sure])
    weights = _most_likely(likely, observed)
    return Mixture(np.concatenate([_RATES, counts[sure] / burst]), np.concatenate([weights, seen[sure]]), burst)


def _most_likely(likely: Floats, observed: Floats) -> Floats:
    """Rows at each rate; every round takes two plain steps and one as far beyond as they point (Varadhan and Roland, 2008)."""

    def step(weights: Floats) -> Floats:
        return weights * (likely.T @ (observed / np.maximum(likely @ weights, 1e-300)))

    weights = np.full(likely.shape[1], observed.sum() / likely.shape[1])
    for _ in range(_ROUNDS):
        first = step(weights)
        second = step(first)
        change, bend = first - weights, second - 2 * first + weights
        length = max(1.0, float(np.linalg.norm(change)) / max(float(np.linalg.norm(bend)), 1e-300))
        beyond = weights + 2 * length * change + length * length * bend
        weights = step(np.where(beyond > 0, beyond, second))
    for _ in range(_PLAIN_ROUNDS):
        weights = step(weights)
    return weights


def poisson_shares(means: Floats, counts: npt.NDArray[Any]) -> Floats:
    """P(N <= count) for counts and means of shapes that broadcast; 0 for counts below 0."""
    means, counts = np.broadcast_arrays(means, counts)
    result = np.zeros(counts.shape)
    few = (counts >= 0) & (counts <= _EXACT_UP_TO)
    mean, term, total = means[few], np.exp(-means[few]), np.zeros(int(few.sum()))
    for number in range(_EXACT_UP_TO + 1):
        total += term * (number <= counts[few])
        term = term * mean / (number + 1)
    result[few] = np.minimum(total, 1.0)
    many = counts > _EXACT_UP_TO
    shapes = counts[many] + 1.0
    result[many] = _normal_share((1 - 1 / (9 * shapes) - np.cbrt(means[many] / shapes)) * 3 * np.sqrt(shapes))
    return result


def shares_in_bins(at_most: Floats) -> Floats:
    """Between one count and the next, along the first axis; the two formulas do not quite meet."""
    return np.maximum(np.diff(at_most, axis=0), 0.0)


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
    at_most = _normal_share(_MEAN_OFFSETS[ends] - _MEAN_FACTORS[ends] * np.repeat(np.cbrt(means), widths))
    at_most[starts] = np.where(firsts == 0, few, 0.0)
    at_most[stops - 1] = 1.0
    gained = np.maximum(np.diff(at_most), 0.0) * np.repeat(rows, widths)[1:]  # the two formulas do not quite meet
    gained[stops[:-1] - 1] = 0.0  # from one group to the next
    result: npt.NDArray[Any] = np.bincount(ends[:-1], weights=gained, minlength=len(_MANY))[: len(_MANY)]
    result[-1] += rows[firsts == len(_MANY)].sum()  # looked up more often than any bin says
    return result


def _normal_share(deviations: Floats) -> Floats:
    """P(Z <= z) to 2e-4: Page, "Approximations to the cumulative normal function", 1977."""
    clipped = np.clip(deviations, -_CERTAIN, _CERTAIN)
    return 1 / (1 + np.exp(-1.5976 * clipped - 0.07056 * (clipped * clipped * clipped)))
