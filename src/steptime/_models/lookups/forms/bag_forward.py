"""`nn.EmbeddingBag` forward: one kernel, whose warps walk bags lookup by lookup: the busiest warp is its critical path."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from steptime._lookups.statistics import QUANTILES
from steptime._lookups.table import Floats, TableColumns
from steptime._models.lookups.caches import LookupConstants, reference_lookups
from steptime._models.lookups.forms import LookupTimes, inside_of, total_only
from steptime._models.lookups.forms.one_table import RATE, KernelTerms, OneTable, Timed, Traffic, sizes_of, traffic_of
from steptime._models.lookups.question import Lookups

_GRID_BLOCKS, _BLOCK_WARPS, _WARP = 1024.0, 8.0, 32.0
_GRID_WARPS = _GRID_BLOCKS * _BLOCK_WARPS
"""ATen's EmbeddingBag kernel is launched with so many warps; each walks bags, 32 elements of a row at a time."""

# Blocks that an SM runs at a time: 2,048 threads.
_RESIDENT = 8.0
_BISECTIONS = 24
# Mean of the largest of n normal values, over their deviation, at n = 1, 2, 4, 8.
_LARGEST_OF = (0.0, 0.564, 1.029, 1.424)
KERNEL = "bag_forward"

# Nanoseconds of an SM per row part while its busiest warp still walks, and of a warp per lookup: the first is about what
# the fit finds (4.2), the second the scale of a step of the path. Only what the path exceeds the SM's work by is a term.
_SM_NS, _STEP_NS = 5.0, 100.0


@dataclass(frozen=True)
class Balance:
    """How the lookups of bags fall on warps and SMs of `EmbeddingBag_updateOutputKernel`, in row parts of 32 elements."""

    parts: Floats  # of a row
    rounds: Floats  # bags that a warp walks
    busiest: Floats  # lookups of the busiest warp
    block: Floats  # of the busiest warp of a typical block
    mean: Floats  # of a warp
    sm: Floats  # row parts of the busiest SM
    sm_mean: Floats
    waves: Floats  # of blocks
    active: Floats  # warps that have a bag


def balance_of(one: OneTable) -> Balance:
    """From quantiles of bag lengths, bags being in no order; what several lookups share is computed once."""
    few, inverse = one.distinct()
    result = _balance_of(few)
    return Balance(*(getattr(result, field.name)[inverse] for field in fields(Balance)))


def _balance_of(one: OneTable) -> Balance:
    parts = np.ceil(one.dim / _WARP)
    chunks = one.batch * parts
    active = np.minimum(chunks, _GRID_WARPS)
    rounds = np.ceil(chunks / _GRID_WARPS)
    lengths = BagLengths.of(one.tables)
    groups = np.maximum(active / parts, 1.0)
    ahead = np.clip((chunks - (rounds - 1) * _GRID_WARPS) / parts, 1.0, None)
    busiest = np.maximum(lengths.largest(rounds, ahead), lengths.largest(np.maximum(rounds - 1, 1), groups))
    bags = np.maximum(_BLOCK_WARPS / parts, 1.0)
    deviations = np.interp(np.log2(bags), np.arange(4.0), _LARGEST_OF)
    block = np.minimum(rounds * lengths.mean + deviations * np.sqrt(rounds) * lengths.spread, busiest)
    blocks = np.ceil(active / _BLOCK_WARPS)
    most = np.ceil(blocks / one.sms)
    drawn = most * bags * chunks / active
    sm = np.maximum(lengths.largest(drawn, np.minimum(one.sms, blocks)) * parts, lengths.longest)
    return Balance(
        parts=parts,
        rounds=rounds,
        busiest=np.maximum(busiest, 1.0),
        block=np.maximum(block, 1.0),
        mean=chunks * lengths.mean / active,
        sm=np.maximum(sm, 1.0),
        sm_mean=chunks * lengths.mean / one.sms,
        waves=np.ceil(blocks / (one.sms * _RESIDENT)),
        active=active,
    )


@dataclass(frozen=True)
class BagLengths:
    """Bag lengths as a few values with a weight each, with the batch's own mean and longest."""

    values: Floats  # [tables, values]
    weights: Floats
    mean: Floats  # [tables]
    spread: Floats
    longest: Floats

    @classmethod
    def of(cls, tables: TableColumns) -> BagLengths:
        """Between quantiles, two values at the quarters; then a single bag that is the longest."""
        low = np.concatenate(
            [np.maximum(2 * tables.lengths[:, :1] - tables.lengths[:, 1:2], 0.0), tables.lengths[:, :-1]], axis=1
        )
        high = tables.lengths
        steps = np.diff(np.concatenate([[0.0], QUANTILES])) / 2
        single = 1.0 / np.maximum(tables.batch, 1.0)[:, None]
        weights = np.concatenate([np.tile(steps, 2) * (1 - single), single], axis=1)
        mean, longest = tables.pooling, tables.longest
        # Bags of the last step may lie at its lower end, with one long bag alone: the exact spread tells.
        near, far = low * 0.75 + high * 0.25, low * 0.25 + high * 0.75
        squares = steps * (1 - single) * (near**2 + far**2)
        rest = tables.spread**2 + mean**2 - squares[:, :-1].sum(axis=1) - single[:, 0] * longest**2
        least = 2 * steps[-1] * low[:, -1] ** 2
        stretch = np.clip((rest - least) / np.maximum(squares[:, -1] - least, 1e-9), 0.0, 1.0)
        near[:, -1] = low[:, -1] + stretch * (near[:, -1] - low[:, -1])
        far[:, -1] = low[:, -1] + stretch * (far[:, -1] - low[:, -1])
        values = np.concatenate([near, far, longest[:, None]], axis=1)
        values[:, :-1] *= (mean / np.maximum((values * weights).sum(axis=1), 1e-9))[:, None]
        return cls(np.minimum(values, longest[:, None]), weights, mean, tables.spread, longest)

    def largest(self, draws: Floats, sets: Floats) -> Floats:
        """Of so many sets of bags the most lookups that a set has: the sum that one set in about `sets` exceeds.

        A sum's tail by its saddle point: P(sum > n k') = exp(n (k - t k')) / (t sqrt(2 pi n k'')), k the log of the mean of
        exp(t length).
        """
        scale = np.maximum(self.longest, 1.0)
        shares = self.values / scale[:, None]
        wanted = np.log(np.maximum(sets, 1.0) / 0.7)  # The median of the largest of many: a tail of ln 2 in so many.
        low, high = np.full(len(scale), -6.0), np.full(len(scale), 9.0)
        reached = self.mean / scale
        for _ in range(_BISECTIONS):  # ln of t
            middle = (low + high) / 2
            tilt = np.exp(middle)
            grown = self.weights * np.exp(tilt[:, None] * (shares - 1.0))
            total = np.maximum(grown.sum(axis=1), 1e-300)
            reached = (grown * shares).sum(axis=1) / total
            wide = np.sqrt(2 * np.pi * draws * np.maximum((grown * shares**2).sum(axis=1) / total - reached**2, 1e-12))
            tail = draws * (tilt * (reached - 1.0) - np.log(total)) + np.log(np.maximum(tilt * wide, 1.0))
            over = tail > wanted
            low, high = np.where(over, low, middle), np.where(over, middle, high)
        one_long = self.longest + (draws - 1.0) * self.mean
        sums = np.clip(draws * reached * scale, draws * self.mean, draws * self.longest)
        sums = np.where(sets < 2, draws * self.mean, sums)
        result: Floats = np.where(draws <= 1.0, np.where(sets >= self._bags * 0.999, self.longest, sums), sums)
        return np.where(sets * draws >= self._bags * 0.999, np.maximum(result, one_long), result)

    @property
    def _bags(self) -> Floats:
        return 1.0 / self.weights[:, -1]


@dataclass(frozen=True)
class BagForward:
    """A fitted model."""

    timed: Timed
    low: Floats
    high: Floats
    device: LookupConstants = field(default_factory=reference_lookups)

    def times(self, lookups: Lookups) -> LookupTimes:
        """One kernel each."""
        item = OneTable.of(lookups, self.device)
        return total_only(KERNEL, self.timed.ns(terms_of(item)), 1.0, inside_of(self.low, self.high, sizes_of(item)))


def terms_of(one: OneTable) -> KernelTerms:
    """Terms and features of lookups."""
    balance, traffic = balance_of(one), traffic_of(one)
    return KernelTerms.of(one, _terms(one, balance, traffic), _features(one, balance, traffic))


def _terms(one: OneTable, balance: Balance, traffic: Traffic) -> tuple[Floats, Floats]:
    """Latency of paths (busiest warp, typical block), work of SMs, bytes; then what these are beside busy other shares."""
    path, block, work = balance.busiest * _STEP_NS, balance.block * _STEP_NS, balance.sm
    behind = np.maximum(path - work * _SM_NS, 0.0)
    uneven = path - np.minimum(block, path)
    first, met = traffic.first, traffic.met
    missed = one.lookups * one.sectors / RATE
    output = one.batch * one.row / RATE
    terms = [
        np.full(len(path), 1e3), balance.rounds * 1e3, path, path * first, path * met, work, work * first, work * met,
        one.batch * balance.parts / one.sms, output, one.lookups * 8.0 / RATE, work * one.half, path * one.weighted,
        work * one.weighted, block, block * first, block * met, missed * met, behind, behind * first, behind * met,
        uneven, uneven * first,
    ]  # fmt: skip
    waves = balance.waves * block
    crowd, stream = one.shares.crowded, one.shares.streaming.astype(np.float64)
    share = missed * one.shares.count
    more = [waves, waves * first, waves * met, share * met * crowd, share * first * crowd, output * one.shares.count * crowd]
    more += [share * met * stream]
    for beside in (crowd, stream):
        more += [path * beside, path * met * beside, path * first * beside, work * met * beside, work * first * beside]
        more += [beside * 1e3, behind * beside, behind * met * beside]
    return np.column_stack(terms), np.column_stack(more)


def _features(one: OneTable, balance: Balance, traffic: Traffic) -> Floats:
    tables, total = one.tables, np.maximum(one.lookups, 1.0)
    moved = total * one.sectors
    longest = np.maximum(tables.longest, 1.0)
    columns = [
        np.log(total), np.log(one.batch), one.dim, one.item, balance.parts, np.log(balance.busiest),
        balance.busiest / np.maximum(balance.mean, 1e-3), np.log(longest + 1), balance.rounds,
        balance.sm / np.maximum(balance.sm_mean, 1e-9), balance.active, traffic.first, traffic.second, traffic.met,
        np.log(moved), np.log(moved * traffic.first + 1), np.log(moved * traffic.met + 1),
        np.log(one.unique * one.sectors + 1), np.log(traffic.footprint), one.warm, one.weighted,
        balance.block / balance.busiest, balance.mean / balance.busiest, one.row, np.log(balance.sm),
        np.log(tables.rows * one.row), tables.spread / np.maximum(tables.pooling, 1e-3),
        *(tables.lengths[:, index] / longest for index in (7, 11, 14, 15, 16)),
        one.bfloat, tables.hottest[:, 0] / total, tables.hottest[:, 3] / total,
        *(tables.locality[:, index] for index in (6, 10, 14, 18)), balance.waves,
    ]  # fmt: skip
    return np.column_stack(columns)
