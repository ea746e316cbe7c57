"""What a batch looks up in one table of a DLRM: statistics of its generator without drawing, or counted ones at this batch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from steptime._build.dlrm.model import Table
from steptime._lookups.statistics import QUANTILES, Lengths, tally_of_lengths, tally_of_offsets
from steptime._lookups.spectrum import grid, of_rows, of_spectrum
from steptime._lookups.generators import Generator
from steptime._lookups.estimated import expected_statistics
from steptime._lookups.estimated import scaled
from steptime._lookups.spectrum import Spectrum, of_statistics, with_totals
from steptime._lookups.statistics import REUSE_EDGES, Statistics
from steptime._lookups.table import TableStatistics

# Tables times batches that are kept: a sharding search asks for the same ones again and again.
_KEPT = 1 << 14
# Exponents among which a skew like that of counted lookups is sought (none is 1, where the formula has another form), and into
# how many groups of rows, each of like popularity, a table is divided for it.
_ALPHAS = np.linspace(0.011, 4.0, 400)
_GROUPS = 200


def table_lookups(table: Table, batch: int) -> TableStatistics:
    """The statistics of a table at a global batch."""
    if table.statistics is not None:
        return replace(_scaled(table.statistics, batch), table=table.name, dim=table.dim)
    generator = table.generator
    if generator.lengths == "fixed":  # then no length is drawn, and the seed does not matter
        generator = replace(generator, seed=0)
    return replace(_expected(generator, batch), table=table.name, dim=table.dim)


def row_share(whole: TableStatistics, ranks: int) -> TableStatistics:
    """What one of so many ranks looks up that hold equal shares of a table's rows, popular and rare ones alike.

    A row is looked up as often as before, on the one rank that has it. So a share has so many times fewer rows, distinct rows
    and lookups, a window of its lookups has the share of the rows that so many times as many of all lookups have, and a bag
    has a binomial number of its lookups there.
    """
    if ranks == 1:
        return whole
    lookups = round(whole.lookups / ranks)
    unique = min(max(round(whole.unique / ranks), 1), lookups)
    spectrum = with_totals(whole.spectrum, unique, lookups) if lookups else Spectrum((), ())
    windows = grid(lookups)
    lengths, spread = _thinned(whole, ranks)
    rows = -(-whole.rows // ranks)
    counted = replace(whole.counted, rows=rows, lookups=lookups, unique=unique, pooling_spread=spread)
    return replace(
        whole,
        counted=counted if lookups else replace(counted, reuse=(0.0,) * len(counted.reuse)),
        lengths=lengths,
        hottest=spectrum.hottest() if lookups else (0,) * len(whole.hottest),
        spectrum=spectrum,
        footprint=of_rows(windows, whole.footprint.distinct(np.minimum(windows * ranks, whole.lookups)) / ranks),
    )


def _thinned(whole: TableStatistics, ranks: int) -> tuple[Lengths, float]:
    """Lengths of bags of which each lookup is kept with one chance in `ranks`, and their standard deviation."""
    mean, kept = whole.lookups / whole.batch / ranks, whole.counted.pooling_spread / ranks
    spread = math.sqrt(kept**2 + mean * (1 - 1 / ranks))
    shares = np.minimum(QUANTILES, 1 - 0.5 / whole.batch)
    wide = np.array(whole.lengths.quantiles) / ranks - mean
    # The larger of the two causes has the shape of the whole, widened to the deviation of both.
    apart = wide * (spread / kept) if kept**2 > mean else spread * np.array([NormalDist().inv_cdf(share) for share in shares])
    longest = np.minimum(np.maximum(np.round(mean + apart), 0.0), whole.lengths.quantiles)
    return Lengths(tuple(np.maximum.accumulate(longest).tolist())), spread


@lru_cache(maxsize=_KEPT)
def _expected(generator: Generator, batch: int) -> TableStatistics:
    return expected_statistics(generator, batch)


@lru_cache(maxsize=_KEPT)
def _scaled(statistics: TableStatistics, batch: int) -> TableStatistics:
    return scaled(statistics, batch)


def of_reuse(
    generator: Generator, dim: int, batch: int, reuse: tuple[float, ...], unique: int | None = None
) -> TableStatistics:
    """Statistics from the 17-bin reuse histogram alone: lookups in random order, bags all of one length.

    Without the number of distinct rows it follows from the lookups, a bin standing for the geometric mean of its ends.
    """
    offsets, lookups = generator.offsets(batch)
    shares = np.array(reuse) / max(sum(reuse), 1e-300)
    ends = np.array((1.0, *REUSE_EDGES[1:], 2.0 * REUSE_EDGES[-1]))
    begins = np.array((1.0, 2.0, *(edge + 1.0 for edge in REUSE_EDGES[1:])))
    result = round(lookups / float(shares @ np.sqrt(begins * ends))) if unique is None else unique
    distinct = max(min(result, generator.rows, lookups), min(1, lookups))
    counted = Statistics(generator.rows, batch, lookups, distinct, float(np.diff(offsets).std()), tuple(shares.tolist()))
    spectrum = of_statistics(counted)
    if lookups:
        spectrum = with_totals(spectrum, distinct, lookups)
    return TableStatistics(
        table="table",
        dim=dim,
        counted=counted,
        lengths=Lengths.of(tally_of_offsets(offsets, "table")),
        hottest=spectrum.hottest(),
        spectrum=spectrum,
        footprint=of_spectrum(spectrum),
    )


def generator_like(rows: int, pooling: float, batch: int, unique: int, seed: int) -> Generator:
    """A generator that finds about as many distinct rows in such a batch: a zipf skew with the exponent that does."""
    edges = np.unique(np.append(0.0, np.round(np.geomspace(1.0, rows, _GROUPS))))
    exponents = 1 - _ALPHAS[:, None]
    below = np.expm1(exponents * np.log1p(edges)) / np.expm1(exponents * np.log1p(float(rows)))  # as lookups.skew has it
    sizes = np.diff(edges)
    distinct = (sizes * -np.expm1(-pooling * batch * np.diff(below, axis=1) / sizes)).sum(axis=1)  # falls with the exponent
    alpha = float(np.interp(unique, distinct[::-1], _ALPHAS[::-1]))
    return Generator(rows=rows, pooling=pooling, kind="zipf", alpha=round(alpha, 4), seed=seed)
