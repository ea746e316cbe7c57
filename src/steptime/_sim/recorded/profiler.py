"""What a profiler cost a recorded run, and the run without it.

Every op and every launch that is recorded costs the host time, kernels of a graph cost the device time. How much was measured
on boxes that ran the same steps with and without a profiler (`data/profiler.toml`). On another host it goes with how long ops
take there that launch nothing: those are nearly all profiler, and slow down with the host and with what it records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

import steptime
from steptime._hardware.description import ValueRange, read_toml
from steptime._program.program import Program
from steptime._program.workload import Workload
from steptime._sim.core.timing import Cohort, Nanoseconds
from steptime._sim.recorded.replay import ops_begun, period_ms
from steptime._sim.recorded.timing import Recorded, inside_graphs, recorded

FILE = Path(steptime.__file__).parent / "data" / "profiler.toml"
SCHEMA_VERSION = 1
_COST = ValueRange(0, 1e9, "nanoseconds")
# What PyTorch calls the frames of compiled functions.
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")
_FEWEST = 5  # calls of an op that say how long it takes
# A step that gets shorter by more than to this share of it is one that its host bounds.
_HOST_BOUND = 0.9


@dataclass(frozen=True)
class ProfilerCosts:
    """What of recorded host time is left without a profiler, and what ops take on the host on which that was measured."""

    left: float  # of host time, at pace 1
    per_pace: float  # the power of the pace by which less is left
    left_at_least: float
    left_at_most: float
    per_event_ns: float  # an op or a call that is recorded costs no more, at pace 1
    per_compiled_event_ns: float  # the same of a step that torch.compile made, where that is all the profiler costs
    per_graph_kernel_ns: float  # of the device
    per_graph_launch_ns: float  # of the host that launches a graph, for each of its kernels
    error: float  # standard deviation of the logarithm of what is left
    usual_ns: Mapping[str, float]

    def left_at(self, pace: float) -> float:
        """What share of host time an unprofiled run spends."""
        return min(max(self.left / math.pow(pace, self.per_pace), self.left_at_least), self.left_at_most)


@cache
def profiler_costs(file: Path = FILE) -> ProfilerCosts:
    """The shipped ones."""
    content = read_toml(file, "profiler", SCHEMA_VERSION)
    usual = {name: _COST.check(f"{file}: {name}", entry["value"]) for name, entry in content["usual_ns"].items()}
    names = [each.name for each in fields(ProfilerCosts) if each.name != "usual_ns"]
    return ProfilerCosts(**{name: _COST.check(f"{file}: {name}", content[name]["value"]) for name in names}, usual_ns=usual)


def pace(program: Program, costs: ProfilerCosts) -> float:
    """How many times as long ops that launch nothing took as on the host of the costs; 1 where none is there."""
    ops = program.ops
    took_ns = ops.end_ns - ops.start_ns
    numbers = {name: number for number, name in enumerate(program.names)}
    logs = []
    for name, usual_ns in costs.usual_ns.items():
        rows = np.flatnonzero(ops.name == numbers.get(name, -1))
        if len(rows) >= _FEWEST:
            # Times in whole microseconds: none is less than half of one.
            logs.append(math.log(max(float(np.mean(np.sort(took_ns[rows])[: max(1, len(rows) * 3 // 4)])), 500.0) / usual_ns))
    return math.exp(float(np.median(logs))) if logs else 1.0


def is_compiled(program: Program) -> bool:
    """Whether a step calls functions that torch.compile made."""
    return any(name.startswith(_COMPILED) for name in program.names)


def run_timings(workload: Workload, *, profiled: bool) -> Recorded:
    """The timings of a recorded run, as it was or as it is without a profiler."""
    inputs = recorded(workload)
    return inputs if profiled else unprofiled(inputs)


def unprofiled(inputs: Recorded, times: float = 1.0, costs: ProfilerCosts | None = None) -> Recorded:
    """The timings of a run as it is without a profiler; `times` as much is left of host times as is usual."""
    costs = costs or profiler_costs()
    cohorts = [_without(cohort, times, costs) for cohort in inputs.cohorts]
    result = replace(inputs, cohorts=tuple(cohorts))
    return result if not any(late_ns.any() for late_ns in inputs.late_ns) else _sooner(inputs, result)


def _without(cohort: Cohort, times: float, costs: ProfilerCosts) -> Cohort:
    if not cohort.program.meta.get("profiled", True):
        return cohort
    host_pace = pace(cohort.program, costs)
    if is_compiled(cohort.program):  # between its events is Python that no profiler slows down
        per_event_ns = costs.per_compiled_event_ns * host_pace / max(times, 1e-9)
        return _graphs(_host(cohort, min(times * costs.left_at_least, 1.0), per_event_ns), costs)
    return _graphs(_host(cohort, min(times * costs.left_at(host_pace), 1.0), costs.per_event_ns * host_pace), costs)


def _sooner(inputs: Recorded, result: Recorded) -> Recorded:
    """Ranks without a trace were recorded too: where the host bounds the step, they come as much sooner as it got quicker."""
    nobody = tuple(np.zeros_like(late_ns) for late_ns in inputs.late_ns)
    shorter = period_ms(replace(result, late_ns=nobody)) / max(period_ms(replace(inputs, late_ns=nobody)), 1e-9)
    by_device = min(max((shorter - _HOST_BOUND) / (1.0 - _HOST_BOUND), 0.0), 1.0)
    late = []
    for before, after, late_ns in zip(inputs.cohorts, result.cohorts, inputs.late_ns, strict=True):
        left = _host_ns(after) / max(_host_ns(before), 1)
        late.append(np.rint(late_ns * (left + (1.0 - left) * by_device)).astype(np.int64))
    return replace(result, late_ns=tuple(late))


def _host(cohort: Cohort, left: float, per_event_ns: float) -> Cohort:
    """Host times with this share left, where the profiler was at work: not where Python or a library is, without any op."""
    timing = cohort.timing
    events = 1 + ops_begun(cohort.program, timing.gap_ns[:, 0, 0])[:, None, None]

    def less(times_ns: Nanoseconds, count: Nanoseconds | int) -> Nanoseconds:
        rest: Nanoseconds = np.rint(times_ns - np.minimum((1.0 - left) * times_ns, count * per_event_ns)).astype(np.int64)
        return rest

    return replace(cohort, timing=replace(timing, gap_ns=less(timing.gap_ns, events), call_ns=less(timing.call_ns, 1)))


def _host_ns(cohort: Cohort) -> int:
    return int(cohort.timing.gap_ns.sum() + cohort.timing.call_ns.sum())


def _graphs(cohort: Cohort, costs: ProfilerCosts) -> Cohort:
    """Graphs are launched sooner, and their kernels follow each other sooner."""
    inside = inside_graphs(cohort.program)
    if not inside.any():
        return cohort
    cohort = _launched_sooner(
        cohort, np.bincount(cohort.program.works.call[inside], minlength=len(cohort.program.calls)), costs
    )
    timing = cohort.timing
    cut = np.where(inside, round(costs.per_graph_kernel_ns), 0)[:, None, None]
    spacing = np.maximum(timing.spacing_ns - cut, np.minimum(timing.spacing_ns, 0))
    rest = cut - (timing.spacing_ns - spacing)
    return replace(cohort, timing=replace(timing, spacing_ns=spacing, duration_ns=np.maximum(timing.duration_ns - rest, 0)))


def _launched_sooner(cohort: Cohort, kernels: npt.NDArray[np.int64], costs: ProfilerCosts) -> Cohort:
    """Without what recording so many kernels costs the host of each call: within it and, where works start first, after it."""
    calls, timing = cohort.program.calls, cohort.timing
    call_ns, gap_ns = timing.call_ns.copy(), timing.gap_ns.copy()
    for row in np.flatnonzero(kernels).tolist():
        cut_ns = round(costs.per_graph_launch_ns * int(kernels[row]))
        taken = np.minimum(cut_ns, call_ns[row])
        call_ns[row] -= taken
        after = np.flatnonzero(calls.thread == calls.thread[row])
        following = [*after[after > row][:1].tolist(), *np.flatnonzero(calls.after == row).tolist()]
        for each in dict.fromkeys(following):
            gap_ns[each] = np.maximum(gap_ns[each] - (cut_ns - taken), 0)
    return replace(cohort, timing=replace(timing, call_ns=call_ns, gap_ns=gap_ns))
