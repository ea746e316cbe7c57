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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._program.program import CallKind, Program, WorkKind
from steptime._sim.core.timing import Cohort, CohortTimeline, Nanoseconds, Timeline
from steptime._units import LONG_AGO
from steptime.errors import DeadlockError

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SectionLayout:
    """Where the sections of a sample are in the sample's tables, and their repetitions in the step's."""

    sample: Program
    order: tuple[int, ...]  # sections
    call_first: Indices  # per section of the sample, and one behind the last
    work_first: Indices
    call_base: Indices  # per repetition
    work_base: Indices

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
    enter: Nanoseconds  # (call, beginning, ...)
    leave: Nanoseconds
    start: Nanoseconds  # (work, beginning, ...)
    end: Nanoseconds
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


class _SectionWalk:
    """Goes through a section's rows; every time is kept per beginning it is counted from."""

    def __init__(self, sample: Program, section: tuple[int, int, int, int], meets: Sequence[int], times: _Times) -> None:
        calls, works = sample.calls, sample.works
        self._low, self._high, self._work_low, self._work_high = section
        self._threads, self._streams = len(sample.threads), len(sample.streams)
        self._turns = [row for row, thread in enumerate(sample.threads) if thread.role in ("main", "backward")]
        self._times, self._meets = times, list(meets)
        count = self._threads + 2 * self._streams + len(meets)
        self._shape = (count, times.width)
        begin = np.full((count, count, times.width), LONG_AGO, dtype=np.int64)
        begin[np.arange(count), np.arange(count)] = 0
        self._begin = begin
        self._thread = [begin[row] for row in range(self._threads)]
        self._stream = [begin[self._threads + row] for row in range(self._streams)]
        self._pending: list[Nanoseconds | None] = [begin[self._threads + self._streams + row] for row in range(self._streams)]
        columns = (calls.kind, calls.thread, calls.stream, calls.awaits, calls.after)
        self._calls = list(zip(*(column[self._low : self._high].tolist() for column in columns), strict=True))
        self._launched: dict[int, list[int]] = {}
        for row in range(self._work_low, self._work_high):
            self._launched.setdefault(int(works.call[row]), []).append(row)
        self._stream_of = works.stream.tolist()

    def paths(self) -> _Paths:
        calls, works = self._high - self._low, self._work_high - self._work_low
        self._enter, self._leave = (np.empty((calls, *self._shape), dtype=np.int64) for _ in range(2))
        self._start, self._end = (np.empty((works, *self._shape), dtype=np.int64) for _ in range(2))
        for place, (kind, thread, stream, awaits, after) in enumerate(self._calls):
            self._call(place, kind, thread, stream, awaits, handed=after >= 0 or place == 0)
        nothing = np.full(self._shape, LONG_AGO, dtype=np.int64)
        pending = [nothing if each is None else each for each in self._pending]
        lanes = np.stack([*self._thread, *self._stream, *pending])
        rows = (self._enter, self._leave, self._start, self._end)
        return _Paths(lanes, *rows, tuple(self._meets), *_waiting(lanes, rows, len(self._meets)))

    def _call(self, place: int, kind: int, thread: int, stream: int, awaits: int, *, handed: bool) -> None:
        times, enter = self._times, self._enter[place]
        front = self._thread[thread]
        if handed and thread in self._turns:
            for other in self._turns:
                front = np.maximum(front, self._thread[other])
        np.add(front, times.gap_ns[place], out=enter)
        leave = np.add(enter, times.call_ns[place], out=self._leave[place])
        for row in self._launched.get(self._low + place, ()):
            self._work(row - self._work_low, self._stream_of[row], enter if kind == CallKind.BLOCKING_COPY else leave)
            if kind == CallKind.BLOCKING_COPY:
                np.maximum(leave, self._end[row - self._work_low] + times.return_ns[place], out=leave)
        if kind == CallKind.STREAM_WAIT and awaits >= 0:
            pending, awaited = self._pending[stream], self._awaited(awaits)
            self._pending[stream] = awaited if pending is None else np.maximum(pending, awaited)
        elif kind == CallKind.EVENT_SYNC and awaits >= 0:
            np.maximum(leave, self._awaited(awaits) + times.return_ns[place], out=leave)
        elif kind in (CallKind.STREAM_SYNC, CallKind.DEVICE_SYNC):
            for each in [self._stream[stream]] if kind == CallKind.STREAM_SYNC else self._stream:
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
            self._end[place] = self._begin[self._threads + 2 * self._streams + self._meets.index(place)]
        else:
            np.add(start, times.duration_ns[place], out=self._end[place])
        self._stream[stream] = self._end[place]

    def _awaited(self, work: int) -> Nanoseconds:
        """When a work ends; one of an earlier section is the last of its stream, or before it."""
        if self._work_low <= work < self._work_high:
            return np.asarray(self._end[work - self._work_low])
        return np.asarray(self._begin[self._threads + self._stream_of[work]])


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


class Sectioned:
    """Cohorts of one rank each, all laid out from samples."""

    def __init__(self, cohorts: Sequence[Cohort], layouts: Sequence[SectionLayout]) -> None:
        self.cohorts, self._layouts = tuple(cohorts), tuple(layouts)
        self.scenarios = max(
            getattr(cohort.timing, name).shape[2] for cohort in cohorts for name in ("gap_ns", "call_ns", "duration_ns")
        )
        present = frozenset(cohort.ranks[0] for cohort in cohorts)
        self._members = [_members(cohort, present) for cohort in cohorts]
        self._paths = [dict[int, _Paths]() for _ in cohorts]
        for group in _by_sample(layouts):
            self._find(group)
        self.fronts = [self._opened(layout) for layout in layouts]
        self._begun: list[list[Nanoseconds]] = []  # per program and repetition: beginnings
        self._before = self.fronts  # where the window opened

    @property
    def lanes(self) -> Nanoseconds:
        """How far every thread and stream has come: (lane, scenario)."""
        counts = [len(layout.sample.threads) + len(layout.sample.streams) for layout in self._layouts]
        return np.concatenate([front[:count] for front, count in zip(self.fronts, counts, strict=True)])

    def _opened(self, layout: SectionLayout) -> Nanoseconds:
        sample = layout.sample
        result = np.zeros((len(sample.threads) + 2 * len(sample.streams), self.scenarios), dtype=np.int64)
        result[len(sample.threads) + len(sample.streams) :] = LONG_AGO
        return result

    # Paths

    def _find(self, group: Sequence[int]) -> None:
        """The paths of all sections of one sample, for all programs that have it."""
        sample = self._layouts[group[0]].sample
        places = [self._layouts[number].last_places() for number in group]
        for section in sorted(set().union(*places)):
            layout = self._layouts[group[0]]
            bounds = (
                *map(int, layout.call_first[section : section + 2]), *map(int, layout.work_first[section : section + 2]),
            )  # fmt: skip
            rows = (bounds[0], bounds[1], bounds[2], bounds[3])
            users = [(number, place[section]) for number, place in zip(group, places, strict=True) if section in place]
            meets = self._meeting(users[0], rows)
            paths = _SectionWalk(sample, rows, meets, self._times(users, rows)).paths()
            for index, (number, _) in enumerate(users):
                self._paths[number][section] = _of_program(paths, index, self.scenarios)

    def _meeting(self, user: tuple[int, int], rows: tuple[int, int, int, int]) -> list[int]:
        """The works of a section at which programs meet, by their place in it."""
        number, place = user
        layout, works = self._layouts[number], self.cohorts[number].program.works
        base = int(layout.work_base[place])
        return [
            offset
            for offset in range(rows[3] - rows[2])
            if works.kind[base + offset] == WorkKind.COLLECTIVE
            and len(self._members[number][int(works.collective[base + offset])]) > 1
        ]

    def _times(self, users: Sequence[tuple[int, int]], rows: tuple[int, int, int, int]) -> _Times:
        calls, works = rows[1] - rows[0], rows[3] - rows[2]

        def side_by_side(name: str, count: int, base: Callable[[SectionLayout, int], int]) -> Nanoseconds:
            pieces = []
            for number, place in users:
                low = base(self._layouts[number], place)
                values = getattr(self.cohorts[number].timing, name)[low : low + count, 0]
                pieces.append(np.broadcast_to(values, (count, self.scenarios)))
            return np.concatenate(pieces, axis=1)

        return _Times(
            gap_ns=side_by_side("gap_ns", calls, _call_base),
            call_ns=side_by_side("call_ns", calls, _call_base),
            return_ns=side_by_side("return_ns", calls, _call_base),
            latency_ns=side_by_side("latency_ns", works, _work_base),
            spacing_ns=side_by_side("spacing_ns", works, _work_base),
            release_ns=side_by_side("release_ns", works, _work_base),
            duration_ns=side_by_side("duration_ns", works, _work_base),
            width=len(users) * self.scenarios,
        )

    # A window

    def play(self) -> None:
        """One step of all programs from where their lanes are."""
        arrived: dict[tuple[object, ...], list[Nanoseconds]] = {}
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
        order = np.array(layout.order, dtype=np.int64)
        for section, paths in self._paths[number].items():
            places = np.flatnonzero(order == section)
            begins = np.stack([begun[place] for place in places.tolist()], axis=1)  # (beginning, repetition, scenario)
            for table, base, rows in (
                (calls, layout.call_base, (paths.enter, paths.leave)),
                (works, layout.work_base, (paths.start, paths.end)),
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


class _SectionRun:
    """One program in one window."""

    def __init__(self, step: Sectioned, number: int, arrived: dict[tuple[object, ...], list[Nanoseconds]]) -> None:
        self.number, self.front, self.begun = number, step.fronts[number], list[Nanoseconds]()
        self._step, self._arrived = step, arrived
        self._layout, self._paths = step._layouts[number], step._paths[number]
        self._place, self._met = 0, 0
        self._begin: Nanoseconds | None = None  # of a section that is under way
        # By lane, meetings that others have not come to yet and that nothing waited for so far.
        self._flying: dict[int, tuple[tuple[object, ...], int, int, Nanoseconds]] = {}

    @property
    def done(self) -> bool:
        """Whether it is through."""
        return self._place == len(self._layout.order) and not self._flying

    @property
    def waits_at(self) -> str:
        """What it waits at, in words."""
        key, *_ = self._meeting(self._paths[self._layout.order[self._place]])
        return f"{key[0]} {key[2]}"

    def advance(self) -> bool:
        """Goes on as far as others have come; whether it came any further."""
        before = self._place, self._met, len(self._flying)
        order, paths_of = self._layout.order, self._paths
        while self._place < len(order):
            paths = paths_of[order[self._place]]
            self._land()
            if not paths.needs.isdisjoint(self._flying) or (paths.meets and not self._meet(paths)):
                break
            begin = self.front if self._begin is None else self._begin
            self.begun.append(begin)
            self.front = _through(paths.lanes, begin)
            self._begin, self._met = None, 0
            self._place += 1
        return before != (self._place, self._met, len(self._flying))

    def _land(self) -> None:
        """Ends what was put off, where all have come by now."""
        for lane, (key, row, size, begin) in list(self._flying.items()):
            if len(self._arrived[key]) == size:
                begin[-1] = self.front[lane] = self._end(key, row)
                if self._begin is not None:
                    self._begin[lane] = begin[-1]
                del self._flying[lane]

    def _end(self, key: tuple[object, ...], row: int) -> Nanoseconds:
        last = np.max(self._arrived[key], axis=0)
        return np.asarray(last + self._step.cohorts[self.number].timing.duration_ns[row, 0], dtype=np.int64)

    def _meet(self, paths: _Paths) -> bool:
        """Whether all have come to all meetings of a section, or it can go on without them."""
        if self._begin is None:
            unknown = np.full((len(paths.meets), self.front.shape[1]), LONG_AGO, dtype=np.int64)
            self._begin = np.concatenate([self.front, unknown])
        first = len(self.front)
        while self._met // 2 < len(paths.meets):
            key, row, size = self._meeting(paths)
            if self._met % 2 == 0:  # to come, then to leave
                arrival = _through(paths.start[paths.meets[self._met // 2]][None], self._begin)[0]
                self._arrived.setdefault(key, []).append(arrival)
                self._met += 1
            if len(self._arrived[key]) < size:
                if paths.put_off >= 0:
                    self._flying[paths.put_off] = (key, row, size, self._begin)
                return paths.put_off >= 0
            self._begin[first + self._met // 2] = self._end(key, row)
            self._met += 1
        return True

    def _meeting(self, paths: _Paths) -> tuple[tuple[object, ...], int, int]:
        """Which meeting is next, the work there, and how many come to it."""
        program = self._step.cohorts[self.number].program
        row = int(self._layout.work_base[self._place]) + paths.meets[min(self._met // 2, len(paths.meets) - 1)]
        collective = program.collectives[int(program.works.collective[row])]
        members = self._step._members[self.number][int(program.works.collective[row])]
        return (collective.group, members, collective.sequence), row, len(members)


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
    """When each lane is free behind a section: (lane, scenario)."""
    return np.asarray(np.maximum((paths + begins).max(axis=1), LONG_AGO), dtype=np.int64)


def _reached(paths: Nanoseconds, begins: Nanoseconds) -> Nanoseconds:
    """When rows are reached in every repetition: (row, repetition, scenario)."""
    result = np.full((len(paths), *begins.shape[1:]), LONG_AGO, dtype=np.int64)
    for column in range(paths.shape[1]):
        path = paths[:, column]
        if (path > LONG_AGO // 2).any():
            np.maximum(result, path[:, None] + begins[column], out=result)
    return result


def _of_program(paths: _Paths, index: int, scenarios: int) -> _Paths:
    piece = slice(index * scenarios, (index + 1) * scenarios)

    def own(values: Nanoseconds) -> Nanoseconds:
        return np.ascontiguousarray(values[:, :, piece])

    return replace(
        paths,
        lanes=own(paths.lanes),
        enter=own(paths.enter),
        leave=own(paths.leave),
        start=own(paths.start),
        end=own(paths.end),
    )


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


def _call_base(layout: SectionLayout, place: int) -> int:
    return int(layout.call_base[place])


def _work_base(layout: SectionLayout, place: int) -> int:
    return int(layout.work_base[place])
