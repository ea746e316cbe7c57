"""Kernel times of the cases from the profiler's raw events, and full traces of a few; in processes of their own."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steptime._calibrate.collectives.cases import fabric_of
from steptime._calibrate.harness.group import Group, no_collector
from steptime._measurements.store import key_of
from steptime_lab.measure.restarts import Attempts, free
from steptime_lab.measure.steps.traced import write_packed
from steptime_lab.measurements.sets import STEP_KERNELS

if TYPE_CHECKING:
    from steptime_lab.measure.device_profile import RawEvent
    from steptime_lab.workloads.case import Case, Step

# Begins the name of the host range around one profiled step; then case and step follow.
MARK = "steptime_step#"


@dataclass(frozen=True, slots=True)
class Launched:
    """One kernel, copy or fill."""

    op: str
    kernel: str
    stream: int
    launched_ns: int
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class StepKernels:
    """What one marked step launched, in the order of launches."""

    begin_ns: int
    host_ns: int
    work: tuple[Launched, ...]

    @property
    def names(self) -> list[str]:
        """The kernels' names, in order: two steps with the same ones can be put side by side."""
        return [each.kernel for each in self.work]


def mark(case: int, step: int) -> str:
    """The name of the range around one step of one case."""
    return f"{MARK}{case}#{step}"


def cut(host: Iterable[RawEvent], device: Iterable[RawEvent]) -> dict[tuple[int, int], StepKernels]:
    """Per (case, step) its device work. Kernels lag the host, so they belong to the step in which they were launched."""
    marks: list[tuple[int, int, tuple[int, int]]] = []
    launches: dict[int, int] = {}
    ops: dict[int, tuple[str, int]] = {}
    for event in host:
        name = event.name()
        if name.startswith(MARK):
            case, _, step = name[len(MARK) :].partition("#")
            marks.append((event.start_ns(), event.start_ns() + event.duration_ns(), (int(case), int(step))))
        # A call of CUDA's runtime or driver; ops have a namespace.
        elif name.startswith("cu") and "::" not in name:
            launches[event.correlation_id()] = event.start_ns()
        elif not event.is_user_annotation():
            ops[event.correlation_id()] = (name, event.start_ns())
    marks.sort()
    begins = [begin for begin, _, _ in marks]
    result: dict[tuple[int, int], list[Launched]] = {key: [] for _, _, key in marks}
    for event in device:
        if event.is_user_annotation():
            continue
        op, op_ns = ops.get(event.linked_correlation_id(), ("", -1))
        # A launch that was not recorded happened within its op.
        launched_ns = launches.get(event.correlation_id(), op_ns)
        at = bisect_right(begins, launched_ns) - 1
        if at >= 0 and launched_ns <= marks[at][1]:
            times = (launched_ns, event.start_ns(), event.duration_ns())
            result[marks[at][2]].append(Launched(op, event.name(), event.device_resource_id(), *times))
    return {
        key: StepKernels(begin, end - begin, tuple(sorted(result[key], key=lambda each: (each.launched_ns, each.start_ns))))
        for begin, end, key in marks
    }


def comparable(steps: Sequence[StepKernels]) -> list[StepKernels]:
    """The steps that can stand side by side: all where they launched the same kernels, else the last one alone."""
    return list(steps) if all(step.names == steps[-1].names for step in steps) else [steps[-1]]


_WARM_UP = 3
# A median needs three: a step now and then stalls. Full traces keep two.
_STEPS, _TRACED_STEPS = 3, 2
# Cases that are profiled together: starting and stopping a profiler takes as long as profiling several.
_TOGETHER = 4
_MARGIN_S = 0.002
_DROPPED = "python_function"


def key_of_kernels(case: str, share: int, fabric: str, *, rank: int) -> str:
    """The key of the row that one rank of this case gives."""
    return key_of(STEP_KERNELS, {"name": case, "share": share, "fabric": fabric, "rank": rank})


def kineto_file(folder: Path, case: str, rank: int) -> Path:
    """The full trace of a rank."""
    return folder / "traces" / f"{case}.rank{rank}.kineto.json.gz"


def work(attempts: Attempts, cases: list[Case], plan: Mapping[str, Any]) -> None:
    """Profiles the cases, several at a time; every rank keeps the rows of its own kernels. The few full traces come first."""
    with no_collector():
        for case in cases:
            if case.name in plan["full_traces"] and attempts.time_left(5.0) and _lacks_trace(case, attempts):
                attempts.attempt(case.name, partial(_keep_trace, case, attempts))
        for together in batches(cases):
            if not attempts.time_left(2.0):
                break
            _profile(attempts, together)


def _lacks_trace(case: Case, attempts: Attempts) -> bool:
    """Whether the full trace is still to be made; every rank hears the same."""
    return bool(attempts.group.decide(int(not kineto_file(attempts.session.folder, case.name, 0).exists())))


def batches(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Cases of the same tables, so that holding them together takes little memory; models without tables one by one."""
    alike: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        alike.setdefault((case.workload, case.task, case.precision), []).append(case)
    for same in alike.values():
        together = _TOGETHER if same[0].plan is not None else 1
        for first in range(0, len(same), together):
            yield same[first : first + together]


def _profile(attempts: Attempts, cases: Sequence[Case]) -> None:
    group = attempts.group
    built: list[tuple[Case, Step]] = []
    for case in cases:
        step = attempts.attempt(case.name, partial(_warm, case, group))
        if step is not None:
            built.append((case, step))
        del step
    if not built:
        return
    names = "+".join(case.name for case, _ in built)
    result = attempts.attempt(names, lambda: profiled([step for _, step in built], group))
    for at, (case, step) in enumerate(built):
        step.close()
        if result is None:
            continue
        steps = [result[key] for key in sorted(result) if key[0] == at]
        if steps and all(each.work for each in steps):
            attempts.session.store.add(STEP_KERNELS, row_of(case, group, comparable(steps)))
            attempts.progress.step()
        else:
            attempts.progress.skip("no kernels were recorded")
    built.clear()
    free(group)


def _warm(case: Case, group: Group) -> Step:
    from steptime_lab.workloads.case import build

    step = build(case, group, group.device)
    for _ in range(_WARM_UP):
        step()
    group.synchronize()
    return step


def profiled(steps: Sequence[Step], group: Group) -> dict[tuple[int, int], StepKernels]:
    """What each of the steps launched, by (which, how many times before)."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, record_function

    cuda = group.device_name.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        for case, step in enumerate(steps):
            group.barrier()
            # The first one after a pause starts with empty queues.
            step()
            for turn in range(_STEPS):
                with record_function(mark(case, turn)):
                    step()
        group.barrier()
        # Records of the device that its translated clock puts behind the end would be dropped.
        time.sleep(_MARGIN_S)
    events = profiler.profiler.kineto_results.events()
    host = [event for event in events if event.device_type() == DeviceType.CPU]
    device = [event for event in events if event.device_type() == DeviceType.CUDA]
    return cut(host, device)


def row_of(case: Case, group: Group, steps: Sequence[StepKernels]) -> dict[str, Any]:
    """The row of one rank: columns over kernels, in the order of launches."""
    last = steps[-1]
    return {
        "workload": case.workload,
        "name": case.name,
        "ranks": case.ranks,
        "share": group.share,
        "fabric": fabric_of(group.ranks, group.share, group.device_name),
        "rank": group.rank,
        "op": [each.op for each in last.work],
        "kernel": [each.kernel for each in last.work],
        "stream": [each.stream for each in last.work],
        "launch_ns": [each.launched_ns - last.begin_ns for each in last.work],
        "start_ns": [each.start_ns - last.begin_ns for each in last.work],
        "kernel_ns": np.array([[each.duration_ns for each in step.work] for step in steps]).T.tolist(),
        "host_ns": [step.host_ns for step in steps],
        "times_ns": [sum(each.duration_ns for each in step.work) for step in steps],
    }


def _keep_trace(case: Case, attempts: Attempts) -> bool:
    group = attempts.group
    step = _warm(case, group)
    try:
        write_packed(kineto_file(attempts.session.folder, case.name, group.rank), full_trace(step, group))
    finally:
        step.close()
        del step
        free(group)
    return True


def full_trace(step: Step, group: Group) -> dict[str, Any]:
    """A trace as PyTorch exports it, with waits between streams, without Python frames."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, schedule

    cuda = group.device_name.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    config = _ExperimentalConfig(enable_cuda_sync_events=True)
    when = schedule(wait=0, warmup=2, active=_TRACED_STEPS, repeat=1)
    group.barrier()
    gc.collect()
    with profile(activities=activities, schedule=when, record_shapes=True, experimental_config=config) as profiler:
        for _ in range(2 + _TRACED_STEPS):
            step()
            profiler.step()
        group.synchronize()
    with tempfile.TemporaryDirectory(prefix="steptime") as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8", errors="replace"))
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != _DROPPED]
    # The name is a path of the machine it was recorded on.
    trace["traceName"] = ""
    return trace
