"""Turns a `Program` into a graph of lanes: one lane per host thread and per stream, and the edges between lanes.

Rows of the graph are laid out lane by lane, each lane preceded by one row for its state when the window opens. So the row
before a node always holds the end of what precedes it, and a stretch of a lane is a slice.

Two kinds of node have a first half with a row of its own, behind all lanes, because others wait for that half: a collective
(this rank has arrived) and a blocking copy (the copy is enqueued).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._program.program import CallKind, Program, WorkKind

Rows = npt.NDArray[np.int64]

# How far back a repeated window looks for the work that frees a queue slot: further than anybody iterates.
WINDOWS_BACK = 64


@dataclass(frozen=True, eq=False)
class Order:
    """The order in which the host issued things, over all threads: by recorded start, or by row where nothing was recorded."""

    call: Rows  # per call: its position
    work: Rows  # per work: the position of its launching call, or -1
    stream_works: tuple[Rows, ...]  # per stream: its works, in execution order
    enqueued: tuple[Rows, ...]  # per stream: the latest launch among the first i + 1 of its works

    @classmethod
    def of(cls, program: Program) -> Order:
        """The order of one program's calls and works."""
        calls = program.calls
        started = np.arange(len(calls))
        if bool((calls.start_ns >= 0).all()):
            started = calls.start_ns.copy()
            for thread in range(len(program.threads)):
                of_thread = np.flatnonzero(calls.thread == thread)
                started[of_thread] = np.maximum.accumulate(started[of_thread])
        call = np.empty(len(calls), dtype=np.int64)
        call[np.argsort(started, kind="stable")] = np.arange(len(calls))
        launched = program.works.call
        work = np.where(launched >= 0, call[launched] if len(call) else -1, -1).astype(np.int64)
        stream_works = tuple(np.flatnonzero(program.works.stream == s) for s in range(len(program.streams)))
        enqueued = tuple(np.maximum.accumulate(work[rows]) for rows in stream_works)
        return cls(call, work, stream_works, enqueued)

    def last_before(self, stream: int, position: int) -> int:
        """The last work enqueued on a stream before a position in the order, or -1."""
        at = int(np.searchsorted(self.enqueued[stream], position)) - 1
        return int(self.stream_works[stream][at]) if at >= 0 else -1

    def first_after(self, stream: int, position: int) -> int:
        """The first work enqueued on a stream after a position in the order, or -1."""
        at = int(np.searchsorted(self.enqueued[stream], position, side="right"))
        return int(self.stream_works[stream][at]) if at < len(self.stream_works[stream]) else -1


def blocking_copies(program: Program) -> dict[int, int]:
    """Blocking copy call -> the (last) work it waits for; calls whose copy is not in the program block on nothing."""
    works = np.flatnonzero(program.works.call >= 0)
    blocking = works[program.calls.kind[program.works.call[works]] == CallKind.BLOCKING_COPY]
    return dict(zip(program.works.call[blocking].tolist(), blocking.tolist(), strict=True))


def synchronisations(program: Program, order: Order) -> Iterator[tuple[int, int, int]]:
    """(call, stream, work) for every work a host call waits for; work -1: whatever the stream held when the window opened."""
    calls = program.calls
    kinds = (CallKind.EVENT_SYNC, CallKind.STREAM_SYNC, CallKind.DEVICE_SYNC)
    for call in np.flatnonzero(np.isin(calls.kind, kinds)).tolist():
        if calls.kind[call] == CallKind.EVENT_SYNC:
            work = int(calls.awaits[call])
            if work >= 0:
                yield call, int(program.works.stream[work]), work
            continue
        everywhere = calls.kind[call] == CallKind.DEVICE_SYNC
        for stream in range(len(program.streams)) if everywhere else (int(calls.stream[call]),):
            if stream >= 0:
                yield call, stream, order.last_before(stream, int(order.call[call]))


def stream_waits(program: Program, order: Order) -> Iterator[tuple[int, int, bool]]:
    """(work, awaited work, next window) for every stream wait: the first work enqueued after it must wait.

    With nothing left to enqueue in the window, the wait holds for the stream's first work of the window that follows.
    """
    calls = program.calls
    for call in np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.awaits >= 0) & (calls.stream >= 0)).tolist():
        stream, awaited = int(calls.stream[call]), int(calls.awaits[call])
        if int(program.works.stream[awaited]) == stream or not len(order.stream_works[stream]):
            continue  # a stream is in order anyway; an unused one has nothing to hold up
        work = order.first_after(stream, int(order.call[call]))
        first = int(order.stream_works[stream][0])
        yield (work, awaited, False) if work >= 0 else (first, awaited, True)


def queue_order(program: Program, order: Order) -> tuple[Rows, Rows, Rows]:
    """(work, work before it, windows back): neighbours in a hardware queue several streams share, where their streams differ.

    Before the first work of a repeated window comes the last of the window before.
    """
    result = [np.zeros((0, 3), dtype=np.int64)]
    streams, queues = program.works.stream, program.hardware_queues
    for queue in np.unique(queues[queues >= 0]):
        works = _in_queue(program, order, queue, program.works.call >= 0)
        differ = np.flatnonzero(np.diff(streams[works]) != 0)
        result.append(np.stack([works[differ + 1], works[differ], np.zeros_like(differ)], axis=1))
        if len(works) and streams[works[0]] != streams[works[-1]]:
            result.append(np.array([[works[0], works[-1], 1]]))
    works, before, back = np.concatenate(result).T
    return works, before, back


def queue_slots(program: Program, order: Order, depth: int, repeated: bool) -> tuple[Rows, Rows, Rows]:
    """(call, work, windows back): the launch at `call` needs the slot that `work` frees when it starts.

    Slots are counted per hardware queue, one per launch however much work it enqueues. In a repeated window, launches
    are numbered on through the windows before it.
    """
    result = [np.zeros((0, 3), dtype=np.int64)]
    for queue in np.unique(program.hardware_queues):
        works = _in_queue(program, order, queue, (program.works.call >= 0) | (not repeated))
        call = program.works.call[works]
        works = works[np.concatenate([[True], (np.diff(call) != 0) | (call[1:] < 0)]) if len(works) else works]
        window, within = np.divmod(np.arange(len(works)) - depth, max(len(works), 1))
        exists = (window >= (-WINDOWS_BACK if repeated else 0)) & (program.works.call[works] >= 0)
        slots = np.stack([program.works.call[works], works[within] if len(works) else works, -window], axis=1)
        result.append(slots[exists])
    calls, freed, back = np.concatenate(result).T
    return calls, freed, back


def _in_queue(program: Program, order: Order, queue: int, chosen: npt.NDArray[np.bool_]) -> Rows:
    """The chosen works of a hardware queue, in the order in which they were enqueued."""
    works = np.flatnonzero((program.hardware_queues[program.works.stream] == queue) & chosen)
    return works[np.lexsort((works, order.work[works]))]


class EdgeKind(IntEnum):
    """Why a node waits for a node of another lane, which decides the lag."""

    LAUNCH = 0  # a work for its launching call: latency_ns
    HAND_OVER = 1  # a call for the call on another thread that hands over: gap_ns
    SYNC = 2  # a synchronising call for a work: return_ns, whatever the call itself costs
    QUEUE = 3  # a launch for the start of the work that frees its slot in the queue: minus that work's duration
    WAIT = 4  # a work for the work its stream waits for: release_ns
    START = 5  # a work for the start of the work before it in a shared hardware queue: minus that work's duration
    ARRIVAL = 6  # the same where the work before it is a collective: its arrival, 0
    QUEUE_ARRIVAL = 7  # a launch for the arrival of the collective that frees its slot in the queue: 0


# Edges that let a node go when their source starts, not when it ends.
FROM_START = (EdgeKind.START, EdgeKind.QUEUE)


@dataclass(frozen=True, eq=False)
class LaneGraph:
    """Lanes, nodes and edges of one program. A row number addresses a node, a lane's opening, a first half or a carried end."""

    rows: int
    threads: int  # lanes 0..threads-1 are host threads, the rest are streams
    opening: Rows  # per lane: the row before its first node
    stop: Rows  # per lane: the row after its last node
    # Per row: row of Program.calls (thread lanes) or Program.works (stream lanes); of a carried end, its origin's; else -1.
    table_row: Rows
    call_row: Rows  # per call: its row here
    work_row: Rows  # per work: its row here
    half: Mapping[int, int]  # row of a collective or of a blocking copy -> row of its first half
    copied: Mapping[int, int]  # row of a blocking copy -> row of the copy
    edge_start: Rows  # per row: its first edge; edges of row i are edge_start[i]:edge_start[i + 1]
    edge_source: Rows
    edge_kind: Rows
    carried_back: Rows  # per carried end: how many windows ago
    carried_from: Rows  # per carried end: the row it had there
    carried_row: int  # row of the first carried end
    stretches: dict[Any, Any] = field(default_factory=dict, repr=False)  # that were cut out of it

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return len(self.opening)

    def arrival(self, work: int) -> int:
        """The row of this rank's arrival at a collective."""
        return self.half[int(self.work_row[work])]


# Ranks that issue alike, whatever the sizes, share one graph; it is kept as long as a plan or a timeline has it.
_graphs: weakref.WeakValueDictionary[tuple[bytes, int | None, bool], LaneGraph] = weakref.WeakValueDictionary()


def lane_graph(program: Program, *, queue_depth: int | None, repeated: bool = False) -> LaneGraph:
    """The graph of a program, built once per structure. `repeated`: the window follows itself, backlog left out."""
    key = (structure(program), queue_depth, repeated)
    graph = _graphs.get(key)
    if graph is None:
        graph = _graphs[key] = _build(program, queue_depth, repeated)
    return graph


def structure(program: Program) -> bytes:
    """A digest of what issues what and waits for what, which is all that a graph depends on."""
    calls, works = program.calls, program.works
    digest = blake2b(np.array([len(program.threads), len(calls), len(works)]).tobytes(), digest_size=16)
    columns = (calls.kind, calls.thread, calls.stream, calls.awaits, calls.after, calls.start_ns)
    for column in (program.hardware_queues, *columns, works.kind, works.stream, works.call):
        digest.update(column.tobytes())
    return digest.digest()


def _build(program: Program, queue_depth: int | None, repeated: bool) -> LaneGraph:
    opening, stop, table_row, call_row, work_row = _layout(program)
    copied = blocking_copies(program)
    collectives = np.flatnonzero(program.works.kind == WorkKind.COLLECTIVE)
    two_halves = [*call_row[sorted(copied)].tolist(), *work_row[collectives].tolist()]
    half = {row: len(table_row) + i for i, row in enumerate(two_halves)}
    carried_row = len(table_row) + len(half)
    edges = _Edges(program, call_row, work_row, half, carried_row)
    edges.add_within_window(opening[len(program.threads) :])
    edges.add_stream_waits(repeated)
    edges.add_queues(queue_depth, repeated)
    rows = carried_row + len(edges.carried)
    start, source, kind = edges.by_destination(rows)
    back, origin = np.array(list(edges.carried), dtype=np.int64).reshape(-1, 2).T
    no_rows = np.full(len(half), -1, dtype=np.int64)
    return LaneGraph(
        rows=rows,
        threads=len(program.threads),
        opening=opening,
        stop=stop,
        table_row=np.concatenate([table_row, no_rows, np.concatenate([table_row, no_rows])[origin]]),
        call_row=call_row,
        work_row=work_row,
        half=half,
        copied={int(call_row[c]): int(work_row[w]) for c, w in copied.items()},
        edge_start=start,
        edge_source=source,
        edge_kind=kind,
        carried_back=back,
        carried_from=origin,
        carried_row=carried_row,
    )


def _layout(program: Program) -> tuple[Rows, Rows, Rows, Rows, Rows]:
    """Per lane its opening and its stop, per row that of its table, per call and per work its row."""
    members = [np.flatnonzero(program.calls.thread == t) for t in range(len(program.threads))]
    members += [np.flatnonzero(program.works.stream == s) for s in range(len(program.streams))]
    sizes = np.array([len(m) + 1 for m in members], dtype=np.int64)
    stop = np.cumsum(sizes)
    opening = stop - sizes
    table_row = np.full(int(sizes.sum()), -1, dtype=np.int64)
    call_row = np.full(len(program.calls), -1, dtype=np.int64)
    work_row = np.full(len(program.works), -1, dtype=np.int64)
    for lane, table_rows in enumerate(members):
        rows = np.arange(opening[lane] + 1, stop[lane])
        table_row[rows] = table_rows
        (call_row if lane < len(program.threads) else work_row)[table_rows] = rows
    if (call_row < 0).any() or (work_row < 0).any():
        raise ValueError(f"{program.source or 'program'}: a call or work refers to a thread or stream that does not exist")
    return opening, stop, table_row, call_row, work_row


class _Edges:
    """Collects the edges of one program, in rows of its graph."""

    def __init__(self, program: Program, call_row: Rows, work_row: Rows, half: Mapping[int, int], carried_row: int) -> None:
        self.program, self.order = program, Order.of(program)
        self.call_row, self.work_row, self.half, self.carried_row = call_row, work_row, half, carried_row
        self.carried: dict[tuple[int, int], int] = {}  # windows back and row -> number of the carried end
        self.edges: list[tuple[Rows, Rows, Rows]] = []  # destinations, sources and kinds

    def _add(self, destination: Rows, source: Rows, kind: EdgeKind) -> None:
        self.edges.append((destination, source, np.full(len(destination), kind, dtype=np.int64)))

    def _add_pairs(self, pairs: Sequence[tuple[int, int]], kind: EdgeKind) -> None:
        destination, source = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self._add(destination, source, kind)

    def _carry(self, back: int, row: int) -> int:
        return self.carried_row + self.carried.setdefault((back, row), len(self.carried))

    def add_within_window(self, stream_openings: Rows) -> None:
        """Launches, hand-overs and synchronisations."""
        calls, works = self.program.calls, np.flatnonzero(self.program.works.call >= 0)
        source = self.call_row[self.program.works.call[works]]
        copies = calls.kind[self.program.works.call[works]] == CallKind.BLOCKING_COPY
        # A copy starts while its blocking call lasts, so it hangs on the call's first half.
        source[copies] = [self.half.get(row, row) for row in source[copies].tolist()]
        self._add(self.work_row[works], source, EdgeKind.LAUNCH)
        handed = np.flatnonzero(calls.after >= 0)
        self._add(self.call_row[handed], self.call_row[calls.after[handed]], EdgeKind.HAND_OVER)
        synced = [
            (self.call_row[call], stream_openings[stream] if work < 0 else self.work_row[work])
            for call, stream, work in synchronisations(self.program, self.order)
        ]
        self._add_pairs(synced, EdgeKind.SYNC)

    def add_stream_waits(self, repeated: bool) -> None:
        """Of streams for works of others."""
        waits = [
            (self.work_row[work], self._carry(1, int(self.work_row[awaited])) if next_window else self.work_row[awaited])
            for work, awaited, next_window in stream_waits(self.program, self.order)
            if repeated or not next_window
        ]
        self._add_pairs(waits, EdgeKind.WAIT)

    def add_queues(self, depth: int | None, repeated: bool) -> None:
        """What the hardware queues hold up: works behind others, and launches without a slot."""
        works, before, back = queue_order(self.program, self.order)
        holds = (back == 0) | repeated
        self._from_starts(self.work_row[works[holds]], before[holds], back[holds], EdgeKind.START, EdgeKind.ARRIVAL)
        if depth is not None:
            calls, works, back = queue_slots(self.program, self.order, depth, repeated)
            self._from_starts(self.call_row[calls], works, back, EdgeKind.QUEUE, EdgeKind.QUEUE_ARRIVAL)

    def _from_starts(self, destination: Rows, works: Rows, back: Rows, kind: EdgeKind, of_collectives: EdgeKind) -> None:
        """From the starts of works some windows back: of a collective its arrival, else the work itself tells it."""
        collective = self.program.works.kind[works] == WorkKind.COLLECTIVE
        rows = self.work_row[works]
        rows[collective] = [self.half[row] for row in rows[collective].tolist()]
        for i in np.flatnonzero(back > 0).tolist():
            rows[i] = self._carry(int(back[i]), int(rows[i]))
        self._add(destination[~collective], rows[~collective], kind)
        self._add(destination[collective], rows[collective], of_collectives)

    def by_destination(self, rows: int) -> tuple[Rows, Rows, Rows]:
        """Per row its first edge; sources and kinds of the edges."""
        destination, source, kind = (np.concatenate(columns) for columns in zip(*self.edges, strict=True))
        order = np.argsort(destination, kind="stable")
        start = np.searchsorted(destination[order], np.arange(rows + 1))
        return start.astype(np.int64), source[order], kind[order]
