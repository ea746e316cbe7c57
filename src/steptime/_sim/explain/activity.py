"""What each rank does during a step: computing, communicating, waiting, idle; and which op families its device is busy with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._ops.families import WorkFamily, work_families
from steptime._program.program import CallKind, WorkKind
from steptime._sim.core.timeline import CohortTimeline, Timeline
from steptime._sim.core.timing import Nanoseconds
from steptime._sim.explain.busy import Spans, clip, fold
from steptime._units import ms

# Ranks looked at together: enough to amortise the array operations, few enough to keep their copies small.
RANKS_AT_ONCE = 256


@dataclass(frozen=True)
class Window:
    """What part of a timeline is looked at. A periodic one repeats itself, each rank with its own period."""

    steps: int
    begin_ns: int = 0
    length_ns: int | None = None  # None: periodic


@dataclass(frozen=True)
class RankSummary:
    """One rank's step, in milliseconds per step. Busy is compute plus exposed communication; busy plus idle is the step."""

    rank: int
    step_ms: float
    device_busy_ms: float
    compute_ms: float  # kernels, copies and memsets
    communication_ms: float  # collectives, waiting for peers included
    exposed_communication_ms: float  # communication during which nothing is computed
    waiting_ms: float  # inside collectives, until the last peer arrives
    idle_ms: float
    host_bound_fraction: float  # share of the step in which the device idles until a launch
    host_blocked_ms: float  # the host waits: in a synchronisation, for a copy or for a place in the launch queue


@dataclass(frozen=True)
class Activity:
    """All ranks, and the device's busy time by family (mean over ranks, milliseconds per step)."""

    ranks: tuple[RankSummary, ...]
    breakdown: dict[str, float]


def activity(timeline: Timeline, window: Window, *, scenario: int = 0) -> Activity:
    """Look at one scenario of a timeline through a window."""
    ranks: list[RankSummary] = []
    busy = np.zeros(len(WorkFamily))
    for cohort in timeline.cohorts:
        families = work_families(cohort.cohort.program)
        for part in _parts(cohort, scenario):
            result, by_family = part.look(window, families)
            ranks += result
            busy += by_family
    ranks.sort(key=lambda r: r.rank)
    per_step = ms(1) * busy / (max(len(ranks), 1) * window.steps)
    order = sorted((f for f in WorkFamily if per_step[f] > 0), key=lambda f: (-per_step[f], f))
    return Activity(tuple(ranks), {f.label: float(per_step[f]) for f in order})


def _parts(cohort: CohortTimeline, scenario: int) -> Iterator[_Part]:
    for low in range(0, len(cohort.cohort.ranks), RANKS_AT_ONCE):
        yield _Part(cohort, slice(low, low + RANKS_AT_ONCE), scenario)


class _Part:
    """Some ranks of a cohort, as (row, rank) arrays."""

    def __init__(self, cohort: CohortTimeline, ranks: slice, scenario: int) -> None:
        self.program, self.ranks = cohort.cohort.program, cohort.cohort.ranks[ranks]
        timing = cohort.cohort.timing

        def take(values: Nanoseconds) -> Nanoseconds:
            chosen = values[:, ranks] if values.shape[1] > 1 else values
            return chosen[:, :, scenario if values.shape[2] > 1 else 0]

        self.call_start, self.call_end = take(cohort.call_start_ns), take(cohort.call_end_ns)
        self.work_start, self.work_end = take(cohort.work_start_ns), take(cohort.work_end_ns)
        self.moving = take(cohort.moving_ns)
        self.call_ns, self.latency = take(timing.call_ns), take(timing.latency_ns)
        self.thread_start, self.stream_start = take(timing.thread_start_ns), take(timing.stream_start_ns)

    def look(self, window: Window, families: npt.NDArray[np.int8]) -> tuple[list[RankSummary], npt.NDArray[np.float64]]:
        """The summaries, and the busy time by family, summed over these ranks and the window."""
        length = self._length(window)
        communicating = self.program.works.kind == WorkKind.COLLECTIVE
        works = self._place(self.work_start, self.work_end, window, length)
        computing = works.keep(np.flatnonzero(~communicating))
        own = computing.own_ns()
        compute, busy = own.sum(axis=0), works.covered_ns()
        waits = self._place(self.work_start, np.maximum(self.moving, self.work_start), window, length)
        columns = {
            "step_ms": length,
            "device_busy_ms": busy,
            "compute_ms": compute,
            "communication_ms": works.keep(np.flatnonzero(communicating)).covered_ns(),
            "exposed_communication_ms": busy - compute,
            "waiting_ms": waits.keep(np.flatnonzero(communicating)).covered_ns(),
            "idle_ms": length - busy,
            "host_blocked_ms": self._blocked(window, length).covered_ns(),
        }
        awaited = np.where(self._launch_bound(), works.idle_before_ns(), 0).sum(axis=0)
        by_family = np.bincount(families[~communicating], weights=own.sum(axis=1), minlength=len(WorkFamily)).astype(np.float64)
        by_family[WorkFamily.COMMUNICATION] += float((busy - compute).sum())
        per_step = {name: values * ms(1) / window.steps for name, values in columns.items()}
        summaries = [
            RankSummary(
                rank=rank,
                host_bound_fraction=float(awaited[i] / max(int(length[i]), 1)),
                **{name: float(values[i]) for name, values in per_step.items()},
            )
            for i, rank in enumerate(self.ranks)
        ]
        return summaries, by_family

    def _length(self, window: Window) -> Nanoseconds:
        """Per rank: the window's length; where it repeats, how far the rank's slowest lane moves."""
        if window.length_ns is not None:
            return np.full(len(self.ranks), window.length_ns, dtype=np.int64)
        length = np.ones(len(self.ranks), dtype=np.int64)
        lanes = (
            (self.program.calls.thread, self.call_end, self.thread_start),
            (self.program.works.stream, self.work_end, self.stream_start),
        )
        for lane, ends, opened in lanes:
            for number in range(len(opened)):
                rows = lane == number
                if rows.any():
                    length = np.maximum(length, ends[rows].max(axis=0) - opened[number])
        return length

    def _place(self, start: Nanoseconds, end: Nanoseconds, window: Window, length: Nanoseconds) -> Spans:
        return fold(start, end, length) if window.length_ns is None else clip(start, end, window.begin_ns, length)

    def _blocked(self, window: Window, length: Nanoseconds) -> Spans:
        start = np.minimum(self.call_start + self.call_ns, self.call_end)
        return self._place(start, self.call_end, window, length)

    def _launch_bound(self) -> npt.NDArray[np.bool_]:
        """Per work and rank: whether it started when its launch let it, and not later."""
        call, calls = self.program.works.call, self.program.calls
        if not len(calls):
            return np.zeros(self.work_start.shape, dtype=bool)
        launched, row = call >= 0, np.maximum(call, 0)
        # The call of a blocking copy ends after the copy, so its latency counts from the call's start.
        copying = calls.kind[row] == CallKind.BLOCKING_COPY
        issued = np.where(copying[:, None], self.call_start[row], self.call_end[row])
        return np.asarray(launched[:, None] & (self.work_start <= issued + self.latency))
