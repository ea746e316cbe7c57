"""Statistics that a generator's lookups have on average, without drawing a row: from its skew and its locality alone.

Lengths of bags are drawn as the generator draws them, and exact.
"""

from __future__ import annotations

import math

import numpy as np

from steptime._lookups import lengths as bag_lengths
from steptime._lookups.footprint import Footprint, grid, of_rows
from steptime._lookups.generators import UNIFORM_BITS, Generator, knots_of
from steptime._lookups.mixture import Mixture
from steptime._lookups.spectrum import HOTTEST, Floats, Spectrum, with_totals
from steptime._lookups.statistics import REUSE_BINS, Statistics
from steptime._lookups.table import TableStatistics
from steptime.errors import InputError

_SURE = 64
"""The hottest rows have the count expected of them where it is above this; below, the spectrum knows what chance adds."""


def expected_statistics(generator: Generator, batch: int, dim: int = 1, table: str = "table") -> TableStatistics:
    """What a batch of a generator looks up, on average over seeds."""
    if batch < 1:
        raise InputError(f"Table {table}: batch is {batch}; expected 1 sample or more.")
    lengths, bags = bag_lengths.tallied(generator.bag_lengths(batch))
    lookups = int(lengths @ bags)
    spread = math.sqrt(float(bags @ np.square(lengths - lookups / batch)) / batch)
    spectrum, footprint, hottest, reuse = Spectrum((), ()), Footprint((), ()), (0,) * len(HOTTEST), (0.0,) * REUSE_BINS
    if lookups:
        mixture = _mixture(generator, lookups)
        raw, footprint = mixture.spectrum(1.0), _footprint(generator, mixture, lookups)
        spectrum, hottest = with_totals(raw, footprint.unique, lookups), _hottest(mixture, raw)
        reuse = tuple((raw.reuse_bins()[0] / raw.unique).tolist())
    unique = round(spectrum.unique)
    return TableStatistics(
        table=table,
        dim=dim,
        counted=Statistics(generator.rows, batch, lookups, unique, spread, reuse),
        lengths=bag_lengths.of_tally((lengths, bags)),
        hottest=hottest,
        spectrum=spectrum,
        footprint=footprint,
    )


def draws_in(generator: Generator, lookups: Floats) -> Floats:
    """How many different draws so many lookups in a row take: fresh ones, and those from before that some of them repeat."""
    share, window = generator.locality, float(generator.window)
    if not share:
        return lookups
    fresh = lookups * (1 - share)
    # A draw from x before the last that can still be repeated is met by share / window of the lookups until it cannot: until
    # x fresh ones have come, or all of these lookups have. Summed over x from 0 to the window.
    rate = share / window
    near = np.minimum(fresh, window)
    met = near - (1 - share) / rate * -np.expm1(-rate * near / (1 - share)) if share < 1 else np.zeros_like(lookups)
    result: Floats = fresh + met + (window - near) * -np.expm1(-rate * lookups)
    return result


def _mixture(generator: Generator, lookups: int) -> Mixture:
    knots = knots_of(generator.kind, generator.rows, generator.alpha, generator.shift)
    # A piece whose rows are rarer than one in 2**36 spans more rows than uniforms: only as many can be drawn.
    alike = np.minimum(knots.row_spans, knots.uniform_spans).astype(np.float64)
    draws = float(draws_in(generator, np.array([float(lookups)]))[0])
    rates = draws * (knots.uniform_spans / (1 << UNIFORM_BITS)) / alike
    return Mixture(rates, alike, lookups / draws)


def _footprint(generator: Generator, mixture: Mixture, lookups: int) -> Footprint:
    windows = grid(lookups)
    draws = draws_in(generator, windows)
    return of_rows(windows, mixture.distinct(draws / draws[-1]))


def _hottest(mixture: Mixture, spectrum: Spectrum) -> tuple[int, ...]:
    order = np.argsort(-mixture.rates, kind="stable")
    places = np.searchsorted(np.cumsum(mixture.rows[order]), HOTTEST)
    expected = [mixture.rates[order[index]] * mixture.burst if index < len(order) else 0.0 for index in places.tolist()]
    results = [
        math.floor(count) if count > _SURE else estimate for count, estimate in zip(expected, spectrum.hottest(), strict=True)
    ]
    return tuple(int(count) for count in np.minimum.accumulate(results))
