"""The profiler's raw events of some marked steps as columns: which kernels each launched, through which op, when, how long."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Begins the name of the host range around one profiled step; then case and step follow.
MARK = "steptime_step#"


class RawEvent(Protocol):
    """What is read of an event of `kineto_results.events()`."""

    def name(self) -> str:
        """Kernel, runtime call, op or range."""

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
        elif _is_runtime(name):
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


def _is_runtime(name: str) -> bool:
    """Whether it is a call of CUDA's runtime or driver; ops have a namespace."""
    return name.startswith("cu") and "::" not in name


def comparable(steps: Sequence[StepKernels]) -> list[StepKernels]:
    """The steps that can stand side by side: all where they launched the same kernels, else the last one alone."""
    return list(steps) if all(step.names == steps[-1].names for step in steps) else [steps[-1]]
