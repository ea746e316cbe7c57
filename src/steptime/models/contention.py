"""How kernels on parts of one GPU slow each other: the parts have their own SMs and share L2 and memory.

Memory gets slower for everybody when it is busy. Where a fraction `u` of its bandwidth is used, an access takes W(u) times as
long as on an idle GPU,

    W(u) = (1 - u^p)^(-1/p),

which never lets more than the limit through. A kernel that uses `u` of the bandwidth while it runs alone, and that waits for
memory during the fraction `f` of its time (its sensitivity), takes 1 + f (W / W(u) - 1) times as long where accesses take W,
and uses as much less. Those that run at once run at the W at which their use and W agree: the equilibrium of a closed queue.

Sensitivity has three sources: a bit of every kernel waits for L2 and instructions, kernels that use what the part's SMs can ask
for wait for bandwidth, and the first microseconds of any kernel are latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError

Fractions = npt.NDArray[np.float64]

# Bytes are counted as if every operand came from memory; what L2 holds can make that more than the memory can give.
USED_AT_MOST = 0.97
# Works that use bandwidth and would not slow at all could ask for more than there is, whatever the others do.
LEAST_SENSITIVITY = 0.05
# Of the bracket around the equilibrium, which spans less than a factor of 20: 1e-8 of it.
_HALVINGS = 30
# Constants that are fitted, in this order.
_FITTED = ("offered", "sharpness", "everywhere", "bandwidth", "start_ns", "busy")


@dataclass(frozen=True)
class Contention:
    """The law's constants. The defaults are those of an H200, fitted by `fit` to the measured kernel rows on parts."""

    limit_bytes_per_s: float = 4.8e12  # NVIDIA H200 datasheet: memory bandwidth
    offered: float = 3.75  # what all SMs of the GPU ask for at most, in units of the limit
    sharpness: float = 1.66  # p: how suddenly memory saturates
    everywhere: float = 0.211  # sensitivity of any kernel
    bandwidth: float = 0.247  # of one that asks for all its SMs can ask for
    start_ns: float = 1529.0  # of one that takes this long
    busy: float = 0.298  # what ranks of a measuring run that all do `same` ask for, of what copying memory asks for

    def used(self, nbytes: Fractions, alone_ns: Fractions) -> Fractions:
        """The fraction of the GPU's bandwidth that kernels use while each runs alone."""
        rate = np.asarray(nbytes, dtype=np.float64) * 1e9 / np.maximum(alone_ns, 1.0)
        return np.clip(rate / self.limit_bytes_per_s, 0.0, USED_AT_MOST)

    def latency(self, used: Fractions) -> Fractions:
        """W: how many times as long an access takes where this fraction of the bandwidth is used."""
        return np.asarray((1.0 - np.asarray(used, dtype=np.float64) ** self.sharpness) ** (-1.0 / self.sharpness))

    def part_bandwidth(self, share: int) -> float:
        """The fraction of the GPU's bandwidth that one of `share` parts gets alone."""
        asked = self.offered / share
        return float(asked / self._asked_latency(np.float64(asked)))

    def sensitivity(self, used: Fractions, alone_ns: Fractions, share: int) -> Fractions:
        """Which fraction of their time kernels wait for memory, on one of `share` parts."""
        asked = np.minimum(used * self.latency(used) * share / self.offered, 1.0)
        waits = self.everywhere + self.bandwidth * asked + self.start_ns / np.maximum(alone_ns, 1.0)
        return np.asarray(1.0 - np.exp(-waits))

    def stretch(self, used: Fractions, sensitivity: Fractions) -> Fractions:
        """W / W(u) of each of the kernels that run at once, which are the last axis: one per part, `used` 0 where none runs."""
        alone = self.latency(used)
        asked = used * alone
        least = np.maximum(sensitivity, LEAST_SENSITIVITY)
        low = self._asked_latency(asked.sum(axis=-1))
        high = self._asked_latency((asked / least).sum(axis=-1))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            slower = 1.0 + least * (np.maximum(middle[..., None] / alone, 1.0) - 1.0)
            over = self._latency_reached((used / slower).sum(axis=-1), middle)
            low, high = np.where(over, middle, low), np.where(over, high, middle)
        # Nobody else asks for anything: exactly as long as alone.
        lonely = (used > 0).sum(axis=-1, keepdims=True) - (used > 0) == 0
        return np.asarray(np.where(lonely, 1.0, np.maximum(low[..., None] / alone, 1.0)))

    def slowdown(self, used: Fractions, sensitivity: Fractions) -> Fractions:
        """How many times as long as alone each of the kernels that run at once takes: one per part on the last axis."""
        return np.asarray(1.0 + sensitivity * (self.stretch(used, sensitivity) - 1.0))

    def beside(self, used: Fractions, sensitivity: Fractions, share: int, others: str) -> Fractions:
        """How many times as long kernels take on one of `share` parts beside what the other parts do (as in `Question`)."""
        if others in ("none", "idle") or share == 1:
            return np.ones_like(used)
        if others not in ("same", "streaming"):
            raise InputError(f"others {others!r}: expected none, idle, same or streaming")
        asked = self.offered / share * (1.0 if others == "streaming" else self.busy)
        company = np.full((*np.shape(used), share - 1), asked / self._asked_latency(np.float64(asked)))
        everyone = np.concatenate([used[..., None], company], axis=-1)
        waiting = np.concatenate([sensitivity[..., None], np.ones_like(company)], axis=-1)
        return np.asarray(self.slowdown(everyone, waiting)[..., 0])

    def _latency_reached(self, used: Fractions, latency: Fractions) -> npt.NDArray[np.bool_]:
        """Whether using this much makes accesses take at least so long."""
        return np.asarray(used >= (1.0 - latency**-self.sharpness) ** (1.0 / self.sharpness))

    def _asked_latency(self, asked: Fractions | np.float64) -> Fractions:
        """W where this much is asked for, in units of the limit, by kernels that only wait for memory."""
        return np.asarray((1.0 + asked**self.sharpness) ** (1.0 / self.sharpness))


@dataclass(frozen=True)
class Beside:
    """A kernel call measured on a part with the others idle, and again with them doing something."""

    share: int
    others: str  # same | streaming
    nbytes: float
    kernels: int
    alone_ns: float
    time_ns: float


def predicted_ns(law: Contention, rows: Sequence[Beside]) -> Fractions:
    """What the law makes of the alone times."""
    found = np.array([row.alone_ns for row in rows])
    kinds = np.array([f"{row.share} {row.others}" for row in rows])
    for kind in np.unique(kinds):
        chosen = np.flatnonzero(kinds == kind)
        some = [rows[i] for i in chosen.tolist()]
        first = some[0]
        used = law.used(np.array([row.nbytes for row in some]), found[chosen])
        each_ns = found[chosen] / np.array([row.kernels for row in some])
        waits = law.sensitivity(used, each_ns, first.share)
        found[chosen] *= law.beside(used, waits, first.share, first.others)
    return found


def fit(rows: Sequence[Beside], peak_bytes_per_s: dict[int, float], start: Contention | None = None) -> Contention:
    """The constants that explain the rows, and the bandwidth that parts of each share reach alone. Needs SciPy."""
    from scipy.optimize import least_squares  # noqa: PLC0415

    start = start or Contention()
    measured = np.array([row.time_ns for row in rows])
    initial = np.array([getattr(start, name) for name in _FITTED])
    # A part's own bandwidth is one number that stands for very many kernels.
    weight = 0.3 * np.sqrt(len(rows) / max(len(peak_bytes_per_s), 1))

    def law_of(scale: Fractions) -> Contention:
        return replace(start, **dict(zip(_FITTED, (initial * np.exp(scale)).tolist(), strict=True)))

    def misses(scale: Fractions) -> Fractions:
        law = law_of(scale)
        reached = [law.part_bandwidth(share) * law.limit_bytes_per_s / peak for share, peak in peak_bytes_per_s.items()]
        return np.concatenate([np.log(predicted_ns(law, rows) / measured), weight * np.log(reached)])

    # Rows beside other ranks scatter with long tails; beyond 10 % a miss counts linearly.
    found = least_squares(misses, np.zeros(len(initial)), loss="soft_l1", f_scale=0.1)
    return law_of(found.x)
