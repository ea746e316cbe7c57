"""Kernels of one profiled step in the order they began: name, op around the launch, stream, nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from steptime._calibrate.harness.group import Group
from steptime_lab.measure.device_profile import NOT_WORK

_MARGIN_S = 0.002
MARK = "steptime_step"
NOTHING: dict[str, Any] = {"kernel": None, "op": None, "stream": None, "kernel_ns": None}
"""The columns where nothing was profiled."""
_BEFORE = 2  # steps within the profile before the one that is read


def profiled(step: Callable[[], None], group: Group) -> dict[str, Any]:
    """The columns of a row; empty where there is no device."""
    if group.device.type != "cuda":
        return NOTHING
    from torch.profiler import ProfilerActivity, profile, record_function

    group.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_BEFORE):
            step()
        group.barrier()
        time.sleep(_MARGIN_S)
        with record_function(MARK):
            step()
        group.synchronize()
        # Records of the device that its translated clock puts behind the end would be dropped.
        time.sleep(_MARGIN_S)
    assert profiler.profiler is not None
    return columns(profiler.profiler.kineto_results.events())


def columns(events: Sequence[Any]) -> dict[str, Any]:
    """Of device work that began after the mark: nothing was running when it was set."""
    from torch._C._autograd import DeviceType

    host_marks = [event for event in events if event.device_type() == DeviceType.CPU and event.name() == MARK]
    since_ns = host_marks[0].start_ns() - int(_MARGIN_S * 5e8)

    ops = {
        event.correlation_id(): event.name()
        for event in events
        if event.device_type() == DeviceType.CPU and not event.name().startswith("cu")
    }
    work = [
        event
        for event in events
        if event.device_type() == DeviceType.CUDA
        and event.start_ns() >= since_ns
        and not event.is_user_annotation()
        and event.name() not in NOT_WORK
    ]
    work.sort(key=lambda event: event.start_ns())
    return {
        "kernel": [event.name() for event in work],
        "op": [ops.get(event.linked_correlation_id(), "") for event in work],
        "stream": [event.device_resource_id() for event in work],
        "kernel_ns": [event.duration_ns() for event in work],
    }
