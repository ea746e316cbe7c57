"""Ties a Kineto-read `Program` to an execution trace: node ids, tensor identity, outputs, details of collectives.

Record function ids tie an op to its node where both files come from one run and carry them. Otherwise order does: on each
thread, the ops of a step have the same names in the same order in both files, even if the execution trace is of another run:
the longest common subsequence by the greedy method of E. W. Myers, Algorithmica 1 (1986), 251-266, whose time grows with the
difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._program.collectives import WAIT, numbered
from steptime._program.execution import ExecutionTrace, collective_of, outer_records, settled_groups
from steptime._program.program import Collective, IntColumn, Program, Signature, SmallColumn, Tensor, Value

# Ids that count from 1 in both files agree by chance in about one op of twenty; files of one run agree in all.
_ID_AGREEMENT = 0.95
_ID_COVERAGE = 0.5
# A step is the recorded one if at least this much of the shorter sequence corresponds; a different step shares far less.
_STEP_AGREEMENT = 0.8
# Where less than this share of the ops is tied, something is lost that people should know of.
_WORTH_A_WARNING = 0.99


def link(program: Program, trace: ExecutionTrace) -> Program:
    """The program with what the execution trace knows about its ops and collectives; a warning says how much was tied."""
    rows, how, skipped = match(program, trace)
    if not program.meta.get("world_size_known", False):
        program = replace(program, world_size=max(program.world_size, trace.world_size or 0))
    signatures, column, conflicts = _signatures(program, trace, rows)
    collectives, told = _collectives(program, trace, np.where(conflicts, -1, rows))
    nodes = np.array([node.id for node in trace.nodes] or [-1], dtype=np.int64)
    ops = program.ops.replace(node=np.where(rows >= 0, nodes[rows], -1), signature=column)
    text = _how_much(program, trace, rows, how)
    meta = {**program.meta, "linked": text}
    linked = replace(program, ops=ops, signatures=signatures, collectives=collectives, meta=meta)
    loose = [text] if (rows >= 0).sum() < _WORTH_A_WARNING * len(rows) else []
    return linked.with_warnings(*trace.warnings, *loose, *_report(program, trace, skipped, int(conflicts.sum())), *told)


def match(program: Program, trace: ExecutionTrace) -> tuple[IntColumn, str, tuple[int, ...]]:
    """Per op the row of its node or -1, by what they were matched, and the steps that are not the recorded one."""
    names = {name: row for row, name in enumerate(program.names)}
    tokens = np.array([names.get(node.name, -1) for node in trace.nodes], dtype=np.int64)
    for key in ("record_function_id", "external_id"):
        rows = _by_id(program, trace, tokens, program.meta.get(key))
        if rows is not None:
            return rows, key.replace("_", " "), ()
    rows, skipped = _by_order(program, trace, tokens)
    return rows, "order of names", skipped


def _by_id(program: Program, trace: ExecutionTrace, tokens: IntColumn, ids: npt.NDArray[np.int64] | None) -> IntColumn | None:
    known = np.array([node.rf_id for node in trace.nodes], dtype=np.int64)
    if ids is None or not len(known):
        return None
    order = np.argsort(known, kind="stable")
    index = np.searchsorted(known[order], ids).clip(0, len(known) - 1)
    rows = np.where((known[order][index] == ids) & (ids > 0), order[index], -1)
    hits = int((rows >= 0).sum())
    agree = (rows >= 0) & (tokens[rows] == program.ops.name)
    if hits == 0 or agree.sum() < _ID_AGREEMENT * hits or agree.sum() < _ID_COVERAGE * len(known):
        return None
    return np.where(agree, rows, -1)


def _by_order(program: Program, trace: ExecutionTrace, tokens: IntColumn) -> tuple[IntColumn, tuple[int, ...]]:
    matched = np.full(len(program.ops), -1, dtype=np.int64)
    tids = np.array([node.tid for node in trace.nodes], dtype=np.int64)
    recorded = [np.flatnonzero((tids == tid) & (tokens >= 0)) for tid in np.unique(tids)]
    matcher = _Matcher(tokens, [rows for rows in recorded if len(rows)])
    skipped = []
    for step, window in _windows(program, len(trace.nodes)):
        lanes = _lanes(program, window, matcher.vocabulary)
        pairs = matcher.pairs(program.ops.name, lanes)
        smaller = min(sum(len(lane) for lane in lanes), matcher.size)
        if smaller and len(pairs) >= _STEP_AGREEMENT * smaller:
            matched[[op for op, _ in pairs]] = [row for _, row in pairs]
        elif len(window):
            skipped.append(step)
    return matched, tuple(skipped)


def _windows(program: Program, recorded: int) -> Iterator[tuple[int, IntColumn]]:
    everything = np.arange(len(program.ops))
    windows = [(step, np.flatnonzero(program.ops.step == step)) for step in program.steps]
    # An execution trace that ran all the time holds several steps: then the runs are compared as a whole.
    typical = float(np.median([len(window) for _, window in windows])) if windows else 0.0
    if len(windows) < 2 or recorded > 1.5 * typical:
        yield -1, everything
        return
    yield from windows


def _lanes(program: Program, window: IntColumn, vocabulary: IntColumn) -> list[IntColumn]:
    inside = window[np.isin(program.ops.name[window], vocabulary)]
    ids = program.meta.get("external_id")
    if ids is not None and len(inside) and (ids[inside] > 0).all():
        # Ids are drawn when an op starts; clocks that tick in microseconds put several starts into one tick.
        inside = inside[np.argsort(ids[inside], kind="stable")]
    threads = program.ops.thread[inside]
    return [inside[threads == thread] for thread in np.unique(threads)]


@dataclass(frozen=True)
class _Matcher:
    """The recorded sequences of names, one per thread, ready to be compared with many steps."""

    tokens: IntColumn
    recorded: Sequence[IntColumn]

    @property
    def size(self) -> int:
        return sum(len(rows) for rows in self.recorded)

    @property
    def vocabulary(self) -> IntColumn:
        return np.unique(self.tokens[self.tokens >= 0])

    def pairs(self, name: SmallColumn, lanes: Sequence[IntColumn]) -> list[tuple[int, int]]:
        """Op and node rows that correspond, each recorded thread compared with the thread most like it."""
        results: list[tuple[int, int]] = []
        bags = [Counter(name[lane].tolist()) for lane in lanes]
        alike = [
            (-(bag & Counter(self.tokens[rows].tolist())).total(), i, j)
            for i, bag in enumerate(bags)
            for j, rows in enumerate(self.recorded)
        ]
        free_lanes, free_recorded = set(range(len(lanes))), set(range(len(self.recorded)))
        for _, i, j in sorted(alike):
            if i in free_lanes and j in free_recorded:
                free_lanes.remove(i)
                free_recorded.remove(j)
                rows = self.recorded[j]
                same = align(name[lanes[i]].tolist(), self.tokens[rows].tolist())
                results.extend((int(lanes[i][x]), int(rows[y])) for x, y in same)
        return results


def _signatures(
    program: Program, trace: ExecutionTrace, rows: IntColumn
) -> tuple[tuple[Signature, ...], IntColumn, npt.NDArray[np.bool_]]:
    known: dict[tuple[int, int], tuple[int, bool]] = {}
    signatures: list[Signature] = []
    column = np.full(len(rows), -1, dtype=np.int64)
    conflicts = np.zeros(len(rows), dtype=bool)
    for op, (old, row) in enumerate(zip(program.ops.signature.tolist(), rows.tolist(), strict=True)):
        if old < 0 and row < 0:
            continue
        if (old, row) not in known:
            mine = program.signatures[old] if old >= 0 else Signature()
            merged = _merged(mine, trace.nodes[row].signature) if row >= 0 else mine
            known[old, row] = (len(signatures), merged is None)
            signatures.append(mine if merged is None else merged)
        column[op], conflicts[op] = known[old, row]
    return tuple(signatures), column, conflicts


def _merged(mine: Signature, recorded: Signature) -> Signature | None:
    inputs = list(recorded.inputs)
    if len(mine.inputs) == len(inputs):
        for at, (old, new) in enumerate(zip(mine.inputs, inputs, strict=True)):
            if _differ(old, new):
                return None
            if isinstance(old, Tensor) and isinstance(new, Tensor) and new.strides is None:
                inputs[at] = replace(new, strides=old.strides)
    if not inputs and not recorded.outputs:
        return mine
    return Signature(tuple(inputs) or mine.inputs, recorded.outputs)


def _differ(old: Value, new: Value) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return old.shape != new.shape
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        return any(_differ(x, y) for x, y in zip(old, new, strict=True))
    return False


def _collectives(program: Program, trace: ExecutionTrace, rows: IntColumn) -> tuple[tuple[Collective, ...], list[str]]:
    groups = settled_groups(trace.groups, program.rank, program.world_size)
    recorded = {
        index: known
        for index, row in _recorded_calls(program, trace, rows)
        if (comm := trace.nodes[row].comm) is not None and (known := collective_of(comm, groups, program.rank)) is not None
    }
    filled = [_filled(each, recorded.get(index)) for index, each in enumerate(program.collectives)]
    return _regrouped(filled, recorded, program.source)


def _recorded_calls(program: Program, trace: ExecutionTrace, rows: IntColumn) -> Iterator[tuple[int, int]]:
    """Index of each collective with the row of the node that recorded it."""
    outer = outer_records(trace)
    calls = program.works.call.tolist()
    for work in np.flatnonzero(program.works.collective >= 0).tolist():
        op = int(program.calls.op[calls[work]]) if calls[work] >= 0 else -1
        while op >= 0:
            row = int(rows[op])
            comm = trace.nodes[row].comm if row >= 0 else None
            if comm is not None and comm.kind != WAIT and row not in outer:
                yield int(program.works.collective[work]), row
                break
            op = int(program.ops.parent[op])


def _filled(old: Collective, new: Collective | None) -> Collective:
    if new is None or (old.bytes_in and new.bytes_in and old.bytes_in != new.bytes_in):
        return old
    return replace(
        old,
        kind=old.kind if new.kind == "unknown" else new.kind,
        ranks=old.ranks or new.ranks,
        bytes_in=old.bytes_in or new.bytes_in,
        bytes_out=old.bytes_out or new.bytes_out,
        dtype=old.dtype or new.dtype,
        in_splits=old.in_splits or new.in_splits,
        out_splits=old.out_splits or new.out_splits,
        root=new.root if old.root is None else old.root,
    )


def _regrouped(
    collectives: list[Collective], recorded: Mapping[int, Collective], source: str
) -> tuple[tuple[Collective, ...], list[str]]:
    """Give collectives of no named group the recorded groups, if these tell more than one apart and cover all of them."""
    nameless = [index for index, each in enumerate(collectives) if not each.group]
    groups = {recorded[index].group for index in nameless if index in recorded}
    if len(groups) < 2:
        return tuple(collectives), []
    lost = [index for index in nameless if index not in recorded]
    if lost:
        text = f"{len(lost)} of {len(nameless)} collectives have no recorded process group; all are left in one group"
        return tuple(collectives), [f"{source}: {text}"]
    grouped = [replace(collectives[index], group=recorded[index].group, ranks=recorded[index].ranks) for index in nameless]
    before = Counter((each.group, each.ranks) for each in grouped if each.sequence < 0)
    for index, each in zip(nameless, numbered(grouped, before), strict=True):
        collectives[index] = each
    return tuple(collectives), []


def _how_much(program: Program, trace: ExecutionTrace, rows: IntColumn, how: str) -> str:
    tied = int((rows >= 0).sum())
    missing = len(trace.nodes) - len(np.unique(rows[rows >= 0]))
    return (
        f"{program.source}: {tied} of {len(rows)} ops are linked to {trace.source} by {how}; "
        f"{missing} of its {len(trace.nodes)} nodes have no op here"
    )


def _report(program: Program, trace: ExecutionTrace, skipped: tuple[int, ...], conflicts: int) -> Iterator[str]:
    if skipped:
        steps = ", ".join(str(step) for step in skipped) if skipped != (-1,) else "all"
        yield f"{program.source}: not linked, because the ops differ from {trace.source}: steps {steps}"
    if conflicts:
        yield f"{program.source}: {conflicts} linked ops have other shapes than in {trace.source}; they keep their own"
    if trace.rank is not None and trace.rank != program.rank:
        yield f"{program.source}: rank {program.rank} is linked to a trace of rank {trace.rank}; check the file names"


def align(a: Sequence[int], b: Sequence[int], limit: int = 1000) -> list[tuple[int, int]]:
    """list[tuple[int, int]] of equal elements in order. After `limit` differences the rest is left unpaired."""
    begin = 0
    shorter = min(len(a), len(b))
    while begin < shorter and a[begin] == b[begin]:
        begin += 1
    end = 0
    while end < shorter - begin and a[len(a) - 1 - end] == b[len(b) - 1 - end]:
        end += 1
    middle = _differing(a[begin : len(a) - end], b[begin : len(b) - end], limit)
    head = [(i, i) for i in range(begin)]
    tail = [(len(a) - i, len(b) - i) for i in range(end, 0, -1)]
    return [*head, *((begin + i, begin + j) for i, j in middle), *tail]


def _differing(a: Sequence[int], b: Sequence[int], limit: int) -> list[tuple[int, int]]:
    if not a or not b:
        return []
    reach = {1: 0}  # diagonal (place in a minus place in b) -> furthest place in a
    history: list[dict[int, int]] = []
    best, best_length = (0, 0), 1
    for differences in range(min(limit, len(a) + len(b)) + 1):
        history.append(dict(reach))
        for diagonal in range(-differences, differences + 1, 2):
            down = _down(reach, diagonal, differences)
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            while x < len(a) and x - diagonal < len(b) and a[x] == b[x - diagonal]:
                x += 1
            reach[diagonal] = x
            if x <= len(a) and x - diagonal <= len(b) and 2 * x - diagonal > sum(best):
                best, best_length = (x, x - diagonal), len(history)
        if best == (len(a), len(b)):
            break
    return _walk_back(history[:best_length], best)


def _down(reach: dict[int, int], diagonal: int, differences: int) -> bool:
    return diagonal == -differences or (diagonal != differences and reach[diagonal - 1] < reach[diagonal + 1])


def _walk_back(history: Sequence[dict[int, int]], end: tuple[int, int]) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    x, y = end
    for differences in range(len(history) - 1, -1, -1):
        reach, diagonal = history[differences], x - y
        down = _down(reach, diagonal, differences)
        start = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
        while x > start:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = (x, y - 1) if down else (x - 1, y)
    return pairs[::-1]
