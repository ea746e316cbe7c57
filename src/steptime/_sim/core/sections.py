"""The steady state of steps that are laid out from samples: the same recurrence, one section at a time.

Between the beginning and the end of a section the laws of the simulator are maxima and sums alone, so a section is a matrix of
longest paths in max-plus algebra (Baccelli et al., Synchronization and Linearity, 1992, chapter 2): from when lanes were free
before it to when they are free after it, and to every call and work inside. It is found once for all repetitions of a section,
by going through its rows with all lanes' beginnings kept apart. What ranks do at the same place of one sample is found for all
of them together. Where programs meet, a section gives the arrival, and the end of what they do there is one more beginning.

One thing is left out: a launch never finds the queue full. A host that is faster than its device runs ahead without a limit
here, and is held up there; neither moves the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._program.program import CallKind, Program, WorkKind
from steptime._sim.core.timing import Cohort, CohortTimeline, Nanoseconds, Timeline
from steptime._units import LONG_AGO
from steptime.errors import DeadlockError

Indices = npt.NDArray[np.int64]

# Members of an enumeration are looked up slowly, and here once per call.
_BLOCKING_COPY, _STREAM_WAIT, _EVENT_SYNC, _STREAM_SYNC, _DEVICE_SYNC = map(
    int, (CallKind.BLOCKING_COPY, CallKind.STREAM_WAIT, CallKind.EVENT_SYNC, CallKind.STREAM_SYNC, CallKind.DEVICE_SYNC)
)
_OUTSIDE = -2  # less a stream, the last work of it before a section; less a mark behind two lanes for each stream
# Equal sections are gone through together, so many programs and scenarios of them at once: more would not stay in caches.
_TOGETHER = 256


@dataclass(frozen=True)
class Mark:
    """A work that calls of other sections wait for: the latest one at a place of some sections, which run the same there."""

    sections: frozenset[int]
    place: int


@dataclass(frozen=True, eq=False)
class SectionLayout:
    """Where the sections of a sample are in the sample's tables, and their repetitions in the step's."""

    sample: Program
    order: tuple[int, ...]  # sections
    call_first: Indices  # per section of the sample, and one behind the last
    work_first: Indices
    call_base: Indices  # per repetition
    work_base: Indices
    marks: tuple[Mark, ...] = ()  # works of layers that later layers wait for though others follow them on their streams
    waits: Mapping[int, int] = field(default_factory=dict)  # call of the sample -> the mark that it waits for

    @staticmethod
    def of(cohort: Cohort) -> SectionLayout | None:
        """How a cohort's step was laid out; None where it was written out."""
        result: SectionLayout | None = cohort.program.derived.get(SectionLayout)
        return result if len(cohort.ranks) == 1 else None

    def evened(self, per_work: Nanoseconds) -> Nanoseconds:
        """Times of works (work, rank, scenario), each the mean over all repetitions of its section."""
        lengths = np.diff(self.work_first)[np.array(self.order, dtype=np.int64)]
        first = np.repeat(self.work_first[np.array(self.order, dtype=np.int64)], lengths)
        source = first + np.arange(len(first)) - np.repeat(self.work_base, lengths)
        count = np.maximum(np.bincount(source, minlength=len(self.sample.works)), 1)
        result = np.empty(per_work.shape, dtype=np.int64)
        for rank, scenario in np.ndindex(per_work.shape[1:]):
            total = np.bincount(source, per_work[:, rank, scenario], len(self.sample.works))
            result[:, rank, scenario] = np.rint(total / count)[source]
        return result

    def last_places(self) -> dict[int, int]:
        """Per section its last repetition."""
        return {section: place for place, section in enumerate(self.order)}


@dataclass(frozen=True, eq=False)
class _Paths:
    """Longest paths through one section: rows are what is reached, columns beginnings; the last axis programs, scenarios."""

    lanes: Nanoseconds  # (lane, beginning, ...)
    arrive: Nanoseconds  # (meeting, beginning, ...)
    rows: tuple[Nanoseconds, ...]  # enter, leave (call, beginning, ...), start, end (work, beginning, ...); none: no timeline
    meets: tuple[int, ...]  # works at which programs meet, by their place in the section
    needs: frozenset[int] = frozenset()  # lanes that anything in the section waits for
    put_off: int = -1  # the lane of the only meeting, where nothing in the section waits for its end


def _waiting(lanes: Nanoseconds, rows: Sequence[Nanoseconds], meets: int) -> tuple[frozenset[int], int]:
    """The lanes that anything in a section waits for; and of a single meeting its lane, if that is all that its end moves."""
    count = len(lanes)
    through = np.asarray((lanes > LONG_AGO // 2).any(axis=2))
    inside = np.asarray(np.stack([(each > LONG_AGO // 2).any(axis=(0, 2)) for each in rows]).any(axis=0))
    beside = through[:, :count] & ~np.eye(count, dtype=bool)
    needs = frozenset(np.flatnonzero(inside[:count] | beside.any(axis=0)).tolist())
    moved = np.flatnonzero(through[:, count]) if meets == 1 else np.zeros(0)
    ends = (rows[3][:, count] > LONG_AGO // 2).any(axis=1) if meets == 1 else np.zeros(0)
    alone = len(moved) == 1 and ends.sum() == 1 and not any((each[:, count] > LONG_AGO // 2).any() for each in rows[:3])
    return needs, int(moved[0]) if alone else -1


@dataclass(frozen=True)
class _Section:
    """What the paths through a section depend on besides times; equal for sections that do the same in the same order."""

    calls: tuple[tuple[int, int, int, int, bool], ...]  # kind, thread, stream, what it awaits, whether it is handed over to
    works: tuple[tuple[int, int], ...]  # the place of the call, stream
    meets: tuple[int, ...] = ()  # works at which programs meet
    marks: tuple[int, ...] = ()  # per mark of the sample the work here that moves it, or -1

    @staticmethod
    def all_of(layout: SectionLayout) -> list[_Section]:
        """Every section of a sample. Awaited works outside the section are told by their streams or marks, below -1."""
        calls, works, result = layout.sample.calls, layout.sample.works, []
        awaits, streams = calls.awaits.astype(np.int64), works.stream.astype(np.int64)
        outside = _OUTSIDE - streams[np.maximum(awaits, 0)] if len(streams) else awaits
        for call, mark in layout.waits.items():
            outside[call] = _OUTSIDE - 2 * len(layout.sample.streams) - mark
        bounds = zip(layout.call_first[:-1], layout.call_first[1:], layout.work_first[:-1], layout.work_first[1:], strict=True)
        for number, (low, high, work_low, work_high) in enumerate(bounds):
            mine = slice(low, high)
            inside = (awaits[mine] >= work_low) & (awaits[mine] < work_high)
            awaited = np.where(inside, awaits[mine] - work_low, np.where(awaits[mine] >= 0, outside[mine], -1))
            columns = (calls.kind[mine], calls.thread[mine], calls.stream[mine], awaited, calls.after[mine] >= 0)
            launched = (works.call[work_low:work_high] - low, streams[work_low:work_high])
            marks = tuple(mark.place if number in mark.sections else -1 for mark in layout.marks)
            result.append(_Section(_rows(columns), _rows(launched), marks=marks))
        return result


def _rows(columns: Sequence[npt.NDArray[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(zip(*(column.tolist() for column in columns), strict=True))


class _SectionWalk:
    """Goes through a section's rows; every time is kept per beginning it is counted from."""

    def __init__(self, sample: Program, section: _Section, times: _Times) -> None:
        meets = section.meets
        self._threads, self._streams = len(sample.threads), len(sample.streams)
        self._turns = [row for row, thread in enumerate(sample.threads) if thread.role in ("main", "backward")]
        self._times, self._meets = times, list(meets)
        self._lanes = self._threads + 2 * self._streams + len(section.marks)
        count = self._lanes + len(meets)
        self._shape = (count, times.width)
        begin = np.full((count, count, times.width), LONG_AGO, dtype=np.int64)
        begin[np.arange(count), np.arange(count)] = 0
        self._begin = begin
        self._thread = [begin[row] for row in range(self._threads)]
        self._stream = [begin[self._threads + row] for row in range(self._streams)]
        self._pending: list[Nanoseconds | None] = [begin[self._threads + self._streams + row] for row in range(self._streams)]
        self._section = section
        self._launched: dict[int, list[tuple[int, int]]] = {}
        for place, (call, stream) in enumerate(section.works):
            self._launched.setdefault(call, []).append((place, stream))

    def paths(self, *, timeline: bool) -> _Paths:
        calls, works = len(self._section.calls), len(self._section.works)
        self._enter, self._leave = (np.empty((calls, *self._shape), dtype=np.int64) for _ in range(2))
        self._start, self._end = (np.empty((works, *self._shape), dtype=np.int64) for _ in range(2))
        for place, (kind, thread, stream, awaits, handed) in enumerate(self._section.calls):
            self._call(place, kind, thread, stream, awaits, handed=handed or place == 0)
        nothing = np.full(self._shape, LONG_AGO, dtype=np.int64)
        pending = [nothing if each is None else each for each in self._pending]
        first = self._threads + 2 * self._streams
        marks = [self._begin[first + mark] if place < 0 else self._end[place] for mark, place in enumerate(self._section.marks)]
        lanes = np.stack([*self._thread, *self._stream, *pending, *marks])
        rows = (self._enter, self._leave, self._start, self._end)
        waiting = _waiting(lanes, rows, len(self._meets))
        return _Paths(lanes, self._start[self._meets], rows if timeline else (), self._section.meets, *waiting)

    def _call(self, place: int, kind: int, thread: int, stream: int, awaits: int, *, handed: bool) -> None:
        times, enter = self._times, self._enter[place]
        front = self._thread[thread]
        if handed and thread in self._turns:
            for other in self._turns:
                front = np.maximum(front, self._thread[other])
        np.add(front, times.gap_ns[place], out=enter)
        leave = np.add(enter, times.call_ns[place], out=self._leave[place])
        for row, of_stream in self._launched.get(place, ()):
            self._work(row, of_stream, enter if kind == _BLOCKING_COPY else leave)
            if kind == _BLOCKING_COPY:
                np.maximum(leave, self._end[row] + times.return_ns[place], out=leave)
        if kind == _STREAM_WAIT and awaits != -1:
            pending, awaited = self._pending[stream], self._awaited(awaits)
            self._pending[stream] = awaited if pending is None else np.maximum(pending, awaited)
        elif kind == _EVENT_SYNC and awaits != -1:
            np.maximum(leave, self._awaited(awaits) + times.return_ns[place], out=leave)
        elif kind in (_STREAM_SYNC, _DEVICE_SYNC):
            for each in [self._stream[stream]] if kind == _STREAM_SYNC else self._stream:
                np.maximum(leave, each + times.return_ns[place], out=leave)
        self._thread[thread] = leave

    def _work(self, place: int, stream: int, launched: Nanoseconds) -> None:
        times, start = self._times, self._start[place]
        np.add(launched, times.latency_ns[place], out=start)
        np.maximum(start, self._stream[stream] + times.spacing_ns[place], out=start)
        pending = self._pending[stream]
        if pending is not None:
            np.maximum(start, pending + times.release_ns[place], out=start)
            self._pending[stream] = None
        if place in self._meets:
            self._end[place] = self._begin[self._lanes + self._meets.index(place)]
        else:
            np.add(start, times.duration_ns[place], out=self._end[place])
        self._stream[stream] = self._end[place]

    def _awaited(self, work: int) -> Nanoseconds:
        """When a work ends; one of an earlier section is the last of its stream, or marked."""
        return np.asarray(self._end[work] if work >= 0 else self._begin[self._threads + _OUTSIDE - work])


@dataclass(frozen=True, eq=False)
class _Times:
    """What the rows of one section take: (row, programs x scenarios)."""

    gap_ns: Nanoseconds
    call_ns: Nanoseconds
    return_ns: Nanoseconds
    latency_ns: Nanoseconds
    spacing_ns: Nanoseconds
    release_ns: Nanoseconds
    duration_ns: Nanoseconds
    width: int


_Key = tuple[str, tuple[int, ...], int]  # group, members, sequence


@dataclass(frozen=True, slots=True, eq=False)
class _Meeting:
    """Where programs meet: how many come, and how long it takes when all are there."""

    key: _Key
    members: int
    duration_ns: Nanoseconds  # (scenario,)


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Repetitions one behind the other, in which nobody is met unless it is one alone."""

    first: int  # repetition
    through: tuple[_Paths, ...]  # from its beginning behind each of them


@dataclass(frozen=True, slots=True)
class _Use:
    """A section of a program, and one of its repetitions."""

    program: int
    section: int
    place: int


class Sectioned:
    """Cohorts of one rank each, all laid out from samples; `timeline`: whether one will be asked for."""

    def __init__(self, cohorts: Sequence[Cohort], layouts: Sequence[SectionLayout], *, timeline: bool = True) -> None:
        self.cohorts, self._layouts = tuple(cohorts), tuple(layouts)
        self.scenarios = max(
            getattr(cohort.timing, name).shape[2] for cohort in cohorts for name in ("gap_ns", "call_ns", "duration_ns")
        )
        present = frozenset(cohort.ranks[0] for cohort in cohorts)
        self._members = [_members(cohort, present) for cohort in cohorts]
        self._paths = [dict[int, _Paths]() for _ in cohorts]
        for group in _by_sample(layouts):
            self._find(group, timeline=timeline)
        self._stretches = [self._joined(number) for number in range(len(cohorts))]
        self._meetings = [self._met(number) for number in range(len(cohorts))]
        self.fronts = [self._opened(layout) for layout in layouts]
        self._begun: list[list[Nanoseconds]] = []  # per program and stretch: beginnings
        self._before = self.fronts  # where the window opened

    @property
    def lanes(self) -> Nanoseconds:
        """How far every thread and stream has come: (lane, scenario)."""
        counts = [len(layout.sample.threads) + len(layout.sample.streams) for layout in self._layouts]
        return np.concatenate([front[:count] for front, count in zip(self.fronts, counts, strict=True)])

    def _opened(self, layout: SectionLayout) -> Nanoseconds:
        sample = layout.sample
        lanes = len(sample.threads) + 2 * len(sample.streams) + len(layout.marks)
        result = np.zeros((lanes, self.scenarios), dtype=np.int64)
        result[len(sample.threads) + len(sample.streams) :] = LONG_AGO
        return result

    # Paths

    def _find(self, group: Sequence[int], *, timeline: bool) -> None:
        """The paths of all sections of one sample, for all programs that have it."""
        sample = self._layouts[group[0]].sample
        sections: list[_Section] | None = sample.derived.get(_Section)
        if sections is None:
            sections = sample.derived[_Section] = _Section.all_of(self._layouts[group[0]])
        alike: dict[_Section, list[_Use]] = {}
        for number in group:
            meeting = self._meeting(number)
            for section, place in self._layouts[number].last_places().items():
                base, shape = int(self._layouts[number].work_base[place]), sections[section]
                meets = tuple(np.flatnonzero(meeting[base : base + len(shape.works)]).tolist())
                alike.setdefault(replace(shape, meets=meets) if meets else shape, []).append(_Use(number, section, place))
        most = max(1, _TOGETHER // self.scenarios)
        for shape, every in alike.items():
            for first in range(0, len(every), most):
                uses = every[first : first + most]
                paths = _SectionWalk(sample, shape, self._times(uses, shape)).paths(timeline=timeline)
                for index, use in enumerate(uses):
                    self._paths[use.program][use.section] = _of_program(paths, index, self.scenarios)

    def _meeting(self, number: int) -> npt.NDArray[np.bool_]:
        """Per work of a program whether it meets others there."""
        works = self.cohorts[number].program.works
        sizes = np.array([*map(len, self._members[number]), 0], dtype=np.int64)
        return np.asarray((works.kind == WorkKind.COLLECTIVE) & (sizes[works.collective] > 1))

    def _times(self, uses: Sequence[_Use], shape: _Section) -> _Times:
        places: dict[int, list[int]] = {}
        for use in uses:
            places.setdefault(use.program, []).append(use.place)

        def side_by_side(name: str, count: int, base: str) -> Nanoseconds:
            pieces = []
            for number, mine in places.items():  # in the order of uses
                rows = getattr(self._layouts[number], base)[mine][None, :] + np.arange(count)[:, None]
                values = getattr(self.cohorts[number].timing, name)[:, 0][rows]
                pieces.append(
                    np.broadcast_to(values, (count, len(mine), self.scenarios)).reshape(count, len(mine) * self.scenarios)
                )
            return np.concatenate(pieces, axis=1)

        calls, works = len(shape.calls), len(shape.works)
        return _Times(
            gap_ns=side_by_side("gap_ns", calls, "call_base"),
            call_ns=side_by_side("call_ns", calls, "call_base"),
            return_ns=side_by_side("return_ns", calls, "call_base"),
            latency_ns=side_by_side("latency_ns", works, "work_base"),
            spacing_ns=side_by_side("spacing_ns", works, "work_base"),
            release_ns=side_by_side("release_ns", works, "work_base"),
            duration_ns=side_by_side("duration_ns", works, "work_base"),
            width=len(uses) * self.scenarios,
        )

    def _joined(self, number: int) -> list[_Stretch]:
        """The repetitions of a program, those between meetings as one where the same ones follow each other again."""
        order, paths = self._layouts[number].order, self._paths[number]
        meeting = [place for place, section in enumerate(order) if paths[section].meets]
        bounds = sorted({0, len(order), *meeting, *(place + 1 for place in meeting)})
        words = [order[first:stop] for first, stop in pairwise(bounds)]
        often = Counter(words)
        known: dict[tuple[int, ...], tuple[_Paths, ...]] = {}
        result: list[_Stretch] = []
        for first, word in zip(bounds[:-1], words, strict=True):
            if len(word) == 1 or often[word] == 1:
                result += [_Stretch(first + at, (paths[section],)) for at, section in enumerate(word)]
                continue
            if word not in known:
                known[word] = tuple(accumulate((paths[section] for section in word), _one_behind_the_other))
            result.append(_Stretch(first, known[word]))
        return result

    def _met(self, number: int) -> dict[int, list[_Meeting]]:
        """Per repetition at which a program meets others: where, with whom, and how long it takes then."""
        layout, program, timing = self._layouts[number], self.cohorts[number].program, self.cohorts[number].timing
        result: dict[int, list[_Meeting]] = {}
        for place, section in enumerate(layout.order):
            for offset in self._paths[number][section].meets:
                row = int(layout.work_base[place]) + offset
                at = int(program.works.collective[row])
                collective, members = program.collectives[at], self._members[number][at]
                key = (collective.group, members, collective.sequence)
                result.setdefault(place, []).append(_Meeting(key, len(members), timing.duration_ns[row, 0]))
        return result

    # A window

    def play(self) -> None:
        """One step of all programs from where their lanes are."""
        arrived: dict[_Key, tuple[int, Nanoseconds]] = {}
        self._begun = [[] for _ in self.cohorts]
        runs = [_SectionRun(self, number, arrived) for number in range(len(self.cohorts))]
        going = True
        while going:
            going = sum(run.advance() for run in runs) > 0
        stuck = [run for run in runs if not run.done]
        if stuck:
            names = ", ".join(f"rank {self.cohorts[run.number].ranks[0]} at {run.waits_at}" for run in stuck[:4])
            raise DeadlockError(f"deadlock: {names} wait for ranks that never come")
        self._before, self.fronts = self.fronts, [run.front for run in runs]
        self._begun = [run.begun for run in runs]

    def timeline(self, period_ns: npt.NDArray[np.float64], queue_depth: int | None) -> Timeline:
        """What was played last, in rows of the programs' tables; `period_ns` before, the same was played."""
        timelines = tuple(self._of_program(number) for number in range(len(self.cohorts)))
        if queue_depth is not None:
            timelines = tuple(_held_up(each, np.rint(period_ns).astype(np.int64), queue_depth) for each in timelines)
        end = np.max([each.work_end_ns.max(axis=(0, 1), initial=LONG_AGO) for each in timelines], axis=0)
        return Timeline(timelines, np.asarray(end, dtype=np.int64), queue_depth=None)

    def _of_program(self, number: int) -> CohortTimeline:
        cohort, layout, begun = self.cohorts[number], self._layouts[number], self._begun[number]
        program = cohort.program
        calls = [np.empty((len(program.calls), self.scenarios), dtype=np.int64) for _ in range(2)]
        works = [np.empty((len(program.works), self.scenarios), dtype=np.int64) for _ in range(2)]
        order, begins_at = np.array(layout.order, dtype=np.int64), self._begins(number, begun)
        for section, paths in self._paths[number].items():
            places = np.flatnonzero(order == section)
            begins = np.stack([begins_at[place] for place in places.tolist()], axis=1)  # (beginning, repetition, scenario)
            for table, base, rows in (
                (calls, layout.call_base, paths.rows[:2]),
                (works, layout.work_base, paths.rows[2:]),
            ):
                at = base[places][None, :] + np.arange(len(rows[0]))[:, None]
                for into, path in zip(table, rows, strict=True):
                    into[at] = _reached(path, begins)
        timing = cohort.timing
        call_start, call_end, work_start, work_end = (each[:, None, :] for each in (*calls, *works))
        moving = work_end - timing.duration_ns
        waiting = (program.works.kind == WorkKind.COLLECTIVE)[:, None, None]
        work_start = np.where(waiting, np.minimum(work_start, moving), moving)
        threads, streams = len(program.threads), len(program.streams)
        opened = self._before[number][:, None]
        timing = replace(timing, thread_start_ns=opened[:threads], stream_start_ns=opened[threads : threads + streams])
        cohort = replace(cohort, timing=timing)
        return CohortTimeline(cohort, call_start, call_end, work_start, work_end, moving)

    def _begins(self, number: int, begun: Sequence[Nanoseconds]) -> list[Nanoseconds]:
        """Beginnings of every repetition, from those of stretches."""
        result: list[Nanoseconds] = [begun[0]] * len(self._layouts[number].order)
        alike: dict[int, list[int]] = {}
        for index, stretch in enumerate(self._stretches[number]):
            result[stretch.first] = begun[index]
            if len(stretch.through) > 1:
                alike.setdefault(id(stretch.through), []).append(index)
        for indices in alike.values():
            stretches = [self._stretches[number][index] for index in indices]
            begins = np.stack([begun[index] for index in indices], axis=1)
            for at, paths in enumerate(stretches[0].through[:-1], 1):
                behind = _reached(paths.lanes, begins)
                for column, stretch in enumerate(stretches):
                    result[stretch.first + at] = behind[:, column]
        return result


class _SectionRun:
    """One program in one window."""

    def __init__(self, step: Sectioned, number: int, arrived: dict[_Key, tuple[int, Nanoseconds]]) -> None:
        self.number, self.front, self.begun = number, step.fronts[number], list[Nanoseconds]()
        self._arrived = arrived
        self._stretches, self._meetings = step._stretches[number], step._meetings[number]
        self._at, self._met = 0, 0
        self._begin: Nanoseconds | None = None  # of a section that is under way
        # By lane, meetings that others have not come to yet and that nothing waited for so far.
        self._flying: dict[int, tuple[_Meeting, Nanoseconds]] = {}

    @property
    def done(self) -> bool:
        """Whether it is through."""
        return self._at == len(self._stretches) and not self._flying

    @property
    def waits_at(self) -> str:
        """What it waits at, in words."""
        flying = [meeting for meeting, _ in self._flying.values()]
        here = [] if self._at == len(self._stretches) else self._meetings.get(self._stretches[self._at].first, [])
        group, _, sequence = (here[self._met // 2 :] or flying)[0].key
        return f"{group} {sequence}"

    def advance(self) -> bool:
        """Goes on as far as others have come; whether it came any further."""
        before = self._at, self._met, len(self._flying)
        stretches, flying = self._stretches, self._flying
        while self._at < len(stretches):
            stretch = stretches[self._at]
            paths = stretch.through[-1]
            if flying:
                self._land()
            if (flying and not paths.needs.isdisjoint(flying)) or (paths.meets and not self._meet(paths, stretch.first)):
                break
            begin = self.front if self._begin is None else self._begin
            self.begun.append(begin)
            self.front = _through(paths.lanes, begin)
            self._begin, self._met = None, 0
            self._at += 1
        if flying:
            self._land()
        return before != (self._at, self._met, len(self._flying))

    def _land(self) -> None:
        """Ends what was put off, where all have come by now."""
        for lane, (meeting, begin) in list(self._flying.items()):
            if self._arrived[meeting.key][0] == meeting.members:
                begin[-1] = self.front[lane] = self._end(meeting)
                if self._begin is not None:
                    self._begin[lane] = begin[-1]
                del self._flying[lane]

    def _end(self, meeting: _Meeting) -> Nanoseconds:
        return self._arrived[meeting.key][1] + meeting.duration_ns

    def _meet(self, paths: _Paths, place: int) -> bool:
        """Whether all have come to all meetings of a section, or it can go on without them."""
        if self._begin is None:
            unknown = np.full((len(paths.meets), self.front.shape[1]), LONG_AGO, dtype=np.int64)
            self._begin = np.concatenate([self.front, unknown])
        first, meetings = len(self.front), self._meetings[place]
        while self._met // 2 < len(meetings):
            index = self._met // 2
            meeting = meetings[index]
            if self._met % 2 == 0:  # to come, then to leave
                arrival = _through(paths.arrive[index : index + 1], self._begin)[0]
                count, last = self._arrived.get(meeting.key, (0, arrival))
                self._arrived[meeting.key] = count + 1, np.maximum(last, arrival)
                self._met += 1
            if self._arrived[meeting.key][0] < meeting.members:
                if paths.put_off >= 0:
                    self._flying[paths.put_off] = (meeting, self._begin)
                return paths.put_off >= 0
            self._begin[first + index] = self._end(meeting)
            self._met += 1
        return True


def _held_up(played: CohortTimeline, period_ns: Nanoseconds, queue_depth: int) -> CohortTimeline:
    """With a host that does not run ahead by more launches than a queue holds; the device is as it was."""
    works = played.cohort.program.works
    leave, enter = played.call_end_ns[:, 0].copy(), played.call_start_ns[:, 0].copy()
    for stream in np.unique(works.stream).tolist():
        rows = np.flatnonzero(works.stream == stream)
        start = played.work_start_ns[rows, 0]
        back = -(-queue_depth // max(len(rows), 1))
        earlier = np.concatenate([start - window * period_ns for window in range(back, -1, -1)])
        free = earlier[len(earlier) - len(rows) - queue_depth : len(earlier) - queue_depth]
        np.maximum.at(leave, works.call[rows], free)
    np.maximum.accumulate(leave, axis=0, out=leave)
    before = leave[-1:] - period_ns  # the step before ended
    leave = np.maximum(leave, before)
    enter = np.maximum(enter, np.concatenate([before, leave[:-1]]))
    leave = np.maximum(leave, enter)
    timing = played.cohort.timing
    starts = np.maximum(timing.thread_start_ns, before[:, None])
    cohort = replace(played.cohort, timing=replace(timing, thread_start_ns=starts))
    return replace(played, cohort=cohort, call_start_ns=enter[:, None], call_end_ns=leave[:, None])


def _through(paths: Nanoseconds, begins: Nanoseconds) -> Nanoseconds:
    """When each lane is free behind a section: (lane, scenario). Some lane has begun, so that none is before `LONG_AGO`."""
    result: Nanoseconds = np.maximum.reduce(paths + begins, axis=1)
    return result


def _one_behind_the_other(first: _Paths, second: _Paths) -> _Paths:
    """Two sections without meetings as one: the product of their matrices."""
    lanes = np.maximum(np.maximum.reduce(second.lanes[:, :, None] + first.lanes[None], axis=1), LONG_AGO)
    return _Paths(lanes, first.arrive, (), (), first.needs | second.needs)


def _reached(paths: Nanoseconds, begins: Nanoseconds) -> Nanoseconds:
    """When rows are reached in every repetition: (row, repetition, scenario)."""
    result = np.full((len(paths), *begins.shape[1:]), LONG_AGO, dtype=np.int64)
    for column in np.flatnonzero((paths > LONG_AGO // 2).any(axis=(0, 2))).tolist():
        np.maximum(result, paths[:, column, None] + begins[column], out=result)
    return result


def _of_program(paths: _Paths, index: int, scenarios: int) -> _Paths:
    piece = slice(index * scenarios, (index + 1) * scenarios)

    def own(values: Nanoseconds) -> Nanoseconds:
        return np.ascontiguousarray(values[:, :, piece])

    return replace(paths, lanes=own(paths.lanes), arrive=own(paths.arrive), rows=tuple(map(own, paths.rows)))


def _members(cohort: Cohort, present: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Of every collective, who comes to it of those that are played."""
    if cohort.members is not None:
        return cohort.members[0]
    return tuple(tuple(rank for rank in each.ranks if rank in present) for each in cohort.program.collectives)


def _by_sample(layouts: Sequence[SectionLayout]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for number, layout in enumerate(layouts):
        groups.setdefault(id(layout.sample), []).append(number)
    return list(groups.values())
