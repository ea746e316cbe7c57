"""Writes Kineto traces of little runs, in every spelling met in the wild; times are nanoseconds since the run began."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from steptime._program.formats import TraceFile, TraceReader, kineto, opened
from steptime._program.program import CallKind, Program, WorkKind
from steptime._sim import CohortTimeline

Json = dict[str, Any]
Spelling = Literal["float", "integer", "epoch", "string", "nanoseconds"]

# When the run began; whole microseconds, so that integer timestamps can say it.
EPOCH_NS = 1_712_345_678_901_234_000
DEVICE, PROCESS, MAIN, AUTOGRAD = 0, 4321, 100, 200
KERNEL, MEMCPY, MEMSET = "kernel", "gpu_memcpy", "gpu_memset"
_BARE = re.compile(r'"@([^"@]*)@"')
# The key of every work's category as writers before PyTorch 1.12 had it.
_OLD_CATEGORIES = {
    "cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel",
    "gpu_memcpy": "Memcpy", "gpu_memset": "Memset",
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Device work behind a launch."""

    stream: int
    start: int
    end: int
    name: str = "gemm"
    kind: str = KERNEL
    args: Json = field(default_factory=dict)


@dataclass
class Trace:
    """One rank's trace being written. Whatever launches or waits gives back its correlation id."""

    rank: int | None = 0
    world_size: int | None = 1
    spelling: Spelling = "float"
    api: Literal["cuda", "hip"] = "cuda"
    shapes: bool = True
    old: bool = False  # categories, external ids and missing arguments as before PyTorch 1.12
    groups: list[Json] | None = None
    epoch_ns: int = EPOCH_NS
    events: list[Json] = field(default_factory=list)
    correlation: int = 0
    external: int = 0

    def event(self, category: str, name: str, start: int, end: int, pid: Any, tid: Any, args: Json) -> None:
        """Any event with a duration; `start` and `end` stay numbers until the trace is written."""
        category = _OLD_CATEGORIES.get(category, category) if self.old else category
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "start": start, "end": end, "args": args}
        )

    def op(self, name: str, start: int, end: int, tid: int = MAIN, category: str = "cpu_op", args: Json | None = None) -> None:
        """A framework op."""
        self.external += 1
        shaped: Json = {"Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"], "Concrete Inputs": ["", "1"]}
        arguments = {"External id": self.external, **(shaped if self.shapes else {}), **(args or {})}
        self.event(category, name, start, end, PROCESS, tid, arguments)

    def call(self, name: str, start: int, end: int, tid: int = MAIN, category: str = "cuda_runtime") -> int:
        """A runtime or driver call."""
        self.correlation += 1
        # Old writers gave calls and kernels an external id that equals the correlation id, and so names a wrong op.
        external = self.correlation if self.old else self.external
        self.event(category, name, start, end, PROCESS, tid, {"External id": external, "correlation": self.correlation})
        return self.correlation

    def work(self, work: Work, correlation: int) -> None:
        """Device work of a call, or (with a correlation id nobody has) from before the window."""
        args = {"device": DEVICE, "stream": work.stream, "correlation": correlation, "External id": correlation}
        if work.kind != KERNEL:
            args["bytes"] = 4096
        self.event(work.kind, work.name, work.start, work.end, DEVICE, work.stream, {**args, **work.args})

    def launch(self, start: int, end: int, *works: Work, tid: int = MAIN, api: str = "", driver: bool = False) -> int:
        """A call and the work it enqueues."""
        verb = {MEMCPY: "MemcpyAsync", MEMSET: "MemsetAsync"}.get(works[0].kind, "LaunchKernel")
        name = api or f"{self.api}{verb}"
        correlation = self.call(name, start, end, tid, "cuda_driver" if driver else "cuda_runtime")
        for work in works:
            self.work(work, correlation)
        return correlation

    def wait(self, start: int, end: int, tid: int = MAIN, **said: int) -> int:
        """A stream waits for an event; `said` is what a cuda_sync record tells about it."""
        correlation = self.call(f"{self.api}StreamWaitEvent", start, end, tid)
        if said:
            self.sync_record("Stream Wait Event", correlation, start, end, **said)
        return correlation

    def sync_record(self, kind: str, correlation: int, start: int, end: int, stream: int = -1, **said: int) -> None:
        """A cuda_sync record of a call."""
        args = {"cuda_sync_kind": kind, "stream": stream, "correlation": correlation, "device": DEVICE, **said}
        self.event("cuda_sync", kind, start, end, DEVICE, stream, args)

    def step(self, number: int, start: int, end: int, tid: int = MAIN) -> None:
        """A ProfilerStep mark."""
        self.event("user_annotation", f"ProfilerStep#{number}", start, end, PROCESS, tid, {})

    def collective(
        self, start: int, end: int, work: Work, *, tid: int = MAIN, name: str = "allreduce", waits: int = 1,
        described: Literal["kernel", "op", "both", "no"] = "both", said: Json | None = None,
    ) -> int:  # fmt: skip
        """An all-reduce (or another) as c10d issues it: its op, waits of its stream, its launch.

        The op lasts from `start` to `end`; waits take 1 us each, the launch behind them takes 2 us.
        """
        args = {"Collective name": name, "In msg nelems": 256, "Out msg nelems": 256, "dtype": "Float", **(said or {})}
        self.op("record_param_comms", start, end, tid, args=args if described in ("op", "both") else {})
        for index in range(waits):
            self.wait(start + 1000 * (index + 1), start + 1000 * (index + 2), tid)
        at = start + 1000 * (waits + 1)
        described_work = replace(work, args={**work.args, **(args if described in ("kernel", "both") else {})})
        return self.launch(at, at + 2000, described_work, tid=tid)

    def document(self) -> Json:
        """The trace as Kineto writes it."""
        header: Json = {"schemaVersion": 1, "deviceProperties": [{"id": DEVICE, "name": "Toy GPU"}]}
        if self.rank is not None or self.world_size is not None:
            info = {"rank": self.rank, "world_size": self.world_size, "pg_config": self.groups}
            header["distributedInfo"] = {key: value for key, value in info.items() if value is not None}
        events = [{"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": "python"}}]
        events += [self._spelt(event) for event in self.events]
        tail: Json = {"traceName": "toy"}
        if self.spelling == "float":
            tail["baseTimeNanoseconds"] = self.epoch_ns
        return {**header, "traceEvents": events, **tail}

    def _spelt(self, event: Json) -> Json:
        """Start and end as timestamps. A text between @ becomes a bare number, with all its digits."""
        start, duration = event["start"], event["end"] - event["start"]
        absolute = self.epoch_ns + start
        rest = {key: value for key, value in event.items() if key not in ("start", "end")}
        match self.spelling:
            case "nanoseconds":
                return {**rest, "ts": absolute, "dur": duration}
            case "integer":
                assert absolute % 1000 == 0 and duration % 1000 == 0, "integer timestamps are whole microseconds"
                return {**rest, "ts": absolute // 1000, "dur": duration // 1000}
            case "epoch":
                return {**rest, "ts": f"@{_microseconds(absolute)}@", "dur": duration / 1000}
            case "string":
                return {**rest, "ts": _microseconds(absolute), "dur": _microseconds(duration)}
            case _:
                return {**rest, "ts": f"@{_microseconds(start)}@", "dur": duration / 1000}

    def text(self) -> bytes:
        """The trace as bytes of JSON."""
        return _BARE.sub(r"\1", json.dumps(self.document())).encode()

    def write(self, path: Path) -> Path:
        """Write the trace, compressed if its name says so."""
        path.write_bytes(gzip.compress(self.text(), mtime=0) if path.name.endswith(".gz") else self.text())
        return path

    def read(self, source: str = "toy.json") -> Program:
        """The program behind it."""
        return read_text(self.text(), source)


def _microseconds(nanoseconds: int) -> str:
    sign, rest = ("-" if nanoseconds < 0 else ""), abs(nanoseconds)
    return f"{sign}{rest // 1000}.{rest % 1000:03d}"


def read_text(text: bytes, source: str = "toy.json") -> Program:
    """The program behind the bytes of a Kineto trace."""
    return kineto.read(TraceReader(TraceFile(Path(source)), io.BytesIO(text)))


def read_path(path: Path) -> Program:
    """The program behind a file."""
    return next(map(kineto.read, opened([TraceFile(path)])))


def plain(program: Program) -> Json:
    """A program as plain values, names spelt out: equal for programs that are the same but number their names differently."""
    names, ops, calls, works = program.names, program.ops, program.calls, program.works
    return {
        "rank": (program.rank, program.world_size, program.steps, program.origin_ns, program.threads, program.streams),
        "ops": [
            (names[op[0]], *op[1:8], program.signatures[op[8]] if op[8] >= 0 else None)
            for op in zip(*(column.tolist() for column in ops.columns().values()), strict=True)
        ],
        "calls": [
            (call[0], names[call[1]], *call[2:]) for call in zip(*(c.tolist() for c in calls.columns().values()), strict=True)
        ],
        "works": [
            (work[0], names[work[1]], *work[2:]) for work in zip(*(c.tolist() for c in works.columns().values()), strict=True)
        ],
        "collectives": program.collectives,
    }


_SYNCS = {
    CallKind.STREAM_SYNC: ("StreamSynchronize", "Stream Sync"),
    CallKind.DEVICE_SYNC: ("DeviceSynchronize", "Context Sync"),
    CallKind.EVENT_SYNC: ("EventSynchronize", "Event Sync"),
}


def recording(timeline: CohortTimeline, *, clock_ahead_ns: int = 0, sync_records: bool = True) -> Trace:
    """A simulated rank as the profiler would have recorded it. Thread 1 is autograd's; steps must be marked.

    Without sync records, a trace does not say what waits refer to, as most do not.
    """
    program = timeline.cohort.program
    trace = Trace(rank=timeline.cohort.ranks[0], world_size=program.world_size, epoch_ns=EPOCH_NS + clock_ahead_ns)
    times = (timeline.call_start_ns, timeline.call_end_ns, timeline.work_start_ns, timeline.work_end_ns)
    writer = _Recorder(trace, program, sync_records, *(values[:, 0, 0].tolist() for values in times))
    for call in range(len(program.calls)):
        writer.call(call)
    return trace


class _Recorder:
    def __init__(self, trace: Trace, program: Program, sync_records: bool, *times: Sequence[int]) -> None:
        self.trace, self.program, self.sync_records = trace, program, sync_records
        self.start, self.end, self.begun, self.done = times  # of calls, then of works

    def call(self, row: int) -> None:
        calls = self.program.calls
        kind, tid = CallKind(calls.kind[row]), (MAIN, AUTOGRAD)[calls.thread[row]]
        start, end = self.start[row], self.end[row]
        if tid == AUTOGRAD:
            self.trace.op("autograd::engine::evaluate_function: AddmmBackward0", start, end, tid)
        if kind == CallKind.STEP_BEGIN:
            closing = [c for c in range(len(calls)) if calls.kind[c] == CallKind.STEP_END and calls.step[c] == calls.step[row]]
            self.trace.step(int(calls.step[row]), start, self.end[closing[0]])
        elif kind in (CallKind.LAUNCH, CallKind.BLOCKING_COPY):
            works = [w for w in range(len(self.program.works)) if self.program.works.call[w] == row]
            self.trace.launch(start, end, *(self._work(w, kind) for w in works), tid=tid)
        elif kind == CallKind.STREAM_WAIT:
            said = {"stream": self.program.streams[calls.stream[row]].id, **self._awaited(int(calls.awaits[row]), tid)}
            self.trace.wait(start, end, tid, **(said if self.sync_records else {}))
            if self._launches_collective(row + 1):
                self.trace.op("record_param_comms", start, self.end[row + 1], tid)
        elif kind in _SYNCS:
            self._sync(row, kind, tid)

    def _sync(self, row: int, kind: CallKind, tid: int) -> None:
        calls, (api, name) = self.program.calls, _SYNCS[kind]
        start, end = self.start[row], self.end[row]
        said = self._awaited(int(calls.awaits[row]), tid) if kind == CallKind.EVENT_SYNC else {}
        stream = self.program.streams[calls.stream[row]].id if kind == CallKind.STREAM_SYNC else -1
        correlation = self.trace.call(f"cuda{api}", start, end, tid)
        if self.sync_records:
            self.trace.sync_record(name, correlation, start, end, stream=stream, **said)

    def _launches_collective(self, call: int) -> bool:
        works = self.program.works
        return bool(((works.call == call) & (works.kind == WorkKind.COLLECTIVE)).any())

    def _awaited(self, work: int, tid: int) -> Json:
        """The event record right behind a work's launch, and its stream."""
        launched = self.start[self.program.works.call[work]] + 1
        record = self.trace.call("cudaEventRecord", launched, launched, tid)
        stream = self.program.streams[self.program.works.stream[work]].id
        return {"wait_on_stream": stream, "wait_on_cuda_event_record_corr_id": record}

    def _work(self, row: int, kind: CallKind) -> Work:
        works = self.program.works
        stream, begun, done = self.program.streams[works.stream[row]].id, self.begun[row], self.done[row]
        if works.kind[row] == WorkKind.COLLECTIVE:
            collective = self.program.collectives[works.collective[row]]
            args = {
                "Collective name": "allreduce", "In msg nelems": 256, "Out msg nelems": 256, "dtype": "Float",
                "Process Group Name": collective.group, "Process Group Ranks": str(list(collective.ranks)),
            }  # fmt: skip
            return Work(stream, begun, done, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", args=args)
        if kind == CallKind.BLOCKING_COPY:
            return Work(stream, begun, done, "Memcpy DtoH (Device -> Pageable)", MEMCPY)
        return Work(stream, begun, done)
