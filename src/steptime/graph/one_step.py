"""One step of a program that was recorded over several: what models are asked about, as if it stood alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from steptime.graph.program import NEVER, CallKind, Collective, Program, WorkKind
from steptime.graph.table import Table

Rows = npt.NDArray[np.intp]
AnyTable = TypeVar("AnyTable", bound=Table)


def one_step(program: Program) -> Program:
    """The ops and collectives of one step in the middle, without times and kernels; the program itself where it is that."""
    if len(program.steps) <= 1 and not program.recorded:
        return program
    step = program.steps[len(program.steps) // 2] if program.steps else -1
    ops = np.flatnonzero(program.ops.step == step)
    works = np.flatnonzero(
        (program.works.kind == WorkKind.COLLECTIVE) & (program.works.step == step) & (program.works.call >= 0)
    )
    calls = _calls(program, step, works)
    op_place, call_place, work_place = (
        _places(len(table), kept) for table, kept in ((program.ops, ops), (program.calls, calls), (program.works, works))
    )
    collectives = [program.collectives[place] for place in program.works.collective[works].tolist()]
    return replace(
        program,
        ops=_taken(program.ops, ops, parent=op_place, start_ns=NEVER, end_ns=NEVER, step=0),
        calls=_taken(
            program.calls, calls, op=op_place, awaits=work_place, after=call_place, start_ns=NEVER, end_ns=NEVER, step=0
        ),
        works=_taken(
            program.works, works, call=call_place, start_ns=NEVER, end_ns=NEVER, step=0, collective=np.arange(len(works))
        ),
        collectives=_numbered(collectives),
        steps=(0,),
    )


def _calls(program: Program, step: int, works: Rows) -> Rows:
    """What launches these collectives, waits for one of them, or marks the step."""
    calls = program.calls
    marks = np.isin(calls.kind, (CallKind.STEP_BEGIN, CallKind.STEP_END))
    waits = (calls.kind == CallKind.STREAM_WAIT) & np.isin(calls.awaits, works)
    launches = np.zeros(len(calls), dtype=np.bool_)
    launches[program.works.call[works]] = True
    return np.flatnonzero((calls.step == step) & (marks | waits | launches))


def _places(count: int, kept: Rows) -> npt.NDArray[np.int64]:
    """Per old row its new one, -1 for what is left out; the last entry serves rows that were -1 before."""
    found = np.full(count + 1, -1, dtype=np.int64)
    found[kept] = np.arange(len(kept))
    return found


def _taken(table: AnyTable, rows: Rows, **changed: int | npt.NDArray[np.int64]) -> AnyTable:
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


def _numbered(collectives: list[Collective]) -> tuple[Collective, ...]:
    count: Counter[tuple[str, tuple[int, ...]]] = Counter()
    found = []
    for each in collectives:
        key = (each.group, each.ranks)
        found.append(replace(each, sequence=count[key]))
        count[key] += 1
    return tuple(found)
