"""`with_collectives`: a captured trace with everything that PyTorch records about its collectives, from the log of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from steptime._capture.collectives.collectives import KINDS, Kind, plain_name
from steptime._capture.collectives.log import COMM, STREAM, CommLog, Launch
from steptime._capture.collectives.ranges import AFTER_BACKWARD
from steptime._program.collectives import WAIT, collective_kind
from steptime._program.execution import COMM_NODE, Comm, ExecutionTrace, Node, ProcessGroup
from steptime._program.program import Signature, Tensor, Value
from steptime._units import dtype_bytes
from steptime.errors import InputError

_ENGINE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Streamed:
    """A trace, and for every node the stream that its device work goes to; 0 is where compute is."""

    trace: ExecutionTrace
    streams: tuple[int, ...]


def with_collectives(trace: ExecutionTrace, log: CommLog, groups: Mapping[str, ProcessGroup]) -> Streamed:
    """Says of every collective and wait what the log knows, and takes the marks of streams out. `groups` by PyTorch's name."""
    marks = sum(node.name == COMM for node in trace.nodes)
    if marks != len(log.calls):
        raise InputError(
            f"{trace.source}: {marks} collectives and waits in the trace, {len(log.calls)} were called; capture again"
        )
    calls = iter(zip(log.calls, log.waits, strict=True))
    nodes: list[Node] = []
    for row, node in enumerate(trace.nodes):
        above = nodes[trace.parents[row]] if trace.parents[row] >= 0 else None
        told = node
        if node.name == COMM:
            launch, wait = next(calls)
            told = _waiting(node, launch, groups) if wait else _launching(node, above, launch, groups)
        elif node.name.startswith("nccl:") and above is not None and above.comm is not None:
            name = _range_name(node.name, above.comm, trace.rank, groups)
            told = replace(node, name=name, signature=Signature(above.comm.inputs, ()))
        nodes.append(told)
    named = {group.name: group for group in groups.values()}
    return _without_marks(replace(trace, nodes=_with_views_of_parts(nodes, trace.parents), groups=named))


def _with_views_of_parts(nodes: list[Node], parents: Sequence[int]) -> tuple[Node, ...]:
    """A view of a sharded tensor shares its memory, as the view of its part inside shows; so does what it is made for."""
    for row in range(len(nodes) - 1, -1, -1):  # inner ops first
        outer = nodes[parents[row]] if parents[row] >= 0 else None
        inside = _view(nodes[row])
        around = _view(outer) if outer is not None and inside is not None else None
        if outer is None or inside is None or around is None or inside[0].storage != inside[1].storage:
            continue
        part = nodes[row].name == outer.name and around[0].storage == inside[0].storage
        if (part or around[1].id == inside[1].id) and around[1].storage != inside[1].storage:
            signature = replace(outer.signature, outputs=(replace(around[1], storage=inside[1].storage),))
            nodes[parents[row]] = replace(outer, signature=signature)
    return tuple(nodes)


def _view(node: Node) -> tuple[Tensor, Tensor] | None:
    """What an op takes first and the one tensor that it makes."""
    inputs, outputs = node.signature.inputs, node.signature.outputs
    if len(outputs) == 1 and inputs and isinstance(inputs[0], Tensor) and isinstance(outputs[0], Tensor):
        return inputs[0], outputs[0]
    return None


def _waiting(node: Node, launch: Launch, groups: Mapping[str, ProcessGroup]) -> Node:
    group = groups[launch.group]
    number: Value = (launch.sequence, launch.point_to_point)
    inputs: tuple[Value, ...] = (number, (group.name, group.description), 0, WAIT, (), (), -1, -1, 1)
    comm = Comm(WAIT, WAIT, group.name, 0, launch.sequence)
    return replace(node, name=COMM_NODE, signature=Signature(inputs, ()), comm=comm)


def _launching(node: Node, above: Node | None, launch: Launch, groups: Mapping[str, ProcessGroup]) -> Node:
    group = groups[launch.group]
    assert above is not None
    kind = KINDS[plain_name(above.name)]
    values = above.signature.inputs
    sent, received = (values[kind.sent], values[kind.received]) if kind.name != "barrier" else ((), ())
    in_splits, out_splits = _splits(kind, values)
    number: Value = (launch.sequence, launch.point_to_point)
    rest: tuple[Value, ...] = (kind.name, in_splits, out_splits, *_pattern(group))
    inputs = ((sent,) if sent != () else ()) + (number, (group.name, group.description), launch.rank, *rest)
    tensors, results = tuple(_flat(sent)), tuple(_flat(received))
    comm = Comm(
        name=kind.name,
        kind=collective_kind(kind.name),
        group=group.name,
        rank=launch.rank,
        sequence=launch.sequence,
        in_splits=in_splits,
        out_splits=out_splits,
        inputs=tensors,
        outputs=results,
        bytes_in=_bytes(tensors),
        bytes_out=_bytes(results),
        dtype=next((tensor.dtype for tensor in _flat((*tensors, *results, *values))), ""),
    )
    return replace(node, name=COMM_NODE, signature=Signature(inputs, (received,) if received != () else ()), comm=comm)


def _splits(kind: Kind, values: Sequence[Value]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not kind.splits:
        return (), ()
    if kind.name == "all_to_all":  # lists of tensors: their sizes
        return _sizes(values[kind.sent]), _sizes(values[kind.received])
    return _integers(values[4]), _integers(values[3])


def _sizes(value: Value) -> tuple[int, ...]:
    return tuple(math.prod(tensor.shape) for tensor in _flat(value))


def _integers(value: Value) -> tuple[int, ...]:
    return tuple(each for each in value if isinstance(each, int)) if isinstance(value, tuple) else ()


def _pattern(group: ProcessGroup) -> tuple[int, int, int]:
    """First global rank, stride and size, as ProcessGroupNCCL records them."""
    first = group.ranks[0] if group.ranks else 0
    stride = group.ranks[1] - first if len(group.ranks) > 1 else 1
    return first, stride, group.size


def _range_name(name: str, comm: Comm, rank: int | None, groups: Mapping[str, ProcessGroup]) -> str:
    """Point-to-point ranges name both sides, in the group: `nccl:send 0->1`, `nccl:recv 0<-1`."""
    if comm.peer is None:
        return name
    members = next((group.ranks for group in groups.values() if group.name == comm.group), ())
    own = members.index(rank) if rank in members else -1
    return f"{name} {own}{'->' if comm.kind == 'send' else '<-'}{comm.peer}"


def _flat(value: Value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _flat(each)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel * dtype_bytes(tensor.dtype) for tensor in tensors)


def _without_marks(trace: ExecutionTrace) -> Streamed:
    """Marks of streams hold until the next one, on whatever thread: the host calls one op after another."""
    backward = next((node.tid for node in trace.nodes if node.name.startswith(_ENGINE)), 0)
    nodes: list[Node] = []
    parents: list[int] = []
    streams: list[int] = []
    place: dict[int, int] = {-1: -1}
    after: set[int] = set()
    current = 0
    for row, node in enumerate(trace.nodes):
        parent = trace.parents[row]
        if node.name.startswith(STREAM):
            current = int(node.name[len(STREAM) :])
            continue
        late = node.name == AFTER_BACKWARD or parent in after
        if late:
            after.add(row)
        if node.name == AFTER_BACKWARD:
            place[row] = place[parent]
            continue
        place[row] = len(nodes)
        nodes.append(replace(node, tid=backward) if late and backward else node)
        parents.append(place[parent])
        streams.append(current)
    return Streamed(replace(trace, nodes=tuple(nodes), parents=tuple(parents)), tuple(streams))
