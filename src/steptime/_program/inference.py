"""What a recorded program does not say outright: blocking copies, lost launches, hand-overs between threads, and waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steptime._program.program import CallKind, Calls, Program, Thread, WorkKind
from steptime._program.queues import with_shared_queues
from steptime._program.table import IntColumn, SmallColumn
from steptime._program.waits import CLOCK_SLACK_NS, WaitHint, resolve_waits


def infer_dependencies(program: Program, hints: tuple[WaitHint, ...] = ()) -> Program:
    """The program with blocking copies marked, waits and synchronisations resolved, and threads handing over to each other."""
    calls = _mark_blocking_copies(program)
    stream, awaits = resolve_waits(replace(program, calls=calls), hints)
    calls = calls.replace(stream=stream, awaits=awaits)
    calls = calls.replace(after=hand_overs(calls, program.threads, max(len(program.steps), 1)))
    return with_shared_queues(replace(program, calls=calls))


def launch_the_unlaunched(program: Program) -> Program:
    """Work in mid-window whose launch was not recorded gets a launch on a thread of its own, where it was seen to start.

    Work without a launch at the head of a stream is backlog from before the window and stays as it is.
    """
    works, calls = program.works, program.calls
    lost = _lost(program)
    if not len(lost):
        return program
    step = _step_of_lost(program, lost)
    new = {column: np.full(len(lost), -1) for column in calls.columns()} | {
        "kind": np.full(len(lost), CallKind.LAUNCH),
        "api": works.name[lost],
        "thread": np.full(len(lost), len(program.threads)),
        "step": step,
        "start_ns": works.start_ns[lost],
        "end_ns": works.start_ns[lost],
    }
    work_call, work_step = works.call.copy(), works.step.copy()
    work_call[lost], work_step[lost] = len(calls) + np.arange(len(lost)), step
    message = (
        f"{program.source}: {len(lost)} of {len(works)} device events have no launch in the trace (filtered?); "
        "they start when they were seen to start"
    )
    return replace(
        program,
        calls=Calls.from_columns({k: np.concatenate([v, new[k]]) for k, v in calls.columns().items()}),
        works=works.replace(call=work_call, step=work_step),
        threads=(*program.threads, Thread(-1, "unrecorded")),
    ).with_warnings(message)


def _lost(program: Program) -> IntColumn:
    """Works without a launch behind launched work of their stream, by start; without any launch, all since the first step."""
    works = program.works
    launched, behind = works.call >= 0, np.zeros(len(works), dtype=bool)
    for index in range(len(program.streams)):
        rows = np.flatnonzero(works.stream == index)
        behind[rows] = np.logical_or.accumulate(launched[rows])
    if not launched.any():
        begins = program.calls.start_ns[program.calls.kind == CallKind.STEP_BEGIN]
        behind = works.start_ns >= begins.min(initial=np.iinfo(np.int64).max)
    lost = np.flatnonzero(behind & ~launched)
    return lost[np.argsort(works.start_ns[lost], kind="stable")]


def _step_of_lost(program: Program, lost: IntColumn) -> SmallColumn:
    """The step in which work without a launch began, but none that its neighbours on the stream rule out."""
    works = program.works
    step = _step_at(program, works.start_ns[lost])
    for index in range(len(program.streams)):
        rows = np.flatnonzero((works.stream == index) & (works.step >= 0))
        if not len(rows):
            continue
        mine = np.flatnonzero(works.stream[lost] == index)
        at = np.searchsorted(rows, lost[mine])
        low = np.where(at > 0, works.step[rows[np.maximum(at - 1, 0)]], -1)
        high = np.where(at < len(rows), works.step[rows[np.minimum(at, len(rows) - 1)]], np.iinfo(np.int32).max)
        step[mine] = np.clip(step[mine], low, np.maximum(low, high))
    return step


def _step_at(program: Program, times: IntColumn) -> SmallColumn:
    calls = program.calls
    begins = np.flatnonzero(calls.kind == CallKind.STEP_BEGIN)
    if not len(begins):
        return np.full(len(times), -1, dtype=np.int32)
    at = np.searchsorted(calls.start_ns[begins], times, side="right") - 1
    return np.where(at >= 0, calls.step[begins[np.maximum(at, 0)]], -1).astype(np.int32)


def _mark_blocking_copies(program: Program) -> Calls:
    """Copies between the device and pageable memory whose call returned only after the copy had finished."""
    calls, works = program.calls, program.works
    synchronous = np.array(
        ["Memcpy" in n and "Async" not in n and not n.startswith("Memcpy") for n in program.names], dtype=bool
    )
    crossing = np.array(["Pageable" in n or "DtoH" in n for n in program.names], dtype=bool)
    copies = np.flatnonzero((works.kind == WorkKind.COPY) & (works.call >= 0))
    call = works.call[copies]
    returned_after = calls.end_ns[call] + CLOCK_SLACK_NS >= works.end_ns[copies]
    blocking = returned_after & (crossing[works.name[copies]] | synchronous[calls.api[call]])
    kind = calls.kind.copy()
    kind[call[blocking]] = CallKind.BLOCKING_COPY
    return calls.replace(kind=kind)


def hand_overs(calls: Calls, threads: tuple[Thread, ...], steps: int) -> SmallColumn:
    """Which call on another thread each call waited for: main hands over to autograd's thread and resumes when that is done."""
    after = np.full(len(calls), -1, dtype=np.int32)
    main = np.flatnonzero(calls.thread == 0)
    main = main[np.argsort(calls.start_ns[main], kind="stable")]
    for index, thread in enumerate(threads):
        if thread.role != "backward" or index == 0:
            continue
        rows = np.flatnonzero(calls.thread == index)
        rows = rows[np.argsort(calls.start_ns[rows], kind="stable")]
        if not len(rows) or not len(main):
            continue
        before = np.searchsorted(calls.start_ns[main], calls.start_ns[rows], side="right") - 1
        edges = np.flatnonzero(np.diff(before)) + 1
        bursts = np.split(np.arange(len(rows)), edges)
        if len(bursts) > 8 * steps + 8:
            continue  # the threads run side by side: no hand-over
        for burst in bursts:
            _hand_over(calls, after, main, int(before[burst[0]]), rows[burst])
    return after


def _hand_over(calls: Calls, after: SmallColumn, main: IntColumn, at: int, burst: IntColumn) -> None:
    first, last = burst[0], burst[-1]
    if at >= 0 and calls.end_ns[main[at]] <= calls.start_ns[first]:
        after[first] = main[at]
    if at + 1 < len(main) and calls.end_ns[last] <= calls.start_ns[main[at + 1]]:
        following = main[at + 1]
        current = after[following]
        if current < 0 or calls.end_ns[current] < calls.end_ns[last]:
            after[following] = last
