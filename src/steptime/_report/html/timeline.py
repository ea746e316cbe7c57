"""The timeline as the data of a page: names once, rows of a program once, times of every rank as short columns.

A lane is a host thread or a stream; lanes that have nothing to draw are left out. Its rows are in order of start and have a
label each (name, op, family and so on); labels belong to the program, so that ranks that run the same one share them. A time
is written as its distance to the one before, so most take two bytes. `page/data.js` reads what is written here.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._ops.families import WorkFamily, work_families
from steptime._program.program import Program, WorkKind
from steptime._report.alike import ranges
from steptime._report.chrome import STEP_MARKS, step_spans
from steptime._report.html.markup import Markup, clean, table
from steptime._report.words import time_ms
from steptime._sim.core.timing import CohortTimeline, Nanoseconds, Timeline
from steptime._sim.explain.bound import family_words
from steptime._sim.explain.critical_path import PathSegment, short_kernel_name
from steptime._units import ms, size_words

Integers = npt.NDArray[np.int64]

_BITS = 7
_MORE = 0x80


def packed(values: Integers | Sequence[int]) -> str:
    """Whole numbers as short text: LEB128 (seven bits a byte, least first), signs folded in, then base64."""
    numbers = np.asarray(values, dtype=np.int64)
    # 0, -1, 1, -2, ... become 0, 1, 2, 3, ...: small numbers of either sign stay short.
    rest = ((numbers << 1) ^ (numbers >> 63)).astype(np.uint64)
    lengths = np.ones(len(rest), dtype=np.int64)
    for index in range(1, 10):
        lengths += rest >= np.uint64(1) << np.uint64(_BITS * index)
    begin = np.cumsum(lengths) - lengths
    out = np.zeros(int(lengths.sum()), dtype=np.uint8)
    for index in range(int(lengths.max(initial=0))):
        here = lengths > index
        low = (rest[here] >> np.uint64(_BITS * index)) & np.uint64(_MORE - 1)
        out[begin[here] + index] = low.astype(np.uint8) | np.where(lengths[here] > index + 1, _MORE, 0).astype(np.uint8)
    return base64.b64encode(out.tobytes()).decode("ascii")


def differences(values: Integers) -> Integers:
    """Each value's distance to the one before, the first from 0."""
    return np.diff(values, prepend=np.int64(0))


@dataclass(frozen=True, eq=False)
class Lanes:
    """Which rows of a program are drawn, lane by lane: host threads, then streams; lanes without rows are left out."""

    titles: tuple[str, ...]
    rows: tuple[Integers, ...]  # per lane, of `calls` or `works`
    hosts: int  # so many lanes are host threads
    thread_lane: dict[int, int]  # thread -> lane
    stream_lane: dict[int, int]  # stream -> lane


def lanes_of(cohort: CohortTimeline) -> Lanes:
    """What is drawn of the ranks of a cohort."""
    program = cohort.cohort.program
    calls = np.flatnonzero(~np.isin(program.calls.kind, STEP_MARKS))
    length = (cohort.work_end_ns - cohort.work_start_ns)[:, :, 0]
    # Backlog that a steady state leaves out has neither a call nor a length.
    works = np.flatnonzero((program.works.call >= 0) | (length > 0).any(axis=1))
    threads = [
        (i, f"{thread.role} thread", calls[program.calls.thread[calls] == i]) for i, thread in enumerate(program.threads)
    ]
    streams = [(i, f"stream {stream.id}", works[program.works.stream[works] == i]) for i, stream in enumerate(program.streams)]
    threads, streams = [item for item in threads if len(item[2])], [item for item in streams if len(item[2])]
    return Lanes(
        tuple(title for _, title, _ in threads + streams),
        tuple(rows for _, _, rows in threads + streams),
        len(threads),
        {thread: lane for lane, (thread, _, _) in enumerate(threads)},
        {stream: len(threads) + lane for lane, (stream, _, _) in enumerate(streams)},
    )


def lanes_table(timeline: Timeline, ranks: Sequence[int], titles: Mapping[int, str]) -> Markup:
    """Per rank and lane how much there is, for those who cannot see a drawing; `titles` say whose lanes they are."""
    rows: list[tuple[int, int, str, int, int]] = []
    for cohort in timeline.cohorts:
        lanes = lanes_of(cohort)
        for index, rank in enumerate(cohort.cohort.ranks):
            for lane, drawn in enumerate(lanes.rows if rank in ranks else ()):
                host = lane < lanes.hosts
                begin, end = (cohort.call_start_ns, cohort.call_end_ns) if host else (cohort.work_start_ns, cohort.work_end_ns)
                busy = int((end - begin)[drawn, index, 0].sum())
                rows.append((rank, lane, lanes.titles[lane], len(drawn), busy))
    heads = ("Rank", "Lane", "Calls or works", "ms in them")
    text = [(titles[rank], title, f"{count:,}", time_ms(ms(busy))) for rank, _, title, count, busy in sorted(rows)]
    return table("Lanes of the timeline, all drawn steps together", heads, text, words=(0, 1))


HOST = len(WorkFamily)  # the family of what a host thread does, behind those of the device

Document = dict[str, Any]
Describe = Callable[[int], tuple[int, ...]]


@dataclass
class Strings:
    """Every text once, by number."""

    numbers: dict[str, int] = field(default_factory=dict)  # text as it is shown -> number
    known: dict[str, int] = field(default_factory=dict)  # text as it was given -> the same

    def number(self, text: str) -> int:
        """The number of a text, the next one where it is new."""
        if text not in self.known:
            self.known[text] = self.numbers.setdefault(clean(text), len(self.numbers))
        return self.known[text]


def program_document(program: Program, lanes: Lanes, strings: Strings) -> Document:
    """Labels of a program's rows, and per lane its title, its rows' labels and, of works, the calls that launched them."""
    labels = _Labels(program, strings)
    hosts = lanes.rows[: lanes.hosts]
    position = np.full(len(program.calls) + 1, -1, dtype=np.int64)  # per call, its place among those drawn; the last: no call
    position[np.concatenate([*hosts, np.zeros(0, dtype=np.int64)])] = np.arange(sum(map(len, hosts)))
    columns: list[Document] = []
    for lane, (title, rows) in enumerate(zip(lanes.titles, lanes.rows, strict=True)):
        if lane < lanes.hosts:
            known = {"labels": packed(labels.of_calls(rows))}
        else:
            issued = position[program.works.call[rows]]
            known = {"labels": packed(labels.of_works(rows)), "calls": packed(differences(issued))}
        columns.append({"title": strings.number(title), **known})
    text = [list(label) for label in labels.numbers]
    return {"device": strings.number(program.device_name), "hosts": lanes.hosts, "labels": text, "lanes": columns}


class _Labels:
    """The labels of a program, by number: what a row is called, in full, the op around it, its family, its step, what else."""

    def __init__(self, program: Program, strings: Strings) -> None:
        calls, works = program.calls, program.works
        self.program, self.number = program, strings.number
        self.numbers: dict[tuple[int, ...], int] = {}
        self.families = work_families(program)
        name = np.append(program.ops.name, -1).astype(np.int64)  # -1, no op, has no name
        self.call_op = name[calls.op]
        self.work_op = np.append(self.call_op, -1)[works.call]

    def of_calls(self, rows: Integers) -> Integers:
        """The number of every call's label."""
        calls = self.program.calls
        return self._numbered(rows, (calls.api, self.call_op, calls.step), self._call)

    def of_works(self, rows: Integers) -> Integers:
        """The number of every work's label."""
        works = self.program.works
        telling = (works.name, self.work_op, self.families, works.bytes, works.collective, works.step)
        return self._numbered(rows, telling, self._work)

    def _numbered(self, rows: Integers, telling: Sequence[npt.NDArray[Any]], describe: Describe) -> Integers:
        """A number per row; rows alike in the telling columns have one label, which is made once."""
        columns = np.column_stack([column[rows] for column in telling])
        _, first, which = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        result = np.zeros(len(first), dtype=np.int64)
        # In the order in which rows come, not in that of the columns' numbers, which depend on how a trace was read.
        for index in np.argsort(first).tolist():
            result[index] = self.numbers.setdefault(describe(int(rows[first[index]])), len(self.numbers))
        return result[which.reshape(-1)]

    def _call(self, row: int) -> tuple[int, ...]:
        calls, names, op = self.program.calls, self.program.names, int(self.call_op[row])
        around = names[op] if op >= 0 else "host work"
        return self._label(around, names[calls.api[row]], around, HOST, int(calls.step[row]), "")

    def _work(self, row: int) -> tuple[int, ...]:
        works, names = self.program.works, self.program.names
        kernel, op = names[works.name[row]], int(self.work_op[row])
        name, more = short_kernel_name(kernel), size_words(int(works.bytes[row])) if works.bytes[row] else ""
        if works.kind[row] == WorkKind.COLLECTIVE and works.collective[row] >= 0:
            item = self.program.collectives[works.collective[row]]
            among = f"{len(item.ranks)} ranks, " if item.ranks else ""
            name, more = item.kind, f"{among}{size_words(item.bytes_in)} in, {size_words(item.bytes_out)} out"
        return self._label(name, kernel, names[op] if op >= 0 else "", int(self.families[row]), int(works.step[row]), more)

    def _label(self, name: str, full: str, op: str, family: int, step: int, more: str) -> tuple[int, ...]:
        return (self.number(name), self.number(full), self.number(op), family, step, self.number(more))


def timeline_document(
    timeline: Timeline, ranks: Sequence[int], path: Sequence[PathSegment], alike: Mapping[int, Sequence[int]] | None = None
) -> Document:
    """These ranks of a timeline, with the critical path where it lies on them or on those that they stand for (`alike`)."""
    standing = {rank: (alike or {}).get(rank, (rank,)) for rank in ranks}
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
    drawn.sort(key=lambda times: times[0])
    places = {each: (index, number) for index, (rank, number, _) in enumerate(drawn) for each in standing[rank]}
    return {
        "strings": list(strings.numbers),
        "families": [{"key": family.label, "name": family_words(family.label)} for family in WorkFamily]
        + [{"key": "host", "name": "host"}],
        "programs": programs,
        "ranks": [{"rank": rank, "title": ranges(standing[rank]), "program": number, **times} for rank, number, times in drawn],
        "path": _path(path, places, [cohort.cohort.program for cohort in cohorts], lanes, origin),
        "end": max([int(timeline.end_ns[0]) - origin, 1]),
    }


def _origin(cohorts: Sequence[CohortTimeline], lanes: Sequence[Lanes]) -> int:
    """The earliest time drawn, which becomes zero."""
    starts: list[int] = []
    for cohort, item in zip(cohorts, lanes, strict=True):
        begun = (cohort.call_start_ns - cohort.cohort.timing.gap_ns)[:, :, 0]
        for lane, rows in enumerate(item.rows):
            times = begun if lane < item.hosts else cohort.work_start_ns[:, :, 0]
            starts.append(int(times[rows].min()))
    return min(starts, default=0)


def _rank(cohort: CohortTimeline, place: int, lanes: Lanes, origin: int) -> Document:
    """The times of one rank: its steps, and per lane the columns from which starts and ends follow."""

    def of(values: Nanoseconds) -> Integers:
        return np.asarray(values[:, place if values.shape[1] > 1 else 0, 0])

    start, end = of(cohort.call_start_ns) - origin, of(cohort.call_end_ns) - origin
    gap, call_ns = of(cohort.cohort.timing.gap_ns), of(cohort.cohort.timing.call_ns)
    columns = []
    for lane, rows in enumerate(lanes.rows):
        if lane < lanes.hosts:
            blocked = np.maximum(end[rows] - start[rows] - call_ns[rows], 0)
            columns.append(_times(start[rows] - gap[rows], start[rows], end[rows], blocked))
            continue
        begun, ended = of(cohort.work_start_ns)[rows] - origin, of(cohort.work_end_ns)[rows] - origin
        moving = np.clip(of(cohort.moving_ns)[rows] - origin, begun, ended)
        columns.append(_times(begun, moving, ended))
    return {"lanes": columns, "steps": step_spans(cohort.cohort.program, start.tolist(), end.tolist())}


def _times(begin: Integers, middle: Integers, end: Integers, blocked: Integers | None = None) -> Document:
    """Begin, as the distance from the end before; what comes before the middle; and the rest."""
    # What one rank does not run, of rows that others of its cohort do, is far away; nothing of a lane begins before its past.
    begin = np.maximum(begin, 0)
    middle, end = np.maximum(middle, begin), np.maximum(end, begin)
    lead = begin - np.concatenate(([0], end[:-1])) if len(end) else begin
    result = {"lead": packed(lead), "first": packed(middle - begin), "rest": packed(end - middle)}
    return result if blocked is None or not blocked.any() else {**result, "blocked": packed(blocked)}


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
