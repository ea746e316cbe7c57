"""Fits a `Population` to public statistics of production lookups.

Source: the `locality_stats_*.txt` files of github.com/facebookresearch/dlrm_datasets (MIT): per file of indices the number of
lookups and of distinct rows over all tables, and two histograms over how often a row was looked up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError
from steptime.lookups.expected import expected_reuse
from steptime.lookups.populations import Population
from steptime.lookups.statistics import REUSE_BINS

_FILE = re.compile(r"fbgemm_t(\d+)_bs(\d+)\S*\.pt")
_BIN = re.compile(r"\(\d+(?:, \d+\]|\+): ([0-9.]+)")

TABLES = 128
"""Over so many tables the totals of a population are summed: enough that no single one shows."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What is known of one file of lookups: totals over its tables, in one batch of all its samples."""

    name: str
    tables: int
    samples: int
    lookups: float
    unique: float
    row_shares: tuple[float, ...]  # [17] of distinct rows, by how often each was looked up
    lookup_shares: tuple[float, ...]  # [17] of lookups

    @property
    def mean_reuse(self) -> float:
        """Lookups per distinct row."""
        return self.lookups / self.unique


def read_totals(path: Path) -> tuple[Totals, ...]:
    """Every file that a `locality_stats` text describes."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error}); expected a locality_stats_*.txt.") from None
    starts = list(_FILE.finditer(text))
    if not starts:
        raise InputError(f"{path}: names no fbgemm_t<tables>_bs<samples>.pt; expected a locality_stats_*.txt.")
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return tuple(_totals(path, match, text[match.end() : end]) for match, end in zip(starts, ends, strict=True))


def _totals(path: Path, match: re.Match[str], block: str) -> Totals:
    lookups = re.search(r"# of indices: (\d+)", block)
    unique = re.search(r"# of unique cols: (\d+)", block)
    shares = [float(share) for share in _BIN.findall(block)]
    if lookups is None or unique is None or len(shares) != 2 * REUSE_BINS:
        raise InputError(
            f"{path}: the block of {match[0]} has {len(shares)} histogram lines; "
            f"expected counts of indices and unique cols and two histograms of {REUSE_BINS} lines."
        )
    return Totals(
        name=match[0],
        tables=int(match[1]),
        samples=int(match[2]),
        lookups=float(lookups[1]),
        unique=float(unique[1]),
        row_shares=tuple(shares[:REUSE_BINS]),
        lookup_shares=tuple(shares[REUSE_BINS:]),
    )


def totals_of(population: Population, samples: int, tables: int, spread_over: int = TABLES) -> Totals:
    """What a population gives on average in a file of so many samples and tables."""
    rows, lookups = np.zeros(REUSE_BINS), np.zeros(REUSE_BINS)
    for table in population.tables(spread_over):
        found = expected_reuse(table.kind, table.rows, table.alpha, table.shift, samples * table.pooling)
        rows += found.rows
        lookups += found.lookups
    scale = tables / spread_over
    return Totals(
        name=population.name,
        tables=tables,
        samples=samples,
        lookups=float(lookups.sum()) * scale,
        unique=float(rows.sum()) * scale,
        row_shares=tuple((rows / rows.sum()).tolist()),
        lookup_shares=tuple((lookups / lookups.sum()).tolist()),
    )


def misfit(population: Population, published: Totals) -> float:
    """Squared distance of the two histograms and of the logarithms of both totals; 0 is a perfect fit."""
    found = totals_of(population, published.samples, published.tables)
    shares = np.subtract([*found.row_shares, *found.lookup_shares], [*published.row_shares, *published.lookup_shares])
    totals = np.log([found.lookups / published.lookups, found.unique / published.unique])
    return float(np.square(shares).sum() + np.square(totals).sum())


def fit(start: Population, published: Totals, rounds: int = 300, seed: int = 0, held: tuple[str, ...] = ()) -> Population:
    """The population nearest to published totals, by a seeded search from `start`: a step is kept where it helps.

    Fields that are `held` stay as they are.
    """
    random = np.random.default_rng(seed)
    names = [field.name for field in fields(start) if field.name not in ("name", *held)]
    best, error, step = start, misfit(start, published), 0.1
    for _ in range(rounds):
        tried = _moved(best, names, step * random.standard_normal(len(names)))
        found = misfit(tried, published)
        # The one-fifth rule of evolution strategies: longer steps after a success, shorter ones after a failure.
        step *= 1.5 if found < error else 1.5**-0.25
        if found < error:
            best, error = tried, found
    return best


def _moved(population: Population, names: list[str], by: npt.NDArray[np.float64]) -> Population:
    values: dict[str, Any] = {name: getattr(population, name) for name in names}
    moved = {name: float(f"{value * np.exp(change):.4g}") for (name, value), change in zip(values.items(), by, strict=True)}
    return replace(population, **cast("dict[str, Any]", moved))
