"""What a batch looks up in one table of a DLRM: statistics of its generator without drawing, or counted ones at this batch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from steptime._build.dlrm.model import Table
from steptime._lookups import lengths as bag_lengths
from steptime._lookups.footprint import of_spectrum
from steptime._lookups.generators import Generator
from steptime._lookups.parametric import expected_statistics
from steptime._lookups.scaling import scaled
from steptime._lookups.spectrum import of_statistics, with_totals
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
    found = round(lookups / float(shares @ np.sqrt(begins * ends))) if unique is None else unique
    distinct = max(min(found, generator.rows, lookups), min(1, lookups))
    counted = Statistics(generator.rows, batch, lookups, distinct, float(np.diff(offsets).std()), tuple(shares.tolist()))
    spectrum = of_statistics(counted)
    if lookups:
        spectrum = with_totals(spectrum, distinct, lookups)
    return TableStatistics(
        table="table",
        dim=dim,
        counted=counted,
        lengths=bag_lengths.of_tally(bag_lengths.tally_of(offsets, "table")),
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
