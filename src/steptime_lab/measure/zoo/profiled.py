"""Device time per op, shapes and kernel of a few profiled steps, summed where all three are the same."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from steptime._calibrate.harness.group import Group
from steptime_lab.measure.device_profile import NOT_WORK, RawEvent
from steptime_lab.measure.memory import let_go
from steptime_lab.workloads.zoo import Architecture

_STEPS = 3
# The clock at which steps go on is reached within a second or two.
_WARM_S = 1.5
_MARGIN_S = 0.002
# Of the device time, what is told with shapes.
_SHOWN = 0.995
MARK = "steptime_step#"
# Wrappers of autograd around its nodes, and what says when something happened instead of what.
_NO_OPS = ("autograd::engine::", "ProfilerStep#", MARK)
_OPTIMIZER_STEP = "Optimizer.step#"


class ShapedEvent(RawEvent, Protocol):
    """What is read of an event that knows the arguments of its op."""

    def shapes(self) -> Sequence[Sequence[int]]:
        """Of the tensors among its arguments; empty for others."""

    def start_thread_id(self) -> int:
        """The thread it began on."""


@dataclass(frozen=True, slots=True)
class Around:
    """Which op launched a kernel."""

    op: str = ""  # the innermost
    outermost: str = ""  # an optimiser's step, a node of autograd, or the op that a program called
    shapes: str = ""  # JSON, of the innermost


@dataclass(frozen=True, slots=True)
class KernelSum:
    """Kernels of one name that calls of one op with the same shapes launch in a step."""

    around: Around
    kernel: str
    count: int
    time_ns: float


def profiled(each: Architecture, group: Group, *, small: bool) -> dict[str, Any]:
    """The row of an architecture."""
    let_go(group)
    step = each.build(group.device.type, small=small)
    begun_s, runs = time.perf_counter(), 0
    while runs < 2 or (not small and time.perf_counter() - begun_s < _WARM_S):
        step()
        runs += 1
        if runs % 8 == 0:
            group.synchronize()
    steps = sums_of(_events(step, group), group.device.type == "cuda")
    kernels = folded(_medians(steps))
    return {
        "architecture": each.name,
        "group": each.group,
        "launches": sum(item.count for item in kernels),
        "op": [item.around.op for item in kernels],
        "around": [item.around.outermost for item in kernels],
        "shapes": [item.around.shapes for item in kernels],
        "kernel": [item.kernel for item in kernels],
        "count": [item.count for item in kernels],
        "kernel_ns": [float(round(item.time_ns)) for item in kernels],
        "times_ns": [sum(item.time_ns for item in one) for one in steps],
    }


def _medians(steps: Sequence[Sequence[KernelSum]]) -> list[KernelSum]:
    """The sums of the last step, each with its median over the steps that have it."""
    by_key = [{(item.around, item.kernel): item.time_ns for item in one} for one in steps]
    times = [[one[item.around, item.kernel] for one in by_key if (item.around, item.kernel) in one] for item in steps[-1]]
    return [replace(item, time_ns=float(np.median(own))) for item, own in zip(steps[-1], times, strict=True)]


def folded(sums: Sequence[KernelSum]) -> list[KernelSum]:
    """The longest as they are; those that take next to nothing together by op and kernel, without shapes, for fewer rows."""
    order = sorted(sums, key=lambda item: -item.time_ns)
    before_ns = np.cumsum([0.0, *(item.time_ns for item in order)])[:-1]
    limit_ns = _SHOWN * sum(item.time_ns for item in order)
    kept = [item for item, sum_ns in zip(order, before_ns, strict=True) if sum_ns < limit_ns]
    rest: dict[tuple[Around, str], list[KernelSum]] = defaultdict(list)
    for item in order[len(kept) :]:
        rest[replace(item.around, shapes=""), item.kernel].append(item)
    together = [
        KernelSum(around, kernel, sum(each.count for each in items), sum(each.time_ns for each in items))
        for (around, kernel), items in rest.items()
    ]
    return kept + together


def _events(step: Any, group: Group) -> list[ShapedEvent]:
    from torch.profiler import ProfilerActivity, profile, record_function

    cuda = group.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    group.synchronize()
    with profile(activities=activities, record_shapes=True) as profiler:
        # The first one after a pause starts with empty queues.
        step()
        for turn in range(_STEPS):
            with record_function(f"{MARK}{turn}"):
                step()
        group.synchronize()
        # Records of the device that its translated clock puts behind the end would be dropped.
        time.sleep(_MARGIN_S)
    assert profiler.profiler is not None
    found: list[ShapedEvent] = profiler.profiler.kineto_results.events()
    return found


def sums_of(events: Iterable[ShapedEvent], cuda: bool) -> list[list[KernelSum]]:
    """Per marked step its kernels, those that take the most time first; without a device, innermost ops count as kernels."""
    from torch._C._autograd import DeviceType

    every = list(events)
    host = [event for event in every if event.device_type() == DeviceType.CPU]
    device = [event for event in every if event.device_type() == DeviceType.CUDA]
    ops = [event for event in host if _is_op(event)]
    around, innermost = _places(ops)
    launches = {event.correlation_id(): event.start_ns() for event in host if _is_call(event)}
    marks = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns()) for event in host if event.name().startswith(MARK)
    )
    steps: list[dict[tuple[Around, str], list[float]]] = [defaultdict(list) for _ in marks]
    for event in device if cuda else innermost:
        if event.is_user_annotation() or (cuda and event.name() in NOT_WORK):
            continue
        place = around.get(event.linked_correlation_id() if cuda else event.correlation_id())
        launched_ns = launches.get(event.correlation_id(), event.start_ns() if place is None else place[1])
        at = bisect_right(marks, (launched_ns, 1 << 62)) - 1
        if at >= 0 and launched_ns <= marks[at][1]:
            key = (Around() if place is None else place[0], event.name())
            steps[at][key].append(float(event.duration_ns()))
    return [_sorted(one) for one in steps]


def _is_call(event: ShapedEvent) -> bool:
    """Of CUDA's runtime or driver; ops have a namespace."""
    return event.name().startswith("cu") and "::" not in event.name()


def _is_op(event: ShapedEvent) -> bool:
    name = event.name()
    if name.startswith(_OPTIMIZER_STEP):
        return True
    return not (event.is_user_annotation() or _is_call(event) or name.startswith(_NO_OPS))


def _places(ops: Iterable[ShapedEvent]) -> tuple[dict[int, tuple[Around, int]], list[ShapedEvent]]:
    """By an op's number, what it is and when it began; and the ops that no other one is in."""
    result: dict[int, tuple[Around, int]] = {}
    inner: list[ShapedEvent] = []
    threads: dict[int, list[ShapedEvent]] = defaultdict(list)
    for event in ops:
        threads[event.start_thread_id()].append(event)
    for thread in threads.values():
        stack: list[ShapedEvent] = []
        order = sorted(thread, key=lambda event: (event.start_ns(), -event.duration_ns()))
        for event, after in zip(order, [*order[1:], None], strict=True):
            begin_ns, end_ns = event.start_ns(), event.start_ns() + event.duration_ns()
            while stack and stack[-1].start_ns() + stack[-1].duration_ns() <= begin_ns:
                stack.pop()
            stack.append(event)
            shapes = json.dumps([list(shape) for shape in event.shapes()], separators=(",", ":"))
            result[event.correlation_id()] = (Around(event.name(), stack[0].name(), shapes), begin_ns)
            if after is None or after.start_ns() >= end_ns:
                inner.append(event)
    return result, inner


def _sorted(sums: dict[tuple[Around, str], list[float]]) -> list[KernelSum]:
    results = [KernelSum(around, kernel, len(times), sum(times)) for (around, kernel), times in sums.items()]
    return sorted(results, key=lambda item: (-item.time_ns, item.kernel, item.around.op, item.around.shapes))
