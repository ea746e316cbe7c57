"""Who waits for whom inside one rank: what the CUDA rules say about a program's calls and works, in rows of its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._program.program import CallKind, Program

Rows = npt.NDArray[np.int64]

# How far back a repeated window looks for the work that frees a queue slot: further than anybody iterates.
WINDOWS_BACK = 64


@dataclass(frozen=True, eq=False)
class Order:
    """The order in which the host issued things, over all threads: by recorded start, or by row where nothing was recorded."""

    call: Rows  # per call: its place
    work: Rows  # per work: the place of its launching call, or -1
    stream_works: tuple[Rows, ...]  # per stream: its works, in execution order
    enqueued: tuple[Rows, ...]  # per stream: the latest launch among the first i + 1 of its works

    @classmethod
    def of(cls, program: Program) -> Order:
        """The order of one program's calls and works."""
        call = _places(program)
        launched = program.works.call
        work = np.where(launched >= 0, call[launched] if len(call) else -1, -1).astype(np.int64)
        stream_works = tuple(np.flatnonzero(program.works.stream == s) for s in range(len(program.streams)))
        enqueued = tuple(np.maximum.accumulate(work[rows]) if len(rows) else work[rows] for rows in stream_works)
        return cls(call, work, stream_works, enqueued)

    def last_before(self, stream: int, place: int) -> int:
        """The last work enqueued on a stream before a place in the order, or -1."""
        at = int(np.searchsorted(self.enqueued[stream], place)) - 1
        return int(self.stream_works[stream][at]) if at >= 0 else -1

    def first_after(self, stream: int, place: int) -> int:
        """The first work enqueued on a stream after a place in the order, or -1."""
        at = int(np.searchsorted(self.enqueued[stream], place, side="right"))
        return int(self.stream_works[stream][at]) if at < len(self.stream_works[stream]) else -1


def _places(program: Program) -> Rows:
    calls = program.calls
    rows = np.arange(len(calls))
    key = rows.astype(np.int64)
    if len(calls) and bool((calls.start_ns >= 0).all()):
        key = calls.start_ns.copy()
        for thread in range(len(program.threads)):
            own = np.flatnonzero(calls.thread == thread)
            key[own] = np.maximum.accumulate(key[own]) if len(own) else key[own]
    places = np.empty(len(calls), dtype=np.int64)
    places[np.lexsort((rows, key))] = rows
    return places


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
    results: list[tuple[Rows, Rows]] = []
    last: list[tuple[int, int]] = []
    queues = program.hardware_queues
    for queue in np.unique(queues[queues >= 0]):
        works = np.flatnonzero((queues[program.works.stream] == queue) & (program.works.call >= 0))
        works = works[np.lexsort((works, order.work[works]))]
        differ = np.flatnonzero(np.diff(program.works.stream[works]) != 0)
        results.append((works[differ + 1], works[differ]))
        if len(works) and program.works.stream[works[0]] != program.works.stream[works[-1]]:
            last.append((int(works[0]), int(works[-1])))
    within = np.array([pair for w, b in results for pair in zip(w.tolist(), b.tolist(), strict=True)], dtype=np.int64)
    across = np.array(last, dtype=np.int64).reshape(-1, 2)
    work, before = np.concatenate([within.reshape(-1, 2), across]).T
    return work, before, np.repeat(np.array([0, 1]), [len(within), len(across)])


def queue_slots(program: Program, order: Order, depth: int, repeated: bool) -> tuple[Rows, Rows, Rows]:
    """(call, work, windows back): the launch at `call` needs the place that `work` frees when it starts.

    Places are counted per hardware queue, one per launch however much work it enqueues. In a repeated window, launches
    are numbered on through the windows before it.
    """
    results = [np.zeros((0, 3), dtype=np.int64)]
    queues = program.hardware_queues
    for queue in np.unique(queues):
        works = np.flatnonzero((queues[program.works.stream] == queue) & ((program.works.call >= 0) | (not repeated)))
        works = works[np.lexsort((works, order.work[works]))]
        call = program.works.call[works]
        works = works[np.concatenate([[True], (np.diff(call) != 0) | (call[1:] < 0)]) if len(works) else works]
        number = np.arange(len(works))
        window, within = np.divmod(number - depth, max(len(works), 1))
        exists = (window >= (-WINDOWS_BACK if repeated else 0)) & (program.works.call[works] >= 0)
        slots = np.stack([program.works.call[works], works[within] if len(works) else works, -window], axis=1)
        results.append(slots[exists])
    calls, freed, back = np.concatenate(results).T
    return calls, freed, back
