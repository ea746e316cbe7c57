"""Chakra traces (`PREFIX.RANK.et`): a graph of host ops, device work and collectives with their dependencies -> Program.

Work is enqueued in an order that respects the dependencies. What depends on work of another stream gets a stream wait; a host
op that depends on work synchronises with it. Without recorded starts, work is laid end to end as its dependencies allow.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from steptime._program.collectives import numbered, point_to_point
from steptime._program.formats import BREAKS_OFF, Format, TraceFile, TraceReader, opened
from steptime._program.formats.arguments import ArgumentLists
from steptime._program.formats.protobuf import (
    COLLECTIVES,
    Attribute,
    ChakraNode,
    NodeType,
    WireError,
    decode_node,
    is_metadata,
    messages,
)
from steptime._program.program import (
    MOST_RANKS,
    NEVER,
    CallKind,
    Calls,
    Collective,
    Ops,
    Phase,
    Program,
    Signature,
    Stream,
    Thread,
    WorkKind,
    Works,
)
from steptime._units import NS_PER_US
from steptime.errors import TraceError

_Table = TypeVar("_Table", Ops, Calls, Works)

_RANK = re.compile(r"\.(\d{1,6})\.et(?:\.gz)?$")
_WORK_TYPES = (NodeType.MEM_LOAD, NodeType.MEM_STORE, NodeType.COMP, NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)
_COMM_TYPES = (NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)
_MEM_TYPES = (NodeType.MEM_LOAD, NodeType.MEM_STORE)
# Streams for nodes that name none.
_COMPUTE, _COMMUNICATION, _MEMORY = "compute", "communication", "memory"
# Times beyond these do not fit a column of nanoseconds: a start in the year 2255, a duration of twelve days.
_LATEST_US, _LONGEST_US = 2**53, 2**40

# Lies beside the traces of a job.
GROUPS_FILE = "comm_group.json"


def rank_in_name(source: str) -> int | None:
    """The rank in a file name like `model.3.et`."""
    result = _RANK.search(source)
    return int(result.group(1)) if result else None


def read_groups(data: bytes, source: str) -> dict[str, tuple[int, ...]]:
    """Process groups from the `comm_group.json` beside the traces: name -> global ranks."""
    try:
        groups = msgspec.json.decode(data, type=dict[str, list[int]])
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f'{source}: not a list of process groups ({error}); expected {{"name": [ranks]}}') from error
    wrong = next((rank for ranks in groups.values() for rank in ranks if not 0 <= rank < MOST_RANKS), None)
    if wrong is not None:
        raise TraceError(f"{source}: rank {wrong} in a process group; expected 0 to {MOST_RANKS - 1}")
    return {name: tuple(sorted(set(ranks))) for name, ranks in groups.items()}


def read(
    data: bytes, source: str, *, groups: Mapping[str, tuple[int, ...]] | None = None, world_size: int | None = None
) -> Program:
    """The program of one rank from the bytes of its Chakra trace."""
    nodes, warnings = _nodes(data, source)
    rank = rank_in_name(source)
    if rank is None:
        warnings.append("the file name holds no rank (PREFIX.RANK.et); it is read as rank 0")
    known = dict(groups or {})
    size = world_size or max([rank or 0, *(each for ranks in known.values() for each in ranks)]) + 1
    ordered, broken = _in_order(nodes)
    rows = _ChakraRows(rank or 0, size, known, tuple(range(size)))
    rows.meta |= {"rank_known": rank is not None, "world_size_known": bool(world_size or known)}
    for node in ordered:
        rows.add(node)
    if not rows.works and not rows.ops:
        raise TraceError(f"{source}: {len(nodes)} nodes, but none computes or communicates; is it a Chakra execution trace?")
    return rows.program(source, [*warnings, *broken])


def _nodes(data: bytes, source: str) -> tuple[list[ChakraNode], list[str]]:
    nodes: list[ChakraNode] = []
    warnings: list[str] = []
    skipped = 0
    try:
        for index, (begin, end) in enumerate(messages(data)):
            try:
                if index or not is_metadata(data, begin, end):
                    nodes.append(decode_node(data, begin, end))
            except WireError:
                skipped += 1
    except WireError as error:
        warnings.append(f"the file {BREAKS_OFF} after {len(nodes)} nodes ({error}); these were read")
    if not nodes:
        reason = warnings[0] if warnings else "no nodes in it"
        raise TraceError(f"{source}: not a Chakra trace ({reason}); expected length-delimited et_def.proto messages")
    if skipped:
        warnings.append(f"{skipped} messages are damaged and left out")
    return nodes, warnings


def _in_order(nodes: Sequence[ChakraNode]) -> tuple[list[ChakraNode], list[str]]:
    """Nodes after what they depend on, by start, then by id; missing and circular dependencies are dropped and named."""
    first: dict[int, int] = {}
    for row, node in enumerate(nodes):
        first.setdefault(node.id, row)
    after: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    missing = 0
    for row, node in enumerate(nodes):
        for dep in set(node.deps):
            missing += dep not in first
            if dep in first and first[dep] != row:
                after[first[dep]].append(row)
                waiting[row] += 1
    keys = [(node.start_us, node.id, row) for row, node in enumerate(nodes)]
    order, circles = _kahn(keys, after, waiting)
    warnings = []
    if len(first) < len(nodes):
        warnings.append(f"{len(nodes) - len(first)} nodes repeat an id; dependencies go to the first of each")
    if missing:
        warnings.append(f"{missing} dependencies name nodes that are not there; they are dropped")
    if circles:
        node = nodes[circles[0]]
        warnings.append(f"{len(circles)} circles of dependencies were cut (first: node {node.id}, {node.name})")
    return [nodes[row] for row in order], warnings


def _kahn(
    keys: Sequence[tuple[int, int, int]], after: Sequence[Sequence[int]], waiting: list[int]
) -> tuple[list[int], list[int]]:
    ready = [key for key in keys if waiting[key[2]] == 0]
    heapq.heapify(ready)
    blocked = sorted(keys, reverse=True)
    placed = [False] * len(keys)
    order: list[int] = []
    circles: list[int] = []
    while len(order) < len(keys):
        if ready:
            row = heapq.heappop(ready)[2]
        else:
            row = blocked.pop()[2]
            if not placed[row]:
                circles.append(row)
        if placed[row]:
            continue
        placed[row] = True
        order.append(row)
        for later in after[row]:
            waiting[later] -= 1
            if waiting[later] == 0 and not placed[later]:
                heapq.heappush(ready, keys[later])
    return order, circles


@dataclass
class _ChakraRows:
    """Collects rows in order of issue."""

    rank: int
    world_size: int
    groups: Mapping[str, tuple[int, ...]]
    everybody: tuple[int, ...]
    names: dict[str, int] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    ops: list[tuple[int, ...]] = field(default_factory=list)
    calls: list[tuple[int, ...]] = field(default_factory=list)
    works: list[tuple[int, ...]] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    deps: list[list[int]] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    op_of: dict[int, int] = field(default_factory=dict)
    work_of: dict[int, int] = field(default_factory=dict)

    def add(self, node: ChakraNode) -> None:
        if node.type == NodeType.COMP and bool(node.attrs.get("is_cpu_op", False)):
            self._host(node)
        elif node.type in _WORK_TYPES:
            self._device(node)

    def _host(self, node: ChakraNode) -> None:
        thread = self.threads.setdefault(_number(node.attrs.get("tid"), 0), len(self.threads))
        start, end = _span(node)
        row = len(self.ops)
        self.op_of.setdefault(node.id, row)
        sequence = _number(node.attrs.get("seq_id"), -1)
        name = self._name(node.name)
        self.ops.append(
            (name, thread, start, end, -1, 0, Phase.OTHER, sequence, self._signature(node), min(node.id, 2**63 - 1))
        )
        for dep in self._works_before(node):
            self._call(CallKind.EVENT_SYNC, "cudaEventSynchronize", thread, row, awaits=dep)
        self.calls.append((CallKind.HOST, name, thread, row, 0, start, end, -1, -1, -1))

    def _device(self, node: ChakraNode) -> None:
        stream = self.streams.setdefault(_stream(node), len(self.streams))
        op = next((self.op_of[dep] for dep in reversed(node.deps) if dep in self.op_of), -1)
        thread = self.ops[op][1] if op >= 0 else self.threads.setdefault(0, len(self.threads))
        before = self._works_before(node)
        for dep in before:
            if self.works[dep][2] != stream:
                self._call(CallKind.STREAM_WAIT, "cudaStreamWaitEvent", thread, op, stream, dep)
        self._call(CallKind.LAUNCH, "launch", thread, op)
        self.work_of.setdefault(node.id, len(self.works))
        collective, kind, bytes_moved = -1, WorkKind.KERNEL, 0
        if node.type in _COMM_TYPES:
            collective, kind = len(self.collectives), WorkKind.COLLECTIVE
            self.collectives.append(self._collective(node))
        elif node.type in _MEM_TYPES:
            kind, bytes_moved = WorkKind.COPY, max(0, _number(node.attrs.get("tensor_size"), 0))
        launch = len(self.calls) - 1
        self.works.append((kind, self._name(node.name), stream, launch, 0, *_span(node), bytes_moved, collective))
        self.durations.append(_duration_ns(node))
        self.deps.append(before)

    def _works_before(self, node: ChakraNode) -> list[int]:
        return sorted({self.work_of[dep] for dep in node.deps if dep in self.work_of})

    def _call(self, kind: CallKind, api: str, thread: int, op: int, stream: int = -1, awaits: int = -1) -> None:
        self.calls.append((kind, self._name(api), thread, op, 0, NEVER, NEVER, stream, awaits, -1))

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _signature(self, node: ChakraNode) -> int:
        inputs, outputs = _arguments(node.inputs), _arguments(node.outputs)
        if not inputs.values and not outputs.values:
            return -1
        self.signatures.append(Signature(inputs.parsed(), outputs.parsed()))
        return len(self.signatures) - 1

    def _collective(self, node: ChakraNode) -> Collective:
        size = max(0, _number(node.attrs.get("comm_size"), 0))
        group = str(node.attrs.get("pg_name", node.attrs.get("comm_group", "")))
        ranks = self.groups.get(group, self.everybody if group in ("", "0") else ())
        if node.type == NodeType.COMM_COLL:
            number = _number(node.attrs.get("comm_type"), -1)
            kind = COLLECTIVES[number] if 0 <= number < len(COLLECTIVES) else "unknown"
            root = _number(node.attrs.get("root"), -1)
            return Collective(kind, group, ranks, 0, size, size, root=root if root >= 0 else None)
        source, target = _number(node.attrs.get("comm_src"), self.rank), _number(node.attrs.get("comm_dst"), self.rank)
        kind = "send" if node.type == NodeType.COMM_SEND else "recv"
        tag = _number(node.attrs.get("comm_tag"), 0)
        name, ranks, root = point_to_point(group, source, target)
        return Collective(kind, name + (f"#{tag}" if tag else ""), ranks, 0, size, size, root=root)

    def program(self, source: str, warnings: list[str]) -> Program:
        ops, calls = Ops.from_rows(self.ops), Calls.from_rows(self.calls)
        works, origin, text = self._timed(Works.from_rows(self.works))
        return Program(
            rank=self.rank,
            world_size=self.world_size,
            names=tuple(self.names),
            threads=tuple(Thread(tid, "main" if row == 0 else "other") for row, tid in enumerate(self.threads)),
            streams=tuple(Stream(int(key) if key.isdigit() else -1 - row) for row, key in enumerate(self.streams)),
            ops=_shifted(ops, origin),
            calls=_shifted(calls, origin),
            works=works,
            collectives=numbered(self.collectives),
            signatures=tuple(self.signatures),
            steps=(0,),
            origin_ns=origin,
            source=source,
            warnings=tuple(f"{source}: {each}" for each in (*warnings, *text)),
            meta=self.meta,
        )

    def _timed(self, works: Works) -> tuple[Works, int, list[str]]:
        recorded = works.start_ns[works.start_ns >= 0]
        if len(recorded):
            op_starts = [op[2] for op in self.ops if op[2] >= 0]
            origin = int(min([recorded.min(), *op_starts]))
            return _shifted(works, origin), origin, []
        if not any(self.durations):
            return works, 0, ["no durations are recorded; they need a model of the device"] if len(works) else []
        front = [0] * len(self.streams)
        start: list[int] = []
        for row, (stream, deps) in enumerate(zip(works.stream.tolist(), self.deps, strict=True)):
            start.append(max([front[stream], *(start[dep] + self.durations[dep] for dep in deps)]))
            front[stream] = start[row] + self.durations[row]
        end = [begin + duration for begin, duration in zip(start, self.durations, strict=True)]
        text = ["no start times are recorded; work is laid end to end as its dependencies allow"]
        return works.replace(start_ns=start, end_ns=end), 0, text


def _shifted(table: _Table, origin: int) -> _Table:
    """The table with times since the origin."""
    times = {name: getattr(table, name) for name in ("start_ns", "end_ns")}
    return table.replace(**{name: np.where(values >= 0, values - origin, NEVER) for name, values in times.items()})


def _span(node: ChakraNode) -> tuple[int, int]:
    if not 0 < node.start_us < _LATEST_US:
        return NEVER, NEVER
    return node.start_us * NS_PER_US, node.start_us * NS_PER_US + _duration_ns(node)


def _duration_ns(node: ChakraNode) -> int:
    return node.duration_us * NS_PER_US if node.duration_us <= _LONGEST_US else 0


def _stream(node: ChakraNode) -> str:
    stream = _number(node.attrs.get("stream"), -1)
    if 0 <= stream < 2**31:
        return str(stream)
    return _COMMUNICATION if node.type in _COMM_TYPES else _MEMORY if node.type in _MEM_TYPES else _COMPUTE


def _number(value: Attribute | None, default: int) -> int:
    """A whole number from any attribute type; texts of digits count, because converters differ."""
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 19:
        value = int(value)
    return int(value) if isinstance(value, int) and abs(value) < 2**62 else default


def _arguments(texts: tuple[str, str, str]) -> ArgumentLists:
    values, shapes, types = (_literal(text) for text in texts)
    return ArgumentLists.of(values, shapes, types, None)


def _literal(text: str) -> Any:
    """A list written as Python prints it."""
    if not text:
        return []
    plain = text.replace("'", '"').replace("None", "null").replace("True", "true").replace("False", "false")
    try:
        return msgspec.json.decode(plain)
    except (msgspec.DecodeError, RecursionError):
        return []


def _recognises(head: bytes, name: str) -> bool:
    return name.endswith((".et", ".et.gz")) and not head.lstrip().startswith(b"{")


def _read_file(reader: TraceReader) -> Program:
    data, file = reader.read_all(), reader.file
    beside = file.path.with_name(GROUPS_FILE)
    groups = None
    for listed in opened([TraceFile(beside)] if file.member is None and beside.is_file() else []):
        groups = read_groups(listed.read_all(), listed.source)
    return read(data, reader.source, groups=groups, world_size=_siblings(file)).with_warnings(*reader.lost())


def _siblings(file: TraceFile) -> int | None:
    """How many ranks there are, from the files of the same prefix beside one."""
    result = _RANK.search(file.name)
    if result is None or file.member is not None:
        return None
    prefix = file.name[: result.start() + 1]
    ranks = [rank_in_name(each.name) for each in file.path.parent.iterdir() if each.name.startswith(prefix)]
    return max(rank for rank in ranks if rank is not None) + 1


FORMAT = Format("chakra", _recognises, _read_file)
