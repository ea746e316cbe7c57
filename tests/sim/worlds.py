"""Random small jobs that can be simulated: a few programs, each run by a few ranks, with everything a program can hold.

A job is drawn as one global list of actions. Each program is that list filtered, so every dependency points to an earlier
action and the job cannot deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from steptime._program.program import CallKind, Calls, Collective, Ops, Program, Stream, Thread, WorkKind, Works
from steptime._sim import LONG_AGO, Cohort, Nanoseconds, Timing

CALL_COLUMNS = {"api": 0, "op": -1, "step": 0, "stream": -1, "awaits": -1, "after": -1}
WORK_COLUMNS = {"name": 0, "step": 0, "start_ns": -1, "end_ns": -1, "bytes": 0, "collective": -1, "call": -1}


@dataclass
class Draft:
    """A program being written, call by call in the order in which the host issues them."""

    threads: int = 1
    streams: int = 1
    calls: list[dict[str, int]] = field(default_factory=list)
    works: list[dict[str, int]] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    queues: tuple[int | None, ...] = (None, None, None)  # hardware queue of each stream

    def call(self, kind: CallKind, thread: int = 0, **columns: int) -> int:
        self.calls.append({**CALL_COLUMNS, "kind": int(kind), "thread": thread, **columns})
        return len(self.calls) - 1

    def work(self, stream: int = 0, kind: WorkKind = WorkKind.KERNEL, **columns: int) -> int:
        self.works.append({**WORK_COLUMNS, "kind": int(kind), "stream": stream, **columns})
        return len(self.works) - 1

    def launch(self, stream: int = 0, thread: int = 0, **columns: int) -> int:
        return self.work(stream, call=self.call(CallKind.LAUNCH, thread, **columns))

    def collective(self, collective: Collective, stream: int = 0, thread: int = 0) -> int:
        self.collectives.append(collective)
        call = self.call(CallKind.LAUNCH, thread)
        return self.work(stream, WorkKind.COLLECTIVE, call=call, collective=len(self.collectives) - 1)

    def program(self, *, rank: int = 0, world_size: int = 1, recorded: bool = False) -> Program:
        """The program; a recorded one has its calls grouped by thread and in order only by their start."""
        place = list(range(len(self.calls)))
        if recorded:
            place.sort(key=lambda call: self.calls[call]["thread"])
        row = {call: row for row, call in enumerate(place)}
        calls = [
            {
                **self.calls[call],
                "start_ns": 10 * call if recorded else -1,
                "end_ns": 10 * call + 5 if recorded else -1,
                "after": row.get(self.calls[call]["after"], -1),
            }
            for call in place
        ]
        works = [{**work, "call": row.get(work["call"], -1)} for work in self.works]
        return Program(
            rank=rank,
            world_size=world_size,
            names=("anything",),
            threads=tuple(Thread(100 + t) for t in range(self.threads)),
            streams=tuple(Stream(7 + s, queue=self.queues[s]) for s in range(self.streams)),
            ops=Ops.from_columns({}),
            calls=Calls.from_columns({name: [call[name] for call in calls] for name in Calls.TYPES} if calls else {}),
            works=Works.from_columns({name: [work[name] for work in works] for name in Works.TYPES} if works else {}),
            collectives=tuple(self.collectives),
        )


def constant_timing(program: Program, **values: int) -> Timing:
    """The same value everywhere, by field; what is not given is 0."""
    sizes = {"gap_ns": len(program.calls), "call_ns": len(program.calls), "return_ns": len(program.calls)}
    sizes |= {name: len(program.works) for name in ("latency_ns", "spacing_ns", "release_ns", "duration_ns", "absent_ns")}
    sizes |= {"thread_start_ns": len(program.threads), "stream_start_ns": len(program.streams)}
    values = {"absent_ns": LONG_AGO, **values}
    arrays: dict[str, Any] = {name: np.full((rows, 1, 1), values.get(name, 0), dtype=np.int64) for name, rows in sizes.items()}
    return Timing(**arrays, waits=np.ones(len(program.works), dtype=np.bool_))


def random_timing(
    program: Program, ranks: int, scenarios: int, rng: np.random.Generator, waits: npt.NDArray[np.bool_]
) -> Timing:
    """Random times, with rank and scenario axes of length 1 or full."""

    def draw(rows: int, low: int, high: int) -> Nanoseconds:
        shape = (rows, ranks if rng.random() < 0.7 else 1, scenarios if rng.random() < 0.7 else 1)
        return rng.integers(low, high, size=shape, dtype=np.int64)

    calls, works = len(program.calls), len(program.works)
    absent = draw(works, 0, 200)
    return Timing(
        gap_ns=draw(calls, 0, 20),
        call_ns=draw(calls, 0, 10),
        return_ns=draw(calls, 0, 8),
        latency_ns=draw(works, 0, 12),
        spacing_ns=draw(works, 0, 4),
        release_ns=draw(works, 0, 5),
        duration_ns=draw(works, 0, 40),
        waits=waits,
        absent_ns=np.where(rng.random((works, 1, 1)) < 0.1, absent, LONG_AGO),
        thread_start_ns=np.zeros((len(program.threads), 1, 1), dtype=np.int64),
        stream_start_ns=draw(len(program.streams), 0, 30) * int(rng.random() < 0.3),
    )


_KINDS = st.sampled_from(
    ["launch"] * 5 + ["collective"] * 3 + ["wait"] * 2 + ["copy", "graph", "host", "event sync", "stream sync", "device sync"]
)
_ACTIONS = st.lists(
    st.tuples(_KINDS, st.integers(0, 5), st.integers(0, 2), st.integers(0, 1), st.integers(0, 7)), min_size=1, max_size=24
)


@st.composite
def jobs(draw: st.DrawFn, *, scenarios: int = 2) -> list[Cohort]:
    """A few cohorts; an action is (kind, which programs, stream, thread, a number to choose by)."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (1, 1), (2, 1), (2, 2), (1, 1, 1), (2, 1, 1)]))
    actions = draw(_ACTIONS)
    recorded, columns = draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers = rng.permutation(10)[: sum(sizes)].tolist()
    ranks = [tuple(numbers[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    queues = draw(st.sampled_from([(None, None, None), (0, 0, None), (0, 1, 0), (0, 0, 0)]))
    drafts = [Draft(threads=2, streams=3, queues=queues) for _ in sizes]
    for draft in drafts:
        for _ in range(int(rng.integers(0, 3))):
            draft.work(int(rng.integers(0, 3)))
    matched = columns and len(set(sizes)) == 1
    for number, action in enumerate(actions):
        chosen = [p for p in range(len(sizes)) if action[1] >= 3 or action[1] % len(sizes) == p]
        members = tuple(sorted(rank for p in chosen for rank in ranks[p]))
        for p in chosen:
            _act(drafts[p], action, number, members)
    programs = [d.program(rank=r[0], world_size=12, recorded=recorded) for d, r in zip(drafts, ranks, strict=True)]
    cohorts = []
    for program, own in zip(programs, ranks, strict=True):
        waits = rng.random(len(program.works)) < 0.9
        timing = random_timing(program, len(own), scenarios, rng, waits)
        cohorts.append(Cohort(program, own, timing, _columns(program, ranks, own) if matched else None))
    return cohorts


def _act(draft: Draft, action: tuple[str, int, int, int, int], number: int, members: tuple[int, ...]) -> None:
    kind, _, stream, thread, pick = action
    last = len(draft.calls) - 1
    crosses = pick % 3 == 0 and last >= 0 and draft.calls[last]["thread"] != thread
    after = {"after": last} if crosses else {}
    any_work = pick % len(draft.works) if draft.works else -1
    match kind:
        case "launch":
            draft.launch(stream, thread, **after)
        case "graph":
            call = draft.call(CallKind.LAUNCH, thread, **after)
            for offset in range(3):
                draft.work((stream + offset // 2) % 3, call=call)
        case "collective":
            draft.collective(Collective("all_reduce", f"group of {members}", members, number), stream, thread)
        case "copy":
            draft.work(stream, WorkKind.COPY, call=draft.call(CallKind.BLOCKING_COPY, thread, **after))
        case "wait":
            draft.call(CallKind.STREAM_WAIT, thread, stream=stream, awaits=any_work)
        case "event sync":
            draft.call(CallKind.EVENT_SYNC, thread, awaits=any_work)
        case "stream sync":
            draft.call(CallKind.STREAM_SYNC, thread, stream=stream, **after)
        case "device sync":
            draft.call(CallKind.DEVICE_SYNC, thread)
        case _:
            draft.call(CallKind.HOST, thread, **after)


def _columns(program: Program, ranks: list[tuple[int, ...]], own: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Members such that the i-th ranks of the programs taking part meet, instead of all their ranks."""
    place = {rank: i for group in ranks for i, rank in enumerate(group)}
    return tuple(
        tuple(tuple(r for r in collective.ranks if place[r] == place[rank]) for collective in program.collectives)
        for rank in own
    )


def single_ranks(cohorts: list[Cohort]) -> list[Cohort]:
    """The same job with a cohort of its own for every rank."""
    found = []
    for cohort in cohorts:
        for place, rank in enumerate(cohort.ranks):
            members = None if cohort.members is None else (cohort.members[place],)
            found.append(replace(cohort, ranks=(rank,), timing=picked(cohort.timing, rank=place), members=members))
    return found


def picked(timing: Timing, *, rank: int | None = None, scenario: int | None = None) -> Timing:
    """The timing of one rank or of one scenario."""
    changes: dict[str, Any] = {}
    for name in vars(timing):
        values = getattr(timing, name)
        if name != "waits":
            if rank is not None and values.shape[1] > 1:
                values = values[:, rank : rank + 1]
            if scenario is not None and values.shape[2] > 1:
                values = values[:, :, scenario : scenario + 1]
        changes[name] = values
    return Timing(**changes)
