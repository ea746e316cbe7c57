"""What the host of a recorded program issued, and when: by stream, by thread, and what held each piece of work back."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from steptime._program.program import CallKind, Program, WorkKind
from steptime._program.table import IntColumn
from steptime._units import LONG_AGO

Listed = tuple[list[int], list[int]]  # launch times, and what was launched, in order


@dataclass(frozen=True, eq=False)
class Issued:
    """The works of a program in the order in which they were launched; backlog first."""

    launch_ns: IntColumn  # per work
    first_work: IntColumn  # per call: the first work it launched, or -1
    streams: tuple[Listed, ...]  # per stream: its works
    threads: tuple[Listed, ...]  # per thread: the calls that launch work
    collective_ns: list[int]
    collectives: list[int]  # works launched in the window, with the times above

    @classmethod
    def of(cls, program: Program) -> Issued:
        """Sort the works and launches of one program."""
        works, calls = program.works, program.calls
        launch_ns = launch_times(program)
        enqueued = np.lexsort((np.arange(len(works)), launch_ns))
        order = enqueued[works.call[enqueued] >= 0]
        first_work = np.full(len(calls), -1, dtype=np.int64)
        first_work[works.call[order[::-1]]] = order[::-1]
        streams = [enqueued[works.stream[enqueued] == index] for index in range(len(program.streams))]
        launching = np.flatnonzero(first_work >= 0)
        threads = [launching[calls.thread[launching] == index] for index in range(len(program.threads))]
        collectives = order[works.kind[order] == WorkKind.COLLECTIVE]
        return cls(
            launch_ns=launch_ns,
            first_work=first_work,
            streams=tuple((launch_ns[rows].tolist(), rows.tolist()) for rows in streams),
            threads=tuple((calls.start_ns[rows].tolist(), rows.tolist()) for rows in threads),
            collective_ns=launch_ns[collectives].tolist(),
            collectives=collectives.tolist(),
        )

    def tail(self, stream: int, before_ns: int) -> int:
        """The last work enqueued on a stream before a time, or -1."""
        times, works = self.streams[stream]
        at = bisect_left(times, before_ns)
        return works[at - 1] if at else -1

    def head(self, stream: int, after_ns: int) -> int:
        """The first work enqueued on a stream from a time on, or -1."""
        times, works = self.streams[stream]
        at = bisect_left(times, after_ns)
        return works[at] if at < len(works) else -1


def launch_times(program: Program) -> IntColumn:
    """Per work, when its launching call began; long ago for backlog."""
    calls, works = program.calls, program.works
    if not len(calls):
        return np.full(len(works), LONG_AGO, dtype=np.int64)
    return np.where(works.call >= 0, calls.start_ns[np.maximum(works.call, 0)], LONG_AGO)


def ready_times(program: Program) -> tuple[IntColumn, IntColumn]:
    """Per work, when everything known to hold it back was over as recorded, and the work before it on its stream (or -1)."""
    calls, works = program.calls, program.works
    launched = works.call >= 0
    ready = np.where(launched, calls.end_ns[np.maximum(works.call, 0)] if len(calls) else 0, LONG_AGO)
    previous = np.full(len(works), -1, dtype=np.int64)
    launch_ns = launch_times(program)
    in_order = [np.flatnonzero(works.stream == s) for s in range(len(program.streams))]
    for rows in in_order:
        previous[rows[1:]] = rows[:-1]
    ready = np.where(previous >= 0, np.maximum(ready, works.end_ns[previous]), ready)
    for row in np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.awaits >= 0)).tolist():
        rows = in_order[calls.stream[row]]
        at = int(np.searchsorted(launch_ns[rows], calls.start_ns[row], side="right"))
        if at < len(rows):
            ready[rows[at]] = max(ready[rows[at]], works.end_ns[calls.awaits[row]])
    return ready, previous
