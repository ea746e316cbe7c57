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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError
from steptime.models.kernels import families, family_of
from steptime.models.kernels.call import Call
from steptime.models.kernels.rows import Row
from steptime.models.kernels.work import moved_bytes

Fractions = npt.NDArray[np.float64]

# Bytes are counted as if every operand came from memory; what L2 holds can make that more than the memory can give.
USED_AT_MOST = 0.97
# Works that use bandwidth and would not slow at all could ask for more than there is, whatever the others do.
LEAST_SENSITIVITY = 0.05
# Use falls with latency, convex, and what memory carries rises, concave: Newton's steps come from below and never overshoot.
# After seven of them the two agree to 1e-12, for up to eight parts and any sensitivity.
_NEWTON_STEPS = 7
_TINY = 1e-300
# Logarithm by which families may differ in how much they wait; tens of rows each, so what few rows say counts little.
_FAMILIES_DIFFER = 0.5
# Bandwidth that parts of so many reach alone: the most that element-wise kernels move in the measured rows on an H200.
_PEAKS = {1: 4.1e12, 2: 3.9e12, 4: 3.1e12, 8: 1.62e12}
# Fitted with the other constants; `lookup` (table-batched and bags) to the measured lookups, bytes of distinct rows.
_H200_FAMILIES = {
    "activation": 0.70, "attention": 0.88, "convolution": 0.95, "copy": 1.06, "dropout": 1.08, "elementwise": 1.06,
    "embedding": 1.06, "fill": 0.42, "indexing": 1.19, "lookup": 2.0, "loss": 1.26, "matmul": 0.96, "norm": 1.96,
    "optimizer": 1.20, "other": 0.67, "pooling": 0.55, "reduction": 1.77, "shape": 0.98, "softmax": 0.53,
}  # fmt: skip
# Constants that are fitted, in this order.
_FITTED = ("offered", "sharpness", "everywhere", "bandwidth", "start_ns", "busy")
_KEPT = ("limit_bytes_per_s", *_FITTED)


@dataclass(frozen=True)
class Contention:
    """The law's constants. The defaults are those of an H200, by `fit` from the measured rows that are not for testing."""

    limit_bytes_per_s: float = 4.3e12  # the most that element-wise kernels move in the measured rows (datasheet: 4.8e12)
    offered: float = 4.17  # what all SMs of the GPU ask for at most, in units of the limit
    sharpness: float = 1.95  # p: how suddenly memory saturates
    everywhere: float = 0.18  # sensitivity of any kernel
    bandwidth: float = 0.235  # of one that asks for all its SMs can ask for
    start_ns: float = 1355.0  # of one that takes this long
    busy: float = 0.32  # what ranks of a measuring run that all do `same` ask for, of what copying memory asks for

    # How many times as much as others the kernels of a family wait; 1 where it is not named.
    families: Mapping[str, float] = field(default_factory=lambda: _H200_FAMILIES)

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

    def sensitivity(self, used: Fractions, alone_ns: Fractions, share: int, factor: Fractions | float = 1.0) -> Fractions:
        """Which fraction of their time kernels wait for memory, on one of `share` parts; `factor` as in `families`."""
        asked = np.minimum(used * self.latency(used) * share / self.offered, 1.0)
        waits = self.everywhere + self.bandwidth * asked + self.start_ns / np.maximum(alone_ns, 1.0)
        return np.asarray(np.maximum(1.0 - np.exp(-waits * factor), LEAST_SENSITIVITY))

    def stretch(self, used: Fractions, sensitivity: Fractions) -> Fractions:
        """W / W(u) of each of the kernels that run at once, which are the last axis: one per part, `used` 0 where none runs."""
        alone = self.latency(used)
        least = np.maximum(sensitivity, LEAST_SENSITIVITY)
        # What would hold if all only waited for memory; who also computes asks for more, so the latency is never lower.
        latency = self._asked_latency((used * alone).sum(axis=-1))
        for _ in range(_NEWTON_STEPS):
            slower = 1.0 + least * (latency[..., None] / alone - 1.0)
            use = used / slower
            missing = 1.0 - latency**-self.sharpness
            carried = missing ** (1.0 / self.sharpness)
            steepness = (use * least / (slower * alone)).sum(axis=-1) + carried * (1.0 - missing) / (
                np.maximum(missing, _TINY) * latency
            )
            latency = latency + np.maximum(use.sum(axis=-1) - carried, 0.0) / np.maximum(steepness, _TINY)
        # Nobody else asks for anything: exactly as long as alone.
        lonely = (used > 0).sum(axis=-1, keepdims=True) - (used > 0) == 0
        return np.asarray(np.where(lonely, 1.0, np.maximum(latency[..., None] / alone, 1.0)))

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

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same law from."""
        names = sorted(self.families)
        return {
            "constants": np.array([getattr(self, name) for name in _KEPT]),
            "families": np.asarray(names, dtype=np.str_),
            "factors": np.array([self.families[name] for name in names]),
        }

    def _asked_latency(self, asked: Fractions | np.float64) -> Fractions:
        """W where this much is asked for, in units of the limit, by kernels that only wait for memory."""
        return np.asarray((1.0 + asked**self.sharpness) ** (1.0 / self.sharpness))


def load(arrays: Mapping[str, npt.NDArray[Any]]) -> Contention:
    """The law that `Contention.arrays` were taken from."""
    names, factors = arrays["families"].tolist(), arrays["factors"].tolist()
    constants = dict(zip(_KEPT, np.asarray(arrays["constants"], dtype=np.float64).tolist(), strict=True))
    return Contention(**constants, families=dict(zip(names, factors, strict=True)))


@dataclass(frozen=True)
class Beside:
    """A call measured on a part with the others idle, and again with them doing something."""

    share: int
    others: str  # same | streaming
    family: str
    nbytes: float
    kernels: int
    alone_ns: float
    time_ns: float


def traffic_bytes(call: Call) -> float:
    """What the kernels of a call read and write, where there are rules for what it launches; else its arguments and output."""
    rules = families()[family].rules if (family := family_of(call.op)) else None
    if rules is None:
        return moved_bytes(call)
    moved = (one for launch in rules(call) for one in (*launch.reads, *launch.writes))
    return float(sum(one.nbytes for one in moved if one.device == "device"))


def beside(rows: Sequence[Row]) -> list[Beside]:
    """The measured rows in company of calls that were measured beside idle parts as well. Copies to the host are left out."""
    times: dict[tuple[object, ...], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        asked = row.question
        if asked.share > 1 and row.family != "transfer":
            times[asked.call, asked.tf32, asked.benchmark, asked.warm, asked.share][asked.others].append(row)
    found = []
    for company in times.values():
        for alone in company.get("idle", ())[:1]:
            nbytes = traffic_bytes(alone.question.call)
            for others in ("same", "streaming"):
                # Two ranks may have measured it; the first stands for both.
                for row in company.get(others, ())[:1]:
                    kernels = max(len(alone.kernel_ns), 1)
                    found.append(Beside(alone.question.share, others, row.family, nbytes, kernels, alone.time_ns, row.time_ns))
    return found


def predicted_ns(law: Contention, rows: Sequence[Beside]) -> Fractions:
    """What the law makes of the alone times."""
    found = np.array([row.alone_ns for row in rows])
    kinds = np.array([f"{row.share} {row.others}" for row in rows])
    for kind in np.unique(kinds):
        chosen = np.flatnonzero(kinds == kind)
        some = [rows[i] for i in chosen.tolist()]
        share, others = some[0].share, some[0].others
        used = law.used(np.array([row.nbytes for row in some]), found[chosen])
        each_ns = found[chosen] / np.array([row.kernels for row in some])
        factor = np.array([law.families.get(row.family, 1.0) for row in some])
        found[chosen] *= law.beside(used, law.sensitivity(used, each_ns, share, factor), share, others)
    return found


def fit(rows: Sequence[Beside], start: Contention | None = None, peaks: Mapping[int, float] = _PEAKS) -> Contention:
    """The constants that explain the rows and the bandwidth that parts reach alone, then families' factors. Needs SciPy."""
    from scipy.optimize import least_squares  # noqa: PLC0415

    start = replace(start or Contention(), families={})
    measured = np.array([row.time_ns for row in rows])
    initial = np.array([getattr(start, name) for name in _FITTED])
    # A part's own bandwidth is one number that stands for very many kernels.
    weight = 0.3 * np.sqrt(len(rows) / max(len(peaks), 1))
    named = sorted({row.family for row in rows})

    def law_of(scale: Fractions) -> Contention:
        return replace(start, **dict(zip(_FITTED, (initial * np.exp(scale)).tolist(), strict=True)))

    def misses(scale: Fractions) -> Fractions:
        law = law_of(scale)
        reached = [law.part_bandwidth(share) * law.limit_bytes_per_s / peak for share, peak in peaks.items()]
        return np.concatenate([np.log(predicted_ns(law, rows) / measured), weight * np.log(reached)])

    # Rows beside other ranks scatter with long tails; beyond 10 % a miss counts linearly.
    common = law_of(least_squares(misses, np.zeros(len(initial)), loss="soft_l1", f_scale=0.1).x)

    def with_factors(scale: Fractions) -> Contention:
        return replace(common, families=dict(zip(named, np.exp(scale).tolist(), strict=True)))

    def misses_by_family(scale: Fractions) -> Fractions:
        missed = np.log(predicted_ns(with_factors(scale), rows) / measured)
        return np.concatenate([missed, 0.1 / _FAMILIES_DIFFER * scale])

    return with_factors(least_squares(misses_by_family, np.zeros(len(named)), loss="soft_l1", f_scale=0.1).x)
