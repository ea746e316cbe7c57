"""From the text of a Kineto trace to columns: which events matter, and what is kept of each.

Only here are the spellings of the format known. Out come columns per kind of event, of which `kineto.py` makes a Program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from steptime._program.formats.files import TolerantReader
from steptime._program.formats.kineto.event_stream import EventStream
from steptime._program.formats.kineto.times import beyond_floats, span_ns, times_ns
from steptime._program.program import WorkKind
from steptime._program.table import IntColumn

_EMPTY = msgspec.Raw(b"")
_OP_CATEGORIES = {"cpu_op", "Operator", "operator", "user_annotation"}
_CALL_CATEGORIES = {"cuda_runtime", "cuda_driver", "Runtime", "runtime", "hip_runtime", "privateuse1_runtime"}
_WORK_KINDS = {
    **dict.fromkeys(("kernel", "Kernel"), WorkKind.KERNEL),
    **dict.fromkeys(("gpu_memcpy", "Memcpy", "memcpy"), WorkKind.COPY),
    **dict.fromkeys(("gpu_memset", "Memset", "memset"), WorkKind.MEMSET),
}
_SYNC_CATEGORY = "cuda_sync"
# Arguments that are whole numbers wherever they occur.
_NUMBERS = (
    "correlation", "bytes", "external_id", "sequence", "record_function_id",
    "wait_on_stream", "wait_on_cuda_event_record_corr_id",
)  # fmt: skip


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
        "source_rank": "Src Rank",
        "destination_rank": "Dst Rank",
    },
):
    """The arguments of an event that steptime reads; everything else is skipped while decoding."""

    external_id: Any = -1
    correlation: Any = -1
    stream: Any = None
    device: Any = None
    bytes: Any = 0
    record_function_id: Any = -1
    sequence: Any = -1
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
    source_rank: Any = None
    destination_rank: Any = None
    wait_on_stream: Any = -1
    wait_on_cuda_event_record_corr_id: Any = -1


_NO_ARGS = Args()


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
    return ExactEvent if beyond_floats(text) else Event


@dataclass
class Rows:
    """Columns of integers that grow by a chunk at a time."""

    columns: tuple[str, ...]
    chunks: list[tuple[IntColumn, ...]] = field(default_factory=list)
    length: int = 0

    def append(self, *columns: IntColumn) -> None:
        """Add the rows of one chunk."""
        self.chunks.append(columns)
        self.length += len(columns[0])

    def arrays(self) -> dict[str, IntColumn]:
        """The columns by name."""
        none = (np.zeros(0, dtype=np.int64),) * len(self.columns)
        joined = [np.concatenate(parts) for parts in zip(none, *self.chunks, strict=True)]
        return dict(zip(self.columns, joined, strict=True))


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
    device: int
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
    """Sorts events into columns, a chunk at a time: the hot path of reading.

    Columns are built whole. Where one event of a chunk does not fit (a number written as text, a missing time), its
    events are mended one by one first, and those that cannot be are counted and left out.
    """

    def __init__(self, kept: KinetoEvents) -> None:
        self.kept = kept

    def __call__(self, events: list[Event]) -> None:
        by_category: dict[str, list[Event]] = {}
        for event in events:
            if event.ph == "X":
                by_category.setdefault(event.cat, []).append(event)
        for category, collect in self._collectors().items():
            result = by_category.get(category)
            if result is None:
                continue
            try:
                collect(result)
            except (TypeError, ValueError, OverflowError):
                mended = [e for e in result if _mend(e)]
                self.kept.skipped += len(result) - len(mended)
                collect(mended)

    def _collectors(self) -> dict[str, Callable[[list[Event]], None]]:
        return {
            **dict.fromkeys(sorted(_OP_CATEGORIES), self._ops),
            **dict.fromkeys(sorted(_CALL_CATEGORIES), self._calls),
            **dict.fromkeys(sorted(_WORK_KINDS), self._works),
            _SYNC_CATEGORY: self._syncs,
        }

    def _names(self, events: list[Event]) -> IntColumn:
        names = self.kept.names
        return _integers([names.setdefault(e.name, len(names)) for e in events])

    def _ops(self, events: list[Event]) -> None:
        kept = self.kept
        start, duration = times_ns([e.ts for e in events], [e.dur for e in events])
        tid = _integers([e.tid for e in events])
        args = [e.args or _NO_ARGS for e in events]
        external = _integers([a.external_id for a in args])
        function = _integers([a.record_function_id for a in args])
        sequence = _integers([a.sequence for a in args])
        marks = [i for i, e in enumerate(events) if e.name.startswith("ProfilerStep")]
        kept.steps += [(events[i].name, int(tid[i]), int(start[i]), int(duration[i])) for i in marks]
        signatures = kept.signatures
        signature = _integers(
            [
                -1
                if a.dims is _EMPTY
                else signatures.setdefault(
                    (bytes(a.dims), bytes(a.types), bytes(a.strides), bytes(a.concrete)), len(signatures)
                )
                for a in args
            ]
        )
        names = self._names(events)
        rows = np.delete(np.arange(len(events)), marks)
        for index, row in enumerate(rows.tolist(), kept.ops.length):
            if events[row].name == "record_param_comms":
                kept.communication[index] = _detached(args[row])
        columns = (start, duration, tid, names, external, function, sequence, signature)
        kept.ops.append(*(column[rows] for column in columns))

    def _calls(self, events: list[Event]) -> None:
        start, duration = times_ns([e.ts for e in events], [e.dur for e in events])
        tid = _integers([e.tid for e in events])
        correlation = _integers([e.args.correlation if e.args is not None else -1 for e in events])
        self.kept.calls.append(start, duration, tid, self._names(events), correlation)

    def _works(self, events: list[Event]) -> None:
        kept = self.kept
        start, duration = times_ns([e.ts for e in events], [e.dur for e in events])
        args = [e.args or _NO_ARGS for e in events]
        stream = _integers([e.tid if a.stream is None else a.stream for e, a in zip(events, args, strict=True)])
        device = _integers([e.pid if a.device is None else a.device for e, a in zip(events, args, strict=True)])
        correlation = _integers([a.correlation for a in args])
        size = np.maximum(_integers([a.bytes for a in args]), 0)
        kind = np.full(len(events), _WORK_KINDS[events[0].cat], dtype=np.int64) if events else start
        for index, arguments in enumerate(args, kept.works.length):
            if arguments.collective is not None:
                kept.work_communication[index] = _detached(arguments)
        kept.works.append(start, duration, stream, self._names(events), correlation, kind, device, size)

    def _syncs(self, events: list[Event]) -> None:
        records = []
        for event in events:
            args = event.args or _NO_ARGS
            device = event.pid if args.device is None else args.device
            fields = (args.correlation, device, args.stream, args.wait_on_stream, args.wait_on_cuda_event_record_corr_id)
            records.append(SyncRecord(*(_number(f) for f in fields)))
        self.kept.syncs += records


def _integers(values: list[Any]) -> IntColumn:
    """A column of whole numbers; anything else raises."""
    column = np.array(values, dtype=None if values else np.int64)
    if column.dtype != np.int64 or column.ndim != 1:
        raise TypeError(column.dtype)
    return column


def _mend(event: Event) -> bool:
    """Make every number of an event a number; False where that cannot be done."""
    try:
        begin, length = span_ns(event.ts, event.dur)
        event.ts, event.dur = f"{'-' if begin < 0 else ''}{abs(begin) // 1000}.{abs(begin) % 1000:03d}", length / 1000
        args = event.args
        on_device = event.cat in _WORK_KINDS or event.cat == _SYNC_CATEGORY
        if on_device:
            event.pid = _number(event.pid if args is None or args.device is None else args.device)
            event.tid = _number(event.tid if args is None or args.stream is None else args.stream)
        else:
            event.tid = _number(event.tid)
        if args is not None:
            args.device, args.stream = (event.pid, event.tid) if on_device else (None, None)
            for name in _NUMBERS:
                setattr(args, name, _number(getattr(args, name)))
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _detached(args: Args) -> Args:
    """Arguments that no longer hold on to the chunk they were decoded from."""
    args.dims, args.types = args.dims.copy(), args.types.copy()
    args.strides, args.concrete = args.strides.copy(), args.concrete.copy()
    return args


def _number(value: Any) -> int:
    """A whole number however it was written; -1 where there is none."""
    number = -1 if value is None or value == "" else int(value)
    if not -(2**63) <= number < 2**63:
        raise OverflowError(number)
    return number
