"""Names of collectives and the index of each within its group: what ranks must agree on to meet."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np

from steptime._program.issued import launch_times
from steptime._program.program import CallKind, Collective, Program, WorkKind
from steptime._program.table import IntColumn

WAIT = "wait"

_NO_LETTER = re.compile(r"[^a-z]")
# Fragments of any spelling, lower case without separators -> canonical kind; the first that fits wins.
_KINDS = (
    ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("broadcast", "broadcast"),
    ("sendrecv", "all_to_all"),  # NCCL has no kernel for all_to_all: it is sends and receives
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
    ("wait", WAIT),
)


@lru_cache(maxsize=1 << 14)
def collective_kind(name: str) -> str:
    """The kind behind a name as c10d, NCCL or RCCL write it (`_all_gather_base`, `ncclDevKernel_AllReduce_Sum_f32_RING_LL`)."""
    plain = _NO_LETTER.sub("", name.lower())
    return next((kind for fragment, kind in _KINDS if fragment in plain), "unknown")


def launch_order(program: Program) -> tuple[IntColumn, IntColumn]:
    """The collective works in the order the host launched them, backlog first, and when that was.

    A stream is in order, so work whose launch was not recorded was launched before what follows it on its stream.
    """
    works, launched = program.works, launch_times(program).copy()
    for stream in range(len(program.streams)):
        rows = np.flatnonzero(works.stream == stream)
        launched[rows] = np.minimum.accumulate(launched[rows][::-1])[::-1]
    rows = np.flatnonzero(works.kind == WorkKind.COLLECTIVE)
    rows = rows[np.lexsort((works.start_ns[rows], launched[rows]))]
    return rows, launched[rows]


def numbered(program: Program, first_step: int) -> Program:
    """The program with the collectives of each group counted from the beginning of a step, backwards before it."""
    calls = program.calls
    begins = calls.start_ns[(calls.kind == CallKind.STEP_BEGIN) & (calls.step == first_step)]
    begin = int(begins.min()) if len(begins) else 0
    rows, launched = launch_order(program)
    order = program.works.collective[rows].tolist()
    before = Counter(_group(program.collectives[i]) for i, at in zip(order, launched.tolist(), strict=True) if at < begin)
    count = Counter({group: -number for group, number in before.items()})
    collectives = list(program.collectives)
    for index in order:
        group = _group(collectives[index])
        collectives[index] = replace(collectives[index], sequence=count[group])
        count[group] += 1
    return replace(program, collectives=tuple(collectives))


def _group(collective: Collective) -> tuple[str, tuple[int, ...]]:
    return collective.group, collective.ranks
