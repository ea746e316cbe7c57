"""Collectives on tensors without data: what c10d and NCCL record around them, while a step runs and in its trace.

Names and nesting are those of torch 2.11 with NCCL 2.28 (execution traces of every call here, on four ranks); see
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from steptime._capture.log import COMM, CollectiveLaunch, CommLog, Streams, TraceRange
from steptime._capture.stream_orders import Streamed, without_marks
from steptime._capture.tensors import tensors_in
from steptime._program.collectives import WAIT, collective_kind
from steptime._program.execution import COMM_NODE, Comm, ExecutionTrace, Node, ProcessGroup
from steptime._program.program import Signature, Tensor, Value
from steptime._program.program import tensors_in as arguments_in
from steptime._units import dtype_bytes
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """One op of c10d: what is recorded for it, and the places of what it sends and receives among its arguments."""

    name: str  # of the collective, in record_param_comms
    range: str  # of NCCL's range
    sent: int = 0
    received: int = 0
    root: str = ""  # the argument that names the root or the peer
    splits: bool = False  # whether parts of different size are sent to each rank


KINDS = {
    "allreduce_": CollectiveOp("allreduce", "nccl:all_reduce"),
    "allreduce_coalesced_": CollectiveOp("allreduce_coalesced", "nccl:all_reduce_coalesced"),
    "broadcast_": CollectiveOp("broadcast", "nccl:broadcast", root="root_rank"),
    "reduce_": CollectiveOp("reduce", "nccl:reduce", root="root_rank"),
    "_allgather_base_": CollectiveOp("_allgather_base", "nccl:_all_gather_base", sent=1),
    "allgather_": CollectiveOp("all_gather", "nccl:all_gather", sent=1),
    "allgather_into_tensor_coalesced_": CollectiveOp(
        "allgather_into_tensor_coalesced", "nccl:all_gather_into_tensor_coalesced", sent=1
    ),
    "_reduce_scatter_base_": CollectiveOp("_reduce_scatter_base", "nccl:_reduce_scatter_base", sent=1),
    "reduce_scatter_": CollectiveOp("reduce_scatter", "nccl:reduce_scatter", sent=1),
    "reduce_scatter_tensor_coalesced_": CollectiveOp(
        "reduce_scatter_tensor_coalesced", "nccl:reduce_scatter_tensor_coalesced", sent=1
    ),
    "alltoall_base_": CollectiveOp("all_to_allv", "nccl:all_to_all", sent=1, splits=True),
    "alltoall_": CollectiveOp("all_to_all", "nccl:all_to_all", sent=1, splits=True),
    "gather_": CollectiveOp("gather", "nccl:gather", sent=1, root="root_rank"),
    "scatter_": CollectiveOp("scatter", "nccl:scatter", sent=1, root="root_rank"),
    "send": CollectiveOp("send", "nccl:send", root="dst"),
    "recv_": CollectiveOp("recv", "nccl:recv", root="src"),
    "barrier": CollectiveOp("barrier", "nccl:all_reduce_barrier"),
}


def plain_name(op: str) -> str:
    """`allreduce_` of `c10d::allreduce_`."""
    return op.rsplit("::", 1)[-1].partition(".")[0]


class Collectives:
    """Answers c10d's ops of one captured rank."""

    def __init__(self, log: CommLog, streams: Streams) -> None:
        self._log, self._streams = log, streams
        self._by_storage: dict[int, CollectiveLaunch] = {}
        self.results: list[torch.Tensor] = []  # of the last one
        self._work: Any = None

    def joined(self) -> None:
        """The process group is there: every collective is over at once, so that one piece of work stands for all."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            self._work = dist.broadcast(torch.zeros(1, device="cpu"), 0, async_op=True).boxed()

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the op gives, with the ranges and copies that NCCL's process group makes around it."""
        arguments = _by_name(func, args, kwargs)
        kind = KINDS.get(plain_name(func._schema.name))
        if kind is None:
            raise InputError(f"{func._schema.name} cannot be captured; collectives that can are {', '.join(KINDS)}")
        launch = self._launch(kind, arguments)
        with TraceRange(COMM):
            _within(kind, list(arguments.values()))
        self.results = list(tensors_in(list(arguments.values())[kind.received]))
        for tensor in self.results:
            self._by_storage[tensor.untyped_storage()._cdata] = launch
        if arguments.get("asyncOp", arguments.get("async_op", True)) is False:
            self._streams.launched_in_order(launch)
        return (args[0], self._work) if len(func._schema.returns) > 1 else self._work

    def waited(self, tensor: torch.Tensor) -> None:
        """`wait_tensor` was called on what a collective gave."""
        launch = self._by_storage.pop(tensor.untyped_storage()._cdata, None)
        if launch is not None:
            self.wait(launch)

    def wait(self, launch: CollectiveLaunch) -> None:
        """The current stream waits for a collective."""
        if self._streams.current is self._streams.default:
            self._log.waited(launch)
        self._streams.current.behind[launch.number] = launch

    def _launch(self, kind: CollectiveOp, arguments: dict[str, Any]) -> CollectiveLaunch:
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        named = int(arguments[kind.root]) if kind.root else group.rank()
        return self._log.launched(group.group_name, named, point_to_point=kind.name in ("send", "recv"))


Arrival = tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]
"""What a rank sends, what it receives, and how the second follows from the first where all ranks send the same."""


def exchanged(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Arrival]:
    """What a collective writes where all ranks of its group do as this one: counts of tokens for each expert, say."""
    name, arguments = plain_name(func._schema.name), _by_name(func, args, kwargs)
    kind = KINDS[name]
    values = list(arguments.values())
    sent, received = (list(tensors_in(values[place])) if values else [] for place in (kind.sent, kind.received))
    if kind.name in ("send", "barrier"):
        return
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    made = _alike(name, arguments, group.rank(), group.size())
    for source, target in zip(sent, received, strict=False):
        yield source, target, made


def _alike(name: str, arguments: dict[str, Any], rank: int, ranks: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if name == "alltoall_base_" and not arguments["output_split_sizes"] and not arguments["input_split_sizes"]:
        return lambda sent: sent.chunk(ranks)[rank].repeat(ranks, *[1] * (sent.dim() - 1))
    if name == "_allgather_base_":
        return lambda sent: sent.repeat(ranks, *[1] * (sent.dim() - 1))
    if name == "broadcast_":
        return lambda sent: sent.clone()
    if name == "allreduce_":  # which does not say in Python how it reduces: zeros stay zeros, and others are as they were
        return lambda sent: sent.clone()
    return None


class Pending:
    """What `async_op=True` gives: PyTorch's work, and the collective that its `wait` is for."""

    def __init__(self, work: Any, launch: CollectiveLaunch, collectives: Collectives) -> None:
        self._work, self._launch, self._collectives = work, launch, collectives
        self._results = collectives.results

    def wait(self, *_: Any, **__: Any) -> bool:
        """The current stream waits; the host goes on."""
        self._collectives.wait(self._launch)
        return True

    synchronize = block_current_stream = wait

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """What the collective gives, at once."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def is_completed(self) -> bool:
        """Every collective is over at once."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _within(kind: CollectiveOp, values: Sequence[Any]) -> None:
    """NCCL's range, and the copies that lists of tensors need because NCCL sends one piece of memory."""
    before = _BEFORE.get(kind.name)
    flat = before(values) if before else None
    with TraceRange(kind.range):
        after = _INSIDE.get(kind.name)
        if after:
            after(values, flat)


def _barrier(_: Sequence[Any]) -> None:
    torch.zeros(1, device="cuda:0")


def _one_piece(values: Sequence[Any]) -> torch.Tensor | None:
    parts = values[0][0] if isinstance(values[0][0], list | tuple) else values[1][0]
    for part in parts:
        torch.is_same_size(parts[0], part)
    return torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype, device="cuda:0")


def _copy_out(values: Sequence[Any], flat: Any) -> None:
    for index, part in enumerate(values[0][0]):
        part.copy_(flat[index], non_blocking=True)


def _copy_in(values: Sequence[Any], flat: Any) -> None:
    for index, part in enumerate(values[1][0]):
        flat[index].copy_(part, non_blocking=True)


_BEFORE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "all_gather": _one_piece,
    "reduce_scatter": _one_piece,
    "barrier": _barrier,
}
_INSIDE: dict[str, Callable[[Sequence[Any], Any], None]] = {"all_gather": _copy_out, "reduce_scatter": _copy_in}


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
    return without_marks(replace(trace, nodes=_with_views_of_parts(nodes, trace.parents), groups=named))


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


def _waiting(node: Node, launch: CollectiveLaunch, groups: Mapping[str, ProcessGroup]) -> Node:
    group = groups[launch.group]
    number: Value = (launch.sequence, launch.point_to_point)
    inputs: tuple[Value, ...] = (number, (group.name, group.description), 0, WAIT, (), (), -1, -1, 1)
    comm = Comm(WAIT, WAIT, group.name, 0, launch.sequence)
    return replace(node, name=COMM_NODE, signature=Signature(inputs, ()), comm=comm)


def _launching(node: Node, above: Node | None, launch: CollectiveLaunch, groups: Mapping[str, ProcessGroup]) -> Node:
    group = groups[launch.group]
    assert above is not None
    kind = KINDS[plain_name(above.name)]
    values = above.signature.inputs
    sent, received = (values[kind.sent], values[kind.received]) if kind.name != "barrier" else ((), ())
    in_splits, out_splits = _splits(kind, values)
    number: Value = (launch.sequence, launch.point_to_point)
    rest: tuple[Value, ...] = (kind.name, in_splits, out_splits, *_pattern(group))
    inputs = ((sent,) if sent != () else ()) + (number, (group.name, group.description), launch.rank, *rest)
    tensors, results = tuple(arguments_in((sent,))), tuple(arguments_in((received,)))
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
        dtype=next((tensor.dtype for tensor in arguments_in((*tensors, *results, *values))), ""),
    )
    return replace(node, name=COMM_NODE, signature=Signature(inputs, (received,) if received != () else ()), comm=comm)


def _splits(kind: CollectiveOp, values: Sequence[Value]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not kind.splits:
        return (), ()
    if kind.name == "all_to_all":  # lists of tensors: their sizes
        return _sizes(values[kind.sent]), _sizes(values[kind.received])
    return _integers(values[4]), _integers(values[3])


def _sizes(value: Value) -> tuple[int, ...]:
    return tuple(math.prod(tensor.shape) for tensor in arguments_in((value,)))


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
    caller = members.index(rank) if rank in members else -1
    return f"{name} {caller}{'->' if comm.kind == 'send' else '<-'}{comm.peer}"


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel * dtype_bytes(tensor.dtype) for tensor in tensors)
