"""Statistics that nobody counted: what a generator's lookups have on average, and those of a batch of another size.

`expected_statistics` draws no row: they follow from a generator's skew and locality. Lengths of bags are drawn as the generator
draws them, and exact.

`scaled` needs no indices. A smaller batch is a window of the larger one: its distinct rows are read off the footprint. What a
larger one meets that this batch did not is an estimate from how many rows it met once, twice and so on (`mixture`). Errors
against drawn batches, from a batch of 4096 (benchmarks/lookup_scaling.py; median and worst over tables):

| batch | distinct rows, like production's | independent lookups | local ones | reuse bins | hit rates |
|---|---|---|---|---|---|
| x 1/16 | 0.6, 2.9 % | 1.0, 7.1 % | 0.8, 6.7 % | 0.005, 0.02 (local 0.07, 0.48) | 0.006, 0.03 |
| x 1/4 | 0.3, 4.1 % | 0.4, 4.0 % | 0.3, 5.9 % | 0.004, 0.02 (local 0.03, 0.15) | 0.003, 0.02 |
| x 4 | 1.0, 3.3 % | 0.6, 1.8 % | 2.5, 40 % | 0.02, 0.06 (local 0.04, 0.25) | 0.003, 0.02 |
| x 16 | 5.9, 14 % | 7.4, 16 % | 13, 73 % | 0.08, 0.15 (local 0.10, 0.58) | 0.006, 0.14 |

The worst of larger batches, and of bins, are those where 80 % of lookups repeat one of the last 4,000 draws, over a quarter of
the batch they come from: rows that were repeated then look like rows that are popular.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from steptime._lookups.generators import UNIFORM_BITS, Generator, knots_of
from steptime._lookups.mixture import Mixture, fitted
from steptime._lookups.spectrum import HOTTEST, Footprint, Spectrum, grid, of_rows, with_totals
from steptime._lookups.statistics import REUSE_BINS, Floats, Lengths, Statistics, tally_of_lengths
from steptime._lookups.table import TableStatistics
from steptime.errors import InputError

_SURE = 64
"""A row with more lookups than this has the count expected of it, within an eighth; below, spectra know what chance adds."""


def expected_statistics(generator: Generator, batch: int, dim: int = 1, table: str = "table") -> TableStatistics:
    """What a batch of a generator looks up, on average over seeds."""
    if batch < 1:
        raise InputError(f"Table {table}: batch is {batch}; expected 1 sample or more.")
    lengths, bags = tally = tally_of_lengths(generator.bag_lengths(batch))
    lookups = int(lengths @ bags)
    spread = math.sqrt(float(bags @ np.square(lengths - lookups / batch)) / batch)
    counted = Statistics(generator.rows, batch, lookups, 0, spread, (0.0,) * REUSE_BINS)
    empty = TableStatistics(table, dim, counted, Lengths.of(tally), (0,) * len(HOTTEST), Spectrum((), ()), Footprint((), ()))
    if not lookups:
        return empty
    mixture, windows = _mixture(generator, lookups), grid(lookups)
    draws = draws_in(generator, windows)
    footprint = of_rows(windows, mixture.distinct(draws / draws[-1]))
    order = np.argsort(-mixture.rates, kind="stable")
    places = np.searchsorted(np.cumsum(mixture.rows[order]), HOTTEST)
    hot = [mixture.rates[order[index]] * mixture.burst if index < len(order) else 0.0 for index in places.tolist()]
    raw = mixture.spectrum(1.0)
    spectrum = with_totals(raw, footprint.unique, lookups)
    hottest = _descending(
        math.floor(count) if count > _SURE else estimate for count, estimate in zip(hot, raw.hottest(), strict=True)
    )
    counted = replace(counted, unique=round(spectrum.unique), reuse=_reuse(raw))
    return replace(empty, counted=counted, hottest=hottest, spectrum=spectrum, footprint=footprint)


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


def scaled(statistics: TableStatistics, batch: int) -> TableStatistics:
    """What a batch of so many samples of the same data looks up, as far as this one tells."""
    if batch < 1:
        raise InputError(f"Table {statistics.table}: batch is {batch}; expected 1 sample or more.")
    if batch == statistics.batch:
        return statistics
    lookups = round(statistics.lookups * batch / statistics.batch)
    lengths = statistics.lengths.of_batch(statistics.batch, batch)
    counted = replace(statistics.counted, batch=batch, lookups=lookups)
    if not lookups:
        counted = replace(counted, unique=0, reuse=(0.0,) * REUSE_BINS)
        return TableStatistics(
            statistics.table, statistics.dim, counted, lengths, (0,) * len(HOTTEST), Spectrum((), ()), Footprint((), ())
        )
    mixture, factor = fitted(statistics.spectrum, statistics.footprint, statistics.rows), lookups / statistics.lookups
    footprint = _scaled_footprint(statistics.footprint, mixture, lookups, statistics.rows)
    raw = mixture.spectrum(factor)
    spectrum = with_totals(raw, footprint.unique, lookups)
    hottest = _descending(  # rows hot enough keep their share
        round(count * factor) if count * min(1.0, factor) > _SURE else estimate
        for count, estimate in zip(statistics.hottest, spectrum.hottest(), strict=True)
    )
    counted = replace(counted, unique=max(1, round(spectrum.unique)), reuse=_reuse(raw))
    return TableStatistics(statistics.table, statistics.dim, counted, lengths, hottest, spectrum, footprint)


def _scaled_footprint(footprint: Footprint, mixture: Mixture, lookups: int, rows: int) -> Footprint:
    """The same curve, cut off, or going on as the mixture does."""
    windows = grid(lookups)
    factors = np.maximum(windows / footprint.lookups, 1.0)
    gained: Floats = mixture.distinct(factors) / mixture.distinct(np.ones(1))
    result = np.minimum(footprint.distinct(windows) * np.maximum(gained, 1.0), np.minimum(windows, rows))
    return of_rows(windows, result)


def _reuse(spectrum: Spectrum) -> tuple[float, ...]:
    return tuple((spectrum.reuse_bins()[0] / spectrum.unique).tolist())


def _descending(counts: Iterable[float]) -> tuple[int, ...]:
    """Counts of rows, hottest first: none is above the one before."""
    return tuple(int(count) for count in np.minimum.accumulate(list(counts)))
