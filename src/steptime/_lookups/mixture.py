"""`Mixture`: rows by how often lookups arrive at them, from which a batch of any size follows.

In a batch a row gets a Poisson number of arrivals; each brings one lookup and, where lookups repeat recent ones, a Poisson
number of further ones. `fitted` finds the rates from one batch: the mixture that makes its counts most likely (by expectation
maximisation; Laird, 1978), the rows that were not looked up included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steptime._lookups.footprint import Footprint
from steptime._lookups.poisson import Binned, binned, rows_in_bins
from steptime._lookups.spectrum import EDGES, Floats, Spectrum, of_bins

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
            rows = _after(_MIDDLES[some], self.burst).rows(rows[some])
        return of_bins(rows, rows * _MIDDLES)


def counted(rates: Floats, burst: float) -> Floats:
    """For rows of these rates the share with a count in each bin of `EDGES`, [bins, rates]."""
    arrivals = binned(rates, np.zeros(len(rates))).matrix(len(rates))
    if burst > _NO_BURST:
        arrivals = _after(_MIDDLES, burst).matrix(len(_MIDDLES)) @ arrivals
    return arrivals


def _after(arrivals: Floats, burst: float) -> Binned:
    """Shares of lookup counts for each number of arrivals."""
    return binned(arrivals * (burst - 1), arrivals)


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
