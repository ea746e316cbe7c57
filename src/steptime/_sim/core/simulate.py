"""Plays the programs of all ranks: one pass over the window from given starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from steptime._program.program import Collective
from steptime._program.queues import QUEUE_DEPTH
from steptime._sim.core.graph import LaneGraph, Rows
from steptime._sim.core.lanes import Sums, play
from steptime._sim.core.meetings import Meeting
from steptime._sim.core.schedule import Depart, Play, Return, Schedule, find_schedule, fused, stacks
from steptime._sim.core.timing import PER_CALL, PER_WORK, Cohort, CohortTimeline, Nanoseconds, Timeline, Timing
from steptime._units import LONG_AGO
from steptime.errors import InputError

Keep = Literal["all", "ends"]


class Departures(Protocol):
    """When ranks leave a collective that they do not leave all at once."""

    def durations_ns(
        self, meeting: Meeting, calls: Mapping[int, Collective], arrivals_ns: Nanoseconds, together_ns: Nanoseconds
    ) -> Nanoseconds | None:
        """From the last arrival to the end of each rank; None where all leave together, after `together_ns`.

        Arrays are (rank, scenario), in the order of `calls`, which says what each rank calls.
        """


def simulate(cohorts: Sequence[Cohort], *, queue_depth: int | None = QUEUE_DEPTH, keep: Keep = "all") -> Timeline:
    """Play one window. `keep="ends"` leaves the start and moving arrays empty (no rows), which saves their memory."""
    playback = Playback(cohorts, find_schedule(cohorts, queue_depth=queue_depth))
    playback.play(continued=False)
    return playback.timeline(queue_depth=queue_depth, keep=keep)


class Playback:
    """The ends of everything, per cohort as (row of its graph, rank, scenario), while a schedule is played."""

    def __init__(self, cohorts: Sequence[Cohort], schedule: Schedule, departures: Departures | None = None) -> None:
        self.cohorts, self.schedule, self.departures = tuple(cohorts), schedule, departures
        self.graphs: dict[int, LaneGraph] = {
            block.cohort: graph for block, graph in zip(schedule.blocks, schedule.graphs, strict=True)
        }
        self.scenarios = _scenarios(self.cohorts)
        self._together_ns = [timing.duration_ns for timing in self._block_timings()]
        if departures is not None:  # writes the durations that it finds
            self.cohorts = tuple(_with_writable_durations(cohort, self.scenarios) for cohort in self.cohorts)
        self.ends: list[Nanoseconds] = [np.empty(0, dtype=np.int64)] * len(self.cohorts)
        stacked = self._stacked()
        # Of blocks and, behind them, of stacks.
        self._graphs = [*schedule.graphs, *(self.graphs[stack[0]] for stack in stacks(schedule))]
        self._ends = [self.ends[block.cohort][:, block.low : block.high] for block in schedule.blocks]
        self._ends += [ends for ends, _ in stacked]
        self._timing = [*self._block_timings(), *(timing for _, timing in stacked)]
        self._sums: list[Sums] = [{} for _ in self._timing]
        for number, cohort in enumerate(self.cohorts):
            graph, ends, timing = self.graphs[number], self.ends[number], cohort.timing
            ends[graph.opening[: graph.threads]] = timing.thread_start_ns
            ends[graph.opening[graph.threads :]] = timing.stream_start_ns

    def _block_timings(self) -> list[Timing]:
        return [self.cohorts[block.cohort].timing.of_ranks(block.low, block.high) for block in self.schedule.blocks]

    def _stacked(self) -> list[tuple[Nanoseconds, Timing]]:
        """Lays the ends and durations of cohorts that are played together side by side."""
        cohorts, result = list(self.cohorts), []
        for stack in stacks(self.schedule):
            graph = self.graphs[stack[0]]
            bounds = np.cumsum([0, *(len(cohorts[number].ranks) for number in stack)]).tolist()
            ends = np.empty((graph.rows, bounds[-1], self.scenarios), dtype=np.int64)
            ends[graph.carried_row :] = LONG_AGO
            timing = _stacked_timing([cohorts[number] for number in stack])
            for number, (low, high) in zip(stack, pairwise(bounds), strict=True):
                self.ends[number] = ends[:, low:high]
                if len(stack) > 1 and self.departures is not None:  # which writes to them
                    duration_ns = timing.duration_ns[:, low:high]
                    cohorts[number] = replace(cohorts[number], timing=replace(cohorts[number].timing, duration_ns=duration_ns))
            result.append((ends, timing))
        self.cohorts = tuple(cohorts)
        return result

    def play(self, *, continued: bool) -> None:
        """Play the window once from where its lanes begin."""
        for step in fused(self.schedule):
            if isinstance(step, Play):
                graph, timing, ends = self._graphs[step.block], self._timing[step.block], self._ends[step.block]
                play(step.stretch, graph, timing, ends, self._sums[step.block], continued=continued)
            elif isinstance(step, Return):
                self._return(step)
            else:
                self._depart(step)

    def _return(self, step: Return) -> None:
        ends, timing = self._ends[step.block], self._timing[step.block]
        call = int(self._graphs[step.block].table_row[step.call])
        ends[step.call] = np.maximum(ends[step.half] + timing.call_ns[call], ends[step.copy] + timing.return_ns[call])

    def _depart(self, step: Depart) -> None:
        if self.departures is not None and not step.alone and len(step.leaving) == len(step.meeting.parties):
            self._leave_one_by_one(step.meeting, self.departures)
        last = None if step.alone else self._last_arrival(step.meeting)
        for party in step.leaving:
            graph, timing, ends = self.schedule.graphs[party.block], self._timing[party.block], self._ends[party.block]
            row = int(graph.work_row[party.work])
            out = ends[row]
            if last is None:
                out[...] = ends[graph.half[row]]
            else:
                out[...] = last if party.group is None else last[party.group]
            np.maximum(out, timing.absent_ns[party.work], out=out)
            out += timing.duration_ns[party.work]

    def _leave_one_by_one(self, meeting: Meeting, departures: Departures) -> None:
        """Writes the durations of a collective whose ranks do not leave together."""
        if meeting.groups > 1:
            return
        arrivals = self._arrivals(meeting)
        calls = {rank: party.collective for party in meeting.parties for rank in self.schedule.blocks[party.block].ranks}
        together_ns = [
            np.broadcast_to(self._together_ns[party.block][party.work], arrival.shape)
            for party, arrival in zip(meeting.parties, arrivals, strict=True)
        ]
        result = departures.durations_ns(meeting, calls, np.concatenate(arrivals), np.concatenate(together_ns))
        if result is not None:
            bounds = np.cumsum([0, *map(len, arrivals)]).tolist()
            for party, (low, high) in zip(meeting.parties, pairwise(bounds), strict=True):
                self._timing[party.block].duration_ns[party.work] = result[low:high]

    def _arrivals(self, meeting: Meeting) -> list[Nanoseconds]:
        """Of every party, (rank, scenario)."""
        return [self._ends[p.block][self.schedule.graphs[p.block].arrival(p.work)] for p in meeting.parties]

    def _last_arrival(self, meeting: Meeting) -> Nanoseconds:
        """When the last member of each concrete group arrives: (group, scenario)."""
        arrivals = self._arrivals(meeting)
        if meeting.groups == 1:
            last = arrivals[0] if len(arrivals) == 1 else np.concatenate(arrivals)
            return np.asarray(last if len(last) == 1 else last.max(axis=0)[None], dtype=np.int64)
        group = np.concatenate([p.group for p in meeting.parties if p.group is not None])
        order = np.argsort(group, kind="stable")
        starts = np.searchsorted(group[order], np.arange(meeting.groups))
        return np.asarray(np.maximum.reduceat(np.concatenate(arrivals)[order], starts, axis=0), dtype=np.int64)

    def timeline(self, *, queue_depth: int | None, keep: Keep) -> Timeline:
        """What has been played, in rows of the programs' tables."""
        timelines = tuple(self._cohort_timeline(number, keep) for number in range(len(self.cohorts)))
        none = np.full((0, 1, self.scenarios), LONG_AGO, dtype=np.int64)
        latest = [
            np.max(ends, axis=(0, 1), initial=LONG_AGO) for t in timelines for ends in (t.call_end_ns, t.work_end_ns, none)
        ]
        end = np.asarray(np.max(latest, axis=0), dtype=np.int64)
        return Timeline(timelines, end, queue_depth=queue_depth)

    def _cohort_timeline(self, number: int, keep: Keep) -> CohortTimeline:
        cohort, graph, ends = self.cohorts[number], self.graphs[number], self.ends[number]
        call_end, work_end = _take(ends, graph.call_row), _take(ends, graph.work_row)
        if keep == "ends":
            none = np.empty((0, *ends.shape[1:]), dtype=np.int64)
            return CohortTimeline(cohort, none, call_end, none, work_end, none)
        call_start = ends[graph.call_row - 1]
        handed = np.flatnonzero(cohort.program.calls.after >= 0)
        if len(handed):
            call_start[handed] = np.maximum(call_start[handed], call_end[cohort.program.calls.after[handed]])
        call_start += cohort.timing.gap_ns
        moving = work_end - cohort.timing.duration_ns
        work_start = moving
        collectives = [(work, graph.half[row]) for work, row in enumerate(graph.work_row.tolist()) if row in graph.half]
        if collectives:
            works, halves = np.array(collectives, dtype=np.int64).T
            work_start = moving.copy()
            work_start[works] = ends[halves]
        return CohortTimeline(cohort, call_start, call_end, work_start, work_end, moving)


def _take(ends: Nanoseconds, rows: Rows) -> Nanoseconds:
    """The given rows; a view where they are consecutive (one thread, one stream), because ends can be most of the memory."""
    if len(rows) and bool((np.diff(rows) == 1).all()):
        return ends[int(rows[0]) : int(rows[-1]) + 1]
    return ends[rows]


def _with_writable_durations(cohort: Cohort, scenarios: int) -> Cohort:
    """With a duration for every rank and scenario, to be written to."""
    duration_ns = cohort.timing.duration_ns
    durations = np.broadcast_to(duration_ns, (len(duration_ns), len(cohort.ranks), scenarios)).copy()
    return replace(cohort, timing=replace(cohort.timing, duration_ns=durations))


def _stacked_timing(cohorts: Sequence[Cohort]) -> Timing:
    """The durations of all ranks of some cohorts, side by side."""
    if len(cohorts) == 1:
        return cohorts[0].timing
    changes: dict[str, Any] = {}
    for name in (*PER_CALL, *PER_WORK):
        arrays = [getattr(cohort.timing, name) for cohort in cohorts]
        same = arrays[0].shape[1] == 1 and all(np.array_equal(arrays[0], other) for other in arrays[1:])
        if same and name != "duration_ns":  # which is written to where ranks leave one by one
            changes[name] = arrays[0]
        else:
            scenarios = max(array.shape[2] for array in arrays)
            shapes = [(len(array), len(cohort.ranks), scenarios) for array, cohort in zip(arrays, cohorts, strict=True)]
            changes[name] = np.concatenate(list(map(np.broadcast_to, arrays, shapes)), axis=1)
    return replace(cohorts[0].timing, **changes)


def _scenarios(cohorts: Sequence[Cohort]) -> int:
    """How many scenarios the timings span, after checking that every array fits its program."""
    if not cohorts:
        raise InputError("nothing to simulate: expected at least one cohort of ranks, got none")
    results = {1}
    for cohort in cohorts:
        program = cohort.program
        sizes = dict.fromkeys(PER_CALL, len(program.calls)) | dict.fromkeys(PER_WORK, len(program.works))
        sizes |= {"thread_start_ns": len(program.threads), "stream_start_ns": len(program.streams)}
        for name, rows in sizes.items():
            shape = getattr(cohort.timing, name).shape
            if shape[0] != rows or shape[1] not in (1, len(cohort.ranks)):
                raise ValueError(f"Timing.{name}: {shape}, expected ({rows}, 1 or {len(cohort.ranks)}, scenarios)")
            results.add(shape[2])
    if len(results) > 2:
        raise ValueError(f"timings of {sorted(results)} scenarios cannot be simulated together")
    return max(results)
