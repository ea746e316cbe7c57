"""An execution trace alone as a `Program`: ops with arguments, and the collectives; no times, no kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from steptime._program.collectives import WAIT
from steptime._program.execution import Comm, ExecutionTrace, Group
from steptime._program.program import (
    NEVER,
    CallKind,
    Calls,
    Collective,
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

_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = ("Optimizer.step", "Optimizer.zero_grad")
_STEP = "ProfilerStep#"
_COMPUTE_STREAM = 0


def to_program(trace: ExecutionTrace, *, rank: int, world_size: int) -> Program:
    """The program of one rank from its execution trace. Kernels are not recorded there; only collectives become device work."""
    names = _Names()
    phases = _phases(trace)
    threads, thread_of = _threads(trace, phases)
    steps, step_of = _steps(trace)
    signatures, signature_of = _signatures(trace)
    ops = Ops.from_columns({
        "name": [names.row(node.name) for node in trace.nodes],
        "thread": [thread_of[node.tid] for node in trace.nodes],
        "start_ns": [NEVER] * len(trace.nodes),
        "end_ns": [NEVER] * len(trace.nodes),
        "parent": trace.parents,
        "step": step_of,
        "phase": phases,
        "sequence": [node.seq_id for node in trace.nodes],
        "signature": signature_of,
        "node": [node.id for node in trace.nodes],
    })  # fmt: skip
    device = _Device(names, [thread.role for thread in threads])
    outer = outer_records(trace)
    groups = settled_groups(trace.groups, rank, world_size)
    for row, node in enumerate(trace.nodes):
        device.enter(step_of[row])
        if node.comm is not None and row not in outer:
            device.issue(node.comm, row, thread_of[node.tid], collective_of(node.comm, groups, rank))
    device.enter(-1)
    calls, works = device.tables()
    return Program(
        rank=rank,
        world_size=world_size,
        names=tuple(names.rows),
        threads=threads,
        streams=tuple(Stream(number) for number in range(1 + len(device.streams))),
        ops=ops,
        calls=calls,
        works=works,
        collectives=numbered(device.collectives),
        signatures=signatures,
        steps=steps,
        source=trace.source,
        warnings=(*trace.warnings, _what_is_missing(trace, device)),
    )


def _what_is_missing(trace: ExecutionTrace, device: _Device) -> str:
    known = f"its {len(device.collectives)} collectives are known, kernels need a model of the device"
    return f"{trace.source}: an execution trace holds no kernels and no times; {known}"


def settled_groups(groups: Mapping[str, Group], rank: int, world_size: int) -> dict[str, Group]:
    """The groups with ranks filled in where the size leaves no choice: everybody, or this rank alone."""
    everybody = {world_size: tuple(range(world_size)), 1: (rank,)}
    return {name: replace(group, ranks=group.ranks or everybody.get(group.size, ())) for name, group in groups.items()}


def collective_of(comm: Comm, groups: Mapping[str, Group], rank: int) -> Collective | None:
    """The collective behind a recorded call, its sequence still open (0); None for a wait and for what moves nothing."""
    if comm.kind == WAIT or (comm.kind == "unknown" and not comm.inputs and not comm.outputs):
        return None
    ranks = groups.get(comm.group, Group(comm.group)).ranks
    group, root = comm.group, _global(comm.root, ranks)
    if comm.peer is not None:
        peer = _global(comm.peer, ranks)
        assert peer is not None
        source, target = (rank, peer) if comm.kind == "send" else (peer, rank)
        # One group per direction: a rank that sends before it receives still meets a peer that does the same.
        group, root, ranks = f"{comm.group}:{source}->{target}", target, tuple(sorted((source, target)))
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


def numbered(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """The same collectives with their sequence counted per group, in the order given."""
    count: dict[str, int] = {}
    numbered = []
    for each in collectives:
        numbered.append(replace(each, sequence=count.get(each.group, 0)))
        count[each.group] = count.get(each.group, 0) + 1
    return tuple(numbered)


@dataclass
class _Names:
    """Strings by row, each once."""

    rows: dict[str, int] = field(default_factory=dict)

    def row(self, name: str) -> int:
        return self.rows.setdefault(name, len(self.rows))


def _phases(trace: ExecutionTrace) -> list[Phase]:
    backward = _backward_threads(trace)
    phases: list[Phase] = []
    for node, parent in zip(trace.nodes, trace.parents, strict=True):
        if node.name.startswith(_OPTIMIZER):
            phase = Phase.OPTIMIZER
        elif node.name.startswith(_BACKWARD) or node.fw_tid != 0 or node.tid in backward:
            phase = Phase.BACKWARD
        else:
            phase = phases[parent] if parent >= 0 else Phase.FORWARD
        phases.append(phase)
    return phases


def _backward_threads(trace: ExecutionTrace) -> set[int]:
    # Where backward runs in the main thread, most of that thread's outermost ops are something else.
    outermost = [node for node, parent in zip(trace.nodes, trace.parents, strict=True) if parent < 0]
    engine = Counter(node.tid for node in outermost if node.name.startswith(_BACKWARD))
    total = Counter(node.tid for node in outermost)
    return {tid for tid, count in engine.items() if 2 * count >= total[tid]}


def _threads(trace: ExecutionTrace, phases: Sequence[Phase]) -> tuple[tuple[Thread, ...], dict[int, int]]:
    backward = _backward_threads(trace)
    count = Counter(node.tid for node, phase in zip(trace.nodes, phases, strict=True) if phase != Phase.BACKWARD)
    main = max(count, key=count.__getitem__) if count else -1
    tids = list(dict.fromkeys(node.tid for node in trace.nodes))
    roles = {tid: "main" if tid == main else "backward" if tid in backward else "other" for tid in tids}
    return tuple(Thread(tid, roles[tid]) for tid in tids), {tid: row for row, tid in enumerate(tids)}


def _steps(trace: ExecutionTrace) -> tuple[tuple[int, ...], list[int]]:
    marked = [node for node in trace.nodes if node.name.startswith(_STEP) and node.name[len(_STEP) :].isascii()]
    numbers = [int(node.name[len(_STEP) :]) for node in marked if node.name[len(_STEP) :].isdigit()]
    if not numbers or len(set(numbers)) != len(numbers) or max(numbers) >= 2**31:
        return (0,), [0] * len(trace.nodes)
    step_of, current = [], -1
    for node in trace.nodes:
        number = node.name[len(_STEP) :] if node.name.startswith(_STEP) else ""
        current = int(number) if number.isascii() and number.isdigit() else current
        step_of.append(current)
    return tuple(numbers), step_of


def _signatures(trace: ExecutionTrace) -> tuple[tuple[Signature, ...], list[int]]:
    rows: dict[int, int] = {}  # by identity: equal ones are one object
    kept: list[Signature] = []
    signature_of = []
    for node in trace.nodes:
        if not node.signature.inputs and not node.signature.outputs:
            signature_of.append(-1)
            continue
        signature = _interned(node.signature)
        row = rows.setdefault(id(signature), len(kept))
        if row == len(kept):
            kept.append(signature)
        signature_of.append(row)
    return tuple(kept), signature_of


# Ranks that do the same call their ops alike: they share signatures, and with them what is derived from one alone.
_MOST_SHARED = 1 << 15
_shared: dict[tuple[object, ...], Signature] = {}


def _interned(signature: Signature) -> Signature:
    key = (*map(_exact, signature.inputs), None, *map(_exact, signature.outputs))
    if len(_shared) >= _MOST_SHARED and key not in _shared:
        _shared.clear()
    return _shared.setdefault(key, signature)


def _exact(value: Value) -> object:
    """A key that tells 1, 1.0 and True apart, which are equal as values."""
    if value.__class__ is Tensor:
        return value
    return tuple(map(_exact, value)) if value.__class__ is tuple else (value.__class__, value)


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


class _Device:
    """The calls and works that are known: collectives, waits for them, and the steps' marks, in order of issue."""

    def __init__(self, names: _Names, roles: Sequence[str]) -> None:
        self.collectives: list[Collective] = []
        self.streams: dict[str, int] = {}
        self._names = names
        self._backward = {row for row, role in enumerate(roles) if role == "backward"}
        self._main = roles.index("main") if "main" in roles else 0
        self._calls: list[tuple[int, ...]] = []
        self._works: list[tuple[int, ...]] = []
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
            self._call(
                CallKind.STREAM_WAIT, WAIT, thread, op, _COMPUTE_STREAM, self._work_of.get((comm.group, comm.sequence), -1)
            )
        elif collective is not None:
            name = f"nccl:{comm.name}"
            self._call(CallKind.LAUNCH, name, thread, op)
            stream = self.streams.setdefault(collective.group, 1 + len(self.streams))
            launch = len(self._calls) - 1
            self._work_of[comm.group, comm.sequence] = self._work_of["", comm.sequence] = len(self._works)
            times = (NEVER, NEVER)
            row = self._names.row(name)
            self._works.append((WorkKind.COLLECTIVE, row, stream, launch, self._step, *times, 0, len(self.collectives)))
            self.collectives.append(collective)

    def _call(self, kind: CallKind, api: str, thread: int, op: int, stream: int = -1, awaits: int = -1) -> None:
        last = len(self._calls) - 1
        previous = self._calls[last][2] if self._calls else thread
        # The main thread sleeps in backward(): control goes over to the engine's thread and comes back.
        handed = previous != thread and (previous in self._backward or thread in self._backward)
        self._calls.append(
            (kind, self._names.row(api), thread, op, self._step, NEVER, NEVER, stream, awaits, last if handed else -1)
        )

    def tables(self) -> tuple[Calls, Works]:
        """What was issued, as tables."""
        calls = dict(zip(Calls.TYPES, zip(*self._calls, strict=True), strict=True)) if self._calls else {}
        works = dict(zip(Works.TYPES, zip(*self._works, strict=True), strict=True)) if self._works else {}
        return Calls.from_columns(calls), Works.from_columns(works)
