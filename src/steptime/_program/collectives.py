"""Names of collectives, who takes part, and the index of each within its group: what ranks must agree on to meet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from steptime._program.program import CallKind, Collective, IntColumn, Program, Tensor, WorkKind
from steptime._program.queues import launch_times
from steptime._units import dtype_bytes

WAIT = "wait"
_Group = tuple[str, tuple[int, ...]]  # name and ranks
# No message is larger; what claims to be comes from damage.
MOST_BYTES = 2**50

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


@lru_cache(maxsize=4)
def everyone(world_size: int) -> tuple[int, ...]:
    """One tuple for all collectives: a large job has thousands of them."""
    return tuple(range(world_size))


def point_to_point(group: str, source: int, target: int) -> tuple[str, tuple[int, ...], int]:
    """Group, ranks and root of a send or a receive: one group per direction, so that ranks which both send first still meet."""
    return f"{group}:{source}->{target}", tuple(sorted({source, target})), target


def numbered(collectives: Iterable[Collective], before: Mapping[_Group, int] | None = None) -> tuple[Collective, ...]:
    """The same collectives with their sequence counted per group, in the order given, from minus the number `before`."""
    count = Counter({group: -number for group, number in (before or {}).items()})
    result = []
    for each in collectives:
        group = each.group, each.ranks
        result.append(replace(each, sequence=count[group]))
        count[group] += 1
    return tuple(result)


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


def sized_by_ops(program: Program) -> Program:
    """The program with sizes of collectives from the tensors of NCCL's ops around them, where kernels have none (2022)."""
    collectives = list(program.collectives)
    works, ops = program.works, program.ops
    for row in np.flatnonzero((works.kind == WorkKind.COLLECTIVE) & (works.call >= 0) & (works.collective >= 0)).tolist():
        index = int(works.collective[row])
        if collectives[index].bytes_in or collectives[index].bytes_out or collectives[index].kind == "barrier":
            continue
        at = int(program.calls.op[works.call[row]])
        while at >= 0 and not program.names[ops.name[at]].startswith("nccl:"):
            at = int(ops.parent[at])
        inputs = program.signatures[ops.signature[at]].inputs if at >= 0 and ops.signature[at] >= 0 else ()
        tensor = next((value for value in inputs if isinstance(value, Tensor) and value.shape), None)
        if tensor is not None:
            collectives[index] = _sized(collectives[index], tensor)
    return replace(program, collectives=tuple(collectives))


def _sized(collective: Collective, given: Tensor) -> Collective:
    """What goes in is the op's tensor; what comes out follows from the kind."""
    nbytes, ranks = given.numel * dtype_bytes(given.dtype), max(len(collective.ranks), 1)
    if not 0 < nbytes <= MOST_BYTES // ranks:
        return collective
    out = {"all_gather": nbytes * ranks, "reduce_scatter": nbytes // ranks}.get(collective.kind, nbytes)
    return replace(collective, bytes_in=nbytes, bytes_out=out, dtype=given.dtype)


def numbered_from(program: Program, first_step: int) -> Program:
    """The program with the collectives of each group counted from the beginning of a step, backwards before it."""
    calls = program.calls
    begins = calls.start_ns[(calls.kind == CallKind.STEP_BEGIN) & (calls.step == first_step)]
    begin = int(begins.min()) if len(begins) else 0
    rows, launched = launch_order(program)
    order = program.works.collective[rows].tolist()
    collectives = list(program.collectives)
    launches = [collectives[index] for index in order]
    before = Counter((each.group, each.ranks) for each, at in zip(launches, launched.tolist(), strict=True) if at < begin)
    for index, each in zip(order, numbered(launches, before), strict=True):
        collectives[index] = each
    return replace(program, collectives=tuple(collectives))
