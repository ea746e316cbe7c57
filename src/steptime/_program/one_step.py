"""One step of a program that was recorded over several: what models are asked about, as if it stood alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from steptime._program.collectives import numbered
from steptime._program.program import NEVER, CallKind, Calls, ColumnTable, Program, WorkKind

Rows = npt.NDArray[np.intp]
AnyTable = TypeVar("AnyTable", bound=ColumnTable)


@dataclass(frozen=True, slots=True)
class RecordedKernel:
    """What one launch of the step ran: a kernel, copy or memset, or a graph of them from its first start to its last end.

    `op` is the row of the op that launched it in the program of the step; of a launch outside every op, the op before it.
    """

    op: int
    name: str
    time_ns: int
    outside: bool = False  # launched by no op


@dataclass(frozen=True)
class OneStep:
    """A step as if it stood alone: its ops and collectives without times, and the kernels that were recorded, if any."""

    program: Program
    kernels: tuple[RecordedKernel, ...] = ()
    whole: bool = False  # a recorded program as it is, whose works are at hand: no op is guessed to launch anything


def one_step(program: Program) -> OneStep:
    """One step in the middle of a program; the program itself where it is one that was never run."""
    if len(program.steps) <= 1 and not program.recorded:
        return OneStep(program)
    step = program.steps[len(program.steps) // 2] if program.steps else -1
    ops = np.flatnonzero(program.ops.step == step)
    works = np.flatnonzero(
        (program.works.kind == WorkKind.COLLECTIVE) & (program.works.step == step) & (program.works.call >= 0)
    )
    calls = _calls(program, step, works)
    new_op, new_call, new_work = (
        _new_rows(len(table), chosen) for table, chosen in ((program.ops, ops), (program.calls, calls), (program.works, works))
    )
    collectives = [program.collectives[index] for index in program.works.collective[works].tolist()]
    chosen = _selected(program.calls, calls, op=new_op, awaits=new_work, after=new_call, start_ns=NEVER, end_ns=NEVER, step=0)
    alone = replace(
        program,
        ops=_selected(program.ops, ops, parent=new_op, start_ns=NEVER, end_ns=NEVER, step=0),
        calls=_with_waits(program, ops, calls, works, chosen),
        works=_selected(
            program.works, works, call=new_call, start_ns=NEVER, end_ns=NEVER, step=0, collective=np.arange(len(works))
        ),
        collectives=numbered(collectives),
        steps=(0,),
    )
    return OneStep(alone, _kernels(program, step, new_op))


def _kernels(program: Program, step: int, new_op: npt.NDArray[np.int64]) -> tuple[RecordedKernel, ...]:
    works = program.works
    rows = np.flatnonzero(
        (works.kind != WorkKind.COLLECTIVE) & (works.step == step) & (works.call >= 0) & (works.start_ns >= 0)
    )
    rows = rows[np.argsort(works.call[rows], kind="stable")]
    launches, first = np.unique(works.call[rows], return_index=True)
    starts, ends = np.minimum.reduceat(works.start_ns[rows], first), np.maximum.reduceat(works.end_ns[rows], first)
    names = [program.names[name] for name in works.name[rows[first]].tolist()]
    results = []
    for call, name, time_ns in zip(launches.tolist(), names, (ends - starts).tolist(), strict=True):
        op = int(program.calls.op[call])
        outside = op < 0
        if outside:
            before = np.flatnonzero((program.ops.start_ns <= program.calls.start_ns[call]) & (program.ops.step == step))
            op = int(before[-1]) if len(before) else int(np.flatnonzero(program.ops.step == step)[:1].sum())
        results.append(RecordedKernel(int(new_op[op]), name, time_ns, outside))
    return tuple(results)


def _calls(program: Program, step: int, works: Rows) -> Rows:
    """What launches these collectives, waits for one of them, or marks the step."""
    calls = program.calls
    marks = np.isin(calls.kind, (CallKind.STEP_BEGIN, CallKind.STEP_END))
    waits = (calls.kind == CallKind.STREAM_WAIT) & np.isin(calls.awaits, works)
    launches = np.zeros(len(calls), dtype=np.bool_)
    launches[program.works.call[works]] = True
    return np.flatnonzero((calls.step == step) & (marks | waits | launches))


def _with_waits(program: Program, ops: Rows, calls: Rows, works: Rows, chosen: Calls) -> Calls:
    """The calls with every wait at the op that comes next, and one for each collective that ran in order with compute.

    A wait is recorded at no op, or at a frame that began long before; collectives called in order are on the stream of compute,
    where nothing has to wait.
    """
    if not program.recorded:
        return chosen
    computing = np.unique(program.works.stream[program.works.kind == WorkKind.KERNEL])
    starts, threads = program.ops.start_ns[ops], program.ops.thread[ops]

    def next_op(thread: int, since_ns: int) -> int:
        later = np.flatnonzero((threads == thread) & (starts >= since_ns))
        later = later if len(later) else np.flatnonzero(starts >= since_ns)
        return int(later[np.argmin(starts[later])]) if len(later) else -1

    columns = {name: values.tolist() for name, values in chosen.columns().items()}
    for row, call in enumerate(calls.tolist()):
        if chosen.kind[row] == CallKind.STREAM_WAIT:
            waits = int(program.calls.stream[call]) in computing
            columns["op"][row] = next_op(int(program.calls.thread[call]), int(program.calls.start_ns[call])) if waits else -1
    for index in np.flatnonzero(np.isin(program.works.stream[works], computing)).tolist():
        call = int(program.works.call[works[index]])
        thread = int(program.calls.thread[call])
        added = {
            "kind": int(CallKind.STREAM_WAIT), "api": int(program.calls.api[call]), "thread": thread, "step": 0,
            "op": next_op(thread, int(program.calls.end_ns[call])), "start_ns": NEVER, "end_ns": NEVER, "stream": 0,
            "awaits": index, "after": -1,
        }  # fmt: skip
        for name, values in columns.items():
            values.append(added[name])
    return Calls.from_columns(columns)


def _new_rows(count: int, rows: Rows) -> npt.NDArray[np.int64]:
    """Per old row its new one, -1 for what is left out; the last entry serves rows that were -1 before."""
    result = np.full(count + 1, -1, dtype=np.int64)
    result[rows] = np.arange(len(rows))
    return result


def _selected(table: AnyTable, rows: Rows, **changed: int | npt.NDArray[np.int64]) -> AnyTable:
    """Some rows of a table; references become those of the new rows, other columns a constant or what is given."""
    columns: dict[str, npt.ArrayLike] = {}
    for name in table.TYPES:
        values = getattr(table, name)[rows]
        change = changed.get(name)
        if change is None:
            columns[name] = values
        elif isinstance(change, int):
            columns[name] = np.full(len(rows), change)
        else:
            columns[name] = change if name == "collective" else change[values]
    return type(table).from_columns(columns)
