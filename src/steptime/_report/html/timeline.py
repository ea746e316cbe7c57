"""The timeline as the data of a page: names once, rows of a program once, times of every rank as short columns.

A lane is a host thread or a stream. Its rows are in order of start and have a label each (name, op, family and so on);
labels belong to the program, so that ranks that run the same one share them. `page/data.js` reads what is written here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steptime._ops.families import WorkFamily
from steptime._program.program import CallKind, Program
from steptime._report.html.columns import Integers, differences, packed
from steptime._report.html.labels import Document, Strings, program_document
from steptime._report.html.lanes import MARKS, SCENARIO, Lanes, lanes_of
from steptime._sim.core.timeline import CohortTimeline, Timeline
from steptime._sim.core.timing import Nanoseconds
from steptime._sim.explain.bound import family_words
from steptime._sim.explain.critical_path import PathSegment


def timeline_document(timeline: Timeline, ranks: Sequence[int], path: Sequence[PathSegment]) -> Document:
    """These ranks of a timeline, with the critical path where it lies on them."""
    strings, wanted = Strings(), set(ranks)
    cohorts = [cohort for cohort in timeline.cohorts if wanted.intersection(cohort.cohort.ranks)]
    lanes = [lanes_of(cohort) for cohort in cohorts]
    origin = _origin(cohorts, lanes)
    programs = [program_document(cohort.cohort.program, lane, strings) for cohort, lane in zip(cohorts, lanes, strict=True)]
    drawn = [
        (rank, number, _rank(cohort, cohort.cohort.ranks.index(rank), lanes[number], origin))
        for number, cohort in enumerate(cohorts)
        for rank in cohort.cohort.ranks
        if rank in wanted
    ]
    drawn.sort(key=lambda one: one[0])
    places = {rank: (index, number) for index, (rank, number, _) in enumerate(drawn)}
    return {
        "strings": list(strings.numbers),
        "families": [{"key": family.label, "name": family_words(family.label)} for family in WorkFamily]
        + [{"key": "host", "name": "host"}],
        "programs": programs,
        "ranks": [{"rank": rank, "program": number, **one} for rank, number, one in drawn],
        "path": _path(path, places, [cohort.cohort.program for cohort in cohorts], lanes, origin),
        "end": max([int(timeline.end_ns[SCENARIO]) - origin, 1]),
    }


def _origin(cohorts: Sequence[CohortTimeline], lanes: Sequence[Lanes]) -> int:
    """The earliest time drawn, which becomes zero."""
    starts: list[int] = []
    for cohort, item in zip(cohorts, lanes, strict=True):
        begun = (cohort.call_start_ns - cohort.cohort.timing.gap_ns)[:, :, SCENARIO]
        for lane, rows in enumerate(item.rows):
            times = begun if lane < item.hosts else cohort.work_start_ns[:, :, SCENARIO]
            starts.append(int(times[rows].min()))
    return min(starts, default=0)


def _rank(cohort: CohortTimeline, place: int, lanes: Lanes, origin: int) -> Document:
    """The times of one rank: its steps, and per lane the columns from which starts and ends follow."""

    def of(values: Nanoseconds) -> Integers:
        return np.asarray(values[:, place if values.shape[1] > 1 else 0, SCENARIO if values.shape[2] > 1 else 0])

    start, end = of(cohort.call_start_ns) - origin, of(cohort.call_end_ns) - origin
    gap, own = of(cohort.cohort.timing.gap_ns), of(cohort.cohort.timing.call_ns)
    columns = []
    for lane, rows in enumerate(lanes.rows):
        if lane < lanes.hosts:
            blocked = np.maximum(end[rows] - start[rows] - own[rows], 0)
            columns.append(_times(start[rows] - gap[rows], start[rows], end[rows], blocked))
            continue
        begun, ended = of(cohort.work_start_ns)[rows] - origin, of(cohort.work_end_ns)[rows] - origin
        moving = np.clip(of(cohort.moving_ns)[rows] - origin, begun, ended)
        columns.append(_times(begun, moving, ended))
    return {"lanes": columns, "steps": _steps(cohort.cohort.program, start, end)}


def _times(begin: Integers, middle: Integers, end: Integers, blocked: Integers | None = None) -> Document:
    """Begin, as the distance from the end before; what comes before the middle; and the rest."""
    # What one rank does not run, of rows that others of its cohort do, is far away; nothing of a lane begins before its past.
    begin = np.maximum(begin, 0)
    middle, end = np.maximum(middle, begin), np.maximum(end, begin)
    lead = begin - np.concatenate(([0], end[:-1])) if len(end) else begin
    result = {"lead": packed(lead), "first": packed(middle - begin), "rest": packed(end - middle)}
    return result if blocked is None or not blocked.any() else {**result, "blocked": packed(blocked)}


def _steps(program: Program, start: Integers, end: Integers) -> list[list[int]]:
    """Number, begin and end of every step, as the host enters and leaves it."""
    calls, begun, result = program.calls, {}, []
    for row in np.flatnonzero(np.isin(calls.kind, MARKS)).tolist():
        step = int(calls.step[row])
        if calls.kind[row] == CallKind.STEP_BEGIN:
            begun[step] = int(start[row])
        elif step in begun:
            result.append([step, begun[step], int(end[row])])
    return result


def _path(
    path: Sequence[PathSegment],
    places: dict[int, tuple[int, int]],
    programs: Sequence[Program],
    lanes: Sequence[Lanes],
    origin: int,
) -> Document:
    """The segments of the critical path that lie on drawn lanes, in order of time."""
    rows: list[tuple[int, int, int, int, int]] = []
    reasons: dict[str, int] = {}
    for segment in path:
        if segment.row < 0 or segment.rank not in places:
            continue
        place, number = places[segment.rank]
        program, result = programs[number], lanes[number]
        if segment.lane == "host":
            lane = result.thread_lane.get(int(program.calls.thread[segment.row]))
        else:
            lane = result.stream_lane.get(int(program.works.stream[segment.row]))
        if lane is not None and segment.end_ns > segment.start_ns:
            reason = reasons.setdefault(segment.reason, len(reasons))
            rows.append((place, lane, segment.start_ns - origin, segment.end_ns - segment.start_ns, reason))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return {
        "reasons": list(reasons),
        "ranks": packed(columns[0]),
        "lanes": packed(columns[1]),
        "starts": packed(differences(columns[2])),
        "lengths": packed(columns[3]),
        "why": packed(columns[4]),
    }
