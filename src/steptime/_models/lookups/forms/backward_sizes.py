"""`BackwardSizes`: what a table-batched backward pass has to do, from its tables alone: lookups, runs of equal rows, levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._lookups.statistics import QUANTILES
from steptime._lookups.table import Floats, TableColumns
from steptime._models.lookups.caches import LookupConstants
from steptime._models.lookups.question import ITEM_BYTES, OPTIMIZERS, Lookups, Pool

# As the launches are made (`steptime_lab.workloads.table_batched.launch`): positions of a chunk, bags of a program of the first
# kernel and the lookups of each that it handles at once, quads of a program of the update.
CHUNK, _BAGS, _LANES, _QUADS = 32, 32, 16, 64

# Levels whose runs are counted row by row; beyond, a row would need millions of lookups to be met.
COUNTED = 4
_SECTOR = 32.0
_INT32 = float(1 << 31)

SMALL_SORT = 4096.0
"""Up to so many keys are sorted by one kernel in one block; measured rows change over between 4,096 and 4,100 lookups."""


@dataclass(frozen=True)
class BackwardSizes:
    """Of each lookup, [lookups]; what differs by level is [lookups, levels]."""

    tables: Floats
    batch: Floats
    any: Floats  # 0 where nothing is looked up, else 1
    lookups: Floats  # at least 1
    unique: Floats
    quads: Floats  # of all rows of all tables, looked up or not
    widest: Floats  # elements of the widest row: all tables' rows take as many lanes
    elements: Floats  # of gradient rows that are read, one for each lookup
    far: Floats  # those of them that a cache does not keep
    row_bytes: Floats  # of the distinct rows, in whole sectors
    gradient_bytes: Floats  # of all samples and tables
    own_gradient: Floats  # bytes of a table's gradient, mean over lookups
    steps: Floats  # of all programs of the first kernel
    info_sectors: Floats  # that a gather of infos in sorted order reads
    far_sectors: Floats  # those of them that a cache does not keep
    longest: Floats  # steps of its longest program
    hottest: Floats  # lookups of the hottest row
    adagrad: Floats  # 0 | 1
    item: Floats  # bytes of an element
    weighted: Floats  # 0 | 1
    cold: Floats  # 0 | 1
    stride: Floats  # lanes that walk a chunk
    wide: Floats  # quads of a program of the update
    live: Floats  # by level: whether it is launched
    count: Floats  # by level: positions
    programs: Floats  # by level
    entries: Floats  # by level, `COUNTED` of them: positions that hold something
    entry_elements: Floats
    ended: Floats  # runs that end there, so that a row is updated
    ended_bytes: Floats
    device: LookupConstants

    @property
    def levels(self) -> Floats:
        """How often the update kernel is launched."""
        number: Floats = self.live.sum(axis=1)
        return number

    @property
    def small_sort(self) -> Floats:
        """1 where one kernel sorts."""
        return (self.lookups <= SMALL_SORT).astype(np.float64)

    @property
    def long_keys(self) -> Floats:
        """1 where 32 bits do not hold the keys that are sorted."""
        return (self.quads >= _INT32).astype(np.float64)


def _summed(pool: Pool, kept: float) -> list[Floats]:
    """What is summed over the tables of a lookup, each [tables]."""
    tables = pool.tables
    lookups, dim = tables.lookups, tables.dim
    own = tables.batch * dim * 4
    sectors = np.ceil(pool.row_bytes / _SECTOR) * _SECTOR
    elements = lookups * dim
    return [
        lookups,
        tables.unique,
        np.ceil(tables.rows * dim / 64) * 16,
        elements,
        elements * np.maximum(1 - kept / np.maximum(own, 1.0), 0.0),
        tables.unique * sectors,
        own,
        own * lookups,
        np.ceil(tables.batch / _BAGS) * _program_steps(tables),
        *_info_sectors(tables, kept),
        *_runs(pool),
    ]


def _program_steps(tables: TableColumns) -> Floats:
    """Mean steps of a program of the first kernel: those of the longest of its bags, whose lengths are as the quantiles say."""
    # The chance that the longest of a program's bags lies between two quantiles, and how long it is then, about: in the
    # middle, and beyond the last quantile but one, where bags get rare, nearer to that.
    chance = np.diff(np.array([0.0, *QUANTILES]) ** _BAGS)
    below = np.concatenate([tables.lengths[:, :1], tables.lengths[:, :-1]], axis=1)
    upper = np.where(np.arange(len(QUANTILES)) < len(QUANTILES) - 1, 0.5, 0.25)
    between: Floats = np.ceil((below * (1 - upper) + tables.lengths * upper) / _LANES) @ chance
    return between


def _info_sectors(tables: TableColumns, kept: float) -> list[Floats]:
    """Sectors that the lookups of each row touch among the infos of the table, four in one, and those that are far."""
    lookups = np.maximum(tables.lookups, 1.0)
    counts = tables.bin_lookups / np.maximum(tables.bin_rows, 1e-9)
    share = np.clip(counts / lookups[:, None], 0.0, 1 - 1e-12)
    sectors = (tables.bin_rows * (lookups / 4)[:, None] * -np.expm1(4 * np.log1p(-share))).sum(axis=1)
    return [sectors, sectors * np.maximum(1 - kept / (8 * lookups), 0.0)]


def _runs(pool: Pool) -> list[Floats]:
    """By level: entries and their elements beyond the first level, runs that end there and bytes of their rows."""
    tables = pool.tables
    rows = tables.bin_rows
    counts = tables.bin_lookups / np.maximum(rows, 1e-9)
    reached = np.ones_like(counts)
    results = []
    for level in range(COUNTED):
        span = CHUNK * 16.0**level
        # A run of so many lookups crosses the border of a chunk with this chance; then it leaves a sum in each it touches.
        leaves = np.clip((counts - 1) / span, 0.0, 1.0)
        ended = (rows * reached * (1 - leaves)).sum(axis=1)
        handed = (rows * leaves * np.maximum(2.0, counts / span + 1)).sum(axis=1)
        results += [handed, handed * tables.dim, ended, ended * pool.row_bytes]
        reached = leaves
    return results


def sizes_of(lookups: Lookups, device: LookupConstants) -> BackwardSizes:
    """Of each lookup."""
    tables = lookups.pool.tables
    sums = np.stack([lookups.sums(column) for column in _summed(lookups.pool, device.gradient_kept_bytes)], axis=1)
    counted = np.maximum(sums[:, 0], 1.0)
    largest = (tables.batch, tables.dim, np.ceil(tables.longest / _LANES), tables.hottest[:, 0])
    most = np.stack([lookups.maxima(column) for column in largest], axis=1)
    runs = sums[:, 11:].reshape(len(lookups), COUNTED, 4)
    adagrad = (lookups.optimizer != OPTIMIZERS.index("sgd")).astype(np.float64)
    needed = np.maximum(most[:, 1] / 4, 1.0)
    power = 2.0 ** np.ceil(np.log2(needed))
    stride = np.where(adagrad > 0, power, needed)
    wide = np.maximum(power, _QUADS)
    live, count, programs = _levels(counted, np.floor(wide / stride))
    first = np.stack([counted, sums[:, 3]], axis=1)[:, None, :]
    entered = np.concatenate([first, runs[:, :-1, :2]], axis=1)
    return BackwardSizes(
        tables=lookups.counts.astype(np.float64),
        batch=most[:, 0],
        any=(sums[:, 0] > 0).astype(np.float64),
        lookups=counted,
        unique=np.maximum(sums[:, 1], 1.0),
        quads=sums[:, 2],
        widest=most[:, 1],
        elements=np.maximum(sums[:, 3], 1.0),
        far=sums[:, 4],
        row_bytes=np.maximum(sums[:, 5], 1.0),
        gradient_bytes=sums[:, 6],
        own_gradient=sums[:, 7] / counted,
        steps=sums[:, 8],
        info_sectors=sums[:, 9],
        far_sectors=sums[:, 10],
        longest=most[:, 2],
        hottest=most[:, 3],
        adagrad=adagrad,
        item=np.array([float(size) for size in ITEM_BYTES.values()])[lookups.dtype],
        weighted=lookups.weighted.astype(np.float64),
        cold=np.where(lookups.warm, 0.0, 1.0),
        stride=stride,
        wide=wide,
        live=live,
        count=count,
        programs=programs,
        entries=entered[..., 0],
        entry_elements=entered[..., 1],
        ended=runs[..., 2],
        ended_bytes=runs[..., 3],
        device=device,
    )


def _levels(lookups: Floats, at_once: Floats) -> tuple[Floats, Floats, Floats]:
    """Which levels are launched, with how many positions and programs: two entries a chunk go up until there is one chunk."""
    live, counts, programs = [np.ones_like(lookups)], [lookups], []
    while True:
        chunks = np.ceil(counts[-1] / CHUNK)
        programs.append(np.ceil(chunks / at_once) * live[-1])
        more = live[-1] * (chunks > 1)
        if not more.any() and len(live) >= COUNTED:
            return np.stack(live, axis=1), np.stack(counts, axis=1), np.stack(programs, axis=1)
        live.append(more)
        counts.append(np.maximum(2 * chunks, 1.0))
