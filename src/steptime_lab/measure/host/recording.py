"""Profilers as conditions of a measurement, and what their records say about launches that no host clock can see."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from steptime_lab.measure.ops.profile import MARKER

MODES = ("off", "cuda", "cpu_cuda", "execution_trace", "after")


class Event(Protocol):
    """A raw record of the profiler."""

    def name(self) -> str:
        """Of the kernel, the runtime call or the op."""

    def device_type(self) -> Any:
        """Where it ran."""

    def start_ns(self) -> int:
        """When it began."""

    def duration_ns(self) -> int:
        """How long it took."""

    def correlation_id(self) -> int:
        """The same for a runtime call and the work it launched."""


@dataclass
class Recording:
    """What was recorded; complete when the `with` block has ended. Empty where nothing was."""

    device: list[Event] = field(default_factory=list)  # kernels, copies, memsets, by start
    runtime: list[Event] = field(default_factory=list)  # calls of the CUDA runtime and driver, by start

    def read(self, events: Sequence[Event]) -> None:
        """Sorts raw events into those two."""
        ordered = sorted(events, key=lambda event: event.start_ns())
        cuda = torch._C._autograd.DeviceType.CUDA
        self.device = [event for event in ordered if event.device_type() == cuda and event.duration_ns() > 0]
        # Runtime calls are cudaX, driver calls cuX; ops have a namespace.
        self.runtime = [event for event in ordered if event.device_type() != cuda and event.name().startswith("cu")]

    def launches(self) -> list[int]:
        """How much device work each marked loop has: between its two marks."""
        counts: list[int] = []
        for event in self.device:
            if MARKER in event.name():
                counts.append(0)
            elif counts:
                counts[-1] += 1
        return counts[::2]


@contextmanager
def recording(mode: str, *, read: bool = False) -> Iterator[Recording]:
    """Runs a block under a profiler, or under none; afterwards its events are there where they were asked for."""
    result = Recording()
    if mode in ("off", "after"):
        yield result
    elif mode == "execution_trace":
        with _execution_trace():
            yield result
    else:
        activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        if mode == "cpu_cuda" or not activities:
            activities.append(torch.profiler.ProfilerActivity.CPU)
        with torch.profiler.profile(activities=activities, record_shapes=mode == "cpu_cuda") as profiler:
            yield result
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        if read:
            result.read(profiler.profiler.kineto_results.events())


@contextmanager
def _execution_trace() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="steptime") as folder:
        observer = torch.profiler.ExecutionTraceObserver()
        observer.register_callback(str(Path(folder) / "trace.json"))
        observer.start()
        try:
            yield
        finally:
            observer.stop()
            observer.unregister_callback()


def around_launches(found: Recording) -> dict[str, list[float]]:
    """Launch call, end of the call to start of the kernel, end of the kernel to return of what waited for it."""
    kernels = {event.correlation_id(): event for event in found.device if MARKER not in event.name()}
    pairs = [(call, kernels[call.correlation_id()]) for call in found.runtime if call.correlation_id() in kernels]
    waits = [call for call in found.runtime if "Synchronize" in call.name()]
    return {
        "launch_call": [float(call.duration_ns()) for call, _ in pairs],
        "launch_latency": [float(kernel.start_ns() - _end(call)) for call, kernel in pairs],
        "sync_return": _returns(found.device, waits),
    }


def gaps(found: Recording) -> list[float]:
    """Between kernels of a stream that were queued behind a mark."""
    return [float(after.start_ns() - _end(before)) for before, after in pairwise(found.device) if MARKER not in before.name()]


def _returns(device: Sequence[Event], waits: Sequence[Event]) -> list[float]:
    """From the end of the last work that a synchronisation waited for to its return."""
    results = []
    for wait in waits:
        inside = [_end(event) for event in device if wait.start_ns() < _end(event) <= _end(wait)]
        if inside:
            results.append(float(_end(wait) - max(inside)))
    return results


def _end(event: Event) -> int:
    return event.start_ns() + event.duration_ns()
