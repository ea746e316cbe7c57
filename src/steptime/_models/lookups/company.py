"""What lookups on parts of one GPU do to each other while they run: each slows the others by what it takes of the memory.

Beside parts that copy memory all the time a lookup takes longer, by a factor that the lookup models know. Another lookup takes
less of the memory than a copy: a part of that for its sort, and more for the rows it reads and writes at random places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Of what a copying part takes of the memory: a backward pass by itself, and what rows add over the part's even share of the
# bandwidth on paper. Fitted to 80 times four ranks of 20 drawn tasks (benchmarks/h200/ranks_together.py, 2026-11-15), from what
# each rank takes alone and beside copies: errors of 4.6 % backward and 7.2 % forward, of 16.8 and 10.4 % where each was alone.
# On 2 ranks, which had no say, 3.1 and 6.6 % (11.6 and 7.9 alone), on 8 ranks 6.0 and 6.1 % (16.9 and 9.3).
_BACKWARD, _ROWS = 0.19, 0.37

# What a rank does: it is not there yet, looks up backward, does other things, looks up forward; then it is done.
_PHASES, _BACK, _BETWEEN, _AHEAD = 4, 1, 2, 3


@dataclass(frozen=True, eq=False)
class Company:
    """Lookups of the ranks of one GPU, one step of each; [plans, ranks]."""

    forward_ns: Floats  # alone
    backward_ns: Floats
    forward_copies: Floats  # how many times as long beside copies
    backward_copies: Floats
    forward_bytes: Floats  # of rows at random places, read or written
    backward_bytes: Floats

    def stretched(self, begin_ns: Floats, between_ns: float, bytes_per_ns: float, parts: int) -> tuple[Floats, Floats]:
        """Forward and backward, [plans, ranks], of ranks that begin backward then, and forward so long after its end.

        `bytes_per_ns`: of the memory; `parts`: of the GPU, also those that no rank has.
        """
        # Ranks first: sums over them are then sums of long rows.
        alone = np.stack([begin_ns.T - begin_ns.min(axis=1), self.backward_ns.T, begin_ns.T, self.forward_ns.T])
        alone[_BETWEEN] = between_ns
        idle = np.zeros(alone.shape[1:])
        slowed = np.stack([idle, self.backward_copies.T - 1.0, idle, self.forward_copies.T - 1.0, idle])
        share = bytes_per_ns / parts
        back = self._rows(self.backward_bytes, self.backward_ns, share) + _BACKWARD * (self.backward_ns > 0)
        ahead = self._rows(self.forward_bytes, self.forward_ns, share)
        taken = np.minimum(np.stack([idle, back.T, idle, ahead.T, idle]), 1.0)
        backward, forward = _played(alone, slowed / max(parts - 1, 1), taken)
        return forward.T, backward.T

    @staticmethod
    def _rows(moved_bytes: Floats, alone_ns: Floats, share_bytes_per_ns: float) -> Floats:
        return _ROWS * moved_bytes / np.maximum(alone_ns, 1.0) / share_bytes_per_ns


def _played(alone: Floats, slowed: Floats, taken: Floats) -> tuple[Floats, Floats]:
    """How long backward and forward take, [ranks, plans]: each slower by what others take of the memory meanwhile."""
    phase = np.zeros(alone.shape[1:], dtype=np.intp)
    back, ahead, left = np.zeros(phase.shape), np.zeros(phase.shape), alone[0].copy()
    where: tuple[npt.NDArray[np.intp], ...] = tuple(np.indices(phase.shape, sparse=True))
    for _ in range(_PHASES * len(phase)):  # each time some rank ends one
        busy = taken[(phase, *where)]
        slower = 1.0 + slowed[(phase, *where)] * (busy.sum(axis=0) - busy)
        needed = np.where(phase < _PHASES, left * slower, np.inf)
        passed = needed.min(axis=0)
        passed[np.isinf(passed)] = 0.0
        back += passed * (phase == _BACK)
        ahead += passed * (phase == _AHEAD)
        ended = needed <= passed * (1.0 + 1e-12)
        phase += ended & (phase < _PHASES)
        left = np.where(ended, alone[(np.minimum(phase, _PHASES - 1), *where)], np.maximum(left - passed / slower, 0.0))
    return back, ahead
