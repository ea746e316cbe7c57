"""Collectives beside computation, as DDP has them, or waited for at once.

Overlapped, a collective has a stream of its own, which waits for what compute has been given before it; compute waits for the
collective before the op that takes its result, where tensors can be followed (configs, captures, execution traces). Kineto's
recordings do not say: there it waits where gradients are needed, which is where DDP copies them back, where the optimiser
begins, at the latest where the step ends. What is launched after the backward pass could have begun within it: then the
collectives of a step are spread over its backward pass, each ready when so much of it is done as those up to it have of all
their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from steptime._ops.families import WorkFamily, op_family
from steptime._ops.waits import DATA, tensor_waits
from steptime._program.program import CallKind, Phase, Program, Stream, WorkKind
from steptime._sim.core.graph import Order
from steptime._sim.core.timing import Cohort
from steptime._whatif.draws import MOST_ERROR, with_errors
from steptime._whatif.edits import Mask, Rows, with_calls

_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


def overlapped(cohort: Cohort, works: Mask) -> Cohort:
    """Some collectives beside compute, not waited for before their results are needed."""
    program = cohort.program
    works = works & (program.works.call >= 0)
    order, calls = Order.of(program), program.calls
    needed = _needed_at(program)
    needed = needed[np.argsort(order.call[needed])]
    waits = tensor_waits(program, recorded=False, ordered=False)
    data = {each.collective: each.needed_by for each in waits if each.reason == DATA}
    moved = _moved(cohort, works & np.isin(program.works.stream, _compute_streams(program)))
    awaits, ready = calls.awaits.copy(), _ready(program, order, works)
    added = _Added(program)
    for work in np.flatnonzero(works).tolist():
        call, old = int(program.works.call[work]), int(program.works.stream[work])
        stream = int(moved.program.works.stream[work])
        until = _until(program, order, work, needed, data)
        waiting = np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.awaits == work) & (calls.stream != stream))
        early = waiting[order.call[waiting] < order.call[until]]
        awaits[early] = -1
        for compute in sorted({*calls.stream[early].tolist(), *([old] if stream != old else [])}):
            added.wait(until, compute, work)
        before = np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.stream == stream) & (calls.awaits > ready[work]))
        holding = [row for row in before.tolist() if order.first_after(stream, int(order.call[row])) == work]
        awaits[holding] = ready[work]
        if stream != old and ready[work] >= 0:
            added.wait(call, stream, ready[work])
    changed = replace(moved, program=replace(moved.program, calls=calls.replace(awaits=awaits)))
    return added.to(with_errors(changed, np.where(works, MOST_ERROR, 0.0)))


def _until(program: Program, order: Order, work: int, needed: Rows, data: Mapping[int, int]) -> int:
    """The call before which compute waits for a collective: of the op that takes its result, or where gradients are needed."""
    call = int(program.works.call[work])
    position, op = int(order.call[call]), data.get(int(program.works.collective[work]), -1)
    if op >= 0:
        needed = np.flatnonzero(program.calls.op >= op)
        needed = needed[np.argsort(order.call[needed])]
    later = needed[order.call[needed] > position]
    return int(later[0]) if len(later) else call


class _Added:
    """Waits to be put before calls of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._before: list[int] = []
        self._columns: list[dict[str, int]] = []

    def wait(self, beside: int, stream: int, awaits: int, *, after: bool = False) -> None:
        """A wait on a stream before a call, or after it."""
        calls = self._program.calls
        columns = {name: int(getattr(calls, name)[beside]) for name in ("api", "thread", "op", "step", "start_ns")}
        columns |= {"end_ns": columns["start_ns"], "kind": int(CallKind.STREAM_WAIT), "stream": stream, "awaits": awaits}
        self._before.append(beside + after)
        self._columns.append(columns)

    def to(self, cohort: Cohort) -> Cohort:
        """The cohort with these waits."""
        return with_calls(cohort, self._before, self._columns)


def waited_for(cohort: Cohort, works: Mask) -> Cohort:
    """Compute waits for some collectives as soon as they are launched."""
    program, own = cohort.program, _compute_streams(cohort.program)
    added = _Added(program)
    for work in np.flatnonzero(works & (program.works.call >= 0)).tolist():
        for compute in own[own != program.works.stream[work]].tolist():
            added.wait(int(program.works.call[work]), compute, work, after=True)
    return added.to(with_errors(cohort, np.where(works, MOST_ERROR, 0.0)))


def _compute_streams(program: Program) -> Rows:
    kernels = program.works.stream[program.works.kind == WorkKind.KERNEL]
    return np.unique(kernels).astype(np.int64)


def _moved(cohort: Cohort, works: Mask) -> Cohort:
    """The works on streams of their own, one for each that they are on."""
    program, timing = cohort.program, cohort.timing
    old, stream = np.unique(program.works.stream[works]), program.works.stream.copy()
    highest = max((each.id for each in program.streams), default=0)
    new = tuple(Stream(highest + 1 + at, program.streams[each].device) for at, each in enumerate(old.tolist()))
    stream[works] = len(program.streams) + np.searchsorted(old, program.works.stream[works])
    changed = replace(program, streams=(*program.streams, *new), works=program.works.replace(stream=stream))
    opened = np.zeros((len(new), *timing.stream_start_ns.shape[1:]), dtype=np.int64)
    return replace(
        cohort,
        program=changed,
        timing=replace(timing, stream_start_ns=np.concatenate([timing.stream_start_ns, opened])),
    )


def _ready(program: Program, order: Order, works: Mask) -> dict[int, int]:
    """Per collective the last work of compute that it has to wait for, or -1."""
    compute = _compute_streams(program)
    result: dict[int, int] = {}
    for rows, backward in _by_step(program, works):
        for row, done in zip(rows.tolist(), _shares(program, rows).tolist(), strict=True):
            position = int(order.work[row])
            before = [order.last_before(stream, position) for stream in compute.tolist()]
            last = max(before, key=lambda work: int(order.work[work]) if work >= 0 else -1, default=-1)
            if len(backward) and position > order.work[backward[-1]]:
                last = int(backward[min(int(np.ceil(done * len(backward))), len(backward)) - 1])
            result[row] = last
    return result


def _by_step(program: Program, works: Mask) -> Iterator[tuple[Rows, Rows]]:
    """Per step the collectives, and the kernels of the backward pass."""
    table, calls = program.works, program.calls
    op = calls.op[table.call]
    phase = program.ops.phase[op] if len(program.ops) else np.zeros(len(table), dtype=np.int8)
    backward = (table.call >= 0) & (op >= 0) & (phase == Phase.BACKWARD) & (table.kind == WorkKind.KERNEL)
    for step in np.unique(table.step[works]).tolist():
        of_step = table.step == step
        kernels = np.flatnonzero(backward & of_step)
        yield np.flatnonzero(works & of_step), kernels[np.argsort(table.call[kernels], kind="stable")]


def _shares(program: Program, rows: Rows) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Of all bytes of some collectives, those up to each."""
    sizes = [max(program.collectives[at].bytes_in, 1) if at >= 0 else 1 for at in program.works.collective[rows].tolist()]
    total = np.cumsum(sizes, dtype=np.float64)
    return np.asarray(total / total[-1])


def _needed_at(program: Program) -> Rows:
    """The calls before which gradients are needed: of copies back, of the optimiser, and where steps end."""
    calls, ops = program.calls, program.ops
    needing = np.array([name == _COPY_BACK or op_family(name) == WorkFamily.OPTIMIZER for name in program.names], dtype=bool)
    of_op = needing[ops.name] | (ops.phase == Phase.OPTIMIZER)
    for row, parent in enumerate(ops.parent.tolist()):
        if parent >= 0 and of_op[parent]:
            of_op[row] = True
    return np.flatnonzero(np.append(of_op, False)[calls.op] | (calls.kind == CallKind.STEP_END)).astype(np.int64)
