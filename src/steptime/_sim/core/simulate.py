"""Plays the programs of all ranks: one pass over the window from given starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from steptime._program.program import Collective
from steptime._program.queues import QUEUE_DEPTH
from steptime._sim.core.compile import LaneGraph
from steptime._sim.core.lanes import Sums, play
from steptime._sim.core.meetings import Meeting, Part
from steptime._sim.core.schedule import Depart, Play, Return, Schedule, schedule
from steptime._sim.core.stacks import fused, stacked_timing, stacks
from steptime._sim.core.timeline import CohortTimeline, Timeline
from steptime._sim.core.timing import Cohort, Nanoseconds, Timing
from steptime._units import LONG_AGO
from steptime.errors import InputError

_PER_CALL = ("gap_ns", "call_ns", "return_ns")
_PER_WORK = ("latency_ns", "spacing_ns", "release_ns", "duration_ns", "absent_ns")

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
    stage = Stage(cohorts, schedule(cohorts, queue_depth=queue_depth))
    for number, cohort in enumerate(stage.cohorts):
        stage.open(number, cohort.timing.thread_start_ns, cohort.timing.stream_start_ns)
    stage.play(continued=False)
    return stage.timeline(queue_depth=queue_depth, keep=keep)


class Stage:
    """The ends of everything, per cohort as (row of its graph, rank, scenario), while a plan is played."""

    def __init__(self, cohorts: Sequence[Cohort], plan: Schedule, departures: Departures | None = None) -> None:
        self.cohorts = tuple(cohorts)
        self.plan = plan
        self.departures = departures
        self.graphs: dict[int, LaneGraph] = {part.cohort: graph for part, graph in zip(plan.parts, plan.graphs, strict=True)}
        self._graphs = [*plan.graphs, *(self.graphs[stack[0]] for stack in stacks(plan))]
        self.scenarios = _scenarios(self.cohorts)
        self._together = [_of_part(self.cohorts[part.cohort].timing, part).duration_ns for part in plan.parts]
        if departures is not None:  # writes the durations that it finds
            self.cohorts = tuple(_with_own_durations(cohort, self.scenarios) for cohort in self.cohorts)
        self.ends: list[Nanoseconds] = [np.empty(0, dtype=np.int64)] * len(self.cohorts)
        stacked = self._stacked()
        # Of parts and, behind them, of stacks.
        self._ends = [self.ends[part.cohort][:, part.low : part.high] for part in plan.parts]
        self._ends += [ends for ends, _ in stacked]
        self._timing = [_of_part(self.cohorts[part.cohort].timing, part) for part in plan.parts]
        self._timing += [timing for _, timing in stacked]
        self._sums: list[Sums] = [{} for _ in self._timing]

    def _stacked(self) -> list[tuple[Nanoseconds, Timing]]:
        """Lays the ends and durations of cohorts that are played together side by side."""
        cohorts, result = list(self.cohorts), []
        for stack in stacks(self.plan):
            graph, several = self.graphs[stack[0]], len(stack) > 1
            bounds = np.cumsum([0, *(len(cohorts[number].ranks) for number in stack)]).tolist()
            ends = np.empty((graph.rows, bounds[-1], self.scenarios), dtype=np.int64)
            ends[graph.carried_row :] = LONG_AGO
            timing = stacked_timing([cohorts[number] for number in stack])
            for number, (low, high) in zip(stack, pairwise(bounds), strict=True):
                self.ends[number] = ends[:, low:high]
                if several and self.departures is not None:  # which writes to them
                    own = replace(cohorts[number].timing, duration_ns=timing.duration_ns[:, low:high])
                    cohorts[number] = replace(cohorts[number], timing=own)
            result.append((ends, timing))
        self.cohorts = tuple(cohorts)
        return result

    def open(self, cohort: int, threads: Nanoseconds, streams: Nanoseconds) -> None:
        """Set when each thread and stream of a cohort begins: (lane, rank or 1, scenario or 1)."""
        graph = self.graphs[cohort]
        self.ends[cohort][graph.opening[: graph.threads]] = threads
        self.ends[cohort][graph.opening[graph.threads :]] = streams

    def play(self, *, continued: bool) -> None:
        """Play the window once from where its lanes begin."""
        for step in fused(self.plan):
            if isinstance(step, Play):
                graph, timing, ends = self._graphs[step.part], self._timing[step.part], self._ends[step.part]
                play(step.stretch, graph, timing, ends, self._sums[step.part], continued=continued)
            elif isinstance(step, Return):
                self._return(step)
            else:
                self._depart(step)

    def _return(self, step: Return) -> None:
        ends, timing = self._ends[step.part], self._timing[step.part]
        call = int(self._graphs[step.part].table_row[step.call])
        ends[step.call] = np.maximum(ends[step.half] + timing.call_ns[call], ends[step.copy] + timing.return_ns[call])

    def _depart(self, step: Depart) -> None:
        if self.departures is not None and not step.alone and len(step.leaving) == len(step.meeting.parties):
            self._leave_one_by_one(step.meeting, self.departures)
        last = None if step.alone else self._last_arrival(step.meeting)
        for party in step.leaving:
            graph, timing, ends = self.plan.graphs[party.part], self._timing[party.part], self._ends[party.part]
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
        parts = [(party, self.plan.parts[party.part]) for party in meeting.parties]
        calls = {
            rank: party.collective
            for party, part in parts
            for rank in self.cohorts[part.cohort].ranks[part.low : part.high]
        }  # fmt: skip
        together = [
            np.broadcast_to(self._together[party.part][party.work], item.shape)
            for party, item in zip(meeting.parties, arrivals, strict=True)
        ]
        result = departures.durations_ns(meeting, calls, np.concatenate(arrivals), np.concatenate(together))
        if result is not None:
            for party, item in zip(
                meeting.parties, np.split(result, np.cumsum([len(arrival) for arrival in arrivals])[:-1]), strict=True
            ):
                self._timing[party.part].duration_ns[party.work] = item

    def _arrivals(self, meeting: Meeting) -> list[Nanoseconds]:
        """Of every party, (rank, scenario)."""
        graphs = self.plan.graphs
        return [self._ends[p.part][graphs[p.part].half[int(graphs[p.part].work_row[p.work])]] for p in meeting.parties]

    def _last_arrival(self, meeting: Meeting) -> Nanoseconds:
        """When the last member of each concrete group arrives: (group, scenario)."""
        arrivals = self._arrivals(meeting)
        if meeting.groups == 1:
            return np.asarray(np.max([a.max(axis=0) for a in arrivals], axis=0)[None], dtype=np.int64)
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


def _take(ends: Nanoseconds, rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Nanoseconds:
    """The given rows; a view where they are consecutive (one thread, one stream), because ends can be most of the memory."""
    if len(rows) and bool((np.diff(rows) == 1).all()):
        return ends[int(rows[0]) : int(rows[-1]) + 1]
    return ends[rows]


def _with_own_durations(cohort: Cohort, scenarios: int) -> Cohort:
    """With a duration for every rank and scenario, to be written to."""
    own = cohort.timing.duration_ns
    durations = np.broadcast_to(own, (len(own), len(cohort.ranks), scenarios)).copy()
    return replace(cohort, timing=replace(cohort.timing, duration_ns=durations))


def _of_part(timing: Timing, part: Part) -> Timing:
    """The timing of some ranks of a cohort."""
    changes = {}
    for field in fields(timing):
        values = getattr(timing, field.name)
        narrow = field.name == "waits" or values.shape[1] == 1
        changes[field.name] = values if narrow else values[:, part.low : part.high]
    return Timing(**changes)


def _scenarios(cohorts: Sequence[Cohort]) -> int:
    """How many scenarios the timings span, after checking that every array fits its program."""
    if not cohorts:
        raise InputError("nothing to simulate: expected at least one cohort of ranks, got none")
    results = {1}
    for cohort in cohorts:
        program = cohort.program
        sizes = {name: len(program.calls) for name in _PER_CALL} | {name: len(program.works) for name in _PER_WORK}
        sizes |= {"thread_start_ns": len(program.threads), "stream_start_ns": len(program.streams)}
        for name, rows in sizes.items():
            shape = getattr(cohort.timing, name).shape
            if shape[0] != rows or shape[1] not in (1, len(cohort.ranks)):
                raise ValueError(f"Timing.{name}: {shape}, expected ({rows}, 1 or {len(cohort.ranks)}, scenarios)")
            results.add(shape[2])
    if len(results) > 2:
        raise ValueError(f"timings of {sorted(results)} scenarios cannot be simulated together")
    return max(results)
