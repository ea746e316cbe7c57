"""From the text of a Kineto trace to columns: which events matter, and what is kept of each.

Only here are the spellings of the format known. Left out are events that cannot be true: a day away from all others, a day
long, or twice. One such event makes a step of days, numbers that wrap around, or work that is counted double; it comes from
damage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from steptime._program.formats import TraceReader
from steptime._program.formats.kineto.stream import EventStream
from steptime._program.formats.kineto.times import beyond_floats, span_ns, times_ns
from steptime._program.program import IntColumn, WorkKind
from steptime._units import NS_PER_S

_EMPTY = msgspec.Raw(b"")
_OP_CATEGORIES = {"cpu_op", "Operator", "operator", "user_annotation"}
_CALL_CATEGORIES = {"cuda_runtime", "cuda_driver", "Runtime", "runtime", "hip_runtime", "privateuse1_runtime"}
_WORK_KINDS = {
    **dict.fromkeys(("kernel", "Kernel"), WorkKind.KERNEL),
    **dict.fromkeys(("gpu_memcpy", "Memcpy", "memcpy"), WorkKind.COPY),
    **dict.fromkeys(("gpu_memset", "Memset", "memset"), WorkKind.MEMSET),
}
_SYNC_CATEGORY = "cuda_sync"
# Profilers record seconds to minutes.
WINDOW_AT_MOST_NS = 24 * 3600 * NS_PER_S
# Sums of durations stay below this, which leaves the simulator's arithmetic room before it wraps around.
TOTAL_AT_MOST_NS = 2**59
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


class ChromeEvent(msgspec.Struct, gc=False):
    """One Chrome trace event."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class ExactEvent(ChromeEvent, gc=False):
    """An event of a trace whose float timestamps hold more digits than a float64: they are kept as text."""

    ts: msgspec.Raw = _EMPTY


_OP_COLUMNS = ("start", "dur", "tid", "name", "external_id", "record_function_id", "sequence", "signature", "comm")
_CALL_COLUMNS = ("start", "dur", "tid", "name", "correlation")
_WORK_COLUMNS = ("start", "dur", "stream", "name", "correlation", "kind", "device", "bytes", "comm")

RawSignature = tuple[bytes, bytes, bytes, bytes]


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


class SyncRecord(NamedTuple):
    """A `cuda_sync` record: newer traces say which stream and which event record a wait refers to."""

    correlation: int
    device: int
    stream: int
    wait_on_stream: int
    record_correlation: int


@dataclass
class KinetoEvents:
    """Everything kept from one trace, added a chunk of events at a time: the hot path of reading.

    Columns are built whole. Where one event of a chunk does not fit (a number written as text, a missing time), its
    events are mended one by one first, and those that cannot be are counted and left out.
    """

    source: str
    names: dict[str, int] = field(default_factory=dict)
    ops: Rows = field(default_factory=lambda: Rows(_OP_COLUMNS))
    calls: Rows = field(default_factory=lambda: Rows(_CALL_COLUMNS))
    works: Rows = field(default_factory=lambda: Rows(_WORK_COLUMNS))
    signatures: dict[RawSignature, int] = field(default_factory=dict)
    steps: list[tuple[str, Any, int, int]] = field(default_factory=list)  # name, tid, start, duration
    syncs: list[SyncRecord] = field(default_factory=list)
    comms: list[Args] = field(default_factory=list)  # arguments of collectives, to which the columns `comm` refer
    header: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    skipped: int = 0

    def add(self, events: list[ChromeEvent]) -> None:
        """Sort the events of one chunk into columns."""
        by_category: dict[str, list[ChromeEvent]] = {}
        for event in events:
            if event.ph == "X":
                by_category.setdefault(event.cat, []).append(event)
        for category, add in _ADD.items():
            chosen = by_category.get(category)
            if chosen is None:
                continue
            try:
                add(self, chosen)
            except (TypeError, ValueError, OverflowError):
                mended = [event for event in chosen if _mend(event)]
                self.skipped += len(chosen) - len(mended)
                add(self, mended)

    def _names(self, events: list[ChromeEvent]) -> IntColumn:
        names = self.names
        return _integers([names.setdefault(e.name, len(names)) for e in events])

    def _comm(self, args: list[Args], described: list[bool]) -> IntColumn:
        """Per event the row of its arguments in `comms`, -1 where they describe no collective."""
        column = np.full(len(args), -1, dtype=np.int64)
        for index in np.flatnonzero(described).tolist():
            column[index] = len(self.comms)
            self.comms.append(_detached(args[index]))
        return column

    def _ops(self, events: list[ChromeEvent]) -> None:
        start, duration = times_ns([e.ts for e in events], [e.dur for e in events])
        tid = _integers([e.tid for e in events])
        args = [e.args or _NO_ARGS for e in events]
        external = _integers([a.external_id for a in args])
        function = _integers([a.record_function_id for a in args])
        sequence = _integers([a.sequence for a in args])
        marks = [i for i, e in enumerate(events) if e.name.startswith("ProfilerStep")]
        self.steps += [(events[i].name, int(tid[i]), int(start[i]), int(duration[i])) for i in marks]
        known = self.signatures
        signature = _integers([
            -1
            if a.dims is _EMPTY
            else known.setdefault((bytes(a.dims), bytes(a.types), bytes(a.strides), bytes(a.concrete)), len(known))
            for a in args
        ])  # fmt: skip
        names = self._names(events)
        comm = self._comm(args, [e.name == "record_param_comms" for e in events])
        columns = (start, duration, tid, names, external, function, sequence, signature, comm)
        self.ops.append(*(np.delete(column, marks) for column in columns))

    def _calls(self, events: list[ChromeEvent]) -> None:
        start, duration = times_ns([e.ts for e in events], [e.dur for e in events])
        tid = _integers([e.tid for e in events])
        correlation = _integers([e.args.correlation if e.args is not None else -1 for e in events])
        self.calls.append(start, duration, tid, self._names(events), correlation)

    def _works(self, events: list[ChromeEvent]) -> None:
        start, duration = times_ns([e.ts for e in events], [e.dur for e in events])
        args = [e.args or _NO_ARGS for e in events]
        stream = _integers([e.tid if a.stream is None else a.stream for e, a in zip(events, args, strict=True)])
        device = _integers([e.pid if a.device is None else a.device for e, a in zip(events, args, strict=True)])
        correlation = _integers([a.correlation for a in args])
        size = np.maximum(_integers([a.bytes for a in args]), 0)
        kind = np.full(len(events), _WORK_KINDS[events[0].cat], dtype=np.int64) if events else start
        comm = self._comm(args, [a.collective is not None for a in args])
        self.works.append(start, duration, stream, self._names(events), correlation, kind, device, size, comm)

    def _syncs(self, events: list[ChromeEvent]) -> None:
        records = []
        for event in events:
            args = event.args or _NO_ARGS
            device = event.pid if args.device is None else args.device
            fields = (args.correlation, device, args.stream, args.wait_on_stream, args.wait_on_cuda_event_record_corr_id)
            records.append(SyncRecord(*map(_number, fields)))
        self.syncs += records


_ADD: dict[str, Callable[[KinetoEvents, list[ChromeEvent]], None]] = {
    **dict.fromkeys(sorted(_OP_CATEGORIES), KinetoEvents._ops),
    **dict.fromkeys(sorted(_CALL_CATEGORIES), KinetoEvents._calls),
    **dict.fromkeys(sorted(_WORK_KINDS), KinetoEvents._works),
    _SYNC_CATEGORY: KinetoEvents._syncs,
}


def read_events(reader: TraceReader) -> KinetoEvents:
    """Decode a whole trace, a chunk at a time, and leave out what cannot be true."""
    events = KinetoEvents(reader.source)
    stream = EventStream(reader, lambda text: ExactEvent if beyond_floats(text) else ChromeEvent)
    for chunk in stream.chunks():
        events.add(chunk)
    events.header = stream.header
    events.warnings += stream.warnings
    if stream.lost_events:
        events.warnings.append(f"{events.source}: {stream.lost_events} events are not valid JSON and were left out")
    elif stream.repaired_chunks:
        events.warnings.append(
            f"{events.source}: bad escapes, bytes that are no UTF-8 or wrong types were repaired while reading"
        )
    if events.skipped:
        events.warnings.append(
            f"{events.source}: {events.skipped} events without a usable time, thread or stream were left out"
        )
    _leave_out_implausible(events)
    return events


def _integers(values: list[Any]) -> IntColumn:
    """A column of whole numbers; anything else raises."""
    column = np.array(values, dtype=None if values else np.int64)
    if column.dtype != np.int64 or column.ndim != 1:
        raise TypeError(column.dtype)
    return column


def _mend(event: ChromeEvent) -> bool:
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


def _leave_out_implausible(events: KinetoEvents) -> None:
    """Leave out what cannot be true and say so; what ends before it starts ends as it starts."""
    tables = (events.ops, events.calls, events.works)
    marks = np.array([s[2] for s in events.steps], dtype=np.int64)
    starts = np.concatenate([*(t.arrays()["start"] for t in tables), marks])
    if not len(starts):
        return
    middle = int(np.partition(starts, len(starts) // 2)[len(starts) // 2])
    negative = sum(_plausible(table, middle) for table in tables) + sum(s[3] < 0 for s in events.steps)
    near = [
        (name, tid, start, max(duration, 0))
        for name, tid, start, duration in events.steps
        if abs(start - middle) <= WINDOW_AT_MOST_NS and duration <= WINDOW_AT_MOST_NS
    ]
    events.steps = list(dict.fromkeys(near))
    far = len(starts) - sum(t.length for t in tables) - len(near)
    # Only these have ids that tell a copy from the same thing done again; a step is marked once.
    twins = sum(_single(table) for table in (events.calls, events.works)) + len(near) - len(events.steps)
    for count, what in (
        (far, "lie a day away from the others or last a day, and were left out"),
        (negative, "end before they start; they count as taking no time"),
        (twins, "occur twice, alike in everything; they count once"),
    ):
        if count:
            events.warnings.append(f"{events.source}: {count} events {what}")


def _plausible(table: Rows, middle: int) -> int:
    """Keep the plausible rows of a table; how many of them had a negative duration."""
    columns = table.arrays()
    start, duration = columns["start"], columns["dur"]
    near = (start >= middle - WINDOW_AT_MOST_NS) & (start <= middle + WINDOW_AT_MOST_NS)
    rows = np.flatnonzero(near & (duration <= WINDOW_AT_MOST_NS))
    negative = int((duration[rows] < 0).sum())
    columns["dur"] = np.maximum(duration, 0)
    # The longest are left out where all of them together would not fit: no run is 18 years long.
    while float(columns["dur"][rows].sum(dtype=np.float64)) > TOTAL_AT_MOST_NS:
        rows = rows[columns["dur"][rows] < columns["dur"][rows].max()]
    _keep(table, columns, rows)
    return negative


def _single(table: Rows) -> int:
    """Keep one of several equal rows of a table; how many were too many."""
    columns = table.arrays()
    correlation = columns["correlation"]
    key = columns["start"] * 1_000_003 + correlation  # wraps around, which does no harm: equal rows have equal keys
    order = np.argsort(key, kind="stable")
    close = np.flatnonzero(np.diff(key[order]) == 0)
    item, other = order[close], order[close + 1]
    twin = other[
        (correlation[other] >= 0) & np.all([c[item] == c[other] for name, c in columns.items() if name != "comm"], axis=0)
    ]
    rows = np.delete(np.arange(table.length), twin)
    # The kernels of one graph launch share their id, and a coarse clock may not tell them apart.
    shared = np.sort(correlation[rows])
    alone = np.searchsorted(shared, correlation[twin], "right") - np.searchsorted(shared, correlation[twin], "left") == 1
    if not alone.any():
        return 0
    _keep(table, columns, np.delete(np.arange(table.length), twin[alone]))
    return int(alone.sum())


def _keep(table: Rows, columns: dict[str, IntColumn], rows: IntColumn) -> None:
    table.chunks, table.length = [tuple(column[rows] for column in columns.values())], len(rows)
