"""What the host spends on a program of which only the ops are known, piece by piece in the order in which it is spent.

A measured op costs what it was measured at, with all inside it. One that only wraps others costs what they do: a composite,
a label, an op under autocast around itself. A leaf that was never measured costs as much as its class, and is said. Every
launch costs one launch, or a launch from Python where an op written in Python makes it. Each node of the backward pass costs
what the engine spends on it besides; an optimiser's step, DDP's hooks and its buckets cost what was measured of them as a
whole, launches included.

Where launches lie within a piece the measured costs do not say: shares seen in recorded steps divide them (`_OPS`,
`_COLLECTIVES`). What a function launches besides the ops in it comes after those: they allocate what it works on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from steptime._models.host.compiled import CompiledCosts, FrameCounts
from steptime._models.host.model import STEP, HostCost, HostModel, Speed
from steptime._notices import Basis
from steptime._ops.catalogue import SPARSE_UPDATES, HostClass, op_kind
from steptime._ops.compiled import GENERATED, Frame, frame_of
from steptime._ops.table import Arguments, op_table
from steptime._program.collectives import collective_kind
from steptime._program.program import KindColumn, Phase, Program, SmallColumn
from steptime.errors import InputError

FloatColumn = npt.NDArray[np.float64]

_ENGINE = "autograd::engine::evaluate_function"
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_EMPTY = "aten::empty_strided"
_DDP_FORWARD = "DistributedDataParallel.forward"
_DDP_GRADIENT = "torch::distributed::reducer::mul_out"
# DDP's own copies out of its buckets are part of its measured cost per parameter.
_DDP_COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
_CALLS = {
    "all_reduce": "all_reduce", "all_to_all": "all_to_all_single", "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor", "broadcast": "broadcast",
}  # fmt: skip

# Class names as the label of a step has them -> the measured optimiser.
_OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adagrad": "adagrad", "RowwiseAdagrad": "rowwise_adagrad"}
# Lists that the measured steps of Adam and AdamW work on (torch/optim/adam.py, _multi_tensor_adam, counts on the CPU).
_ADAM_CALLS = {
    "_foreach_add_": 2, "_foreach_mul_": 2, "_foreach_lerp_": 1, "_foreach_addcmul_": 1, "_foreach_sqrt": 1, "_foreach_div_": 1,
    "_foreach_addcdiv_": 1,
}  # fmt: skip
# What their loops over parameters call once for each.
_ONCE_PER_PARAMETER = {"sgd": "add_", "sgd_momentum": "mul_", "adam": "addcdiv_", "adamw": "addcdiv_", "adagrad": "addcdiv_"}

# Of the CPU's work, what may be of ops never measured without a word: less than steps repeat to.
WORTH_SAYING = 0.03
# An op called by another saves the Python binding, but never more than three quarters of what a call from Python takes.
LEAST_INSIDE = 0.25


# Python around ops, in calls of `add_`, measured on a CPU with PyTorch 2.13 (benchmarks/python_dispatch.py): DTensor's dispatch
# of an op, and of each tensor in a list; what makes DTensors and plain tensors of each other and redistributes them; FSDP2's
# hooks around a module, and what gathering and reducing take besides their ops, each with what a parameter adds. The last two
# take longer on a GPU, where streams and events come in: seven tiny steps without a wire, in eight processes at once
# (benchmarks/h200/divided_parts.py, 2026-11-18), took 1.5 and 2.6 times that at 2.32 times a burst's speed. Hosts at once take
# 1.25 times as long (`host_slowdown`), and steps 2.54 (`STEP`), which leaves 1.1 and 1.9.
_SHARDED_OP, _SHARDED_TENSOR = 7.2, 0.78
_ON_GPU_DTENSOR, _ON_GPU_FSDP = 1.1, 1.9
_DTENSOR = {
    "_FromTorchTensor": 11.0, "_ToTorchTensor": 2.0, "_FromTorchTensorBackward": 13.5, "_ToTorchTensorBackward": 13.5,
    "Redistribute": 39.0, "RedistributeBackward": 76.0,
}  # fmt: skip
_FSDP = {
    "FSDP::pre_forward": (42.0, 0.0), "FSDP::pre_backward": (40.0, 0.0),
    "fsdp::all_gather_copy_in": (54.0, 7.0), "fsdp::chunk_cat": (21.0, 7.5),
}  # fmt: skip
# A checkpoint in the same calls, besides its block's second pass (the same benchmark): the generator's state, hooks, and for a
# reentrant one its own call of the engine; for one that is not, each tensor that its block keeps. A layer of GPT-2 takes
# 1.3 ms with the Python of its second pass; blocks of other people's models took 1.2 to 1.8 (H200, torch 2.11, 2026-11-19).
_CHECKPOINT, _REENTRANT, _KEPT = 60.0, 49.0, 4.8
_KEPT_AGAIN = "aten::detach"  # how a tensor that was computed again is handed over
_PYTHON: Mapping[str, tuple[float, float]] = {
    **{name: (_ON_GPU_DTENSOR * calls, 0.0) for name, calls in _DTENSOR.items()},
    **{name: (_ON_GPU_FSDP * calls, _ON_GPU_FSDP * each) for name, (calls, each) in _FSDP.items()},
}


class Piece(IntEnum):
    """What a piece of host time is."""

    OP = 0  # an op with all inside it, and their launches
    OWN_LAUNCHES = 1  # what a function or a composite launches besides the ops in it
    PYTHON = 2  # before an op of the forward pass
    RECORD = 3  # recording the graph of such an op
    FUNCTION = 4  # calling a function written in Python in the forward pass
    NODE = 5  # the engine's part of a node of the backward pass
    BACKWARD_CALL = 6  # once per pass, before its first node
    OPTIMIZER_STEP = 7
    ZERO_GRAD = 8
    DDP_FORWARD = 9
    DDP_GRADIENT = 10  # DDP's hook on one gradient, and copying it back later
    DDP_BUCKET = 11  # a bucket that is complete, with its collective
    DDP_COPY = 12  # costs nothing here, being in DDP_GRADIENT, and launches
    COLLECTIVE = 13  # calling a collective
    STREAM_WAIT = 14  # waiting for one, which only orders streams
    COMPILED = 15  # guards, or what PyTorch's compiler puts around a compiled function
    REPLAY = 16  # a CUDA graph: one launch of all ops within


class LaunchDivision(NamedTuple):
    """How CPU work lies about launches: weights of what is before the first, between each two, and after the last."""

    before: float
    between: float
    after: float


# Seen in the recorded steps of examples/ (dlrm_overlap4, gpt_fsdp2_small, h200_mps4_dlrm, prefetch_sync): of an op with one
# launch 81 to 85 % lie before it (medians over 2,250 ops), of one with two 81 to 89 % before and 6 to 8 % between (741 ops);
# an optimiser's step with one launch has 84 % before it, one with 14 has 42 % before and 53 % between (the rule: 41 and 51).
# It is wrong for those with 3 and 5 launches, which have 21 and 37 % before the first (the rule: 72 and 64).
_OPS = LaunchDivision(0.84, 0.08, 0.16)
# Everything but returning comes before the launch of a graph.
_REPLAYS = LaunchDivision(0.9, 0.0, 0.1)
# There, of the 204 calls of collectives 60 to 65 % lie before the launch (medians of three examples).
_COLLECTIVES = LaunchDivision(0.63, 0.0, 0.37)


@dataclass(frozen=True, eq=False)
class HostColumns:
    """Pieces of host time of all steps of a program, in the order in which its host spends them; nanoseconds at speed 1.

    A piece before an op has the row of that op. `cpu_ns` is `before_ns + between_ns + after_ns`; without launches all of it
    is before. Between launches it is spread evenly, and each launch takes its share of `launch_ns`, which is 0 where a piece
    was measured as a whole and its launches were not counted. Launches may be fractions: means over calls.
    """

    piece: KindColumn  # Piece
    op: SmallColumn  # row of Program.ops
    thread: SmallColumn  # index into Program.threads; a backward pass is called on the main thread
    phase: KindColumn  # Phase
    step: SmallColumn
    cpu_ns: FloatColumn
    launch_ns: FloatColumn
    launches: FloatColumn
    before_ns: FloatColumn  # CPU work before the first launch
    between_ns: FloatColumn  # between the first and the last
    after_ns: FloatColumn
    warnings: tuple[str, ...] = ()
    graphed: bool = False  # all of it is one CUDA graph

    def __len__(self) -> int:
        return len(self.piece)

    def time_ns(self, speed: Speed = STEP) -> FloatColumn:
        """What every piece takes at this speed."""
        result: FloatColumn = self.cpu_ns * speed.cpu + self.launch_ns * speed.launch
        return result

    def replayed(self, model: HostModel) -> HostColumns:
        """The same step captured in a CUDA graph: the host launches it once, and nothing of it by itself."""
        cost = CompiledCosts(model).replay(float(self.launches.sum()))
        nothing, cpu, launch = (np.zeros(len(self)) for _ in range(3))
        first = np.flatnonzero(self.launches > 0)[:1]
        cpu[first], launch[first] = cost.cpu_ns, cost.launch_ns
        return replace(
            self, thread=np.full_like(self.thread, self.thread[0] if len(self) else 0), cpu_ns=cpu, launch_ns=launch,
            before_ns=cpu, between_ns=nothing, after_ns=nothing, warnings=(), graphed=True,
        )  # fmt: skip


def host_columns(program: Program, model: HostModel, launches: Sequence[float] | None = None) -> HostColumns:
    """What the host spends on a program, in order.

    `launches`: how many kernels, copies and memsets each op launches itself; without them, as many as it usually does.
    """
    if not len(program.ops):
        raise InputError(f"{program.source or f'rank {program.rank}'}: contains no ops, so its host costs cannot be predicted")
    known: tuple[HostModel, Sequence[float] | None, HostColumns] | None = program.derived.get(HostColumns)
    if known is None or known[0] is not model or known[1] != launches:
        walk = _HostWalk(program, model, launches)
        for row in walk.table.outermost():
            walk.visit(row)
        known = program.derived[HostColumns] = (model, launches, walk.columns())
    return known[2]


class _Spent(NamedTuple):
    piece: Piece
    row: int
    cost: HostCost
    launches: float
    division: LaunchDivision


class _HostWalk:
    """Visits the ops of a program in order and notes what each piece costs."""

    def __init__(self, program: Program, model: HostModel, launches: Sequence[float] | None) -> None:
        self.program, self.model, self.launches = program, model, launches
        self.table = table = op_table(program)
        self.names, self.children, self.phases = table.names, table.children, table.phases
        self.sequence: list[int] = program.ops.sequence.tolist()
        self.spent: list[_Spent] = []
        self.unknown: Counter[str] = Counter()
        self.unknown_ns = 0.0  # what of the CPU's work is that of ops never measured
        self.called: set[tuple[int, int, str]] = set()
        self.in_python = self._in_python()
        self.compiled = CompiledCosts(model)
        self.counts = FrameCounts(table) if any(frame_of(name) for name in program.names) else None
        self.in_backward: int | None = None  # the step, where the outermost op before is a node of its backward pass

    def _in_python(self) -> dict[int, float]:
        """By row, CPU time of Python that dispatches an op on sharded tensors, or of FSDP's hooks at their label."""
        model = self.model
        result: dict[int, float] = {}
        call_ns = model.op("aten::add_")[0].cpu_ns
        for row, inside in self.table.same_inside.items():
            if _shares_memory(self.table.arguments[row], self.table.arguments[inside[0]]):
                result[row] = call_ns * (_SHARDED_OP + _SHARDED_TENSOR * self.table.arguments[row].longest_list)
        for row, name in enumerate(self.names):
            calls, calls_each = _PYTHON.get(name.partition(" ")[0], (0.0, 0.0))
            if calls:
                result[row] = call_ns * (calls + calls_each * self.table.arguments[row].longest_list)
        return result

    def _python_around(self, row: int) -> None:
        """Adds what Python spends on dispatching an op or in a hook, before all inside it; once."""
        cpu_ns = self.in_python.pop(row, 0.0)
        if cpu_ns:
            self.add(Piece.FUNCTION, row, HostCost(cpu_ns))

    def add(self, piece: Piece, row: int, cost: HostCost, launches: float = 0.0, division: LaunchDivision = _OPS) -> None:
        self.spent.append(_Spent(piece, row, cost, launches, division))

    def columns(self) -> HostColumns:
        ops = self.program.ops
        piece = np.array([item.piece for item in self.spent], dtype=np.int8)
        rows = np.array([item.row for item in self.spent], dtype=np.int32)
        cpu_ns = np.array([item.cost.cpu_ns for item in self.spent], dtype=np.float64)
        launches = np.array([item.launches for item in self.spent], dtype=np.float64)
        weights = np.array([item.division for item in self.spent], dtype=np.float64).reshape(-1, 3)
        # Before the first launch, between launches and after the last one; less than one launch counts as one.
        weights *= np.stack([np.ones_like(launches), np.maximum(launches - 1.0, 0.0), launches > 0.0], axis=1)
        between_ns, after_ns = (cpu_ns * weights[:, index] / weights.sum(axis=1) for index in (1, 2))
        call = piece == Piece.BACKWARD_CALL
        main = next((number for number, thread in enumerate(self.program.threads) if thread.role == "main"), None)
        return HostColumns(
            piece=piece,
            op=rows,
            thread=ops.thread[rows] if main is None else np.where(call, np.int32(main), ops.thread[rows]),
            phase=np.where(call, np.int8(Phase.BACKWARD), ops.phase[rows]),
            step=ops.step[rows],
            cpu_ns=cpu_ns,
            launch_ns=np.array([item.cost.launch_ns for item in self.spent], dtype=np.float64),
            launches=launches,
            before_ns=cpu_ns - between_ns - after_ns,
            between_ns=between_ns,
            after_ns=after_ns,
            warnings=self._warnings(),
        )

    def _warnings(self) -> tuple[str, ...]:
        if not self.unknown or self.unknown_ns < WORTH_SAYING * sum(item.cost.cpu_ns for item in self.spent):
            return ()
        most = ", ".join(f"{name} ({count})" for name, count in self.unknown.most_common(5)) + ", ..." * (len(self.unknown) > 5)
        return (Basis(f"host costs of ops that were never measured, as of their class: {most}"),)

    def visit(self, row: int) -> None:
        """One op in its phase, with all inside it."""
        name = self.names[row]
        self._python_around(row)
        if name.startswith(_ENGINE):
            self._node(row)
            return
        if (frame := frame_of(name)) is not None:
            self._frame(row, frame)
            return
        self.in_backward = None
        if name.startswith("Optimizer."):
            self._optimizer(row)
        elif name.startswith(_DDP_FORWARD):
            self.add(Piece.DDP_FORWARD, row, self.model.mechanism("ddp_forward_fixed", "ddp"))
            self._inside(row)
        elif name == _DDP_COPY:
            self.add(Piece.DDP_COPY, row, HostCost(), self._all_launches(row))
        elif name.startswith("##"):
            return
        elif "::" not in name and not name.startswith("detach"):
            self._python(row)
        elif self.phases[row] == Phase.FORWARD:
            self._called(row)
        else:
            self._op(row, outermost=self.phases[row] != Phase.BACKWARD)

    def _called(self, row: int) -> None:
        """An op that Python calls in a forward pass, the first or a second one."""
        self.add(Piece.PYTHON, row, self._before(row))
        self.add(Piece.RECORD, row, self.model.mechanism("record", "graph"))
        self._op(row, outermost=True)

    def _before(self, row: int, *, module: bool = True) -> HostCost:
        """Python before an op: next to none before a method of a tensor, the call of a module before most others."""
        method = not module or self.table.kinds[row].host_class is HostClass.VIEW
        return self.model.mechanism("between", "view" if method and "between view" in self.model.around else "forward")

    def _optimizer(self, row: int) -> None:
        """An optimiser's step or its clearing of gradients; other labels of it are functions in Python."""
        name = self.names[row]
        if name.startswith("Optimizer.step"):
            inside = [(self.names[child], self.table.arguments[child].longest_list) for child in self.children[row]]
            cost, unknown = _optimizer_cost(self.model, name, inside, frozenset(self._nested(row)))
            if cost is None:
                self._own_loop(row)
                return
            sharded_ns = sum(self.in_python.pop(child, 0.0) for child in range(row, self.table.last[row] + 1))
            cost = replace(cost, cpu_ns=cost.cpu_ns + sharded_ns)
            self.add(Piece.OPTIMIZER_STEP, row, cost, self._all_launches(row))
            if unknown:
                self.unknown[unknown] += 1
                self.unknown_ns += cost.cpu_ns
        elif name.startswith("Optimizer.zero_grad"):
            # By letting go of gradients, which is PyTorch's default.
            cost = self.model.mechanism("zero_grad", "to_none", self._parameters())
            self.add(Piece.ZERO_GRAD, row, cost, self._all_launches(row))
        else:
            self._python(row)

    def _own_loop(self, row: int) -> None:
        """A step that nobody measured and that takes parameters one by one: what its ops cost, called from Python."""
        for child in self.children[row]:
            self.add(Piece.PYTHON, child, self._before(child, module=False))
            self.visit(child)

    def _node(self, row: int) -> None:
        """A node of a backward pass; before the first of each, its call."""
        step = self.table.steps[row]
        if self.in_backward != step:
            self.add(Piece.BACKWARD_CALL, row, self.model.mechanism("backward_call", "all"))
        self.add(Piece.NODE, row, self.model.mechanism("engine", "node"))
        for child in self.children[row]:
            self._visit_node(child)
        self.in_backward = step

    def _visit_node(self, row: int) -> None:
        """What a node of the backward pass does: its function, then hooks and sums of gradients."""
        name = self.names[row]
        self._python_around(row)
        if (frame := frame_of(name)) is not None:
            self._frame(row, frame)
        elif name == _DDP_GRADIENT:
            self.add(Piece.DDP_GRADIENT, row, self.model.mechanism("ddp_backward", "ddp"), self._all_launches(row))
        elif collective_kind(name) == "all_reduce":
            self.add(Piece.DDP_BUCKET, row, self.model.mechanism("ddp_bucket", "ddp"), 1.0, _COLLECTIVES)
        elif op_kind(name).aten:
            self._op(row)
        else:
            own_launches = self._own_launches(row, python=_is_python(name))
            self._inside(row, self._checkpoint(row))
            self.spent += own_launches

    def _checkpoint(self, row: int) -> int:
        """How many of the ops in a node's function a checkpoint computes again, whose Python is added; these come first."""
        children, own = self.children[row], self.sequence[row]
        nested = next((place for place, child in enumerate(children) if self.names[child].startswith(_ENGINE)), -1)
        again = 0  # up to the last op that makes a node itself: autograd numbers it anew
        for place, child in enumerate(children[:nested] if nested >= 0 else children):
            if not {-1, own}.issuperset(self.sequence[child : self.table.last[child] + 1]):
                again = place + 1
        if not again:
            return 0
        kept = self.names[row : self.table.last[row] + 1].count(_KEPT_AGAIN)
        calls = _REENTRANT if nested >= 0 else (_CHECKPOINT + _KEPT * kept) * bool(kept)
        if not calls:  # a function of somebody's own, whose Python is charged as a whole
            return 0
        self.add(Piece.FUNCTION, row, HostCost(calls * self.model.op("aten::add_")[0].cpu_ns))
        return again

    def _frame(self, row: int, frame: Frame) -> None:
        """What PyTorch's compiler made: a frame and what is inside it, or a CUDA graph as a whole."""
        cost = self.compiled.frame(frame)
        if frame is Frame.GRAPH:
            launches, around = self._all_launches(row), self.table.parents[row]
            # A graph that a script captured and replays itself has none of what PyTorch's compiler does about its own.
            cost = cost if around >= 0 and frame_of(self.names[around]) is not None else HostCost()
            self.add(Piece.REPLAY, row, cost + self.compiled.replay(launches), launches, _REPLAYS)
            return
        if frame is Frame.WRAPPER:
            cost = self._tensors_around(row)
        self.add(Piece.COMPILED, row, cost)
        for child in self.children[row]:
            if frame is Frame.WRAPPER and frame_of(self.names[child]) is None:
                self._from_wrapper(child)
            else:
                self._op(child)

    def _tensors_around(self, row: int) -> HostCost:
        """What the frames around a wrapper cost for its tensors, up to its region: one that it resumes has its own."""
        assert self.counts is not None
        counts, result, at = self.counts.of(row), HostCost(), self.table.parents[row]
        while at >= 0:
            frame = frame_of(self.names[at])
            result += HostCost() if frame is None else self.compiled.tensors(frame, counts)
            at = self.table.parents[at] if frame is not Frame.REGION else -1
        return result

    def _from_wrapper(self, row: int) -> None:
        """What Inductor's wrapper calls itself: a generated kernel, memory, an external call as from Python."""
        name, launches = self.names[row], self._launches(row)
        if name.startswith(GENERATED):
            cost = self.compiled.kernel(len(self.table.arguments[row].inputs))
            cost = (cost + HostCost(0.0, self.model.launch_ns * launches)).times(self._coldness(row))
            self.add(Piece.OP, row, cost, launches)
        elif name == _EMPTY:
            self.add(Piece.OP, row, self.compiled.of("empty"))
        else:
            self._op(row, outermost=True)

    def _python(self, row: int) -> None:
        """A function written in Python, or a label: what it calls, and the call itself where it stands for a function."""
        if self.phases[row] == Phase.FORWARD:
            self.add(Piece.FUNCTION, row, self.model.mechanism("python_function", "forward"))
        own_launches = self._own_launches(row, python=True)
        self._inside(row)
        self.spent += own_launches

    def _inside(self, row: int, called: int = 0) -> None:
        """The ops in a label or a function, of which so many are called from Python as in a forward pass."""
        for place, child in enumerate(self.children[row]):
            if self.names[child].startswith(_ENGINE):  # a label around a call of backward
                self._node(child)
            elif place < called and "::" in self.names[child]:
                self._called(child)
            elif self.phases[child] == Phase.BACKWARD:
                self._op(child)
            else:
                self.visit(child)

    def _wraps(self, row: int) -> bool:
        """Whether an op costs and launches what those inside it do."""
        return bool(self.children[row]) and (self.names[row] not in self.model.ops or row in self.table.same_inside)

    def _op(self, row: int, *, outermost: bool = False) -> None:
        name = self.names[row]
        self._python_around(row)
        if (frame := frame_of(name)) is not None:
            self._frame(row, frame)
            return
        if self.table.kinds[row].host_class is HostClass.COLLECTIVE:
            self._collective(row)
            return
        if self._wraps(row):
            own_launches = self._own_launches(row, python=False)
            for child in self.children[row]:
                self._op(child)
            self.spent += own_launches
            return
        cost, measured = self.model.op(name)
        tensors = self.table.arguments[row].longest_list if self.table.kinds[row].host_class is HostClass.FOREACH else 0
        binding_ns = 0.0 if outermost else min(self.model.binding_ns, (1.0 - LEAST_INSIDE) * cost.cpu_ns)
        count = self._launches(row)
        own_ns = cost.cpu_ns - binding_ns + tensors * cost.per_tensor_ns
        if not measured and "::" in name:
            self.unknown[name] += 1
            self.unknown_ns += own_ns
        self.add(Piece.OP, row, HostCost(own_ns, self.model.launch_ns * count).times(self._coldness(row)), count)

    def _collective(self, row: int) -> None:
        call = f"collective_call {_CALLS.get(collective_kind(self.names[row]), '')}"
        cost = self.model.around.get(call, HostCost(self.model.classes[HostClass.COLLECTIVE].cpu_ns))
        # Waiting for a collective is recorded under the same name and only orders streams.
        if self.children[row] or self.names[row].startswith("c10d::"):
            self.add(Piece.COLLECTIVE, row, cost, 1.0, _COLLECTIVES)
        elif self.names[row] == "record_param_comms":
            self.add(Piece.STREAM_WAIT, row, self.model.mechanism("stream_wait", "stream_wait"))

    def _own_launches(self, row: int, *, python: bool) -> list[_Spent]:
        """What an op launches besides the ops in it; Python's own launches take several times as long, before each of them."""
        count = 0.0 if self.launches is None else self.launches[row]
        if not count:
            return []
        cost = self.model.mechanism("table_batched", "forward_sgd") if python else HostCost(0.0, self.model.launch_ns)
        coldness = self._coldness(row)
        cost = cost.times(count - 1.0 + coldness)
        return [_Spent(Piece.OWN_LAUNCHES, row, cost, count, LaunchDivision(coldness, 1.0, 0.0))]

    def _launches(self, row: int) -> float:
        """Launches of an op that is charged as a whole."""
        if self.launches is not None:
            return self._known_launches(row, self.launches)
        return 0.0 if self.table.arguments[row].on_cpu else self.model.op(self.names[row])[0].launches

    def _all_launches(self, row: int) -> float:
        """Launches of all ops within one whose cost was measured as a whole; of itself too where they are known."""
        if self.launches is not None:
            return self._known_launches(row, self.launches)
        inside = self.children[row]
        return sum(self._all_launches(child) if self._wraps(child) else self._launches(child) for child in inside)

    def _coldness(self, row: int) -> float:
        """How many times as long a call takes: more where it is the first of its op in this phase of this step."""
        key = (self.table.steps[row], self.phases[row], self.names[row])
        if key in self.called:
            return 1.0
        self.called.add(key)
        return self.model.first_call

    def _known_launches(self, row: int, launches: Sequence[float]) -> float:
        return launches[row] + sum(self._known_launches(child, launches) for child in self.children[row])

    def _nested(self, row: int) -> Iterator[str]:
        for child in self.children[row]:
            yield self.names[child]
            yield from self._nested(child)

    def _parameters(self) -> int:
        """Parameters that one optimiser clears: gradients that the backward pass takes over, the same number for each."""
        if self.program.repetition is not None:  # a sample has not all of them, but its optimiser steps over all
            steps = (row for row, name in enumerate(self.names) if name.startswith("Optimizer.step"))
            inside = (self.table.arguments[child].longest_list for row in steps for child in self.children[row])
            return max(inside, default=0)
        clears = sum(name.startswith("Optimizer.zero_grad") for name in self.names)
        return self.names.count(_ACCUMULATE) // max(1, clears)


def _shares_memory(outer: Arguments, inner: Arguments) -> bool:
    """Whether an op is on tensors that wrap those of the same op inside it: others with the same memory."""
    first, second = (next((tensor for tensor in each.inputs if tensor.shape), None) for each in (outer, inner))
    if first is None or second is None or first.storage is None:
        return False
    return first.storage == second.storage and first.id != second.id and first.dtype == second.dtype


def _is_python(name: str) -> bool:
    """Whether a node's function is written in Python: built-in ones end in a number (AddmmBackward0)."""
    return name.endswith("Backward") or not name[-1:].isdigit()


def _optimizer_cost(
    model: HostModel, label: str, inside: Sequence[tuple[str, int]], nested: frozenset[str]
) -> tuple[HostCost | None, str]:
    """The cost of an optimiser's step and, where it is that of another one, which one is missing; None: that of its ops.

    `inside`: the ops that the step calls, each with how many tensors it works on; `nested`: names of those inside them.
    """
    name = label.partition("#")[2].partition(".")[0]
    kind = _OPTIMIZERS.get(name, "")
    called = [(op_kind(op).plain, count) for op, count in inside]
    if kind == "sgd" and any(op.startswith("_foreach_mul") or op == "mul_" for op, _ in called):
        kind = "sgd_momentum"
    fused, lists = ([count for op, count in called if op.startswith(way)] for way in ("_fused_", "_foreach_"))
    if fused:
        way, count = "fused", sum(fused)
    elif lists:
        way, count = "foreach", max(lists)
    elif any(op_kind(op).sparse_part for op in nested):
        # Measured were SGD, and a row-wise Adagrad for all that sum rows first.
        like = "rowwise_adagrad" if SPARSE_UPDATES["rowwise_adagrad"] in nested else "sgd"
        cost = model.mechanism("optimizer_step", f"{like}_sparse", sum(op == SPARSE_UPDATES[like] for op, _ in inside))
        return cost, "" if kind == like else f"optimiser {name or label}"
    elif kind in _ONCE_PER_PARAMETER:
        way, count = "for_loop", max(1, sum(op == _ONCE_PER_PARAMETER[kind] for op, _ in called))
    else:
        return None, ""
    more = _more_calls(model, called) if way == "foreach" else HostCost()
    if f"optimizer_step {kind}_{way}" in model.around:
        return model.mechanism("optimizer_step", f"{kind}_{way}", count) + more, ""
    return model.mechanism("optimizer_step", f"adam_{way}", count) + more, f"optimiser {name or label}"


def _more_calls(model: HostModel, called: Sequence[tuple[str, int]]) -> HostCost:
    """What calls cost that the measured step of an optimiser had none of: those of step counts on the device (`capturable`)."""
    if not any(op.startswith("_foreach_pow") for op, _ in called):
        return HostCost()
    usual = Counter(_ADAM_CALLS)
    result = HostCost()
    for op, count in called:
        if usual[op] > 0:
            usual[op] -= 1
        elif op.startswith("_foreach_"):
            cost, _ = model.op(f"aten::{op}")
            result += HostCost(cost.cpu_ns + cost.per_tensor_ns * count)
    return result
