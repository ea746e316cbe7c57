"""Points of a sweep, in this process while that is quick, else by processes of this machine or by any executor.

What costs is building a variant and asking models. Points that share a workload stand one after the other in a chunk, so that
whoever gets the chunk builds it once.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, as_completed
from typing import Any

from steptime._processes import context, cores, workers
from steptime._sweep.axes import SweepPoint

# Seconds of work left from which processes are worth it: each takes about half of one to begin.
_WORTH_PROCESSES_S = 2.0
# Seconds of a chunk: little enough that all workers end together, enough that sending points costs nothing beside it.
_CHUNK_S = 1.0
# Of a cluster's workers, of which nothing is known: chunks at least, for each of many.
_CHUNKS = 64

Job = Callable[[Sequence[SweepPoint]], list[Any]]
Told = Callable[[int, Any], None]
"""Called with the place of a point and its result, in the order in which they are finished."""

_Chunks = Sequence[Sequence[int]]
_shared: list[Job] = []  # the job of a worker process


def run(
    job: Job,
    points: Sequence[SweepPoint],
    groups: Sequence[Sequence[int]],
    told: Told,
    executor: Executor | None = None,
    most: int | None = None,
) -> None:
    """Does all points of some groups; those of a group share a workload.

    `executor` does them where there is one; else so many processes at most, by default one for every core.
    """
    if executor is not None:
        size = -(-sum(map(len, groups)) // _CHUNKS)
        _spread(lambda chunk: executor.submit(job, [points[at] for at in chunk]), _chunks(groups, size), told)
        return
    left, processes = list(groups), most or cores()
    began, done = time.process_time(), 0
    while left:
        each_s = (time.process_time() - began) / max(done, 1)  # whatever else runs on the machine
        remaining = sum(map(len, left))
        worth = done and remaining > 1 and remaining * each_s > _WORTH_PROCESSES_S and processes > 1
        if worth and (context().get_start_method() == "fork" or _sendable(job)):
            size = min(max(int(_CHUNK_S / max(each_s, 1e-3)), 1), -(-remaining // (2 * processes)))
            chunks = _chunks(left, size)
            with workers(min(processes, len(chunks)), _begin, job, advice="; --resume goes on") as pool:
                _spread(lambda chunk: pool.submit(_of_worker, [points[at] for at in chunk]), chunks, told)
            return
        group = left.pop(0)
        for at in group:
            told(at, job([points[at]])[0])
            done += 1


def _chunks(groups: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """The places of all groups in chunks of about this size; a group is parted only where it is larger."""
    chunks: list[list[int]] = []
    for group in groups:
        for begin in range(0, len(group), max(size, 1)):
            part = list(group[begin : begin + size])
            if chunks and len(chunks[-1]) + len(part) <= size:
                chunks[-1] += part
            else:
                chunks.append(part)
    return chunks


def _spread(submit: Callable[[Sequence[int]], Future[list[Any]]], chunks: _Chunks, told: Told) -> None:
    """Hands chunks out and tells what comes back; whatever ends it, nothing is left waiting."""
    futures: dict[Future[list[Any]], Sequence[int]] = {}
    try:
        for chunk in chunks:
            futures[submit(chunk)] = chunk
        for future in as_completed(futures):
            for at, result in zip(futures[future], future.result(), strict=True):
                told(at, result)
    finally:
        for future in futures:
            future.cancel()


def _begin(job: Job) -> None:
    """In a worker."""
    _shared[:] = [job]


def _of_worker(points: Sequence[SweepPoint]) -> list[Any]:
    return _shared[0](points)


def _sendable(job: Job) -> bool:
    """Whether other processes can do the job: a function made on the spot cannot be sent to them."""
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
