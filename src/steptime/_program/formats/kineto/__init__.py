"""Kineto (Chrome) traces -> Program.

The way of the data: events become columns (`events`); threads and streams are numbered; ops are nested; calls are classified
and tied to the work they launch through their correlation id (never through the op's external id, which older traces reuse);
collectives are described (`arguments`); what a trace does not say about waits and hand-overs is inferred
(`steptime._program.inference`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._program.collectives import launch_order, numbered_from
from steptime._program.formats import Format, TraceReader, rank_in_name
from steptime._program.formats.kineto.arguments import Sources, describe, least_world_size, mark_collectives, read_signatures
from steptime._program.formats.kineto.events import Args, KinetoEvents, read_events
from steptime._program.inference import WaitHint, infer_dependencies, launch_the_unlaunched
from steptime._program.nesting import ENGINE, innermost, nest, phases
from steptime._program.program import (
    MOST_RANKS,
    CallKind,
    Calls,
    IntColumn,
    Ops,
    Phase,
    Program,
    SmallColumn,
    Stream,
    Thread,
    Works,
)
from steptime.errors import TraceError

_STEP_NUMBER = re.compile(r"#(\d{1,9})(?!\d)")
# A bare array of events, or a header whose process groups are so many that the events begin beyond what is looked at.
_OPENING = re.compile(rb'\s*(?:\[\s*\{\s*"(?:ph|name|cat)"|\{\s*"schemaVersion"\s*:\s*\d)')

# A timeline of ours, which holds what was played as a saved workload.
_DRAWN = b'{"displayTimeUnit":"ms","played":'
_IGNORED = -1
_RECORD = 100  # event records are only needed to resolve what a wait refers to
# What a runtime call does, by its name (CUDA runtime, CUDA driver and HIP alike); the first that fits wins.
_CALL_KINDS = (
    (re.compile(r"StreamWaitEvent"), int(CallKind.STREAM_WAIT)),
    (re.compile(r"EventSynchronize"), int(CallKind.EVENT_SYNC)),
    (re.compile(r"StreamSynchronize"), int(CallKind.STREAM_SYNC)),
    (re.compile(r"(?:Device|Ctx)Synchronize"), int(CallKind.DEVICE_SYNC)),
    # cudaFree waits for the device (CUDA runtime API, memory management); the stream-ordered cudaFreeAsync does not.
    (re.compile(r"^(?:cuda|hip)Free$|^cuMemFree(?:_v2)?$"), int(CallKind.DEVICE_SYNC)),
    (re.compile(r"Launch|Memcpy|Memset"), int(CallKind.LAUNCH)),
    (re.compile(r"EventRecord"), _RECORD),
)


def identify(header: Mapping[str, Any], source: str) -> tuple[int | None, int | None, bool]:
    """Rank and world size, None where unknown, and whether the trace itself says the rank; else it is from the file's name."""
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = info.get("rank"), info.get("world_size")
    world = world if type(world) is int and 0 < world <= MOST_RANKS else None
    if type(rank) is int and 0 <= rank < MOST_RANKS:
        return rank, world, True
    return rank_in_name(source), world, False


def read(reader: TraceReader) -> Program:
    """The program behind one rank's trace; `meta` says how its rank is known and keeps the ids that link it to other files."""
    events = read_events(reader)
    if not events.ops.length and not events.works.length:
        lost = "; ".join(message.removeprefix(f"{events.source}: ") for message in events.warnings)
        why = f" ({lost})" if lost else "; was the profiler's window empty?"
        raise TraceError(f"{events.source}: no framework ops and no GPU events{why}")
    return _KinetoTables(events).program()


class _KinetoTables:
    """Turns columns of events into the tables of a Program, one table after the other."""

    def __init__(self, events: KinetoEvents) -> None:
        self.events, self.source, self.warnings = events, events.source, list(events.warnings)
        self.names = list(events.names)
        self.rank, self.world_size, self.rank_said = identify(events.header, self.source)
        self.raw_ops, self.raw_calls, self.raw_works = events.ops.arrays(), events.calls.arrays(), events.works.arrays()
        starts = [int(c["start"].min()) for c in (self.raw_ops, self.raw_calls, self.raw_works) if len(c["start"])]
        self.origin = min([*starts, *(s[2] for s in events.steps)])

    def program(self) -> Program:
        """All tables, in the order in which they depend on each other."""
        self._steps_and_threads()
        self._order_works()
        self._select_calls()
        ops = self._ops()
        calls = self._calls(ops)
        works = self._works(calls)
        program = Program(
            rank=self.rank or 0,
            world_size=self.world_size or self._least_world_size(),
            names=tuple(self.names),
            threads=self.threads,
            streams=self.streams,
            ops=ops,
            calls=calls,
            works=works,
            signatures=read_signatures(self.events.signatures),
            steps=tuple(self.step_numbers),
            origin_ns=self.origin + self._base_ns(),
            device_name=str(self._device().get("name", "")),
            source=self.source,
            warnings=tuple(self.warnings),
            meta=self._meta(),
        )
        program = self._with_collectives(launch_the_unlaunched(program))
        return infer_dependencies(program, self._hints())

    def _least_world_size(self) -> int:
        described = (self._comms(raw["comm"]).values() for raw in (self.raw_works, self.raw_ops))
        least = least_world_size(args for each in described for args in each)
        if least > 1:
            self.warnings.append(f"{self.source}: does not say how many ranks there were; its process groups need {least}")
        return least

    def _base_ns(self) -> int:
        base = self.events.header.get("baseTimeNanoseconds")
        return base if type(base) is int and 0 <= base < 2**62 else 0

    def _device(self) -> dict[str, Any]:
        """What the trace says of the device that its work ran on."""
        devices = self.events.header.get("deviceProperties")
        used = int(self.raw_works["device"][0]) if len(self.raw_works["device"]) else 0
        for device in devices if isinstance(devices, list) else []:
            if isinstance(device, dict) and device.get("id") == used:
                return device
        return {}

    def _meta(self) -> dict[str, Any]:
        return {
            "rank_said": self.rank_said,
            "rank_known": self.rank is not None,
            "world_size_known": self.world_size is not None,
            **({"device_sms": sms} if isinstance(sms := self._device().get("numSms"), int) else {}),
            "external_id": self.raw_ops["external_id"][self.op_order],
            "record_function_id": self.raw_ops["record_function_id"][self.op_order],
        }

    def _steps_and_threads(self) -> None:
        """Steps by their marks on a thread; threads numbered, the one with the marks (or most ops) first."""
        marks = sorted(self.events.steps, key=lambda s: (s[2], s[0]))
        numbers = [_STEP_NUMBER.search(s[0]) for s in marks]
        self.step_numbers = [int(n.group(1)) if n else i for i, n in enumerate(numbers)]
        if len(set(self.step_numbers)) < len(self.step_numbers):
            self.warnings.append(f"{self.source}: some ProfilerStep numbers occur twice; steps are numbered by their order")
            self.step_numbers = list(range(len(marks)))
        self.step_begin = np.array([s[2] for s in marks], dtype=np.int64) - self.origin
        self.step_end = self.step_begin + np.array([s[3] for s in marks], dtype=np.int64)
        backward_names = np.array([n.startswith(ENGINE) for n in self.names], dtype=bool)
        counts = Counter([*self.raw_ops["tid"].tolist(), *self.raw_calls["tid"].tolist()])
        under_engine = set(self.raw_ops["tid"][backward_names[self.raw_ops["name"]]].tolist())
        candidates = [t for t in counts if t not in under_engine] or list(counts) or [0]
        self.main = marks[0][1] if marks else max(candidates, key=lambda t: (counts[t], -t))
        tids = [self.main, *sorted((t for t in counts if t != self.main), key=lambda t: (-counts[t], t))]
        tids += sorted({s[1] for s in marks} - set(tids))
        self.thread_of = {tid: i for i, tid in enumerate(tids)}
        roles = ["main" if t == self.main else "backward" if t in under_engine else "other" for t in tids]
        self.threads = tuple(Thread(t, r) for t, r in zip(tids, roles, strict=True))
        self.mark_thread = [self.thread_of[s[1]] for s in marks]

    def _thread_column(self, tids: IntColumn) -> SmallColumn:
        values, inverse = np.unique(tids, return_inverse=True)
        return np.array([self.thread_of[tid] for tid in values.tolist()], dtype=np.int32)[inverse]

    def _order_works(self) -> None:
        """Streams numbered by how much runs on them; works sorted by stream and start."""
        raw = self.raw_works
        _, device = np.unique(raw["device"], return_inverse=True)
        ids, stream = np.unique(raw["stream"], return_inverse=True)
        keys = device * len(ids) + stream
        values, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        position = np.empty(len(values), dtype=np.int32)
        position[order] = np.arange(len(values), dtype=np.int32)
        self.streams = tuple(Stream(int(raw["stream"][row]), int(raw["device"][row])) for row in first[order])
        self.work_stream = position[inverse]
        self.work_order = np.lexsort((raw["start"], self.work_stream))

    def _select_calls(self) -> None:
        """Calls that launch work or synchronise; each work's launching call by correlation id."""
        raw, works = self.raw_calls, self.raw_works
        kinds = np.array([_call_kind(n) for n in self.names] or [_IGNORED], dtype=np.int64)
        kind = kinds[raw["name"]]
        correlation = works["correlation"][self.work_order]
        launches = (raw["correlation"] >= 0) & np.isin(raw["correlation"], correlation) & (kind != _RECORD)
        records = (raw[name][kind == _RECORD].tolist() for name in ("correlation", "start"))
        self.records: dict[int, int] = dict(zip(*records, strict=True))
        self._warn_of_lost_work(kind == CallKind.LAUNCH, launches)
        kind = np.where(launches, int(CallKind.LAUNCH), kind)
        chosen = np.flatnonzero((kind != _IGNORED) & (kind != _RECORD) & ((kind != CallKind.LAUNCH) | launches))
        self.call_rows = chosen[np.lexsort((-raw["dur"][chosen], raw["start"][chosen]))]
        self.call_kind = kind[self.call_rows].astype(np.int8)
        self.work_call = _match(correlation, raw["correlation"][self.call_rows], self.call_kind == CallKind.LAUNCH)

    def _warn_of_lost_work(self, launching: npt.NDArray[np.bool_], answered: npt.NDArray[np.bool_]) -> None:
        """Every kernel launch and copy has a device event; memsets of some versions have none even in whole traces."""
        memset = np.array(["Memset" in name for name in self.names] or [False], dtype=bool)[self.raw_calls["name"]]
        expected = launching & ~memset
        lost = int((expected & ~answered).sum())
        if lost:
            self.warnings.append(
                f"{self.source}: {lost} of {int(expected.sum())} launches and copies have no device event; the work they "
                "launched is missing, and steps come out too short"
            )

    def _ops(self) -> Ops:
        raw = self.raw_ops
        start, end = raw["start"] - self.origin, raw["start"] - self.origin + raw["dur"]
        self.op_order = np.lexsort((-end, start))
        start, end = start[self.op_order], end[self.op_order]
        thread = self._thread_column(raw["tid"][self.op_order])
        parent = nest(thread.astype(np.int64), start, end)
        name = raw["name"][self.op_order].astype(np.int32)
        backward = np.array([t.role == "backward" for t in self.threads], dtype=bool)
        step = self._step_of(start)
        sequence = raw["sequence"][self.op_order]
        phase = phases(self.names, name, parent, backward[thread], sequence)
        return Ops(
            name=name,
            thread=thread,
            start_ns=start,
            end_ns=end,
            parent=parent,
            step=step,
            phase=np.where(step >= 0, phase, Phase.OTHER),
            sequence=sequence,
            signature=raw["signature"][self.op_order].astype(np.int32),
            node=np.full(len(start), -1),
        )

    def _step_of(self, start: IntColumn) -> SmallColumn:
        """The step number whose host interval holds each time, or -1."""
        if not len(self.step_begin):
            return np.zeros(len(start), dtype=np.int32)
        at = np.searchsorted(self.step_begin, start, side="right") - 1
        inside = (at >= 0) & (start <= self.step_end[np.maximum(at, 0)])
        numbers = np.array(self.step_numbers, dtype=np.int32)
        return np.where(inside, numbers[np.maximum(at, 0)], -1).astype(np.int32)

    def _calls(self, ops: Ops) -> Calls:
        """The selected calls and the step marks, per thread in order of start."""
        raw, rows = self.raw_calls, self.call_rows
        start = raw["start"][rows] - self.origin
        end = start + raw["dur"][rows]
        thread = self._thread_column(raw["tid"][rows])
        op = innermost(ops.thread, ops.start_ns, ops.end_ns, ops.parent, thread.astype(np.int64), start, end)
        step = self._step_of(start)
        begins, ends, threads = self._marks(start, end, ops)
        marks = np.repeat((CallKind.STEP_BEGIN, CallKind.STEP_END), len(begins))
        columns: dict[str, tuple[Any, ...]] = {
            "kind": (self.call_kind, marks),
            "api": (raw["name"][rows], np.full(len(marks), len(self.names))),
            "thread": (thread, threads, threads),
            "op": (op, np.full(len(marks), -1)),
            "step": (step, self.step_numbers, self.step_numbers),
            "start_ns": (start, begins, ends),
            "end_ns": (end, begins, ends),
        }
        self.names.append("ProfilerStep")
        joined = {name: np.concatenate(parts) for name, parts in columns.items()}
        # Marks open a step before the calls at the same instant and close it after them.
        rank = np.where(joined["kind"] == CallKind.STEP_BEGIN, -1, np.where(joined["kind"] == CallKind.STEP_END, 1, 0))
        order = np.lexsort((rank, joined["start_ns"]))
        none = np.full(len(order), -1)
        self.call_position = np.argsort(order)[: len(rows)]
        return Calls.from_columns({**{k: v[order] for k, v in joined.items()}, "stream": none, "awaits": none, "after": none})

    def _marks(self, start: IntColumn, end: IntColumn, ops: Ops) -> tuple[IntColumn, IntColumn, list[int]]:
        """Begin, end and thread of every step; without ProfilerStep marks the whole window is step 0."""
        if len(self.step_begin):
            return self.step_begin, self.step_end, self.mark_thread
        self.warnings.append(f"{self.source}: no ProfilerStep marks; the whole window counts as one step")
        firsts = [int(c.min()) for c in (start, ops.start_ns) if len(c)]
        lasts = [int(c.max()) for c in (end, ops.end_ns) if len(c)]
        self.step_numbers = [0]
        return np.array([min(firsts, default=0)]), np.array([max(lasts, default=0)]), [0]

    def _works(self, calls: Calls) -> Works:
        raw, order = self.raw_works, self.work_order
        call = np.append(self.call_position, -1)[self.work_call]
        start = raw["start"][order] - self.origin
        works = Works(
            kind=raw["kind"][order].astype(np.int8),
            name=raw["name"][order].astype(np.int32),
            stream=self.work_stream[order],
            call=call,
            step=np.where(call >= 0, calls.step[call], -1),
            start_ns=start,
            end_ns=start + raw["dur"][order],
            bytes=raw["bytes"][order],
            collective=np.full(len(order), -1),
        )
        return mark_collectives(works, self.names)

    def _with_collectives(self, program: Program) -> Program:
        works, calls, ops = program.works, program.calls, program.ops
        rows, _ = launch_order(program)
        sources = Sources(
            by_work=self._comms(self.raw_works["comm"][self.work_order]),
            by_op=self._comms(self.raw_ops["comm"][self.op_order]),
            parent=ops.parent,
            op_name=ops.name,
            names=self.names,
            header=self.events.header,
            rank=program.rank,
            world_size=program.world_size,
        )
        launch_op = np.where(works.call >= 0, calls.op[works.call], -1).astype(np.int32)
        column = np.full(len(works), -1, dtype=np.int32)
        column[rows] = np.arange(len(rows), dtype=np.int32)
        collectives = describe(works, rows, launch_op, sources)
        described = replace(program, works=works.replace(collective=column), collectives=collectives)
        return numbered_from(described, program.steps[0])

    def _comms(self, column: IntColumn) -> dict[int, Args]:
        return {row: self.events.comms[column[row]] for row in np.flatnonzero(column >= 0).tolist()}

    def _hints(self) -> tuple[WaitHint, ...]:
        """What `cuda_sync` records say about waits, for the calls they belong to."""
        correlation = self.raw_calls["correlation"][self.call_rows]
        by_correlation = dict(zip(correlation.tolist(), self.call_position.tolist(), strict=True))
        stream_of = {(s.device, s.id): i for i, s in enumerate(self.streams)}

        def named(device: int, stream: int) -> int | None:
            return stream_of.get((device, stream), -1) if stream >= 0 else None

        hints = []
        for sync in self.events.syncs:
            call, recorded = by_correlation.get(sync.correlation), self.records.get(sync.record_correlation)
            if call is not None:
                stream, source = named(sync.device, sync.stream), named(sync.device, sync.wait_on_stream)
                hints.append(WaitHint(call, stream, source, None if recorded is None else recorded - self.origin))
        return tuple(hints)


def _call_kind(name: str) -> int:
    return next((kind for pattern, kind in _CALL_KINDS if pattern.search(name)), _IGNORED)


def _match(correlation: IntColumn, calls: IntColumn, launch: npt.NDArray[np.bool_]) -> IntColumn:
    """For every work the launching call with its correlation id, or -1."""
    rows = np.flatnonzero(launch & (calls >= 0))
    if not len(rows) or not len(correlation):
        return np.full(len(correlation), -1, dtype=np.int64)
    order = rows[np.argsort(calls[rows], kind="stable")]
    at = np.minimum(np.searchsorted(calls[order], correlation), len(order) - 1)
    return np.where((calls[order][at] == correlation) & (correlation >= 0), order[at], -1)


def _recognises(head: bytes, name: str) -> bool:
    if name.endswith((".et", ".et.gz")) or head.startswith(_DRAWN):
        return False
    return b'"traceEvents"' in head or bool(_OPENING.match(head))


FORMAT = Format("kineto", _recognises, read)
