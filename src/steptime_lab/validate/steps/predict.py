"""One shipped step predicted for all its visits: the step, its interval, baselines beside, what ranks do, whose error it is.

Each part of a predicted step is in turn put as it was profiled. What the step is longer with the modelled part than with the
measured one is that part's error; what no part explains is put down to synchronisation: who waits for whom, and what parts do
to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np
import numpy.typing as npt

from steptime._sim.core.steady import Steady, play_again
from steptime._sim.core.timing import Cohort
from steptime._sim.explain.activity import Window, activity
from steptime._sim.modelled.prediction import interval_ns
from steptime._sim.modelled.step import ModelledStep, modelled
from steptime._units import NS_PER_MS
from steptime_lab.validate.steps.cases import StepCase, Visit, platform_of
from steptime_lab.validate.steps.measured import with_host_of, with_measured_device, with_measured_host, with_measured_wire
from steptime_lab.validate.steps.sources import Build


@dataclass(frozen=True, slots=True)
class Split:
    """The signed relative error of a prediction and its parts; `error` is the sum of the four parts."""

    error: float
    device: float
    host: float
    communication: float
    synchronisation: float
    measured_parts: float  # the error that is left where all three parts are as measured


def split(step: ModelledStep, recorded: ModelledStep, predicted_step: Steady, case: StepCase, visit: Visit) -> Split:
    """The error of one visit; `found` is its prediction, `recorded` the step with the profile's host."""
    base = [played.cohort for played in predicted_step.timeline.cohorts]
    host = recorded.cohorts(visit.calibration)
    device = with_measured_device(step, base, case)
    wire = with_measured_wire(step, base, case, visit.calibration)
    measured = with_measured_wire(step, with_host_of(device, host), case, visit.calibration)
    predicted, with_device, with_host, with_wire, with_all = (
        float(play_again(predicted_step.timeline, cohorts).period_ns[0]) / visit.measured_ns
        for cohorts in (base, device, with_host_of(base, host), wire, measured)
    )
    of_device, of_host, of_wire = predicted - with_device, predicted - with_host, predicted - with_wire
    return Split(
        error=predicted - 1.0,
        device=of_device,
        host=of_host,
        communication=of_wire,
        synchronisation=predicted - 1.0 - of_device - of_host - of_wire,
        measured_parts=with_all - 1.0,
    )


def mean_splits(splits: Mapping[str, Sequence[Split]]) -> dict[str, dict[str, float]]:
    """Per group: of the error and each of its parts, the mean and the mean of absolute values."""
    result: dict[str, dict[str, float]] = {}
    for name, entry in splits.items():
        columns = {each.name: np.array([getattr(item, each.name) for item in entry]) for each in fields(Split)}
        result[name] = {
            "rows": float(len(entry)),
            **{part: float(values.mean()) for part, values in columns.items()},
            **{f"absolute_{part}": float(np.abs(values).mean()) for part, values in columns.items()},
        }
    return result


Floats = npt.NDArray[np.float64]

KERNEL_SUM, STREAM_MAX, HOST_ALONE = "kernel sum", "max of streams", "host alone"


@dataclass(frozen=True)
class VisitOutcome:
    """A visit and what was predicted for it."""

    visit: Visit
    predicted_ns: float
    interval_ns: tuple[float, float]
    baselines_ns: Mapping[str, float]
    split: Split | None = None


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What one rank does in a step, predicted at the calibration of the run that profiled it, and as profiled."""

    compute_ns: float
    exposed_ns: float
    profiled_compute_ns: float
    profiled_exposed_ns: float


@dataclass(frozen=True)
class CaseOutcome:
    """A case with its visits predicted."""

    name: str
    workload: str
    ranks: int
    regime: str
    visits: tuple[VisitOutcome, ...]
    by_rank: tuple[RankOutcome, ...]
    fallback: float  # share of the predicted device time that no model knows
    outside: float = 0.0  # and that is beyond what the models were fitted on
    warnings: tuple[str, ...] = ()

    @property
    def measured_ns(self) -> float:
        """The median of the visits."""
        return median(visit.visit.measured_ns for visit in self.visits)

    @property
    def predicted_ns(self) -> float:
        """The median of the visits."""
        return median(visit.predicted_ns for visit in self.visits)

    @property
    def spread(self) -> float:
        """Of the repeats of a visit, in the middle of the visits."""
        return median(visit.visit.spread for visit in self.visits)


def predict_case(case: StepCase, build: Build, *, recorded: bool = False, explain: bool = False) -> CaseOutcome:
    """A case; `recorded`: with the host times of its profile.

    `explain` splits the error of one visit, if possible on the machine that was profiled.
    """
    step = modelled(build(case), platform_of(case.ranks))
    if recorded:
        step = with_measured_host(step, case)
    with_host = with_measured_host(step, case) if explain else None
    machine = str(case.profile[0]["machine"])
    explained = next((visit for visit in case.visits if visit.machine == machine), case.visits[0])
    visits = [_visit(step, case, visit, with_host if visit is explained else None) for visit in case.visits]
    return CaseOutcome(
        name=case.name,
        workload=case.workload,
        ranks=case.ranks,
        regime=case.regime,
        visits=tuple(visits),
        by_rank=_by_rank(step, case),
        fallback=step.coverage.get("fallback", 0.0),
        outside=step.coverage["out_of_range"],
        warnings=step.warnings,
    )


def _visit(step: ModelledStep, case: StepCase, visit: Visit, recorded: ModelledStep | None) -> VisitOutcome:
    played = step.play(visit.calibration)
    return VisitOutcome(
        visit=visit,
        predicted_ns=played.step_ns,
        interval_ns=interval_ns(played),
        baselines_ns=baselines_ns(step.cohorts(visit.calibration)),
        split=None if recorded is None else split(step, recorded, played.steady, case, visit),
    )


def baselines_ns(cohorts: Iterable[Cohort]) -> dict[str, float]:
    """Forms that simulate nothing, each of the rank that takes longest; kernels and collectives alone on the device."""
    result: dict[str, float] = {KERNEL_SUM: 0.0, STREAM_MAX: 0.0, HOST_ALONE: 0.0}
    for cohort in cohorts:
        timing = cohort.timing
        compute = float(timing.duration_ns[~timing.waits].sum(axis=0).max(initial=0))
        wire = float(timing.duration_ns[timing.waits].sum(axis=0).max(initial=0))
        host = float((timing.gap_ns + timing.call_ns).sum(axis=0).max())
        for name, time_ns in ((KERNEL_SUM, compute + wire), (STREAM_MAX, max(compute, wire)), (HOST_ALONE, host)):
            result[name] = max(result[name], time_ns)
    return result


def _by_rank(step: ModelledStep, case: StepCase) -> tuple[RankOutcome, ...]:
    seen = activity(step.play(case.reference).timeline, Window(1)).ranks
    ranks = []
    for summary, row in zip(seen, case.profile, strict=True):
        collective = np.array(["nccl" in name.lower() for name in row["kernel"]], dtype=bool)
        took = np.array([float(np.median(times)) if times else 0.0 for times in row["kernel_ns"]])
        start = np.asarray(row["start_ns"], dtype=np.float64)
        ranks.append(
            RankOutcome(
                compute_ns=summary.compute_ms * NS_PER_MS,
                exposed_ns=summary.exposed_communication_ms * NS_PER_MS,
                profiled_compute_ns=float(took[~collective].sum()),
                profiled_exposed_ns=_covered(start, took) - _covered(start[~collective], took[~collective]),
            )
        )
    return tuple(ranks)


def _covered(start: Floats, took: Floats) -> float:
    """Time during which at least one of these runs."""
    order = np.argsort(start)
    begin, end = start[order], (start + took)[order]
    reached = np.concatenate([begin[:1], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(begin, reached), 0.0).sum())
