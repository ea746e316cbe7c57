"""`ExecutionTrace`: what a PyTorch execution trace says, in one form for every schema version, and its `Program`.

An execution trace lists the ops of one process with their arguments and the identity of every tensor, but no times, no kernels.
Ids are drawn when an op starts, so order of id is order of start; ids of tensors come from the same counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from steptime._program.collectives import WAIT, numbered, point_to_point
from steptime._program.nesting import ENGINE, OPTIMIZER, phases
from steptime._program.program import (
    NEVER,
    CallKind,
    Calls,
    Collective,
    KindColumn,
    Ops,
    Phase,
    Program,
    Signature,
    Stream,
    Tensor,
    Thread,
    Value,
    WorkKind,
    Works,
)
from steptime._values import value_class
from steptime.errors import TraceError

COMM_NODE = "record_param_comms"
_STEP = "ProfilerStep#"
_COMPUTE_STREAM = 0

# Calls whose recorded rank is the root or the peer instead of the caller (ProcessGroupNCCL, RECORD_PARAM_COMMS_DATA).
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_POINT_TO_POINT = ("send", "recv")
# A call of Inductor's wrapper, and what it does itself where it replays a graph.
_COMPILED = "## Call CompiledFxGraph"
_COPIES = frozenset(("aten::_foreach_copy_", "aten::copy_"))


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group: its name, what it is for, its global ranks (empty: not recorded) and its size (0: not recorded)."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0


@dataclass(frozen=True, slots=True)
class Comm:
    """What a `record_param_comms` node says about one collective or one wait. Splits count rows, as recorded."""

    name: str  # as recorded: allreduce, all_to_allv, wait, ...
    kind: str  # canonical, or `wait`
    group: str
    rank: int = -1  # in the group: the caller, or for rooted and point-to-point calls the root or the peer
    sequence: int = -1  # as recorded: counts within the group since the process began
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    bytes_in: int = 0
    bytes_out: int = 0
    dtype: str = ""
    pattern: tuple[int, int, int] = (-1, -1, -1)  # first global rank, stride and size of the group, -1 for what is not recorded

    @property
    def caller(self) -> int | None:
        """The caller's rank in its group, or None where the recorded rank is somebody else's."""
        foreign = self.kind in _ROOTED or self.kind in _POINT_TO_POINT or self.kind == "unknown"
        return None if foreign or self.rank < 0 else self.rank

    @property
    def root(self) -> int | None:
        """The root of a broadcast, reduce, gather or scatter, in the group; None for everything else."""
        return self.rank if self.kind in _ROOTED and self.rank >= 0 else None

    @property
    def peer(self) -> int | None:
        """The other side of a send or a receive, in the group; None for everything else."""
        return self.rank if self.kind in _POINT_TO_POINT and self.rank >= 0 else None


@value_class
class Node:
    """One op of an execution trace."""

    id: int
    name: str
    parent: int  # id; 1 is the process
    rf_id: int = -1  # record function id, which newer Kineto traces carry too
    seq_id: int = -1  # autograd sequence number
    tid: int = 0
    fw_tid: int = 0
    signature: Signature = field(default_factory=Signature)
    comm: Comm | None = None

    @property
    def marker(self) -> bool:
        """Whether it stands for the process or a thread instead of an op."""
        return self.name.startswith("[pytorch|profiler|execution_")


@dataclass(frozen=True, slots=True)
class ExecutionTrace:
    """The ops of one process in order of start (parents before children), and what is known about its process groups."""

    schema: str
    nodes: tuple[Node, ...]
    parents: tuple[int, ...]  # per node: row of the enclosing op, markers left out, or -1
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    rank: int | None = None
    world_size: int | None = None
    source: str = ""
    warnings: tuple[str, ...] = ()


def to_program(trace: ExecutionTrace, *, rank: int, world_size: int) -> Program:
    """The program of one rank from its execution trace. Kernels are not recorded there; only collectives become device work."""
    _refuse_graphs(trace)
    nodes, parents = trace.nodes, np.array(trace.parents, dtype=np.int32)
    names: dict[str, int] = {}
    name = np.array([names.setdefault(node.name, len(names)) for node in nodes], dtype=np.int32)
    backward = _backward_threads(trace)
    in_backward = [(node.fw_tid != 0 or node.tid in backward) and not node.name.startswith(OPTIMIZER) for node in nodes]
    sequence = np.array([node.seq_id for node in nodes], dtype=np.int64)
    phase = phases(tuple(names), name, parents, np.array(in_backward, dtype=bool), sequence)
    threads = _threads(trace, phase, backward)
    thread_of = {thread.tid: row for row, thread in enumerate(threads)}
    steps, step_of = _steps(trace)
    signatures, signature_of = _signatures(trace)
    never = np.full(len(nodes), NEVER)
    device = _Collectives(names, [thread.role for thread in threads])
    outer = outer_records(trace)
    groups = settled_groups(trace.groups, rank, world_size)
    for row, node in enumerate(nodes):
        device.enter(step_of[row])
        if node.comm is not None and row not in outer:
            device.issue(node.comm, row, thread_of[node.tid], collective_of(node.comm, groups, rank))
    device.enter(-1)
    known = f"its {len(device.collectives)} collectives are known, kernels need a model of the device"
    missing = f"{trace.source}: an execution trace holds no kernels and no times; {known}"
    return Program(
        rank=rank,
        world_size=world_size,
        names=tuple(names),
        threads=threads,
        streams=tuple(Stream(number) for number in range(1 + len(device.streams))),
        ops=Ops(
            name=name,
            thread=np.array([thread_of[node.tid] for node in nodes], dtype=np.int32),
            start_ns=never,
            end_ns=never,
            parent=parents,
            step=np.array(step_of, dtype=np.int32),
            phase=phase,
            sequence=sequence,
            signature=np.array(signature_of, dtype=np.int32),
            node=np.array([node.id for node in nodes], dtype=np.int64),
        ),
        calls=Calls.from_rows(device.calls),
        works=Works.from_rows(device.works),
        collectives=numbered(device.collectives),
        signatures=signatures,
        steps=steps,
        source=trace.source,
        warnings=(*trace.warnings, missing),
    )


def _refuse_graphs(trace: ExecutionTrace) -> None:
    """Compiled functions that replay CUDA graphs copy their inputs and launch the graph, whose kernels are nowhere."""
    inside: dict[int, set[str]] = {row: set() for row, node in enumerate(trace.nodes) if node.name.startswith(_COMPILED)}
    for node, parent in zip(trace.nodes, trace.parents, strict=True):
        if parent in inside:
            inside[parent].add(node.name)
    replayed = sum(bool(names) and names <= _COPIES for names in inside.values())
    if replayed:
        raise TraceError(
            f"{trace.source}: {replayed} calls of compiled functions replay CUDA graphs, whose kernels no execution trace has; "
            "give the Kineto trace recorded with it, or predict the script"
        )


def settled_groups(groups: Mapping[str, ProcessGroup], rank: int, world_size: int) -> dict[str, ProcessGroup]:
    """The groups with ranks filled in where the size leaves no choice: everybody, or this rank alone."""
    everybody = {world_size: tuple(range(world_size)), 1: (rank,)}
    return {name: replace(group, ranks=group.ranks or everybody.get(group.size, ())) for name, group in groups.items()}


def collective_of(comm: Comm, groups: Mapping[str, ProcessGroup], rank: int) -> Collective | None:
    """The collective behind a recorded call, its sequence still open (0); None for a wait and for what moves nothing."""
    if comm.kind == WAIT or (comm.kind == "unknown" and not comm.inputs and not comm.outputs):
        return None
    ranks = groups.get(comm.group, ProcessGroup(comm.group)).ranks
    group, root = comm.group, _global(comm.root, ranks)
    peer = _global(comm.peer, ranks)
    if peer is not None:
        group, ranks, root = point_to_point(comm.group, *((rank, peer) if comm.kind == "send" else (peer, rank)))
    return Collective(
        kind=comm.kind,
        group=group,
        ranks=ranks,
        sequence=0,
        bytes_in=comm.bytes_in,
        bytes_out=comm.bytes_out,
        dtype=comm.dtype,
        in_splits=comm.in_splits,
        out_splits=comm.out_splits,
        root=root,
    )


def _global(rank: int | None, ranks: Sequence[int]) -> int | None:
    return ranks[rank] if rank is not None and rank < len(ranks) else rank


def _backward_threads(trace: ExecutionTrace) -> set[int]:
    # Where backward runs in the main thread, most of that thread's outermost ops are something else. A label around a call of
    # backward is of the main thread; what has no thread is a root of all.
    above = (
        (node, trace.nodes[parent] if parent >= 0 else None) for node, parent in zip(trace.nodes, trace.parents, strict=True)
    )
    outermost = [node for node, outer in above if outer is None or outer.tid not in (0, node.tid)]
    engine = Counter(node.tid for node in outermost if node.name.startswith(ENGINE))
    total = Counter(node.tid for node in outermost)
    return {tid for tid, count in engine.items() if 2 * count >= total[tid]}


def _threads(trace: ExecutionTrace, phase: KindColumn, backward: set[int]) -> tuple[Thread, ...]:
    count = Counter(node.tid for node, each in zip(trace.nodes, phase.tolist(), strict=True) if each != Phase.BACKWARD)
    main = max(count, key=count.__getitem__) if count else -1
    tids = dict.fromkeys(node.tid for node in trace.nodes)
    return tuple(Thread(tid, "main" if tid == main else "backward" if tid in backward else "other") for tid in tids)


def _steps(trace: ExecutionTrace) -> tuple[tuple[int, ...], list[int]]:
    marks = [node.name[len(_STEP) :] if node.name.startswith(_STEP) else "" for node in trace.nodes]
    numbers = [int(mark) for mark in marks if mark.isascii() and mark.isdigit()]
    if not numbers or len(set(numbers)) != len(numbers) or max(numbers) >= 2**31:
        return (0,), [0] * len(trace.nodes)
    step_of, current = [], -1
    for mark in marks:
        current = int(mark) if mark.isascii() and mark.isdigit() else current
        step_of.append(current)
    return tuple(numbers), step_of


def _signatures(trace: ExecutionTrace) -> tuple[tuple[Signature, ...], list[int]]:
    rows: dict[int, int] = {}  # by identity: equal ones are one object
    signatures: list[Signature] = []
    signature_of = []
    tensors: dict[int, int] = {}
    for node in trace.nodes:
        if not node.signature.inputs and not node.signature.outputs:
            signature_of.append(-1)
            continue
        signature = _interned(node.signature, tensors)
        row = rows.setdefault(id(signature), len(signatures))
        if row == len(signatures):
            signatures.append(signature)
        signature_of.append(row)
    return tuple(signatures), signature_of


# Ranks that do the same call their ops alike: they share signatures, and with them what is derived from one alone.
_MOST_SHARED = 1 << 15
_shared: dict[tuple[object, ...], Signature] = {}
_tensors: dict[Tensor, Tensor] = {}  # equal ones are one object, by whose identity signatures are found


def _interned(signature: Signature, tensors: dict[int, int]) -> Signature:
    """The signature that is equal to this one; `tensors` has what stands for tensors of the same trace, by their identity."""
    if len(_shared) >= _MOST_SHARED:
        _shared.clear()
        _tensors.clear()
        tensors.clear()
    inputs, outputs = _exact(signature.inputs, tensors), _exact(signature.outputs, tensors)
    return _shared.setdefault((inputs, outputs, signature.switches), signature)


def _exact(values: tuple[Value, ...], tensors: dict[int, int]) -> tuple[object, ...]:
    """A key that tells 1, 1.0 and True apart, which are equal as values."""
    key: list[object] = []
    for value in values:
        if value.__class__ is Tensor:
            known = tensors.get(id(value))
            if known is None:
                known = tensors[id(value)] = id(_tensors.setdefault(value, value))
            key.append(known)
        elif value.__class__ is tuple:
            key.append(_exact(value, tensors))
        else:
            key.append((value.__class__, value))
    return tuple(key)


def outer_records(trace: ExecutionTrace) -> set[int]:
    """Rows of recorded collectives that are made of other recorded collectives."""
    # A barrier is recorded around the all_reduce it is made of; the inner record is the one that moves data.
    outer: set[int] = set()
    for row, node in enumerate(trace.nodes):
        at = trace.parents[row] if node.comm is not None and node.comm.kind != WAIT else -1
        while at >= 0 and at not in outer:
            above = trace.nodes[at]
            if above.comm is not None and above.comm.kind != WAIT:
                outer.add(at)
            at = trace.parents[at]
    return outer


class _Collectives:
    """The calls and works that are known: collectives, waits for them, and the steps' marks, in order of issue."""

    def __init__(self, names: dict[str, int], roles: Sequence[str]) -> None:
        self.collectives: list[Collective] = []
        self.streams: dict[str, int] = {}
        self.calls: list[tuple[int, ...]] = []
        self.works: list[tuple[int, ...]] = []
        self._names = names
        self._backward = {row for row, role in enumerate(roles) if role == "backward"}
        self._main = roles.index("main") if "main" in roles else 0
        self._work_of: dict[tuple[str, int], int] = {}
        self._step = -1

    def enter(self, step: int) -> None:
        """Mark the end of one step and the beginning of the next where the step changes; -1 is outside every step."""
        if step == self._step:
            return
        if self._step >= 0:
            self._call(CallKind.STEP_END, "ProfilerStep", self._main, -1)
        self._step = step
        if step >= 0:
            self._call(CallKind.STEP_BEGIN, "ProfilerStep", self._main, -1)

    def issue(self, comm: Comm, op: int, thread: int, collective: Collective | None) -> None:
        """Launch a collective on the stream of its group, or make the compute stream wait for one."""
        if comm.kind == WAIT:
            awaits = self._work_of.get((comm.group, comm.sequence), -1)
            self._call(CallKind.STREAM_WAIT, WAIT, thread, op, _COMPUTE_STREAM, awaits)
        elif collective is not None:
            name = self._call(CallKind.LAUNCH, f"nccl:{comm.name}", thread, op)
            stream = self.streams.setdefault(collective.group, 1 + len(self.streams))
            self._work_of[comm.group, comm.sequence] = self._work_of["", comm.sequence] = len(self.works)
            row = (WorkKind.COLLECTIVE, name, stream, len(self.calls) - 1, self._step, NEVER, NEVER, 0, len(self.collectives))
            self.works.append(row)
            self.collectives.append(collective)

    def _call(self, kind: CallKind, api: str, thread: int, op: int, stream: int = -1, awaits: int = -1) -> int:
        """Adds a call and gives the row of its name."""
        name = self._names.setdefault(api, len(self._names))
        last = len(self.calls) - 1
        previous = self.calls[last][2] if self.calls else thread
        # The main thread sleeps in backward(): control goes over to the engine's thread and comes back.
        handed = previous != thread and (previous in self._backward or thread in self._backward)
        self.calls.append((kind, name, thread, op, self._step, NEVER, NEVER, stream, awaits, last if handed else -1))
        return name
