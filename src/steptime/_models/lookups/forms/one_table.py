"""What forms of one-table lookups share: their columns, what caches keep of their traffic, and the time of a kind of kernels.

The whole GPU is fitted by itself, so that rows of shares cannot make it worse; shares have factors of their own on terms of
their own, and a correction that sees what the whole GPU's says."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from steptime._lookups.table import Floats, Places, TableColumns
from steptime._models.engine.stored import stored
from steptime._models.lookups.caches import LookupConstants, misses
from steptime._models.lookups.forms import Correction
from steptime._models.lookups.question import DTYPES, Flags, Lookups, Pool, Shares

RATE = 4e3  # bytes a nanosecond, about what memory moves: scales terms, so that factors are near one
SPLIT_BYTES = 2.0**31  # output of one gather kernel: all fitted rows with more have two
SECTOR = 32.0
"""Bytes that caches and memory move at a time."""

_SHARPNESS = 4.0  # of what stays in the cache from the batch before, over its footprint
# Where rows wait for each other, trees know little of more skew than so many of their rows had; so much further, they have no
# say. Chosen on rows of embedding_bag, of fit and validation, that are more skewed than those fitted to.
_FADING = 0.25
# No kernel of the measured rows takes less.
_SHORTEST = 600.0


@dataclass(frozen=True)
class OneTable:
    """Lookups of one table each, with the columns of that table: all [lookups]."""

    tables: TableColumns
    pool: Pool
    place: Places  # of the table among those that lookups share
    lookups: Floats
    unique: Floats
    batch: Floats
    dim: Floats
    item: Floats
    row: Floats  # bytes
    sectors: Floats  # bytes of a row as caches move it
    warm: Floats
    weighted: Floats
    half: Floats
    bfloat: Floats
    sms: Floats  # of the share of the GPU
    shares: Shares
    device: LookupConstants

    @classmethod
    def of(cls, lookups: Lookups, device: LookupConstants) -> OneTable:
        """Tables beside the first of a lookup are left out: these implementations have one."""
        place = lookups.member[lookups.starts[:-1]]
        pool = lookups.pool.take(place)
        tables = pool.tables
        return cls(
            tables=tables,
            pool=pool,
            place=place,
            lookups=tables.lookups,
            unique=tables.unique,
            batch=np.maximum(tables.batch, 1.0),
            dim=tables.dim,
            item=pool.item,
            row=pool.row_bytes,
            sectors=SECTOR * np.ceil(pool.row_bytes / SECTOR),
            warm=lookups.warm.astype(np.float64),
            weighted=lookups.weighted.astype(np.float64),
            half=(pool.item < 4).astype(np.float64),
            bfloat=(pool.dtype == DTYPES.index("bfloat16")).astype(np.float64),
            sms=device.sms / lookups.share,
            shares=lookups.shares,
            device=device,
        )

    def take(self, places: Flags | Places) -> OneTable:
        """Some of the lookups."""
        columns: dict[str, Any] = {name: value[places] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        columns |= {name: getattr(self, name).take(places) for name in ("tables", "pool", "shares")}
        return OneTable(**columns, device=self.device)

    def distinct(self) -> tuple[OneTable, Places]:
        """One lookup of each table on each kind of share, and of every lookup which of these it is: caches, weights aside."""
        keys = (self.place * 1024 + self.shares.count.astype(np.intp)) * 2 + self.shares.crowded.astype(np.intp)
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return self.take(first), inverse


@dataclass(frozen=True)
class Traffic:
    """Shares of lookups that miss caches, [lookups]."""

    first: Floats  # an SM's own cache
    second: Floats  # the cache of the GPU, empty at first
    met: Floats  # the same, with what stays of the batch before where rows are warm
    footprint: Floats  # bytes of all that the kernel touches


def traffic_of(one: OneTable) -> Traffic:
    """From reuse and order of lookups. Shares in use have their part of the GPU's cache each."""
    few, inverse = one.distinct()
    device, share = one.device, few.shares.count
    capacity = device.l2_kept_bytes / np.where(few.shares.crowded > 0, share, 1.0)
    total = np.maximum(few.lookups, 1.0)
    second = misses(few.tables, capacity / few.sectors)
    first = np.maximum(misses(few.tables, device.l1_kept_bytes / few.sectors, share / device.sms), second)
    footprint = few.unique * few.sectors + few.batch * few.row + 16.0 * few.lookups
    stays = 1.0 / (1.0 + (footprint / (device.warm_kept_bytes * capacity / device.l2_kept_bytes)) ** _SHARPNESS)
    met = (second / total)[inverse] * (1.0 - one.warm * stays[inverse])
    return Traffic((first / total)[inverse], (second / total)[inverse], met, footprint[inverse])


def sizes_of(one: OneTable) -> Floats:
    """By which a lookup is inside or outside of what was fitted, [lookups, sizes]."""
    return np.column_stack([one.batch, one.dim, one.lookups + 1, one.tables.longest + 1, one.tables.rows, one.shares.count])


def over(bytes_: Floats, limit: Floats | float) -> Floats:
    """What goes beyond a limit."""
    result: Floats = np.maximum(bytes_ - limit, 0.0)
    return result


@dataclass(frozen=True)
class KernelTerms:
    """What the time of a kind of kernels is made of, a row for each lookup."""

    terms: Floats  # nanoseconds up to a factor
    more: Floats  # further terms that shares of a GPU have
    features: Floats
    shares: Floats  # share and others: [lookups, 2]
    skew: Floats  # share of lookups that go to the hottest row
    slower: Floats  # how much longer terms but the first take where no row of a share of a GPU was measured
    serial: Floats  # nanoseconds of what happens one after the other, however many SMs there are
    least: Floats  # nanoseconds that memory takes in any case

    @classmethod
    def of(
        cls,
        one: OneTable,
        terms: tuple[Floats, Floats],
        features: Floats,
        *,
        serial: Floats | None = None,
        least: Floats | None = None,
        spread: bool = False,
    ) -> KernelTerms:
        """Of lookups, with terms (and those of shares) and features of the same rows.

        `spread`: whether terms are of work that all SMs share, and do not say so themselves.
        """
        none = np.zeros(len(features))
        slower = one.shares.count if spread else none + 1.0
        skew = one.tables.hottest[:, 0] / np.maximum(one.lookups, 1.0)
        return cls(
            *terms,
            features,
            one.shares.columns(),
            skew,
            slower,
            none if serial is None else serial,
            none if least is None else least,
        )

    def take(self, places: Flags) -> KernelTerms:
        """Some of the rows."""
        return KernelTerms(*(getattr(self, column.name)[places] for column in fields(self)))

    @property
    def whole(self) -> Flags:
        """Rows on a whole GPU."""
        result: Flags = self.shares[:, 0] == 1.0
        return result

    @property
    def joined(self) -> Floats:
        """The terms of shares of a GPU."""
        return np.concatenate([self.terms, self.more], axis=1)

    def physics(self, terms: Floats, factors: Floats) -> Floats:
        """Nanoseconds: what happens side by side and what happens one after the other overlap in part."""
        result: Floats = np.maximum(np.hypot(terms @ factors, self.serial), np.maximum(self.least, _SHORTEST))
        return result


@dataclass(frozen=True)
class Timed:
    """Factors of terms and the corrections on top."""

    factors: Floats
    correction: Correction
    share_factors: Floats = field(metadata=stored(key="part_factors"))  # none without rows of shares
    share_correction: Correction = field(metadata=stored(prefix="part_correction."))
    skew: float  # that enough fitted rows have

    def ns(self, terms: KernelTerms) -> Floats:
        """Nanoseconds of each row."""
        whole = terms.whole
        times, factors = np.empty(len(whole)), np.empty(len(whole))
        if whole.any():
            rows = terms.take(whole)
            times[whole], factors[whole] = rows.physics(rows.terms, self.factors), self.correction.factors(rows.features)
        if not whole.all():
            times[~whole], features = self.of_shares(terms.take(~whole))
            factors[~whole] = self.share_correction.factors(features)
        further = np.where(terms.serial > 0, terms.skew - self.skew, 0.0) / (_FADING * self.skew + 1e-9)
        times *= factors ** np.clip(1.0 - further, 0.0, 1.0)
        return times

    def of_shares(self, terms: KernelTerms) -> tuple[Floats, Floats]:
        """Physics and features of rows on shares of a GPU."""
        base = terms.physics(terms.terms, self.factors)
        if self.share_factors.size:
            physics = terms.physics(terms.joined, self.share_factors)
        else:
            slower = np.column_stack([terms.terms[:, :1], terms.terms[:, 1:] * terms.slower[:, None]])
            physics = terms.physics(slower, self.factors)
        known = self.correction.trees.values(terms.features)
        return physics, np.column_stack([terms.features, terms.shares, np.log(physics / base), known])
