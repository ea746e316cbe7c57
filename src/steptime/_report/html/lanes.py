"""The lanes of a page: host threads, then streams, those that have something to draw; and what is on them as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steptime._program.program import CallKind
from steptime._report.html.columns import Integers
from steptime._report.html.markup import Markup, table
from steptime._report.layout import time_ms
from steptime._sim.core.timeline import CohortTimeline, Timeline
from steptime._units import ms

SCENARIO = 0  # the one that is drawn
MARKS = (CallKind.STEP_BEGIN, CallKind.STEP_END)


@dataclass(frozen=True, eq=False)
class Lanes:
    """Which rows of a program are drawn, lane by lane: host threads, then streams; lanes without rows are left out."""

    titles: tuple[str, ...]
    rows: tuple[Integers, ...]  # per lane, of `calls` or `works`
    hosts: int  # so many lanes are host threads
    thread_lane: dict[int, int]  # thread -> lane
    stream_lane: dict[int, int]  # stream -> lane


def lanes_of(cohort: CohortTimeline) -> Lanes:
    """What is drawn of the ranks of a cohort."""
    program = cohort.cohort.program
    calls = np.flatnonzero(~np.isin(program.calls.kind, MARKS))
    length = (cohort.work_end_ns - cohort.work_start_ns)[:, :, SCENARIO]
    # Backlog that a steady state leaves out has neither a call nor a length.
    works = np.flatnonzero((program.works.call >= 0) | (length > 0).any(axis=1))
    threads = [
        (i, f"{thread.role} thread", calls[program.calls.thread[calls] == i]) for i, thread in enumerate(program.threads)
    ]
    streams = [(i, f"stream {stream.id}", works[program.works.stream[works] == i]) for i, stream in enumerate(program.streams)]
    threads, streams = [item for item in threads if len(item[2])], [item for item in streams if len(item[2])]
    return Lanes(
        tuple(title for _, title, _ in threads + streams),
        tuple(rows for _, _, rows in threads + streams),
        len(threads),
        {thread: lane for lane, (thread, _, _) in enumerate(threads)},
        {stream: len(threads) + lane for lane, (stream, _, _) in enumerate(streams)},
    )


def lanes_table(timeline: Timeline, ranks: Sequence[int]) -> Markup:
    """Per rank and lane how much there is, for those who cannot see a drawing."""
    rows: list[tuple[int, int, str, int, int]] = []
    for cohort in timeline.cohorts:
        lanes = lanes_of(cohort)
        for index, rank in enumerate(cohort.cohort.ranks):
            for lane, drawn in enumerate(lanes.rows if rank in ranks else ()):
                host = lane < lanes.hosts
                begin, end = (cohort.call_start_ns, cohort.call_end_ns) if host else (cohort.work_start_ns, cohort.work_end_ns)
                busy = int((end - begin)[drawn, index, SCENARIO].sum())
                rows.append((rank, lane, lanes.titles[lane], len(drawn), busy))
    heads = ("Rank", "Lane", "Calls or works", "ms in them")
    text = [(str(rank), title, f"{count:,}", time_ms(ms(busy))) for rank, _, title, count, busy in sorted(rows)]
    return table("Lanes of the timeline, all drawn steps together", heads, text, words=(0, 1))
