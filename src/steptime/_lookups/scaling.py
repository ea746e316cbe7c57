"""Statistics of a batch of another size, from those of one batch and without its indices.

A smaller batch is a window of the larger one: its distinct rows are read off the footprint. What a larger one meets that
this batch did not is an estimate from how many rows it met once, twice and so on (`mixture`).

Errors against drawn batches, from a batch of 4096 (benchmarks/lookup_scaling.py; median and worst over tables):

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

from dataclasses import replace

import numpy as np

from steptime._lookups.footprint import Footprint, grid, of_rows
from steptime._lookups.mixture import Mixture, fitted
from steptime._lookups.spectrum import Floats, Spectrum, with_totals
from steptime._lookups.table import TableStatistics
from steptime.errors import InputError

_SURE = 64
"""A row with more lookups than this gets its share of a batch of any size, within an eighth."""


def scaled(statistics: TableStatistics, batch: int) -> TableStatistics:
    """What a batch of so many samples of the same data looks up, as far as this one tells."""
    if batch < 1:
        raise InputError(f"Table {statistics.table}: batch is {batch}; expected 1 sample or more.")
    if batch == statistics.batch:
        return statistics
    lookups = round(statistics.lookups * batch / statistics.batch)
    if not lookups:
        return _without_lookups(statistics, batch)
    mixture = fitted(statistics.spectrum, statistics.footprint, statistics.rows)
    footprint = _footprint(statistics.footprint, mixture, lookups, statistics.rows)
    raw = mixture.spectrum(lookups / statistics.lookups)
    spectrum = with_totals(raw, footprint.unique, lookups)
    reuse = raw.reuse_bins()[0] / raw.unique
    return replace(
        statistics,
        counted=replace(
            statistics.counted, batch=batch, lookups=lookups, unique=max(1, round(spectrum.unique)), reuse=tuple(reuse.tolist())
        ),
        lengths=statistics.lengths.of_batch(statistics.batch, batch),
        hottest=_hottest(statistics.hottest, spectrum, lookups / statistics.lookups),
        spectrum=spectrum,
        footprint=footprint,
    )


def _footprint(footprint: Footprint, mixture: Mixture, lookups: int, rows: int) -> Footprint:
    """The same curve, cut off, or going on as the mixture does."""
    windows = grid(lookups)
    factors = np.maximum(windows / footprint.lookups, 1.0)
    gained: Floats = mixture.distinct(factors) / mixture.distinct(np.ones(1))
    result = np.minimum(footprint.distinct(windows) * np.maximum(gained, 1.0), np.minimum(windows, rows))
    return of_rows(windows, result)


def _hottest(known: tuple[int, ...], spectrum: Spectrum, factor: float) -> tuple[int, ...]:
    """Rows hot enough keep their share; of the others the spectrum tells."""
    results = (
        round(count * factor) if count * min(1.0, factor) > _SURE else estimate
        for count, estimate in zip(known, spectrum.hottest(), strict=True)
    )
    ordered = list(results)
    return tuple(int(count) for count in np.minimum.accumulate(ordered))


def _without_lookups(statistics: TableStatistics, batch: int) -> TableStatistics:
    counted = replace(statistics.counted, batch=batch, lookups=0, unique=0, reuse=(0.0,) * len(statistics.counted.reuse))
    return replace(
        statistics,
        counted=counted,
        lengths=statistics.lengths.of_batch(statistics.batch, batch),
        hottest=(0,) * len(statistics.hottest),
        spectrum=Spectrum((), ()),
        footprint=Footprint((), ()),
    )
