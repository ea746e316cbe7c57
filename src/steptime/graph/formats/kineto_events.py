"""From the text of a Kineto trace to columns: which events matter, and what is kept of each.

Only here are the spellings of the format known. What comes out are plain lists per kind of event; `kineto.py` turns them into a Program.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from steptime.graph.formats.event_stream import EventStream
from steptime.graph.formats.files import TolerantReader
from steptime.graph.program import WorkKind
from steptime.graph.table import IntColumn

_EMPTY = msgspec.Raw(b"")
# Above this many microseconds a float64 no longer holds nanoseconds (2**53 ns).
_FLOAT_US_EXACT = 2**53 / 1000
# Integer timestamps above this are nanoseconds since the epoch, not microseconds (1e17 us is the year 5138).
_INT_NS_FROM = 10**17

_OP_CATEGORIES = {"cpu_op", "Operator", "operator", "user_annotation"}
_CALL_CATEGORIES = {"cuda_runtime", "cuda_driver", "Runtime", "runtime", "hip_runtime", "privateuse1_runtime"}
_WORK_KINDS = {
    **dict.fromkeys(("kernel", "Kernel"), WorkKind.KERNEL),
    **dict.fromkeys(("gpu_memcpy", "Memcpy", "memcpy"), WorkKind.COPY),
    **dict.fromkeys(("gpu_memset", "Memset", "memset"), WorkKind.MEMSET),
}
_FIRST_TIME = re.compile(rb'"ts"\s*:\s*"?(\d+)\.\d')
# Times beyond this (about 292 years) would not fit int64 arithmetic.
_NS_AT_MOST = 2**62


class Args(
    msgspec.Struct,
    gc=False,
    rename={
        "external_id": "External id",
        "record_function_id": "Record function id",
        "sequence": "Sequence number",
        "dims": "Input Dims",
        "types": "Input type",
        "strides": "Input Strides",
        "concrete": "Concrete Inputs",
        "collective": "Collective name",
        "in_elements": "In msg nelems",
        "out_elements": "Out msg nelems",
        "in_splits": "In split size",
        "out_splits": "Out split size",
        "group": "Process Group Name",
        "group_ranks": "Process Group Ranks",
        "group_size": "Group size",
        "collective_sequence": "Seq",
        "source_rank": "Src Rank",
        "destination_rank": "Dst Rank",
    },
):
    """The arguments of an event that steptime reads; everything else is skipped while decoding."""

    external_id: Any = None
    correlation: Any = None
    stream: Any = None
    device: Any = None
    bytes: Any = None
    record_function_id: Any = None
    sequence: Any = None
    dims: msgspec.Raw = _EMPTY
    types: msgspec.Raw = _EMPTY
    strides: msgspec.Raw = _EMPTY
    concrete: msgspec.Raw = _EMPTY
    collective: Any = None
    in_elements: Any = None
    out_elements: Any = None
    dtype: Any = None
    in_splits: Any = None
    out_splits: Any = None
    group: Any = None
    group_ranks: Any = None
    group_size: Any = None
    collective_sequence: Any = None
    source_rank: Any = None
    destination_rank: Any = None
    wait_on_stream: Any = None
    wait_on_cuda_event_record_corr_id: Any = None
    name: Any = None


class Event(msgspec.Struct, gc=False):
    """One Chrome trace event."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """An event of a trace whose float timestamps hold more digits than a float64: they are kept as text."""

    ts: msgspec.Raw = _EMPTY


def _event_type(text: bytes) -> type[Event]:
    first = _FIRST_TIME.search(text)
    return ExactEvent if first is not None and int(first.group(1)) >= _FLOAT_US_EXACT else Event


@dataclass
class Rows:
    """Rows collected one by one and read as integer columns."""

    columns: tuple[str, ...]
    rows: list[tuple[int, ...]] = field(default_factory=list)

    def arrays(self) -> dict[str, IntColumn]:
        """The columns by name."""
        table = np.array(self.rows, dtype=np.int64).reshape(len(self.rows), len(self.columns))
        return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(self.columns)}


def _op_rows() -> Rows:
    return Rows(("start", "dur", "tid", "name", "external_id", "record_function_id", "sequence", "signature"))


def _call_rows() -> Rows:
    return Rows(("start", "dur", "tid", "name", "correlation"))


def _work_rows() -> Rows:
    return Rows(("start", "dur", "stream", "name", "correlation", "kind", "device", "bytes"))


@dataclass
class SyncRecord:
    """A `cuda_sync` record: newer traces say which stream and which event record a wait refers to."""

    correlation: int
    stream: int
    wait_on_stream: int
    record_correlation: int


RawSignature = tuple[bytes, bytes, bytes, bytes]


@dataclass
class KinetoEvents:
    """Everything kept from one trace."""

    source: str
    names: dict[str, int] = field(default_factory=dict)
    ops: Rows = field(default_factory=_op_rows)
    calls: Rows = field(default_factory=_call_rows)
    works: Rows = field(default_factory=_work_rows)
    signatures: dict[RawSignature, int] = field(default_factory=dict)
    steps: list[tuple[str, Any, int, int]] = field(default_factory=list)  # name, tid, start, duration
    syncs: list[SyncRecord] = field(default_factory=list)
    communication: dict[int, Args] = field(default_factory=dict)  # op row -> its collective arguments
    work_communication: dict[int, Args] = field(default_factory=dict)  # work row -> its collective arguments
    header: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    skipped: int = 0

    def name_id(self, name: str) -> int:
        """The index of an interned name."""
        return self.names.setdefault(name, len(self.names))


def read_events(reader: TolerantReader, source: str, progress: Callable[[int], None] | None = None) -> KinetoEvents:
    """Decode a whole trace, a chunk at a time."""
    kept = KinetoEvents(source)
    stream = EventStream(reader, source, _event_type, progress)
    collect = _Collector(kept)
    for chunk in stream.chunks():
        collect(chunk)
    kept.header = stream.header
    kept.warnings += stream.warnings
    if stream.lost_events:
        kept.warnings.append(f"{source}: {stream.lost_events} events are not valid JSON and were left out")
    elif stream.repaired_chunks:
        kept.warnings.append(f"{source}: bad escapes, bytes that are no UTF-8 or wrong types were repaired while reading")
    if kept.skipped:
        kept.warnings.append(f"{source}: {kept.skipped} events without a usable time, thread or stream were left out")
    return kept


class _Collector:
    """Sorts events into columns: the hot path of reading."""

    def __init__(self, kept: KinetoEvents) -> None:
        self.kept = kept
        self.handlers: dict[str, Callable[[Event], None]] = {
            **dict.fromkeys(_OP_CATEGORIES, self._op),
            **dict.fromkeys(_CALL_CATEGORIES, self._call),
            **dict.fromkeys(_WORK_KINDS, self._work),
            "cuda_sync": self._sync,
        }

    def __call__(self, events: list[Event]) -> None:
        handlers = self.handlers
        for event in events:
            handle = handlers.get(event.cat)
            if handle is None or event.ph != "X":
                continue
            try:
                handle(event)
            except (TypeError, ValueError, OverflowError):
                self.kept.skipped += 1

    def _op(self, event: Event) -> None:
        kept, args, name = self.kept, event.args, event.name
        start, duration = _span_ns(event.ts, event.dur)
        tid = _thread(event.tid)
        if name.startswith("ProfilerStep"):
            kept.steps.append((name, tid, start, duration))
            return
        ops = kept.ops
        row = (start, duration, tid, kept.names.setdefault(name, len(kept.names)))
        if args is None:
            ops.rows.append((*row, -1, -1, -1, -1))
            return
        signature = -1
        if args.dims is not _EMPTY:
            key = (bytes(args.dims), bytes(args.types), bytes(args.strides), bytes(args.concrete))
            signature = kept.signatures.setdefault(key, len(kept.signatures))
        if name == "record_param_comms":
            kept.communication[len(ops.rows)] = _detached(args)
        ops.rows.append((*row, _number(args.external_id), _number(args.record_function_id), _number(args.sequence), signature))

    def _call(self, event: Event) -> None:
        kept, args = self.kept, event.args
        start, duration = _span_ns(event.ts, event.dur)
        kept.calls.rows.append(
            (
                start,
                duration,
                _thread(event.tid),
                kept.names.setdefault(event.name, len(kept.names)),
                -1 if args is None else _number(args.correlation),
            )
        )

    def _work(self, event: Event) -> None:
        kept, args = self.kept, event.args
        start, duration = _span_ns(event.ts, event.dur)
        stream, device, size, correlation = event.tid, event.pid, 0, -1
        if args is not None:
            stream = stream if args.stream is None else args.stream
            device = device if args.device is None else args.device
            size = max(_number(args.bytes), 0)
            correlation = _number(args.correlation)
            if args.collective is not None:
                kept.work_communication[len(kept.works.rows)] = _detached(args)
        name = kept.names.setdefault(event.name, len(kept.names))
        kind = _WORK_KINDS[event.cat]
        kept.works.rows.append((start, duration, _thread(stream), name, correlation, kind, _thread(device), size))

    def _sync(self, event: Event) -> None:
        args = event.args
        if args is None:
            return
        self.kept.syncs.append(
            SyncRecord(
                _number(args.correlation),
                _number(args.stream),
                _number(args.wait_on_stream),
                _number(args.wait_on_cuda_event_record_corr_id),
            )
        )


def _detached(args: Args) -> Args:
    """Arguments that no longer hold on to the chunk they were decoded from."""
    args.dims, args.types = args.dims.copy(), args.types.copy()
    args.strides, args.concrete = args.strides.copy(), args.concrete.copy()
    return args


def _number(value: Any) -> int:
    """A whole number however it was written; -1 where there is none."""
    if type(value) is int:
        return value
    if value is None or value == "":
        return -1
    return int(value)


def _thread(value: Any) -> int:
    """A thread, stream or device number; traces write some as text."""
    return value if type(value) is int else int(value)


def _span_ns(start: Any, duration: Any) -> tuple[int, int]:
    """Start and duration in nanoseconds, from integer, float, string or nanosecond timestamps."""
    if type(start) is float:
        begin, scale = round(start * 1000), 1000
    elif type(start) is int:
        begin, scale = _whole_ns(start)
    else:
        begin, scale = _text_ns(start)
    if not -_NS_AT_MOST < begin < _NS_AT_MOST:
        raise ValueError(begin)
    if type(duration) is float or type(duration) is int:
        length = round(duration * scale)
    else:
        length = 0 if duration is None else round(float(duration) * scale)
    if length > _NS_AT_MOST:
        raise ValueError(length)
    return begin, max(length, 0)


def _whole_ns(start: int) -> tuple[int, int]:
    return (start, 1) if abs(start) >= _INT_NS_FROM else (start * 1000, 1000)


def _text_ns(start: Any) -> tuple[int, int]:
    """From text, without going through a float: it may hold more digits than one."""
    text = start if type(start) is str else bytes(start).strip(b'"').decode()
    whole, _, fraction = text.partition(".")
    if not fraction:
        return _whole_ns(int(whole))
    if not (fraction.isdigit() and whole.lstrip("-").isdigit()):
        return round(float(text) * 1000), 1000
    below = int((fraction + "00")[:3])
    return int(whole) * 1000 + (-below if whole.startswith("-") else below), 1000
