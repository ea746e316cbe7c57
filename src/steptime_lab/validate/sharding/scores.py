"""How good picks among measured plans are: regret, ties with the fastest, and what the noise of the measurements allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime_lab.validate.engine import rank_correlation
from steptime_lab.validate.sharding.measured import MeasuredTask, levels

Floats = npt.NDArray[np.float64]

CLOSE = 0.10
"""The published rule: a pick within this of the fastest counts as a success."""

# Quantiles of Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom; beyond, of the normal distribution.
_STUDENT = (
    12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
    2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.96
_RESAMPLED, _SEED = 1000, 40
_INTERVAL = (0.025, 0.975)
# Estimates that differ by less are the same: sums in another order.
_SAME = 1e-9


@dataclass(frozen=True, eq=False)
class Judged:
    """A task with what every pick would cost, resampled; computed once for all that pick."""

    task: MeasuredTask
    regret: Floats  # [plans] over the fastest
    resampled: Floats  # [resamples, plans] the same of blocks drawn with replacement
    tied: npt.NDArray[np.bool_]  # [plans] with the fastest, paired

    @classmethod
    def of(cls, task: MeasuredTask) -> Judged:
        """From its paired blocks."""
        draws = np.random.default_rng([_SEED, len(task.name), *task.name.encode()])
        blocks = draws.integers(0, task.times_ns.shape[1], (_RESAMPLED, task.times_ns.shape[1]))
        drawn = levels(np.moveaxis(task.paired[:, blocks], 0, 1))
        return cls(task, regrets(levels(task.paired)), regrets(drawn), tied_with_fastest(task.paired))


def regrets(level: Floats) -> Floats:
    """How much longer than the fastest each plan takes, as a fraction; plans are the last axis."""
    result: Floats = level / level.min(axis=-1, keepdims=True) - 1.0
    return result


def tied_with_fastest(paired: Floats) -> npt.NDArray[np.bool_]:
    """Which plans may be as fast as the fastest: the 95 % interval of their mean ratio over the same blocks holds 1."""
    best = int(np.argmin(levels(paired)))
    result: npt.NDArray[np.bool_] = np.arange(len(paired)) == best
    if paired.shape[1] > 1:
        result |= np.array([ratio_interval(np.log(item / paired[best]))[1] <= 1.0 for item in paired])
    return result


def ratio_interval(logs: Floats) -> tuple[float, float, float]:
    """The mean ratio of which these are logarithms, one for each of two blocks or more, and its 95 % interval."""
    blocks = len(logs)
    student = _STUDENT[blocks - 2] if blocks - 2 < len(_STUDENT) else _NORMAL
    mean, half = float(logs.mean()), float(student * logs.std(ddof=1) / np.sqrt(blocks))
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def picked(estimate: Floats) -> Floats:
    """How likely each plan is picked by an estimate, [plans]: the smallest, evenly among equals."""
    least = estimate <= estimate.min() * (1.0 + _SAME)
    result: Floats = least / least.sum()
    return result


@dataclass(frozen=True, slots=True)
class Score:
    """What some way to pick plans reaches over many tasks, as fractions."""

    tasks: int
    mean_regret: float
    mean_regret_interval: tuple[float, float]  # 95 %, over tasks and blocks drawn with replacement
    max_regret: float
    max_regret_interval: tuple[float, float]
    worst: str
    tied_with_fastest: float
    success_10: float
    top1: float
    spearman: float | None  # the median over tasks; None where nothing is estimated


def score(judged: Sequence[Judged], picks: Sequence[Floats], estimates: Sequence[Floats] | None = None) -> Score:
    """Of picks, one for each task: how likely each of its plans is taken."""
    regret = np.array([float(item.regret @ pick) for item, pick in zip(judged, picks, strict=True)])
    drawn = np.stack([item.resampled @ pick for item, pick in zip(judged, picks, strict=True)], axis=1)
    chosen = np.random.default_rng(_SEED).integers(0, len(judged), drawn.shape)
    again = np.take_along_axis(drawn, chosen, axis=1)
    pairs = list(zip(judged, picks, strict=True))
    result = None
    if estimates is not None:
        levels_of = [item.task.measured_ns for item in judged]
        result = float(np.median([spearman(level, estimate) for level, estimate in zip(levels_of, estimates, strict=True)]))
    return Score(
        tasks=len(judged),
        mean_regret=float(regret.mean()),
        mean_regret_interval=_ends(again.mean(axis=1)),
        max_regret=float(regret.max()),
        max_regret_interval=_ends(again.max(axis=1)),
        worst=judged[int(np.argmax(regret))].task.name,
        tied_with_fastest=float(np.mean([item.tied @ pick for item, pick in pairs])),
        success_10=float(np.mean([(item.regret <= CLOSE) @ pick for item, pick in pairs])),
        top1=float(np.mean([(item.regret == 0.0) @ pick for item, pick in pairs])),
        spearman=result,
    )


def _ends(values: Floats) -> tuple[float, float]:
    low, high = np.quantile(values, _INTERVAL)
    return float(low), float(high)


def spearman(measured: Floats, estimated: Floats) -> float:
    """Correlation of ranks; estimates that differ by rounding alone are equal."""
    return rank_correlation(measured, np.round(estimated / estimated.mean(), 9))


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What picking by one half of the blocks reaches on the other: nobody who predicts can be expected to do better."""

    mean_regret: float
    tied_with_fastest: float
    top1: float


def ceiling(tasks: Sequence[MeasuredTask]) -> Ceiling:
    """Every second block against the others, both ways."""
    rows = []
    for task in tasks:
        halves = [task.paired[:, first::2] for first in (0, 1)]
        for here, there in (halves, halves[::-1]):
            pick = int(np.argmin(levels(here)))
            away = regrets(levels(there))
            rows.append((away[pick], tied_with_fastest(there)[pick], away[pick] == 0.0))
    regret, tied, first = np.array(rows, dtype=np.float64).mean(axis=0).tolist()
    return Ceiling(regret, tied, first)
