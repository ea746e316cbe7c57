"""What each rank does during a step: computing, communicating, waiting, idle; and which op families its device is busy with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._ops.families import WorkFamily, work_families
from steptime._program.program import CallKind, WorkKind
from steptime._sim.core.timing import CohortTimeline, Nanoseconds, Timeline
from steptime._units import ms


@dataclass(frozen=True, eq=False)
class Spans:
    """Starts and ends inside a window of `length_ns` per rank: 0 <= start <= end <= length.

    Everything here is sorting and running maxima along the rows, so that thousands of ranks cost a handful of array operations.
    """

    start_ns: Nanoseconds  # (row, rank)
    end_ns: Nanoseconds
    length_ns: Nanoseconds  # (rank,)
    rows: int  # rows before folding; the parts of row r are r, r + rows, ...
    periodic: bool = False

    def keep(self, chosen: Nanoseconds) -> Spans:
        """The spans of some of the original rows."""
        parts = len(self.start_ns) // max(self.rows, 1)
        rows = (np.arange(parts)[:, None] * self.rows + chosen[None, :]).reshape(-1)
        return Spans(self.start_ns[rows], self.end_ns[rows], self.length_ns, len(chosen), self.periodic)

    def covered_ns(self) -> Nanoseconds:
        """Per rank: how much of the window at least one span covers."""
        return np.asarray(self.own_ns().sum(axis=0), dtype=np.int64)

    def own_ns(self) -> Nanoseconds:
        """Per original row and rank: its part of the covered time. Where spans overlap, the one that started first has it."""
        order, start, end = self._sorted()
        fresh = np.maximum(end - np.maximum(start, _reach_before(start, end)), 0)
        return self._by_row(order, fresh)

    def idle_before_ns(self) -> Nanoseconds:
        """Per original row and rank: the uncovered time that its start ends."""
        order, start, end = self._sorted()
        if not len(start):
            return self._by_row(order, start)
        gap = np.maximum(start - _reach_before(start, end), 0)
        gap[0] = start[0]
        if self.periodic:
            gap[0] += self.length_ns - end.max(axis=0)
        return self._by_row(order, gap)

    def _sorted(self) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
        order = np.argsort(self.start_ns, axis=0, kind="stable")
        return order, np.take_along_axis(self.start_ns, order, 0), np.take_along_axis(self.end_ns, order, 0)

    def _by_row(self, order: Nanoseconds, values: Nanoseconds) -> Nanoseconds:
        result = np.empty_like(values)
        np.put_along_axis(result, order, values, 0)
        return np.asarray(result.reshape(-1, self.rows, result.shape[1]).sum(axis=0) if self.rows else result, dtype=np.int64)


def fold(start: Nanoseconds, end: Nanoseconds, length: Nanoseconds) -> Spans:
    """Spans of a window that repeats every `length`: what sticks out at the end covers the beginning."""
    length = np.maximum(length, 1)
    begin = start % length
    stop = begin + np.minimum(end - start, length)
    over = np.maximum(stop - length, 0)
    # A span that does not wrap leaves an empty second part where it starts itself, so that it ends no gap of its own.
    again = np.where(over > 0, 0, begin)
    starts, ends = np.concatenate([begin, again]), np.concatenate([np.minimum(stop, length), again + over])
    return Spans(starts, ends, length, len(start), periodic=True)


def clip(start: Nanoseconds, end: Nanoseconds, begin: int, length: Nanoseconds) -> Spans:
    """The parts of spans inside a window from `begin`, seen once."""
    low, high = np.clip(start - begin, 0, length), np.clip(end - begin, 0, length)
    return Spans(low, high, np.asarray(length, dtype=np.int64), len(start))


def _reach_before(start: Nanoseconds, end: Nanoseconds) -> Nanoseconds:
    """Per sorted row: the latest end of the rows before it; its own start for the first."""
    reach = np.maximum.accumulate(end, axis=0)
    return np.concatenate([start[:1], reach[:-1]])


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


def activity(timeline: Timeline, window: Window) -> Activity:
    """Look at the first scenario of a timeline through a window."""
    ranks: list[RankSummary] = []
    busy = np.zeros(len(WorkFamily))
    for cohort in timeline.cohorts:
        families = work_families(cohort.cohort.program)
        for low in range(0, len(cohort.cohort.ranks), RANKS_AT_ONCE):
            result, by_family = _Part(cohort, slice(low, low + RANKS_AT_ONCE)).look(window, families)
            ranks += result
            busy += by_family
    ranks.sort(key=lambda r: r.rank)
    per_step = ms(1) * busy / (max(len(ranks), 1) * window.steps)
    order = sorted((f for f in WorkFamily if per_step[f] > 0), key=lambda f: (-per_step[f], f))
    return Activity(tuple(ranks), {f.label: float(per_step[f]) for f in order})


class _Part:
    """Some ranks of a cohort, as (row, rank) arrays."""

    def __init__(self, cohort: CohortTimeline, ranks: slice) -> None:
        self.program, self.ranks = cohort.cohort.program, cohort.cohort.ranks[ranks]
        timing = cohort.cohort.timing

        def take(values: Nanoseconds) -> Nanoseconds:
            return (values[:, ranks] if values.shape[1] > 1 else values)[:, :, 0]

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
        covered = computing.own_ns()
        compute, busy = covered.sum(axis=0), works.covered_ns()
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
        by_family = np.bincount(families[~communicating], weights=covered.sum(axis=1), minlength=len(WorkFamily)).astype(
            np.float64
        )
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
