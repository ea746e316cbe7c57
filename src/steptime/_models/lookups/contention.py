"""What lookups on shares of one GPU do to each other while they run: each slows the others by what it takes of the memory.

Beside shares that copy memory all the time a lookup takes longer, by a factor that the lookup models know. Another lookup takes
less of the memory than a copy: a part of that for its sort, and more for the rows it reads and writes at random places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import DeviceLimits
from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import STATE_BYTES, STATE_PER_WEIGHT
from steptime._lookups.workload import row_bytes as bytes_of_row
from steptime._models.lookups.question import BACKWARD

Floats = npt.NDArray[np.float64]

# Of memory, what is read or written at once; and of a row's optimiser state, which lies by itself, read and written.
_SECTOR_BYTES = 32.0
# What a rank does: it is not there yet, looks up backward, does other things, looks up forward; then it is done.
_PHASES, _BACK, _BETWEEN, _AHEAD = 4, 1, 2, 3


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of one lookup: what it takes of the memory, of what a copy takes, and how much longer it takes beside one that copies."""

    taken: float
    slowed: float


@dataclass(frozen=True, slots=True)
class Contention:
    """The law of one device with so many shares."""

    backward: float
    rows: float
    share_bytes_per_ns: float
    shares: int

    @classmethod
    def of(cls, limits: DeviceLimits) -> Contention | None:
        """None where ranks share no memory, or nobody timed lookups side by side."""
        if limits.share == 1 or limits.contention is None:
            return None
        share = limits.bandwidth_bytes_per_s.value / 1e9 / limits.share
        return cls(limits.contention.backward.value, limits.contention.rows.value, share, limits.share)

    def taken(self, direction: str, alone_ns: Floats, row_bytes: Floats) -> Floats:
        """Of the memory, of what a copy takes."""
        rows = self.rows * row_bytes / np.maximum(alone_ns, 1.0) / self.share_bytes_per_ns
        own = self.backward * (alone_ns > 0) if direction == BACKWARD else 0.0
        return np.minimum(rows + own, 1.0)

    def slowed(self, alone_ns: Floats, beside_copies_ns: Floats) -> Floats:
        """By which fraction of its time alone a lookup takes longer beside one share that takes what a copy does."""
        factor = np.maximum(beside_copies_ns / np.maximum(alone_ns, 1.0), 1.0)
        return (factor - 1.0) / max(self.shares - 1, 1)


def row_bytes(tables: Sequence[TableStatistics], direction: str, optimizer: str, dtype: str = "float32") -> Floats:
    """[tables] bytes at random places that the distinct rows of each table take."""
    rows = np.array([float(table.unique) for table in tables])
    row = _in_sectors(np.array([float(bytes_of_row(table.dim, dtype)) for table in tables]))
    of_weights = STATE_BYTES * STATE_PER_WEIGHT.get(optimizer, 0) * np.array([float(table.dim) for table in tables])
    state = 2.0 * (_SECTOR_BYTES if optimizer == "rowwise_adagrad" else _in_sectors(of_weights))
    return rows * (2.0 * row + state) if direction == BACKWARD else rows * row


def _in_sectors(nbytes: Floats) -> Floats:
    whole: Floats = np.ceil(nbytes / _SECTOR_BYTES) * _SECTOR_BYTES
    return whole


@dataclass(frozen=True, eq=False)
class LookupsTogether:
    """Lookups of the ranks of one GPU, one step of each; [plans, ranks]."""

    forward_ns: Floats  # alone
    backward_ns: Floats
    forward_taken: Floats
    backward_taken: Floats
    forward_slowed: Floats
    backward_slowed: Floats

    def durations_ns(self, begin_ns: Floats, between_ns: Floats) -> tuple[Floats, Floats]:
        """Forward and backward, [plans, ranks], of ranks that begin backward then, and forward so long after its end."""
        # Ranks first: sums over them are then sums of long rows.
        alone = np.stack([begin_ns.T - begin_ns.min(axis=1), self.backward_ns.T, begin_ns.T, self.forward_ns.T])
        alone[_BETWEEN] = between_ns.T
        idle = np.zeros(alone.shape[1:])
        slowed = np.stack([idle, self.backward_slowed.T, idle, self.forward_slowed.T, idle])
        taken = np.stack([idle, self.backward_taken.T, idle, self.forward_taken.T, idle])
        backward, forward = _played(alone, slowed, taken)
        return forward.T, backward.T


def _played(alone: Floats, slowed: Floats, taken: Floats) -> tuple[Floats, Floats]:
    """How long backward and forward take, [ranks, plans]: each slower by what others take of the memory meanwhile."""
    phase = np.zeros(alone.shape[1:], dtype=np.int8)
    back, ahead = np.zeros(phase.shape), np.zeros(phase.shape)
    left, slowing, busy = alone[0].copy(), slowed[0].copy(), taken[0].copy()  # of the phase in which each rank is
    alone, slowed, taken = (item.reshape(len(item), -1) for item in (alone, slowed, taken))
    for _ in range(_PHASES * len(phase)):  # each time some rank ends one
        slower = 1.0 + slowing * (busy.sum(axis=0) - busy)
        needed = left * slower
        passed = needed.min(axis=0)
        passed[np.isinf(passed)] = 0.0
        back += passed * (phase == _BACK)
        ahead += passed * (phase == _AHEAD)
        ended = np.flatnonzero(needed <= passed * (1.0 + 1e-12))
        if not len(ended):
            break
        np.maximum(left - passed / slower, 0.0, out=left)
        now = phase.ravel()[ended] + 1
        phase.ravel()[ended] = now
        left.ravel()[ended] = np.where(now < _PHASES, alone[np.minimum(now, _PHASES - 1), ended], np.inf)
        slowing.ravel()[ended], busy.ravel()[ended] = slowed[now, ended], taken[now, ended]
    return back, ahead
