"""Where the host's time goes: every thread of a recorded program cut into pieces that touch and never overlap.

The op is the lowest op that launches device work, as everywhere in steptime, because that is what a captured program and an
execution trace know too. Calls that an op makes itself while ops inside it launch as well stand alone, under its name. An op
that makes no call is host-only; the outermost such op counts, with all inside it. What lies between two of these (Python, and
the wrapping ops' own time) is charged to the op that follows: `between_ops` where both sit in the same op and phase,
`around_ops` where a wrapper or label opens or closes in between, `between_steps` across a step mark.

Blocking is cut out: synchronisations that had to wait, blocking copies, launches held up by a full queue, threads that wait
for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from steptime.graph.nesting import innermost
from steptime.graph.program import CallKind, Phase, Program
from steptime.graph.table import IntColumn, KindColumn, SmallColumn, Table
from steptime.models.host.blocking import blocked_calls

Mask = npt.NDArray[np.bool_]


class Spent(IntEnum):
    """What a piece of host time was spent on; the first eight are costs, the rest is waiting."""

    BETWEEN_OPS = 0  # T1: from the end of one op to the start of the next, inside the same op
    BEFORE_FIRST_LAUNCH = 1  # T2
    AFTER_LAST_LAUNCH = 2  # T3
    LAUNCH = 3  # T4: inside a call that nothing holds up; by API
    BETWEEN_LAUNCHES = 4  # T5
    HOST_ONLY = 5  # the whole of an op that makes no call
    AROUND_OPS = 6  # like BETWEEN_OPS, where wrappers or labels open or close in between
    BETWEEN_STEPS = 7  # like BETWEEN_OPS, over a step mark; holds the profiler's own work between steps
    BLOCKED = 8  # inside a call that waited for the device
    WAITING = 9  # between ops, until another thread handed over


COSTS = tuple(kind for kind in Spent if kind < Spent.BLOCKED)


@dataclass(frozen=True, eq=False)
class Segments(Table):
    """Pieces of host time, per thread in order of start."""

    spent: KindColumn  # Spent
    name: SmallColumn  # index into Program.names: the op, for LAUNCH and BLOCKED the API
    phase: KindColumn
    thread: SmallColumn
    start_ns: IntColumn
    end_ns: IntColumn

    TYPES: ClassVar = {
        "spent": np.int8, "name": np.int32, "phase": np.int8, "thread": np.int32, "start_ns": np.int64, "end_ns": np.int64,
    }  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Pieces(Table):
    """Calls and host-only ops with the op they count for, per thread in order of start."""

    is_call: KindColumn
    row: SmallColumn  # of the calls, or of the ops
    owner: SmallColumn  # launching op, or -1 where the piece stands alone
    parent: SmallColumn  # op around the owner, or around the piece
    name: SmallColumn
    phase: KindColumn
    step: SmallColumn
    thread: SmallColumn
    start_ns: IntColumn
    end_ns: IntColumn

    TYPES: ClassVar = {
        "is_call": np.int8, "row": np.int32, "owner": np.int32, "parent": np.int32, "name": np.int32, "phase": np.int8,
        "step": np.int32, "thread": np.int32, "start_ns": np.int64, "end_ns": np.int64,
    }  # fmt: skip


def segments(program: Program) -> Segments:
    """The host time of the main and the backward threads inside the program's steps, cut into pieces."""
    counted = np.array([thread.role in ("main", "backward") for thread in program.threads], dtype=bool)
    pieces = _pieces(program, counted)
    if not len(pieces):
        return Segments.empty()
    own = Segments(
        spent=np.where(pieces.is_call, Spent.LAUNCH, Spent.HOST_ONLY),
        name=np.where(pieces.is_call, _of_call(program.calls.api, pieces), pieces.name),
        phase=pieces.phase,
        thread=pieces.thread,
        start_ns=pieces.start_ns,
        end_ns=pieces.end_ns,
    )
    blocked = (pieces.is_call == 1) & _of_call(blocked_calls(program), pieces)
    own = own.replace(spent=np.where(blocked, Spent.BLOCKED, own.spent))
    parts = [own, *_between(program, pieces)]
    columns = {name: np.concatenate([part.columns()[name] for part in parts]) for name in own.columns()}
    order = np.lexsort((columns["end_ns"], columns["start_ns"], columns["thread"]))
    return Segments.from_columns({name: values[order] for name, values in columns.items()})


def _of_call(column: npt.NDArray[Any], pieces: _Pieces) -> npt.NDArray[Any]:
    """A column of the calls for every piece; whatever it holds first where the piece is an op."""
    return column[pieces.row * pieces.is_call] if len(column) else np.zeros(len(pieces), dtype=column.dtype)


def _pieces(program: Program, counted: Mask) -> _Pieces:
    ops, calls = program.ops, program.calls
    call = np.flatnonzero((calls.kind <= CallKind.HOST) & counted[calls.thread] & (calls.step >= 0))
    direct = np.zeros(len(ops), dtype=bool)
    direct[calls.op[call][calls.op[call] >= 0]] = True
    enclosing = _enclosing(ops.parent, np.flatnonzero(direct))
    enclosing |= _holding_hand_overs(program)
    lowest = direct & ~enclosing
    transparent = enclosing | direct  # not one piece of host-only time
    outermost = (ops.parent < 0) | enclosing[ops.parent] if len(ops) else direct
    host_only = np.flatnonzero(~transparent & outermost & counted[ops.thread] & (ops.step >= 0))
    inside = calls.op[call]
    known = np.maximum(inside, 0)
    owner = np.where((inside >= 0) & lowest[known], inside, -1) if len(ops) else inside
    phase = np.where(inside >= 0, ops.phase[known], Phase.OTHER) if len(ops) else np.full(len(call), Phase.OTHER)
    name = np.where(inside >= 0, ops.name[known], calls.api[call]) if len(ops) else calls.api[call]
    around = np.where(owner >= 0, ops.parent[known], inside) if len(ops) else inside
    columns = {
        "is_call": (np.ones(len(call)), np.zeros(len(host_only))),
        "row": (call, host_only),
        "owner": (owner, np.full(len(host_only), -1)),
        "parent": (around, ops.parent[host_only]),
        "name": (name, ops.name[host_only]),
        "phase": (phase, ops.phase[host_only]),
        "step": (calls.step[call], ops.step[host_only]),
        "thread": (calls.thread[call], ops.thread[host_only]),
        "start_ns": (calls.start_ns[call], ops.start_ns[host_only]),
        "end_ns": (calls.end_ns[call], ops.end_ns[host_only]),
    }
    return _apart(_Pieces.from_columns({key: np.concatenate(both) for key, both in columns.items()}))


def _enclosing(parent: SmallColumn, rows: npt.NDArray[np.integer]) -> Mask:
    """The ops around the given ones, at any distance."""
    found = np.zeros(len(parent), dtype=bool)
    above = np.unique(parent[rows]) if len(rows) else rows
    above = above[above >= 0]
    while len(above):
        found[above] = True
        above = np.unique(parent[above])
        above = above[above >= 0]
        above = above[~found[above]]
    return found


def _holding_hand_overs(program: Program) -> Mask:
    """Ops inside which another thread handed over: a label around `backward()` waits, it does not work."""
    ops, calls = program.ops, program.calls
    taking = np.flatnonzero(calls.after >= 0)
    if not len(taking) or not len(ops):
        return np.zeros(len(ops), dtype=bool)
    moment = calls.end_ns[calls.after[taking]]
    thread = calls.thread[taking].astype(np.int64)
    inner = innermost(ops.thread, ops.start_ns, ops.end_ns, ops.parent, thread, moment, moment)
    inner = inner[inner >= 0]
    found = _enclosing(ops.parent, inner)
    found[inner] = True
    return found


def _apart(pieces: _Pieces) -> _Pieces:
    """In order, overlaps cut off, and without pieces that lie inside others (a driver call inside a runtime call)."""
    pieces = pieces.take(np.lexsort((-pieces.end_ns, pieces.start_ns, pieces.thread)))
    if not len(pieces):
        return pieces
    # Threads laid end to end on one axis, so that a running maximum does not leak from one into the next.
    lift = pieces.thread.astype(np.int64) * (int(pieces.end_ns.max()) - int(pieces.start_ns.min()) + 1)
    reached = np.maximum.accumulate(pieces.end_ns + lift) - lift
    before = np.concatenate([[np.iinfo(np.int64).min], reached[:-1]])
    first = np.concatenate([[True], pieces.thread[1:] != pieces.thread[:-1]])
    start = np.where(first, pieces.start_ns, np.maximum(pieces.start_ns, before))
    inside = ~first & (pieces.end_ns <= before) & (pieces.start_ns < before)
    return pieces.replace(start_ns=start).take(~inside)


def _between(program: Program, pieces: _Pieces) -> list[Segments]:
    """What lies between neighbours: inside one op, after one op, between two, before the next."""
    ops = program.ops
    known = np.maximum(pieces.owner, 0)
    owned = pieces.owner >= 0
    opens = np.where(owned, np.minimum(ops.start_ns[known], pieces.start_ns), pieces.start_ns) if len(ops) else pieces.start_ns
    closes = np.where(owned, np.maximum(ops.end_ns[known], pieces.end_ns), pieces.end_ns) if len(ops) else pieces.end_ns
    left, right = np.arange(len(pieces) - 1), np.arange(1, len(pieces))
    near = pieces.thread[left] == pieces.thread[right]
    within = near & (pieces.owner[left] == pieces.owner[right]) & owned[left]
    apart = near & ~within
    found = [_piece(pieces, right, Spent.BETWEEN_LAUNCHES, pieces.end_ns[left], pieces.start_ns[right], within)]
    # Rows of the same thread, or the two ends of a thread: where there is no neighbour the op itself is the limit.
    last, first = ~np.append(near, False), ~np.append(False, near)
    close = np.append(np.where(apart, np.minimum(closes[left], pieces.start_ns[right]), 0), 0)
    close = np.where(last, closes, close)
    found.append(_piece(pieces, np.arange(len(pieces)), Spent.AFTER_LAST_LAUNCH, pieces.end_ns, close,
                        owned & (last | np.append(apart, False))))  # fmt: skip
    begin = np.append(0, np.where(apart, np.maximum(opens[right], close[left]), 0))
    begin = np.where(first, opens, begin)
    found.append(_piece(pieces, np.arange(len(pieces)), Spent.BEFORE_FIRST_LAUNCH, begin, pieces.start_ns,
                        owned & (first | np.append(False, apart))))  # fmt: skip
    rows = np.flatnonzero(apart)
    gap = _Gaps(rows + 1, close[rows], begin[rows + 1])
    until = _handed_over(program, pieces, gap, closes)
    handed = until > gap.start_ns
    # After a hand-over the thread's own previous op, and its step, have nothing to do with the gap.
    kinds = np.where(handed, Spent.AROUND_OPS, _kinds(pieces, gap.row)).astype(np.int8)
    found.append(_piece(pieces, gap.row, kinds, until, gap.end_ns, np.ones(len(rows), dtype=bool)))
    found.append(_piece(pieces, gap.row, Spent.WAITING, gap.start_ns, until, handed))
    return found


@dataclass(frozen=True, eq=False)
class _Gaps:
    row: IntColumn  # the piece that follows
    start_ns: IntColumn
    end_ns: IntColumn


def _piece(
    pieces: _Pieces, row: IntColumn, spent: int | KindColumn, start: IntColumn, end: IntColumn, chosen: Mask
) -> Segments:
    kinds = np.broadcast_to(np.asarray(spent, dtype=np.int8), row.shape)
    at = row[chosen]
    return Segments(kinds[chosen], pieces.name[at], pieces.phase[at], pieces.thread[at], start[chosen], end[chosen])


def _kinds(pieces: _Pieces, row: IntColumn) -> KindColumn:
    same = (pieces.parent[row] == pieces.parent[row - 1]) & (pieces.phase[row] == pieces.phase[row - 1])
    kinds = np.where(same, Spent.BETWEEN_OPS, Spent.AROUND_OPS)
    return np.where(pieces.step[row] != pieces.step[row - 1], Spent.BETWEEN_STEPS, kinds).astype(np.int8)


def _handed_over(program: Program, pieces: _Pieces, gap: _Gaps, closes: IntColumn) -> IntColumn:
    """Per gap, until when the thread waited for another: the end of what the other did last before it; else the gap's start."""
    until = gap.start_ns.copy()
    calls = program.calls
    for row in np.flatnonzero(calls.after >= 0).tolist():
        giver = int(calls.after[row])
        gaps = np.flatnonzero(pieces.thread[gap.row] == calls.thread[row])
        at = int(np.searchsorted(gap.end_ns[gaps], calls.end_ns[giver]))
        if at == len(gaps) or gap.start_ns[gaps[at]] > calls.end_ns[giver]:
            continue
        others = closes[pieces.thread == calls.thread[giver]]
        before = int(np.searchsorted(others, gap.end_ns[gaps[at]], side="right")) - 1
        done = int(others[before]) if before >= 0 else 0
        until[gaps[at]] = max(until[gaps[at]], min(max(done, int(calls.end_ns[giver])), int(gap.end_ns[gaps[at]])))
    return until
