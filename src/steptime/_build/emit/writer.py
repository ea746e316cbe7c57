"""`Writer`: the ops of a training step that was never run, written down as PyTorch's execution trace records them.

Tensors are made first, with ids and storages that nobody else has; then every op is written with what it takes and returns, and
ops inside an op are written while it is open:

    emit = Emitter(rank=0, world_size=2, source="my model")
    x, weight, bias = emit.tensor((512, 64)), emit.tensor((16, 64)), emit.tensor((16,))
    y = emit.tensor((512, 16))
    with emit.op("linear", (x, weight, bias), (y,), node=True):
        turned = emit.strided(weight, (64, 16), (1, 64), ("t", ()), ("transpose", (0, 1)), node=True)
        emit.op("addmm", (bias, x, turned, 1, 1), (y,), node=True)
    emit.all_reduce((y,))  # c10d::allreduce_, record_param_comms, nccl:all_reduce
    with emit.backward_thread():  # what follows is on autograd's thread
        with emit.write("autograd::engine::evaluate_function: AddmmBackward0"):
            emit.write("AddmmBackward0", (emit.tensor((512, 16)),))
    program = emit.program()  # ops only; phases and roles as for a trace that was read

A view has an id of its own and the storage of what it looks at: `emit.view(x, (64, 512), (1, 64))`; a tensor that autograd
saved and unpacked is one too: `emit.view(x)`. `op` writes ATen ops, whose whole names the catalogue knows; `write` writes
anything else. An op that autograd records (`node=True`) carries the value of its counter, which the node then
takes (`next_sequence`). `tape` has the engine and `layers` what uses both, so that a builder writes the forward pass alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from steptime._ops.catalogue import ATEN
from steptime._ops.operations import PRODUCTS
from steptime._program.collectives import WAIT
from steptime._program.execution import COMM_NODE, Comm, ExecutionTrace, Node, ProcessGroup, to_program
from steptime._program.program import DEFAULT_SWITCHES, CallKind, Program, Signature, StreamOrder, Switches, Tensor, Value
from steptime._program.repetition import Repetition
from steptime._units import dtype_bytes

MAIN_THREAD, BACKWARD_THREAD = 1, 2
GROUP, GROUP_DESCRIPTION = "0", "default_pg"  # what PyTorch calls the group of all ranks
# Groups of ranks that hold copies, shards and parts of the same parameters, parts of the same sequences, other experts of the
# same layers, and copies of the same experts.
DATA, FSDP, TENSOR, CONTEXT, EXPERT, EXPERT_DATA = "data", "fsdp", "tensor", "context", "expert", "expert_data"
OBJECT = "<Object>"  # how a trace writes what is neither a tensor nor a plain value
_PROCESS, _EMPTY_STORAGE = 1, 2  # ids of the process node and of the storage that all empty tensors share
_SCHEMA = "1.1.1-chakra.0.0.4"  # that of the traces that come with the package, by PyTorch 2.11
_NO_TIMEOUT = -1
_KEPT = -2  # row of an op that is not written, nor what is inside it: its result is there
_SIGNATURE = Signature()
# What c10d, the record of communication and NCCL call a collective.
_COLLECTIVES = {
    "all_reduce": ("allreduce_", "allreduce", "all_reduce"),
    "all_to_all": ("alltoall_base_", "all_to_allv", "all_to_all"),
    "broadcast": ("broadcast_", "broadcast", "broadcast"),
    "all_gather": ("_allgather_base_", "_allgather_base", "_all_gather_base"),
    "reduce_scatter": ("_reduce_scatter_base_", "_reduce_scatter_base", "_reduce_scatter_base"),
    "send": ("send", "send", "send"),
    "recv": ("recv_", "recv", "recv"),
    "send_recv": ("send", "send_recv", "coalesced"),
}


def group_names(groups: Mapping[str, tuple[int, ...]], world_size: int) -> dict[str, str]:
    """What PyTorch calls groups of ranks: the first of all ranks is the default one, others are made beside it."""
    default = next((name for name, ranks in groups.items() if len(ranks) == world_size), "")
    return {name: GROUP if name == default else name for name in groups}


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides as PyTorch makes them: a size of 0 counts as 1."""
    strides, step = [1] * len(shape), 1
    for index in range(len(shape) - 1, -1, -1):
        strides[index] = step
        step *= max(shape[index], 1)
    return tuple(strides)


def is_contiguous(tensor: Tensor) -> bool:
    """Whether a tensor is row-major, as PyTorch sees it: the stride of an axis of one element does not matter."""
    laid = zip(tensor.shape, tensor.strides or (), contiguous_strides(tensor.shape), strict=True)
    return 0 in tensor.shape or all(size == 1 or stride == expected for size, stride, expected in laid)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor that has been laid out."""
    assert tensor.strides is not None
    return tensor.strides


def next_part(section: str) -> str:
    """The name of what follows a part of a section."""
    return section + "'"


class Writer:
    """Writes the step of one rank, op by op in order of start."""

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: str = "cuda:0",
        source: str = "",
        groups: Mapping[str, tuple[int, ...]] | None = None,
        tf32: bool = False,
    ) -> None:
        """`groups` are those whose names collectives take; a group of all ranks has PyTorch's own name.

        `tf32`: matrix products of float32 may use TF32, which they may not by default.
        """
        self.rank, self.world_size, self.device, self.source = rank, world_size, device, source
        if groups is None:
            groups = {GROUP: tuple(range(world_size))} if world_size > 1 else {}
        self._groups = {
            name: ProcessGroup(said, GROUP_DESCRIPTION if said == GROUP else name, groups[name], len(groups[name]))
            for name, said in group_names(groups, world_size).items()
        }
        self._of_products = Switches(tf32=True) if tf32 else DEFAULT_SWITCHES
        self.sequence = 0  # autograd's counter: what the next node gets
        self._nodes: list[Node] = []
        self._parents: list[int] = []
        self._open: list[int] = []  # rows of the ops around what is written next
        self._last = -1  # row of what was written last
        self._thread = MAIN_THREAD
        self._id = _EMPTY_STORAGE
        self._collectives = 0
        self._views: set[int] = set()
        self._inside = _Inside(self)
        self.muted = False  # nothing is written: what recomputation leaves out, and what the step before did
        # Asked about every op with its outputs: whether its result is there already, so that it is not written.
        self.watch: Callable[[str, tuple[Value, ...]], bool] | None = None
        self.stands_for: dict[int, int] = {}  # storage of what such an op would make -> where its result is
        self._absent: set[int] = set()  # collectives that are not written
        self._orders: list[StreamOrder] = []
        self._sections: list[tuple[str, int]] = []
        self._flying: tuple[int, str] | None = None  # a collective beside other sections, and its group
        self._put_off: list[tuple[int, str]] | None = None
        if world_size > 1:
            self.write("## process_group:init ##")

    # Tensors

    def tensor(
        self,
        shape: Sequence[int],
        dtype: str = "float32",
        *,
        strides: Sequence[int] | None = None,
        device: str | None = None,
    ) -> Tensor:
        """A tensor with memory of its own; row-major where no strides are given."""
        sizes = tuple(shape)
        laid = contiguous_strides(sizes) if strides is None else tuple(strides)
        storage = _EMPTY_STORAGE if 0 in sizes else self._next_id()
        return Tensor(sizes, dtype, laid, self._next_id(), storage, 0, device or self.device)

    def view(
        self,
        of: Tensor,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        offset: int | None = None,
    ) -> Tensor:
        """Another tensor over the same storage; `offset` counts elements from the storage's begin."""
        sizes = of.shape if shape is None else tuple(shape)
        laid = of.strides if shape is None else contiguous_strides(sizes)
        laid = laid if strides is None else tuple(strides)
        number = self._next_id()
        self._views.add(number)
        return Tensor(sizes, of.dtype, laid, number, of.storage, of.offset if offset is None else offset, of.device)

    def sparse(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """A sparse tensor, as it is recorded: an id and no memory."""
        sizes = tuple(shape)
        return Tensor(sizes, dtype, (0,) * len(sizes), self._next_id())

    def is_view(self, tensor: Tensor) -> bool:
        """Whether `view` made it."""
        return tensor.id in self._views

    # Ops

    def write(
        self,
        name: str,
        inputs: tuple[Value, ...] = (),
        outputs: tuple[Value, ...] = (),
        *,
        sequence: int = -1,
        comm: Comm | None = None,
        forward_thread: int = 0,
    ) -> AbstractContextManager[None]:
        """Writes a frame, a function or an op under its whole name, unless muted; in a `with`, around what is written there."""
        if self.muted or (self._open and self._open[-1] == _KEPT):
            self._last = -1 if self.muted else _KEPT
            return self._inside
        if self.stands_for:
            inputs, outputs = self._placed(inputs), self._placed(outputs)
        parent = self._open[-1] if self._open else -1
        # Under autocast an op is shown twice, one inside the other.
        shown = parent >= 0 and self._nodes[parent].name == name
        if self.watch is not None and not shown and self.watch(name, outputs):
            self._last = _KEPT
            self._make_nothing_around()
            return self._inside
        self._last = len(self._nodes)
        switches = self._of_products if name in PRODUCTS else DEFAULT_SWITCHES
        signature = Signature(inputs, outputs, switches) if inputs or outputs else _SIGNATURE
        above = self._nodes[parent].id if parent >= 0 else _PROCESS
        self._nodes.append(Node(self._next_id(), name, above, -1, sequence, self._thread, forward_thread, signature, comm))
        self._parents.append(parent)
        return self._inside

    def op(
        self, name: str, inputs: tuple[Value, ...] = (), outputs: tuple[Value, ...] = (), *, node: bool = False
    ) -> AbstractContextManager[None]:
        """Writes an ATen op; `node` says that autograd records it."""
        return self.write(f"{ATEN}{name}", inputs, outputs, sequence=self.sequence if node else -1)

    def there(self, tensor: Tensor) -> Tensor:
        """A tensor where its result is: in other memory where that was kept."""
        storage = self.stands_for.get(tensor.storage or 0)
        return tensor if storage is None else replace(tensor, storage=storage)

    def _placed(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(
            self.there(each) if isinstance(each, Tensor) else self._placed(each) if isinstance(each, tuple) else each
            for each in values
        )

    def _make_nothing_around(self) -> None:
        """Ops around one that is not written do not make what it would."""
        for row in self._open:
            node, inputs = self._nodes[row], self._nodes[row].signature.inputs
            made = (each for each in node.signature.outputs if not isinstance(each, Tensor) or self.there(each) is each)
            self._nodes[row] = replace(node, signature=Signature(inputs, tuple(made), node.signature.switches))

    def open(self) -> None:
        """What is written next is inside what was written last."""
        self._open.append(self._last)

    def close(self) -> None:
        """What is written next is outside again."""
        self._open.pop()

    def new(
        self,
        name: str,
        inputs: tuple[Value, ...],
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        *,
        strides: Sequence[int] | None = None,
        node: bool = False,
    ) -> Tensor:
        """Writes an ATen op that makes one tensor, of the shape and dtype of its first argument where nothing else is said."""
        like = inputs[0]
        if shape is None or dtype is None:
            assert isinstance(like, Tensor)
            shape, dtype = like.shape if shape is None else shape, dtype or like.dtype
        result = self.tensor(shape, dtype, strides=strides)
        self.op(name, inputs, (result,), node=node)
        return result

    def strided(
        self,
        of: Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        *calls: tuple[str, tuple[Value, ...]],
        offset: int | None = None,
        node: bool = False,
    ) -> Tensor:
        """Writes a view by way of the ops that lead to it, each called by the one before: all end in `as_strided`.

        Most views leave the offset to be what it was, and do not say it.
        """
        result = self.view(of, shape, strides, offset)
        for name, arguments in calls:
            self.op(name, (of, *arguments), (result,), node=node)
            self.open()
            node = False
        self.op("as_strided", (of, result.shape, result.strides, offset), (result,), node=node)
        for _ in calls:
            self.close()
        return result

    @contextmanager
    def backward_thread(self) -> Iterator[None]:
        """What is written inside runs on autograd's thread, with nothing of the main thread around it."""
        before = self._thread, self._open
        self._thread, self._open = BACKWARD_THREAD, []
        yield
        self._thread, self._open = before

    def section(self, name: str) -> None:
        """What is written next is a section of this name; sections of one name do the same. Without a name nothing begins."""
        if name:
            self._sections.append((name, len(self._nodes)))

    def fly(self, number: int, group: str) -> None:
        """Ends the section: the next of its parts is run when others were, and the collective beside those."""
        self._flying = number, group
        self.section(next_part(self._sections[-1][0]))

    def land(self) -> None:
        """Waits for what still flies."""
        if self._flying is not None:
            flying, self._flying = self._flying, None
            self.wait(*flying)

    # Streams; 0 is where compute is

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """What is written inside is launched on another stream, which waits for what compute was given so far."""
        self.follow(stream, 0)
        self._orders.append(StreamOrder(len(self._nodes), int(CallKind.LAUNCH), stream))
        yield
        self._orders.append(StreamOrder(len(self._nodes), int(CallKind.LAUNCH), 0))

    def follow(self, stream: int, of: int) -> None:
        """`stream.wait_stream(of)`; what `of` is only given later, the step before gave it."""
        here = len(self._nodes)
        self._orders.append(StreamOrder(here, int(CallKind.STREAM_WAIT), stream, of, here))

    def synchronize(self) -> None:
        """`torch.cuda.synchronize()`: before the next op, the host waits for everything that was launched."""
        self._orders.append(StreamOrder(len(self._nodes), int(CallKind.DEVICE_SYNC)))

    @contextmanager
    def waits_put_off(self) -> Iterator[list[tuple[int, str]]]:
        """Collectives that are waited for inside, with their groups, instead of what waits for them."""
        self._put_off = []
        yield self._put_off
        self._put_off = None

    def next_sequence(self) -> int:
        """Takes the next number of autograd's counter."""
        self.sequence += 1
        return self.sequence - 1

    # Collectives, over all ranks where no group is named; each gives what `wait` takes

    def group_size(self, group: str) -> int:
        """How many ranks a group has; 1 where there is none."""
        return self._groups[group].size if group in self._groups else 1

    def all_reduce(self, tensors: tuple[Tensor, ...], group: str = GROUP, *, asynchronous: bool = True) -> int:
        """Sums tensors over the ranks, in place."""
        call = (tensors, OBJECT, OBJECT, None, asynchronous, _NO_TIMEOUT)
        return self._collective("all_reduce", group, call, (tensors, OBJECT), (tensors,), (tensors,))

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        *,
        group: str = GROUP,
        asynchronous: bool = True,
    ) -> int:
        """Sends shares of `in_splits` elements to every rank and receives `out_splits`."""
        splits = tuple(in_splits), tuple(out_splits)
        call = (received, sent, OBJECT, splits[1], splits[0], asynchronous, _NO_TIMEOUT)
        return self._collective("all_to_all", group, call, (OBJECT,), (sent,), (received,), *splits)

    def broadcast(self, tensor: Tensor, group: str = GROUP) -> int:
        """Gives every rank what the first has."""
        call = ((tensor,), OBJECT, 0, 0, True, _NO_TIMEOUT)
        return self._collective("broadcast", group, call, ((tensor,), OBJECT), ((tensor,),), ((tensor,),))

    def all_gather(self, whole: Tensor, shard: Tensor, group: str = GROUP) -> int:
        """Gathers every rank's shard into the whole."""
        call = (whole, shard, OBJECT, True, _NO_TIMEOUT)
        return self._collective("all_gather", group, call, (whole, OBJECT), (shard,), (whole,))

    def reduce_scatter(self, shard: Tensor, whole: Tensor, group: str = GROUP) -> int:
        """Sums the whole over the ranks and leaves each its shard."""
        call = (shard, whole, OBJECT, OBJECT, True, _NO_TIMEOUT)
        return self._collective("reduce_scatter", group, call, (shard, OBJECT), (whole,), (shard,))

    def send(self, tensor: Tensor, group: str) -> int:
        """Sends a tensor to the other rank of a group of two: a group for each direction, so that both may send first."""
        call = ((tensor,), OBJECT, 1, 0)
        return self._collective("send", group, call, (OBJECT,), ((tensor,),), ())

    def receive(self, tensor: Tensor, group: str) -> int:
        """Receives a tensor from the other rank of a group of two."""
        call = ((tensor,), OBJECT, 0, 0)
        return self._collective("recv", group, call, (OBJECT,), (), ((tensor,),))

    def rotate(self, received: Tensor, sent: Tensor, group: str) -> int:
        """Sends to the next rank of a group and receives from the one before, as one `batch_isend_irecv` of every rank."""
        call = ((sent,), OBJECT, 1, 0)
        return self._collective("send_recv", group, call, (OBJECT,), (sent,), (received,))

    def wait(self, number: int, group: str = GROUP) -> None:
        """Makes the stream that computes wait for a collective."""
        if number in self._absent:
            return
        if self._put_off is not None:
            self._put_off.append((number, group))
            return
        named = self._groups[group]
        recorded = ((number, False), (named.name, named.description), self.rank, WAIT, (), (), -1, -1, 1)
        # A wait is recorded with no tensor, and PyTorch writes the dtype of none as Byte.
        self.write(COMM_NODE, recorded, comm=Comm(WAIT, WAIT, named.name, self.rank, number, dtype="uint8"))

    def _collective(
        self,
        kind: str,
        group: str,
        call: tuple[Value, ...],
        result: tuple[Value, ...],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        in_splits: tuple[int, ...] = (),
        out_splits: tuple[int, ...] = (),
    ) -> int:
        """Writes c10d's op, the record of what is communicated, and NCCL's range inside it; gives the collective's number."""
        self._collectives += 1
        number, named, (c10d, name, nccl) = self._collectives, self._groups[group], _COLLECTIVES[kind]
        sent, received = _flat(inputs), _flat(outputs)
        # Where the rank would name a peer, the group of two already says who that is.
        rank, first = -1 if kind in ("send", "recv") else self.rank, (*sent, *received)[0]
        comm = Comm(
            name, kind, named.name, rank, number, in_splits, out_splits, sent, received,
            _bytes(sent), _bytes(received), first.dtype,
        )  # fmt: skip
        about = ((number, False), (named.name, named.description), self.rank, name, in_splits, out_splits, 0, 1, named.size)
        frame = self.write(f"c10d::{c10d}", call, result)
        if self._last == _KEPT:
            self._absent.add(number)
        with frame, self.write(COMM_NODE, (*inputs, *about), outputs, comm=comm):
            self.write(f"nccl:{nccl}", (first,))
        return number

    # The whole

    def trace(self) -> ExecutionTrace:
        """What was written, as an execution trace."""
        return ExecutionTrace(
            schema=_SCHEMA,
            nodes=tuple(self._nodes),
            parents=tuple(self._parents),
            groups={group.name: group for group in self._groups.values()},
            rank=self.rank,
            world_size=self.world_size,
            source=self.source,
        )

    def program(self, order: Sequence[str] = (), twins: Mapping[int, int] | None = None) -> Program:
        """What was written, as the program of the rank: ops and collectives, no times, no kernels.

        `order` names the sections as the step runs them, where what was written is a sample of it; `twins` are the storages of
        parameters that the sample leaves out, each with one that it does the same with.
        """
        result = f"{self.source or 'a step'}: built, never run; its kernels and times need models of a device and a host"
        program = to_program(self.trace(), rank=self.rank, world_size=self.world_size)
        repetition = Repetition.of(self._sections, order, twins or {}) if order else None
        return replace(program, warnings=(result,), orders=tuple(self._orders), repetition=repetition)

    @property
    def collectives(self) -> int:
        """How many were called so far."""
        return self._collectives

    def _next_id(self) -> int:
        self._id += 1
        return self._id


class _Inside(AbstractContextManager[None]):
    """The inside of the op that was written last; one for all ops, which are closed in the order in which they nest."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        self._writer.open()

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def _flat(values: tuple[Value, ...]) -> tuple[Tensor, ...]:
    return tuple(
        tensor for value in values for tensor in (value if isinstance(value, tuple) else (value,)) if isinstance(tensor, Tensor)
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(math.prod(tensor.shape) * dtype_bytes(tensor.dtype) for tensor in tensors)
