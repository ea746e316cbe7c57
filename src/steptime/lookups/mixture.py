"""`Mixture`: rows by how often lookups arrive at them, from which a batch of any size follows.

In a batch a row gets a Poisson number of arrivals; each brings one lookup and, where lookups repeat recent ones, a Poisson
number of further ones. `fitted` finds the rates from one batch: the mixture that makes its counts most likely (by expectation
maximisation; Laird, 1978), the rows that were not looked up included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steptime.lookups.expected import poisson_share
from steptime.lookups.footprint import Footprint
from steptime.lookups.spectrum import EDGES, Floats, Spectrum, of_bins

_SURE = 64
"""A row with more lookups than this has the rate it shows; what chance adds is a small part of it."""

_RATES = np.concatenate([2.0 ** np.arange(-13, 3, 0.5), 2.0 ** np.arange(3, 7.3, 0.25)])
"""Lookups per batch of the rows whose rates are sought; they end above `_SURE`."""

_UNSEEN = 128
"""Rows that were not looked up count up to so many times those that were: more tell little and slow the search down. Chosen, as
the rounds below, by the errors that benchmarks/lookup_scaling.py prints."""

_ROUNDS, _PLAIN_ROUNDS = 300, 30

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
        found: Floats = (1 - np.exp(-np.outer(factors, self.rates))) @ self.rows
        return found

    def half(self) -> float:
        """Distinct rows in half the batch over those in all of it."""
        half, whole = self.distinct(np.array([0.5, 1.0]))
        return float(half / whole)

    def spectrum(self, factor: float) -> Spectrum:
        """Of a batch with so many times the lookups."""
        shares, lookups = counted(self.rates * factor, self.burst)
        return of_bins(shares @ self.rows, lookups @ self.rows)


def counted(rates: Floats, burst: float) -> tuple[Floats, Floats]:
    """For rows of these rates the share with a count in each bin of `EDGES`, and the lookups they bring, [bins, rates]."""
    arrivals = _binned(rates)
    middles = (np.append(0, EDGES[:-1]) + 1 + EDGES)[:, None] / 2
    if burst > 1 + 1e-6:
        further = _after(middles[:, 0], burst)  # [bins of lookups, bins of arrivals]
        arrivals = further @ arrivals
    return arrivals, arrivals * middles


def _binned(rates: Floats) -> Floats:
    at_most = poisson_share(rates[None, :], EDGES[:, None].astype(np.float64))
    none = np.exp(-rates)[None, :]
    shares: Floats = np.diff(np.concatenate([none, at_most]), axis=0)
    return np.maximum(shares, 0.0)


def _after(arrivals: Floats, burst: float) -> Floats:
    """Shares of lookup counts for each number of arrivals, [lookup bins, arrival bins]."""
    more = EDGES[:, None].astype(np.float64) - arrivals[None, :]
    at_most = np.where(more >= 0, poisson_share(arrivals[None, :] * (burst - 1), np.maximum(np.floor(more), 0.0)), 0.0)
    shares: Floats = np.diff(np.concatenate([np.zeros((1, len(arrivals))), at_most]), axis=0)
    return np.maximum(shares, 0.0)


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
    shares, _ = counted(_RATES, burst)
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
