"""What ran on the device between two marks: thousands of op runs in one profile, told apart by a marker kernel.

Only the profiler's raw records are read. Nothing is exported, and no tree of events is built: that would take longer than
the runs themselves.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import LostContextError, Progress

Case = TypeVar("Case")

# The kernel of `torch.cuda._sleep`; no op that is measured launches it.
MARKER = "spin_kernel"

# Records on the device's time line that are not work.
NOT_WORK = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")


# The profiler drops records outside its window, and the device's clock is only translated into the host's.
_MARGIN_S = 0.002


COLD, WARM = "cold", "warm"


class RawEvent(Protocol):
    """What is read of an event of `kineto_results.events()`."""

    def name(self) -> str:
        """Kernel, runtime call, op or range."""

    def device_type(self) -> Any:
        """Where it ran."""

    def start_ns(self) -> int:
        """Since the epoch."""

    def duration_ns(self) -> int:
        """How long it took."""

    def correlation_id(self) -> int:
        """Of device work and runtime calls: what pairs them; of ops: their own number."""

    def linked_correlation_id(self) -> int:
        """Of device work and runtime calls: the number of the innermost op around the call; 0 where none was."""

    def device_resource_id(self) -> int:
        """Of device work: its stream."""

    def is_user_annotation(self) -> bool:
        """Whether it is a range that a program named, on the host or mirrored on the device."""


class MarkersError(RuntimeError):
    """The profile does not hold as many markers as were issued: what ran between them cannot be told apart."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A kernel, copy or fill as the device ran it."""

    name: str
    start_ns: int
    duration_ns: int


Segment = tuple[DeviceWork, ...]


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

    def mark(self, what: str, cycles: int = 1) -> None:  # noqa: ARG002
        """What is issued from now on belongs to a new segment, which the device begins after so many cycles."""
        _marker(cycles)
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

    def mark(self, what: str, cycles: int = 1) -> None:  # noqa: ARG002
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


Profile = DeviceProfile | HostProfile


def profile_on(device: torch.device) -> Profile:
    """The way to profile that a device has."""
    return DeviceProfile() if device.type == "cuda" else HostProfile()


def _marker(cycles: int = 1) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def cut(work: Iterable[DeviceWork], marks: int) -> list[Segment]:
    """What ran after each of so many markers; one more marker closes the last segment."""
    segments: list[list[DeviceWork]] = []
    for one in sorted(work, key=lambda one: one.start_ns):
        if MARKER in one.name:
            segments.append([])
        elif segments and one.name not in NOT_WORK:
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


def busy_ns(segment: Segment) -> int:
    """How long any of it ran: kernels side by side count once, gaps between them not at all."""
    total, until = 0, 0
    for work in sorted(segment, key=lambda one: one.start_ns):
        end = work.start_ns + work.duration_ns
        total += max(0, end - max(until, work.start_ns))
        until = max(until, end)
    return total


@contextmanager
def execution_trace(file: Path) -> Iterator[None]:
    """Records the execution trace of a block into a file."""
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(file))
    try:
        observer.start()
        yield
    finally:
        observer.stop()
        observer.unregister_callback()


def batches_of(cases: Sequence[Case], bytes_of: Callable[[Case], int], most: int, limit_bytes: float) -> Iterator[list[Case]]:
    """Cut by count and by the bytes that prepared cases hold: the same on every rank."""
    batch: list[Case] = []
    held = 0
    for case in cases:
        needed = bytes_of(case)
        if batch and (len(batch) >= most or held + needed > limit_bytes):
            yield batch
            batch, held = [], 0
        batch.append(case)
        held += needed
    if batch:
        yield batch


def skip_failed(group: Group, progress: Progress, error: Exception, what: str) -> str:
    """Counts a failed case as skipped; why, in a line, or nothing where it lacked memory. Raises where the context is lost."""
    try:
        group.synchronize()
    except RuntimeError as lost:
        raise LostContextError(f"the CUDA context was lost in {what}: {error}") from lost
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        progress.skip("out of memory")
        return ""
    progress.skip("failed")
    return reason_of(error)


def reason_of(error: Exception) -> str:
    """The first line of what an error says, else its kind."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
