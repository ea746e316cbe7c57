"""The shipped sharding tasks as measured, every plan in the same blocks, and how good picks among these plans are."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._platforms.calibration import Calibration
from steptime._shard.rules import RULES
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.engine import rank_correlation
from steptime_lab.validate.steps.cases import RunCalibrations
from steptime_lab.workloads.drawn_tasks import further_tasks

Row = Mapping[str, Any]
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

_COLUMNS = (
    "task", "rule", "aliases", "plan", "config", "batch", "ranks", "run", "process", "block", "time_ns",
)  # fmt: skip
# The published rule: a pick within this of the fastest counts as a success.
CLOSE = 0.10
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
class MeasuredTask:
    """A task with its distinct plans, all timed in every one of its blocks."""

    model: Dlrm
    ranks: int
    rank_of: Places  # [plans, tables]
    rules: Mapping[str, int]  # rule -> its plan; several rules may make the same
    times_ns: Floats  # [plans, blocks]
    calibration: Calibration  # of the processes that timed most of the blocks

    @property
    def name(self) -> str:
        """As the set has it."""
        return self.model.name

    @property
    def paired(self) -> Floats:
        """[plans, blocks] over the mean of all plans in the same block."""
        result: Floats = self.times_ns / self.times_ns.mean(axis=0)
        return result

    @property
    def measured_ns(self) -> Floats:
        """[plans] the median of the blocks, each freed of what it was slower or faster for all plans."""
        return levels(self.paired) * float(np.median(self.times_ns.mean(axis=0)))

    @property
    def heavy(self) -> bool:
        """Whether all its tables have long bags."""
        return "-heavy" in self.name

    @property
    def further(self) -> bool:
        """Whether it was drawn later, and its plans predicted before any of them ran (`data/committed`)."""
        return self.name in {task.name for task in further_tasks()}

    @property
    def equal(self) -> bool:
        """Whether its tables are of equal load."""
        return self.name.endswith("-equal")


def levels(paired: Floats) -> Floats:
    """[..., plans] the middle of blocks, [..., plans, blocks]."""
    result: Floats = np.median(paired, axis=-1)
    return result


def shipped_tasks(names: Sequence[str] | None = None) -> tuple[list[MeasuredTask], list[MeasuredTask]]:
    """The shipped tasks, or those of some names, in the order of their names; and those with plans beside the rules' again."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in shipped("sharding").select(_COLUMNS).to_pylist():
        if names is None or row["task"] in names:
            rows[row["task"]].append(row)
    known, tasks, beside = RunCalibrations(), [], []
    for _, item in sorted(rows.items()):
        calibration = known.of_run(_usual_run(item), int(item[0]["ranks"]))
        tasks.append(task_of(item, calibration))
        given = [row for row in item if not set(names_of(row)) <= set(RULES)]
        if given:
            runs = {row["run"] for row in given}
            own = [row for row in item if row["run"] in runs]
            beside.append(task_of(own, known.of_run(_usual_run(given), int(item[0]["ranks"])), given=True))
    return tasks, beside


def task_of(rows: Sequence[Row], calibration: Calibration, *, given: bool = False) -> MeasuredTask:
    """The plans of the rules, from the rows of one task; with `given` also others that were timed beside them.

    Blocks that lack a plan are left out.
    """
    model = Dlrm.from_dict(json.loads(rows[0]["config"])).with_batch(int(rows[0]["batch"]))
    plans: dict[str, int] = {}
    rules: dict[str, int] = {}
    times: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for row in rows:
        names = [name for name in names_of(row) if given or name in RULES]
        if not names:
            continue
        index = plans.setdefault(row["plan"], len(plans))
        rules.update(dict.fromkeys(names, index))
        times[row["run"], row["process"], row["block"]][index] = float(row["time_ns"])
    whole = [block for _, block in sorted(times.items()) if len(block) == len(plans)]
    placed = [json.loads(plan) for plan in plans]
    return MeasuredTask(
        model,
        int(rows[0]["ranks"]),
        np.array([[plan[table.name] for table in model.tables] for plan in placed], dtype=np.intp),
        dict(sorted(rules.items())),
        np.array([[block[index] for block in whole] for index in range(len(plans))]),
        calibration,
    )


def names_of(row: Row) -> tuple[str, ...]:
    """Rules, and plans that were given by name, of which this row is."""
    return (row["rule"], *filter(None, (row["aliases"] or "").split(",")))


def _usual_run(rows: Iterable[Row]) -> str:
    counts: Counter[str] = Counter(row["run"] for row in rows)
    return max(sorted(counts), key=counts.__getitem__)


# --- picks -----------------------------------------------------------------------------------------------------------------


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
