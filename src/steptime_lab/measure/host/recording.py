"""Profilers as conditions of a measurement, and what their records say about launches that no host clock can see."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from steptime_lab.measure.device_profile import MARKER, RawEvent, execution_trace
from steptime_lab.measure.host.bench import MOST_LAUNCHES, Action, HostBench, Probe
from steptime_lab.measure.host.launches import CUDA, GATE_CYCLES, QUEUED
from steptime_lab.measure.host.runner import Runner
from steptime_lab.measure.restarts import CrashMarker

MODES = ("off", "cuda", "cpu_cuda", "execution_trace", "after")


@dataclass
class Recording:
    """What was recorded; complete when the `with` block has ended. Empty where nothing was."""

    device: list[RawEvent] = field(default_factory=list)  # kernels, copies, memsets, by start
    runtime: list[RawEvent] = field(default_factory=list)  # calls of the CUDA runtime and driver, by start

    def read(self, events: Sequence[RawEvent]) -> None:
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
        with tempfile.TemporaryDirectory(prefix="steptime") as folder, execution_trace(Path(folder) / "trace.json"):
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


def _returns(device: Sequence[RawEvent], waits: Sequence[RawEvent]) -> list[float]:
    """From the end of the last work that a synchronisation waited for to its return."""
    results = []
    for wait in waits:
        inside = [_end(event) for event in device if wait.start_ns() < _end(event) <= _end(wait)]
        if inside:
            results.append(float(_end(wait) - max(inside)))
    return results


def _end(event: RawEvent) -> int:
    return event.start_ns() + event.duration_ns()


@dataclass
class MarkedBench(HostBench):
    """Where `marking`, a marking kernel goes before and after the calls of a loop; `loops` counts loops."""

    marking: bool = False
    loops: int = 0

    def per_call(self, action: Action, most_calls: int = MOST_LAUNCHES) -> list[float]:
        """As every bench, between two marks."""
        self._mark()
        self.loops += 1
        try:
            return super().per_call(action, most_calls)
        finally:
            self._mark()

    def _mark(self) -> None:
        if self.marking:
            CUDA._sleep(1)


@dataclass
class ProfiledRunner(Runner):
    """Its `mode` names the profiler; `marker` holds the probe that runs."""

    bench: MarkedBench
    marker: CrashMarker | None = None
    _loops: dict[int, tuple[int, int]] = field(default_factory=dict)  # probe -> its loop in the recording, the calls of that

    @contextmanager
    def around(self, block: Mapping[int, Probe]) -> Iterator[None]:
        """One recording of a block; how much each probe launched is known when it has ended."""
        bench = self.bench
        bench.marking = self.mode == "cuda" and bench.cuda and all(probe.kinds == ("op",) for probe in block.values())
        bench.loops = 0
        self._loops = {}
        records = Recording()
        try:
            with recording(self.mode, read=bench.marking) as records:
                yield
        finally:
            counts = records.launches()
            if bench.marking and len(counts) == bench.loops:
                for number, (loop, calls) in self._loops.items():
                    self._results[number].launches = counts[loop - 1] / calls

    def starts(self, probe: Probe) -> None:
        """Notes the probe that comes next."""
        if self.marker is not None:
            self.marker.begin(probe.name)

    def ran(self, number: int) -> None:
        """Notes which loop of the recording the probe was."""
        self._loops[number] = self.bench.loops, self.bench.calls_made


REPEATS = 50


def scenes(bench: HostBench, mode: str) -> dict[str, list[float]]:
    """Kind -> times; empty where there is no device to look at."""
    if not bench.cuda or mode not in ("cuda", "cpu_cuda"):
        return {}
    x = torch.randn(256, device=bench.group.device)
    out = torch.empty_like(x)
    with recording(mode, read=True) as idle:
        for _ in range(REPEATS):
            torch.neg(x, out=out)
            bench.synchronize()
    with recording(mode, read=True) as queued:
        CUDA._sleep(GATE_CYCLES)
        for _ in range(QUEUED):
            torch.neg(x, out=out)
        bench.synchronize()
    return read_scenes(idle, queued)


def read_scenes(idle: Recording, queued: Recording) -> dict[str, list[float]]:
    """Times by kind from launches on an idle device and from kernels behind a gate; kinds without any are left out."""
    result = {
        **around_launches(idle),
        "kernel_gap": gaps(queued),
        "kernel_duration": [float(e.duration_ns()) for e in idle.device],
    }
    return {kind: times for kind, times in result.items() if times}
