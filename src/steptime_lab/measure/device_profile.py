"""What ran on the device between two marks: thousands of op runs in one profile, told apart by a marker kernel.

Only the profiler's raw records are read. Nothing is exported, and no tree of events is built: that would take longer than
the runs themselves.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

# The kernel of `torch.cuda._sleep`; no op that is measured launches it.
MARKER = "spin_kernel"

# Records on the device's time line that are not work.
_NOT_WORK = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")


# The profiler drops records outside its window, and the device's clock is only translated into the host's.
_MARGIN_S = 0.002


class MarkersError(RuntimeError):
    """The profile does not hold as many markers as were issued: what ran between them cannot be told apart."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A kernel, copy or fill as the device ran it."""

    name: str
    start_ns: int
    duration_ns: int


Segment = tuple[DeviceWork, ...]


class Profile(Protocol):
    """Cuts what a device does into segments."""

    def __enter__(self) -> Profile: ...

    def __exit__(self, *_: object) -> None: ...

    def mark(self, what: str) -> None:
        """What is issued from now on belongs to a new segment."""

    def segments(self) -> list[Segment]:
        """One per mark, in order; complete after the `with` block."""


def profile_on(device: torch.device) -> Profile:
    """The way to profile that a device has."""
    return DeviceProfile() if device.type == "cuda" else HostProfile()


class DeviceProfile:
    """Records of CUPTI. Every launch of this process is slower from its first use on: time nothing on the host after it."""

    def __init__(self) -> None:
        # The older of torch's two profilers, for its end is cheap: it leaves the records as they are until they are asked for.
        self._profile: Any = torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True)
        self._marks = 0

    def __enter__(self) -> DeviceProfile:
        torch.cuda.synchronize()
        self._profile.__enter__()
        time.sleep(_MARGIN_S)
        return self

    def __exit__(self, *failure: object) -> None:
        _marker()
        torch.cuda.synchronize()
        time.sleep(_MARGIN_S)
        self._profile.__exit__(*failure)

    def mark(self, what: str) -> None:  # noqa: ARG002
        """What is issued from now on belongs to a new segment."""
        _marker()
        self._marks += 1

    def segments(self) -> list[Segment]:
        """One per mark, in order; complete after the `with` block."""
        cuda = torch._C._autograd.DeviceType.CUDA
        records = [event for event in self._profile.kineto_results.events() if event.device_type() == cuda]
        work = (DeviceWork(event.name(), event.start_ns(), event.duration_ns()) for event in records)
        return cut(work, self._marks)


class HostProfile:
    """Where there is no GPU: the time an op took on the CPU, as if it were one kernel named after it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._names: list[str] = []

    def __enter__(self) -> HostProfile:
        return self

    def __exit__(self, *_: object) -> None:
        self._starts.append(time.perf_counter_ns())

    def mark(self, what: str) -> None:
        """What is issued from now on belongs to a new segment."""
        self._names.append(what)
        self._starts.append(time.perf_counter_ns())

    def segments(self) -> list[Segment]:
        """One per mark, in order; complete after the `with` block."""
        ends = self._starts[1:]
        return [
            (DeviceWork(name, start, end - start),)
            for name, start, end in zip(self._names, self._starts[: len(ends)], ends, strict=True)
        ]


def _marker() -> None:
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]


def cut(work: Iterable[DeviceWork], marks: int) -> list[Segment]:
    """What ran after each of so many markers; one more marker closes the last segment."""
    segments: list[list[DeviceWork]] = []
    for one in sorted(work, key=lambda one: one.start_ns):
        if MARKER in one.name:
            segments.append([])
        elif segments and one.name not in _NOT_WORK:
            segments[-1].append(one)
    if len(segments) != marks + 1:
        raise MarkersError(f"{len(segments)} markers in the profile, {marks + 1} were issued")
    return [tuple(segment) for segment in segments[:-1]]


def told_by(repeats: Sequence[Segment]) -> dict[str, Any] | None:
    """The measured columns; nothing where nothing was launched.

    Which kernels are launched can change between repeats (libraries choose). Those of the commonest list are given one by
    one; `times_ns` has all.
    """
    lists = Counter(tuple(work.name for work in segment) for segment in repeats if segment)
    if not lists:
        return None
    names = lists.most_common(1)[0][0]
    alike = [segment for segment in repeats if tuple(work.name for work in segment) == names]
    durations = np.array([[work.duration_ns for work in segment] for segment in alike], dtype=np.float64)  # (repeat, kernel)
    return {
        "kernel_names": list(names),
        "kernel_ns": np.median(durations, axis=0).tolist(),
        "span_ns": float(np.median([span_ns(segment) for segment in repeats if segment])),
        "event_ns": None,
        "times_ns": [float(sum(work.duration_ns for work in segment)) for segment in repeats if segment],
    }


def span_ns(segment: Segment) -> int:
    """From the first start to the last end; cuDNN runs the groups of a convolution side by side, so the last to start may not
    be the last to end."""
    return max(work.start_ns + work.duration_ns for work in segment) - min(work.start_ns for work in segment)
