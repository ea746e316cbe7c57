"""A replay as an answer: the replayed timeline explained, its error per step, and the step measured without a profiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from steptime._program.program import CallKind
from steptime._sim.explain.activity import Window
from steptime._sim.prediction import PredictedStep, explain
from steptime._sim.recorded.replay import Replay, StepReplay
from steptime._sim.recorded.unprofiled import MEASURED_FILE, PUBLISHED, Case, read_measured
from steptime._units import ms
from steptime.errors import InputError


@dataclass(frozen=True)
class Unprofiled:
    """The same job measured without a profiler, several times, and what the profiled recording says about it."""

    source: str
    step_ms: float  # median of the repeats
    low_ms: float
    high_ms: float
    as_recorded_ms: float  # the steady step of the recording, profiler included
    as_recorded_error: float
    deflated_ms: float  # the same with the profiler's published cost per event taken out
    deflated_error: float


@dataclass(frozen=True)
class ReplayReport:
    """What `steptime replay` says."""

    prediction: PredictedStep
    steps: tuple[StepReplay, ...]
    measured_step_ms: float  # mean of the recorded steps
    error: float  # of the mean step
    unprofiled: Unprofiled | None = None


def report_replay(played: Replay, measured: Path | None = None) -> ReplayReport:
    """Explain a replay; `measured` is a file of unprofiled step times."""
    if not played.steps:
        raise InputError("the traces have no step in common to replay; were all ranks recorded at the same time?")
    begin, end = _begin(played), _end(played)
    count = len(played.steps)
    mean_ns = fmean(s.predicted_ns for s in played.steps)
    recorded_ms = [ms(s.measured_ns) for s in played.steps]
    workload = played.workload
    warnings = list(workload.warnings)
    if workload.absent:
        text = f"waiting for ranks without a trace ({len(workload.absent)} of {workload.world_size}) is taken as recorded"
        warnings.append(text)
    prediction = explain(
        workload,
        played.timeline,
        Window(count, begin, max(end - begin, 1)),
        step_ns=mean_ns,
        interval_ms=(min(recorded_ms), max(recorded_ms)),
        warnings=warnings,
    )
    unprofiled = None if measured is None else read_unprofiled(measured, played)
    return ReplayReport(prediction, played.steps, fmean(recorded_ms), ms(mean_ns) / fmean(recorded_ms) - 1, unprofiled)


def _begin(played: Replay) -> int:
    """The earliest start of a step in the replay."""
    starts = [
        t.call_start_ns[t.cohort.program.calls.kind == CallKind.STEP_BEGIN].min() for t in played.timeline.cohorts
        if (t.cohort.program.calls.kind == CallKind.STEP_BEGIN).any()
    ]  # fmt: skip
    return int(min(starts))


def _end(played: Replay) -> int:
    return _begin(played) + sum(s.predicted_ns for s in played.steps)


def find_measured(paths: list[Path]) -> Path | None:
    """The file of unprofiled step times that lies beside the traces, if there is one."""
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in paths)
    return next((folder / MEASURED_FILE for folder in folders if (folder / MEASURED_FILE).is_file()), None)


def read_unprofiled(file: Path, played: Replay) -> Unprofiled:
    """The unprofiled step times in a file, and how the recording compares."""
    case = Case(played.workload.name, played, read_measured(file))
    recorded_ms, deflated_ms = case.period_ms(), case.period_ms(PUBLISHED)
    return Unprofiled(
        source=str(file),
        step_ms=case.measured_ms,
        low_ms=min(case.unprofiled_ms),
        high_ms=max(case.unprofiled_ms),
        as_recorded_ms=recorded_ms,
        as_recorded_error=recorded_ms / case.measured_ms - 1,
        deflated_ms=deflated_ms,
        deflated_error=deflated_ms / case.measured_ms - 1,
    )
