"""`nn.EmbeddingBag` forward: one kernel, whose warps walk bags lookup by lookup."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.device import LookupConstants, reference_lookups
from steptime._models.lookups.forms import LookupTimes, inside_of, total_only
from steptime._models.lookups.forms.bag_balance import Balance, balance_of
from steptime._models.lookups.forms.one_table import RATE, OneTable, Traffic, sizes_of, traffic_of
from steptime._models.lookups.forms.timed import KernelTerms, Timed

KERNEL = "bag_forward"

# Nanoseconds of an SM per row part while its busiest warp still walks, and of a warp per lookup: the first is about what
# the fit finds (4.2), the second the scale of a step of the path. Only what the path exceeds the SM's work by is a term.
_SM_NS, _STEP_NS = 5.0, 100.0


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
