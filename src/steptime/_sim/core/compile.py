"""Turns a `Program` into a graph of lanes: one lane per host thread and per stream, and the edges between lanes.

Rows of the graph are laid out lane by lane, each lane preceded by one row for its state when the window opens. So the row
before a node always holds the end of what precedes it, and a stretch of a lane is a slice.

Two kinds of node have a first half with a row of its own, behind all lanes, because others wait for that half: a collective
(this rank has arrived) and a blocking copy (the copy is enqueued).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._program.program import CallKind, Program, WorkKind
from steptime._sim.core import edges

Rows = npt.NDArray[np.int64]


class EdgeKind(IntEnum):
    """Why a node waits for a node of another lane, which decides the lag."""

    LAUNCH = 0  # a work for its launching call: latency_ns
    HAND_OVER = 1  # a call for the call on another thread that hands over: gap_ns
    SYNC = 2  # a synchronising call for a work: return_ns, whatever the call itself costs
    QUEUE = 3  # a launch for the start of the work that frees its place in the queue: minus that work's duration
    WAIT = 4  # a work for the work its stream waits for: release_ns
    START = 5  # a work for the start of the work before it in a shared hardware queue: minus that work's duration
    ARRIVAL = 6  # the same where the work before it is a collective: its arrival, 0
    QUEUE_ARRIVAL = 7  # a launch for the arrival of the collective that frees its place in the queue: 0


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
    copied = edges.blocking_copies(program)
    collectives = np.flatnonzero(program.works.kind == WorkKind.COLLECTIVE)
    two_halves = [*call_row[sorted(copied)].tolist(), *work_row[collectives].tolist()]
    half = {row: len(table_row) + i for i, row in enumerate(two_halves)}
    carried_row = len(table_row) + len(half)
    result = _Edges(program, call_row, work_row, half, opening[len(program.threads) :], carried_row)
    result.launches()
    result.hand_overs()
    result.synchronisations()
    result.stream_waits(repeated)
    result.queue_order(repeated)
    result.queue(queue_depth, repeated)
    rows = carried_row + len(result.carried)
    start, source, kind = result.by_destination(rows)
    back = np.array([b for b, _ in result.carried], dtype=np.int64)
    origin = np.array([r for _, r in result.carried], dtype=np.int64)
    return LaneGraph(
        rows=rows,
        threads=len(program.threads),
        opening=opening,
        stop=stop,
        table_row=np.concatenate([table_row, np.full(len(half), -1, dtype=np.int64), _table_rows(table_row, origin)]),
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


def _table_rows(table_row: Rows, rows: Rows) -> Rows:
    """Table rows of rows that may lie behind all lanes."""
    return np.where(rows < len(table_row), table_row[np.minimum(rows, len(table_row) - 1)], -1)


def _layout(program: Program) -> tuple[Rows, Rows, Rows, Rows, Rows]:
    members = [np.flatnonzero(program.calls.thread == t) for t in range(len(program.threads))]
    members += [np.flatnonzero(program.works.stream == s) for s in range(len(program.streams))]
    sizes = np.array([len(m) + 1 for m in members], dtype=np.int64)
    stop = np.cumsum(sizes)
    opening = stop - sizes
    table_row = np.full(int(sizes.sum()), -1, dtype=np.int64)
    call_row = np.full(len(program.calls), -1, dtype=np.int64)
    work_row = np.full(len(program.works), -1, dtype=np.int64)
    for lane, rows in enumerate(members):
        places = np.arange(opening[lane] + 1, stop[lane])
        table_row[places] = rows
        (call_row if lane < len(program.threads) else work_row)[rows] = places
    if (call_row < 0).any() or (work_row < 0).any():
        raise ValueError(f"{program.source or 'program'}: a call or work refers to a thread or stream that does not exist")
    return opening, stop, table_row, call_row, work_row


class _Edges:
    """Collects the edges of one program, in rows of its graph."""

    def __init__(
        self, program: Program, call_row: Rows, work_row: Rows, half: Mapping[int, int], streams: Rows, carried_row: int
    ) -> None:
        self.program = program
        self.call_row = call_row
        self.work_row = work_row
        self.half = half
        self.streams = streams  # opening rows of the stream lanes
        self.carried_row = carried_row
        self.order = edges.Order.of(program)
        self.carried: dict[tuple[int, int], int] = {}
        self.found: list[tuple[Rows, Rows, int]] = []

    def add(self, destination: Rows, source: Rows, kind: EdgeKind) -> None:
        if len(destination):
            self.found.append((destination, source, int(kind)))

    def carry(self, back: int, row: int) -> int:
        return self.carried_row + self.carried.setdefault((back, row), len(self.carried))

    def launches(self) -> None:
        works = np.flatnonzero(self.program.works.call >= 0)
        source = self.call_row[self.program.works.call[works]]
        copies = self.program.calls.kind[self.program.works.call[works]] == CallKind.BLOCKING_COPY
        # A copy starts while its blocking call lasts, so it hangs on the call's first half.
        source[copies] = [self.half.get(row, row) for row in source[copies].tolist()]
        self.add(self.work_row[works], source, EdgeKind.LAUNCH)

    def hand_overs(self) -> None:
        calls = np.flatnonzero(self.program.calls.after >= 0)
        self.add(self.call_row[calls], self.call_row[self.program.calls.after[calls]], EdgeKind.HAND_OVER)

    def synchronisations(self) -> None:
        pairs = [
            (self.call_row[call], self.streams[stream] if work < 0 else self.work_row[work])
            for call, stream, work in edges.synchronisations(self.program, self.order)
        ]
        destination, source = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self.add(destination, source, EdgeKind.SYNC)

    def stream_waits(self, repeated: bool) -> None:
        pairs = []
        for work, awaited, next_window in edges.stream_waits(self.program, self.order):
            source = int(self.work_row[awaited])
            if next_window and not repeated:
                continue
            pairs.append((self.work_row[work], self.carry(1, source) if next_window else source))
        destination, source_rows = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self.add(destination, source_rows, EdgeKind.WAIT)

    def queue_order(self, repeated: bool) -> None:
        works, before, back = edges.queue_order(self.program, self.order)
        kept = np.flatnonzero((back == 0) | repeated)
        collective = self.program.works.kind[before] == WorkKind.COLLECTIVE
        source = self._starts(before, np.where(repeated, back, 0))
        for kind, chosen in ((EdgeKind.START, kept[~collective[kept]]), (EdgeKind.ARRIVAL, kept[collective[kept]])):
            self.add(self.work_row[works[chosen]], source[chosen], kind)

    def queue(self, depth: int | None, repeated: bool) -> None:
        if depth is None:
            return
        calls, works, back = edges.queue_slots(self.program, self.order, depth, repeated)
        source = self._starts(works, back)
        collective = self.program.works.kind[works] == WorkKind.COLLECTIVE
        self.add(self.call_row[calls[~collective]], source[~collective], EdgeKind.QUEUE)
        self.add(self.call_row[calls[collective]], source[collective], EdgeKind.QUEUE_ARRIVAL)

    def _starts(self, works: Rows, back: Rows) -> Rows:
        """Rows from which the starts of works some windows back are told: a collective's arrival, else the work itself."""
        collective = self.program.works.kind[works] == WorkKind.COLLECTIVE
        rows = self.work_row[works]
        rows[collective] = [self.half[row] for row in rows[collective].tolist()]
        for i in np.flatnonzero(back > 0).tolist():
            rows[i] = self.carry(int(back[i]), int(rows[i]))
        return rows

    def by_destination(self, rows: int) -> tuple[Rows, Rows, Rows]:
        none = np.zeros(0, dtype=np.int64)
        destination = np.concatenate([none, *(d for d, _, _ in self.found)])
        source = np.concatenate([none, *(s for _, s, _ in self.found)])
        kind = np.concatenate([none, *(np.full(len(d), k, dtype=np.int64) for d, _, k in self.found)])
        order = np.argsort(destination, kind="stable")
        start = np.searchsorted(destination[order], np.arange(rows + 1))
        return start.astype(np.int64), source[order], kind[order]
