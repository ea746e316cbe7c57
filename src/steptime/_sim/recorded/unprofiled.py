"""Replay with the profiler's inflation taken out, against the step time of processes that never profiled.

A profiler makes the host slower: every op event and every runtime call costs time that an unprofiled run does not spend. Two
forms of taking it out are compared. `events`: so much per op, call and launch, in the published proportions. `share`: the same
share of all host time. How strong either is differs between boxes, so strengths are estimated from recordings whose
unprofiled step is known; a case is never predicted with a strength estimated on itself.

This is a report. Host costs measured without a profiler replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import numpy.typing as npt

from steptime._program.load import load
from steptime._program.program import CallKind, Program
from steptime._sim import Cohort
from steptime._sim.core.repeatable import repeatable
from steptime._sim.core.steady import steady
from steptime._sim.recorded.replay import Replay, replay
from steptime._sim.recorded.timing import Recorded
from steptime._units import NS_PER_MS
from steptime.errors import InputError

MEASURED_FILE = "measured.json"
# A case says how strong the inflation is only if its profiled period is longer by this share; below, noise would be fitted.
TELLING_EXCESS = 0.1
# Times the published constants; ten times stronger than anything seen.
STRENGTH_AT_MOST = {"events": 50.0, "share": 1.0}
_HALVINGS = 24


@dataclass(frozen=True)
class Inflation:
    """What a profiler adds to host time: so much per event, and a share of what remains."""

    per_op_ns: float = 0.0  # per op that begins, before the next call
    per_call_ns: float = 0.0  # per runtime call
    per_launch_ns: float = 0.0  # on top, where the call launches work
    share: float = 0.0
    source: str = ""


NO_INFLATION = Inflation(source="as recorded")
# 2 us per CPU event (ops and calls alike) and 4 us per GPU event: the constants of the published overhead model for DLRM on
# PyTorch. On H200 boxes they take out a third to two thirds of what the profiler adds (benchmarks/unprofiled_replay.py).
PUBLISHED = Inflation(per_op_ns=2_000, per_call_ns=2_000, per_launch_ns=4_000, source="published constants")


def inflation(form: str, strength: float) -> Inflation:
    """The inflation of one form: times the published constants for `events`, the share itself for `share`."""
    if form == "share":
        return Inflation(share=strength, source=f"{strength:.0%} of host time")
    return Inflation(
        per_op_ns=PUBLISHED.per_op_ns * strength,
        per_call_ns=PUBLISHED.per_call_ns * strength,
        per_launch_ns=PUBLISHED.per_launch_ns * strength,
        source=f"{strength:.2f} times the published constants",
    )


def without_profiler(inputs: Recorded, inflated: Inflation) -> Recorded:
    """The same timings with the inflation taken out of host gaps and calls, none below zero. Device times stay as recorded."""
    return replace(inputs, cohorts=tuple(_deflated(cohort, inflated) for cohort in inputs.cohorts))


def _deflated(cohort: Cohort, inflated: Inflation) -> Cohort:
    timing, calls = cohort.timing, cohort.program.calls
    begun = _ops_begun(cohort.program, timing.gap_ns[:, 0, 0])[:, None, None]
    real = ((calls.kind != CallKind.STEP_BEGIN) & (calls.kind != CallKind.STEP_END))[:, None, None]
    launching = np.isin(calls.kind, (CallKind.LAUNCH, CallKind.BLOCKING_COPY))[:, None, None]
    kept = 1 - inflated.share
    gap = (timing.gap_ns - begun * inflated.per_op_ns) * kept
    call = (timing.call_ns - real * inflated.per_call_ns - launching * inflated.per_launch_ns) * kept
    timing = replace(timing, gap_ns=_whole(gap), call_ns=_whole(call))
    return replace(cohort, timing=timing)


def _whole(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.maximum(np.rint(values), 0).astype(np.int64)


def _ops_begun(program: Program, gap_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Per call, how many ops began on its thread in the gap before it: a profiler does most of its work where an op begins."""
    ops, calls = program.ops, program.calls
    result = np.zeros(len(calls), dtype=np.int64)
    for thread in range(len(program.threads)):
        starts = np.sort(ops.start_ns[ops.thread == thread])
        rows = np.flatnonzero(calls.thread == thread)
        until = np.searchsorted(starts, calls.start_ns[rows], side="right")
        result[rows] = until - np.searchsorted(starts, calls.start_ns[rows] - gap_ns[rows], side="left")
    return np.maximum(result, 0)


@dataclass(frozen=True, eq=False)
class Case:
    """A recorded run whose unprofiled step time is known."""

    name: str
    replayed: Replay
    unprofiled_ms: tuple[float, ...]
    _periods: dict[Inflation, float] = field(default_factory=dict, repr=False)

    @property
    def measured_ms(self) -> float:
        """The unprofiled step: median over the repeats."""
        return median(self.unprofiled_ms)

    @property
    def spread(self) -> float:
        """Range of the repeats, relative to their median."""
        return (max(self.unprofiled_ms) - min(self.unprofiled_ms)) / self.measured_ms

    def period_ms(self, inflated: Inflation = NO_INFLATION) -> float:
        """The period of the recorded steps with an inflation taken out."""
        if inflated not in self._periods:
            inputs = without_profiler(self.replayed.recorded, inflated)
            result = steady(repeatable(inputs).cohorts, queue_depth=inputs.queue_depth)
            self._periods[inflated] = float(result.period_ns[0]) / NS_PER_MS
        return self._periods[inflated]

    @cached_property
    def strengths(self) -> Mapping[str, float]:
        """How strong each form must be for the period to be the unprofiled step; empty where this case cannot tell."""
        if self.period_ms() < (1 + TELLING_EXCESS) * self.measured_ms:
            return {}
        result = {
            form: _root(lambda x, form=form: self.period_ms(inflation(form, x)) - self.measured_ms, limit)  # type: ignore[misc]
            for form, limit in STRENGTH_AT_MOST.items()
        }
        return {form: strength for form, strength in result.items() if strength is not None}


def _root(excess: Callable[[float], float], limit: float) -> float | None:
    """Where a falling function crosses zero, by halving; None if it does not."""
    low, high = 0.0, limit
    if excess(high) > 0:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Deflated:
    """One prediction of an unprofiled step."""

    predicted_ms: float
    error: float
    source: str


@dataclass(frozen=True)
class UnprofiledReplay:
    """One case: the unprofiled step, the profiled one, and predictions of the former from the recording of the latter."""

    name: str
    measured_ms: float
    spread: float
    profiled_ms: float
    predictions: Mapping[str, Deflated]  # as_recorded, published, and per form where other cases could tell its strength
    floor_ms: float  # the period with no host time at all: less no inflation can explain
    telling: bool  # whether this case says how strong the inflation is


class _Measured(msgspec.Struct):
    measured_step_ms_unprofiled: list[float]


def read_measured(file: Path) -> tuple[float, ...]:
    """The unprofiled step times in a file, one per repeat."""
    expected = "expected measured_step_ms_unprofiled"
    try:
        times = msgspec.json.decode(file.read_bytes(), type=_Measured).measured_step_ms_unprofiled
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error}); {expected}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: no unprofiled step times ({error}); {expected}") from error
    if not times or not min(times) > 0:
        raise InputError(f"{file}: measured_step_ms_unprofiled is {times}; expected one or more positive step times")
    return tuple(times)


def read_case(folder: Path) -> Case:
    """The traces of a folder and the unprofiled step times beside them."""
    measured_ms = read_measured(folder / MEASURED_FILE)
    return Case(folder.name, replay(load([folder])), measured_ms)


def compare(cases: Sequence[Case]) -> tuple[UnprofiledReplay, ...]:
    """Every case predicted with strengths that the other cases tell."""
    return tuple(_compared(case, [other for other in cases if other is not case]) for case in cases)


def _compared(case: Case, others: Sequence[Case]) -> UnprofiledReplay:
    tried = {"as_recorded": NO_INFLATION, "published": PUBLISHED}
    for form in STRENGTH_AT_MOST:
        known = [other.strengths[form] for other in others if form in other.strengths]
        if known:
            tried[form] = inflation(form, median(known))
    return UnprofiledReplay(
        name=case.name,
        measured_ms=case.measured_ms,
        spread=case.spread,
        profiled_ms=median(step.measured_ns for step in case.replayed.steps) / NS_PER_MS,
        predictions={name: _predicted(case, inflated) for name, inflated in tried.items()},
        floor_ms=case.period_ms(inflation("share", 1.0)),
        telling=bool(case.strengths),
    )


def _predicted(case: Case, inflated: Inflation) -> Deflated:
    predicted = case.period_ms(inflated)
    return Deflated(predicted, predicted / case.measured_ms - 1, inflated.source)
