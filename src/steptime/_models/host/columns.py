"""What the host spends on a program of which only the ops are known, piece by piece in the order in which it is spent.

A measured op costs what it was measured at, with all inside it. One that only wraps others costs what they do: a composite,
a label, an op under autocast around itself. A leaf that was never measured costs as much as its class, and is said. Every
launch costs one launch, or a launch from Python where an op written in Python makes it. Each node of the backward pass costs
what the engine spends on it besides; an optimiser's step, DDP's hooks and its buckets cost what was measured of them as a
whole, launches included.

Where launches lie within a piece the measured costs do not say: shares seen in recorded steps divide them (`_OPS`,
`_COLLECTIVES`). What a function launches besides the ops in it comes after those: they allocate what it works on.


from __future__ import annotations"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from steptime._models.host.model import STEP, HostCost, HostModel, Speed
from steptime._ops.catalogue import HostClass
from steptime._ops.table import op_table
from steptime._program.collectives import collective_kind
from steptime._program.program import Phase, Program
from steptime._program.table import KindColumn, SmallColumn
from steptime.errors import InputError

# Class names as the label of a step has them -> the measured optimiser.
_KINDS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adagrad": "adagrad", "RowwiseAdagrad": "rowwise_adagrad"}
# What is called once for each parameter whose gradient holds looked-up rows only.
_PER_SPARSE = {"sgd": "aten::add_", "rowwise_adagrad": "aten::coalesce"}


def optimizer_cost(
    model: HostModel, label: str, inside: Sequence[tuple[str, int]], nested: frozenset[str] = frozenset()
) -> tuple[HostCost, str]:
    """The cost of a step and, where it is that of another optimiser, which one is missing.

    `inside`: the ops that the step calls, each with how many tensors it works on; `nested`: names of those inside them.
    """
    name = label.partition("#")[2].partition(".")[0]
    kind = _KINDS.get(name, "")
    way, count = _way(inside)
    if kind == "sgd" and any(op.startswith("aten::_foreach_mul") for op, _ in inside):
        kind = "sgd_momentum"
    if kind in _PER_SPARSE and way == "for_loop" and "aten::_values" in nested:
        way, count = "sparse", sum(op == _PER_SPARSE[kind] for op, _ in inside)
    measured = f"{kind}_{way}"
    if f"optimizer_step {measured}" in model.around:
        return _cost(model, measured, count), ""
    return _cost(model, f"adam_{way}", count), f"optimiser {name or label}"


def zero_grad_cost(model: HostModel, parameters: int) -> HostCost:
    """Clearing the gradients of so many parameters by letting go of them, which is PyTorch's default."""
    each, fixed = model.mechanism("zero_grad", "to_none"), model.mechanism("zero_grad_fixed", "to_none")
    return each.times(parameters) + fixed


def _way(inside: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """How it works on its parameters, and how many there are."""
    fused = [count for op, count in inside if op.startswith("aten::_fused_")]
    lists = [count for op, count in inside if op.startswith("aten::_foreach_")]
    if fused:
        return "fused", sum(fused)
    if lists:
        return "foreach", max(lists)
    return "for_loop", max(1, sum(op.startswith("aten::add") for op, _ in inside))


def _cost(model: HostModel, measured: str, count: int) -> HostCost:
    return model.mechanism("optimizer_step", measured).times(count) + model.mechanism("optimizer_step_fixed", measured)


FloatColumn = npt.NDArray[np.float64]

_ENGINE = "autograd::engine::evaluate_function"
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_DDP_FORWARD = "DistributedDataParallel.forward"
_DDP_GRADIENT = "torch::distributed::reducer::mul_out"
# DDP's own copies out of its buckets are part of its measured cost per parameter.
_DDP_COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
_CALLS = {
    "all_reduce": "all_reduce", "all_to_all": "all_to_all_single", "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor", "broadcast": "broadcast",
}  # fmt: skip


# Of the CPU's work, what may be of ops never measured without a word: less than steps repeat to.
WORTH_SAYING = 0.03
# An op called by another saves the Python binding, but never more than three quarters of what a call from Python takes.
LEAST_INSIDE = 0.25


class Piece(IntEnum):
    """What a piece of host time is."""

    OP = 0  # an op with all inside it, and their launches
    OWN_LAUNCHES = 1  # what a function or a composite launches besides the ops in it
    PYTHON = 2  # before an op of the forward pass
    RECORD = 3  # recording the graph of such an op
    FUNCTION = 4  # calling a function written in Python in the forward pass
    NODE = 5  # the engine's part of a node of the backward pass
    BACKWARD_CALL = 6  # once per step, before its first node
    OPTIMIZER_STEP = 7
    ZERO_GRAD = 8
    DDP_FORWARD = 9
    DDP_GRADIENT = 10  # DDP's hook on one gradient, and copying it back later
    DDP_BUCKET = 11  # a bucket that is complete, with its collective
    DDP_COPY = 12  # costs nothing here, being in DDP_GRADIENT, and launches
    COLLECTIVE = 13  # calling a collective
    STREAM_WAIT = 14  # waiting for one, which only orders streams


class Division(NamedTuple):
    """How CPU work lies about launches: weights of what is before the first, between each two, and after the last."""

    before: float
    between: float
    after: float


# Seen in the recorded steps of examples/ (dlrm_overlap4, gpt_fsdp2_small, h200_mps4_dlrm, prefetch_sync): of an op with one
# launch 81 to 85 % lie before it (medians over 2,250 ops), of one with two 81 to 89 % before and 6 to 8 % between (741 ops);
# an optimiser's step with one launch has 84 % before it, one with 14 has 42 % before and 53 % between (the rule: 41 and 51).
# It is wrong for those with 3 and 5 launches, which have 21 and 37 % before the first (the rule: 72 and 64).
_OPS = Division(0.84, 0.08, 0.16)
# There, of the 204 calls of collectives 60 to 65 % lie before the launch (medians of three examples).
_COLLECTIVES = Division(0.63, 0.0, 0.37)


@dataclass(frozen=True, eq=False)
class HostColumns:
    """Pieces of host time of all steps of a program, in the order in which its host spends them; nanoseconds at speed 1.

    A piece before an op has the row of that op. `cpu_ns` is `before_ns + between_ns + after_ns`; without launches all of it
    is before. Between launches it is spread evenly, and each launch takes its share of `launch_ns`, which is 0 where a piece
    was measured with its launches as a whole. Launches may be fractions: means over calls.
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
    steps: int = 1  # how many steps these are; at least 1
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.piece)

    def time_ns(self, speed: Speed = STEP) -> FloatColumn:
        """What every piece takes at this speed."""
        result: FloatColumn = self.cpu_ns * speed.cpu + self.launch_ns * speed.launch
        return result


Launches = Mapping[str, float] | Sequence[float]
"""How many kernels, copies and memsets ops launch themselves: per name of an op, all its calls in a step; or per row of ops."""


def host_columns(program: Program, model: HostModel, launches: Launches | None = None) -> HostColumns:
    """What the host spends on a program, in order. Without `launches` each op launches as many as it usually does."""
    if not len(program.ops):
        raise InputError(f"{program.source or f'rank {program.rank}'}: holds no ops, so that nothing can be said of its host")
    kept: tuple[HostModel, Launches | None, HostColumns] | None = program.derived.get(HostColumns)
    if kept is None or kept[0] is not model or kept[1] != launches:
        kept = program.derived[HostColumns] = (model, launches, _walked(program, model, launches))
    return kept[2]


def _walked(program: Program, model: HostModel, launches: Launches | None) -> HostColumns:
    walk = _Walk(program, model, launches)
    for row in walk.table.outermost():
        walk.visit(row)
    return walk.columns()


class _Found(NamedTuple):
    piece: Piece
    row: int
    cost: HostCost
    launches: float
    division: Division


@dataclass
class _Walk:
    program: Program
    model: HostModel
    given: Launches | None
    found: list[_Found] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    unknown_ns: float = 0.0  # what of the CPU's work is that of ops never measured
    called: set[tuple[int, int, str]] = field(default_factory=set)
    backward: set[int] = field(default_factory=set)  # steps whose backward pass has begun

    def __post_init__(self) -> None:
        self.table = table = op_table(self.program)
        self.steps = max(1, len(self.program.steps))
        self.names, self.children, self.phases = table.names, table.children, table.phases
        self.around_itself = frozenset(table.same_inside)
        self.own = self._own()

    def _own(self) -> Sequence[float]:
        """Launches of each op itself. By name: the step's over its calls, an op around itself not counted."""
        if not isinstance(self.given, Mapping):
            return [0.0] * len(self.names) if self.given is None else self.given
        calls = Counter(name for row, name in enumerate(self.names) if row not in self.around_itself)
        each = {name: count / (calls[name] / self.steps) for name, count in self.given.items() if calls[name]}
        return [0.0 if row in self.around_itself else each.get(name, 0.0) for row, name in enumerate(self.names)]

    def add(self, piece: Piece, row: int, cost: HostCost, launches: float = 0.0, division: Division = _OPS) -> None:
        self.found.append(_Found(piece, row, cost, launches, division))

    def columns(self) -> HostColumns:
        ops = self.program.ops
        piece = np.array([item.piece for item in self.found], dtype=np.int8)
        rows = np.array([item.row for item in self.found], dtype=np.int32)
        cpu_ns = np.array([item.cost.cpu_ns for item in self.found], dtype=np.float64)
        launches = np.array([item.launches for item in self.found], dtype=np.float64)
        weights = np.array([item.division for item in self.found], dtype=np.float64).reshape(-1, 3)
        before_ns, between_ns, after_ns = _divided(cpu_ns, launches, weights)
        call = piece == Piece.BACKWARD_CALL
        main = next((number for number, thread in enumerate(self.program.threads) if thread.role == "main"), None)
        return HostColumns(
            piece=piece,
            op=rows,
            thread=ops.thread[rows] if main is None else np.where(call, np.int32(main), ops.thread[rows]),
            phase=np.where(call, np.int8(Phase.BACKWARD), ops.phase[rows]),
            step=ops.step[rows],
            cpu_ns=cpu_ns,
            launch_ns=np.array([item.cost.launch_ns for item in self.found], dtype=np.float64),
            launches=launches,
            before_ns=before_ns,
            between_ns=between_ns,
            after_ns=after_ns,
            steps=self.steps,
            warnings=self._warnings(),
        )

    def _warnings(self) -> tuple[str, ...]:
        if not self.unknown or self.unknown_ns < WORTH_SAYING * sum(item.cost.cpu_ns for item in self.found):
            return ()
        most = ", ".join(f"{name} ({count})" for name, count in self.unknown.most_common(5))
        return (f"host costs of {len(self.unknown)} ops were never measured and are those of their class: {most}",)

    def visit(self, row: int) -> None:
        """One op in its phase, with all inside it."""
        name = self.names[row]
        if name.startswith("Optimizer."):
            self._optimizer(row)
        elif name.startswith(_ENGINE):
            self._node(row)
        elif name.startswith(_DDP_FORWARD):
            self.add(Piece.DDP_FORWARD, row, self.model.mechanism("ddp_forward_fixed", "ddp"))
            self._inside(row)
        elif name == _DDP_COPY:
            self.add(Piece.DDP_COPY, row, HostCost(), self._all_launches(row))
        elif name.startswith("##"):
            return
        elif "::" not in name and not name.startswith("detach"):
            self._python(row)
        else:
            if self.phases[row] == Phase.FORWARD:
                self.add(Piece.PYTHON, row, self.model.mechanism("between", "forward"))
                self.add(Piece.RECORD, row, self.model.mechanism("record", "graph"))
            self._op(row, outermost=self.phases[row] != Phase.BACKWARD)

    def _optimizer(self, row: int) -> None:
        """An optimiser's step or its clearing of gradients; other labels of it are functions in Python."""
        name = self.names[row]
        if name.startswith("Optimizer.step"):
            inside = [(self.names[child], self.table.arguments[child].longest_list) for child in self.children[row]]
            cost, note = optimizer_cost(self.model, name, inside, frozenset(self._nested(row)))
            self.add(Piece.OPTIMIZER_STEP, row, cost, self._all_launches(row))
            if note:
                self.unknown[note] += 1
                self.unknown_ns += cost.cpu_ns
        elif name.startswith("Optimizer.zero_grad"):
            self.add(Piece.ZERO_GRAD, row, zero_grad_cost(self.model, self._parameters()), self._all_launches(row))
        else:
            self._python(row)

    def _node(self, row: int) -> None:
        """A node of the backward pass; before the first of a step, the call of the pass."""
        step = self.table.steps[row]
        if step not in self.backward:
            self.backward.add(step)
            self.add(Piece.BACKWARD_CALL, row, self.model.mechanism("backward_call", "all"))
        self.add(Piece.NODE, row, self.model.mechanism("engine", "node"))
        for child in self.children[row]:
            self._visit_node(child)

    def _visit_node(self, row: int) -> None:
        """What a node of the backward pass does: its function, then hooks and sums of gradients."""
        name = self.names[row]
        if name == _DDP_GRADIENT:
            self.add(Piece.DDP_GRADIENT, row, self.model.mechanism("ddp_backward", "ddp"), self._all_launches(row))
        elif collective_kind(name) == "all_reduce":
            self.add(Piece.DDP_BUCKET, row, self.model.mechanism("ddp_bucket", "ddp"), 1.0, _COLLECTIVES)
        elif name.startswith("aten::"):
            self._op(row)
        else:
            own = self._own_launches(row, python=_is_python(name))
            self._inside(row)
            self.found += own

    def _python(self, row: int) -> None:
        """A function written in Python, or a label: what it calls, and the call itself where it stands for a function."""
        if self.phases[row] == Phase.FORWARD:
            self.add(Piece.FUNCTION, row, self.model.mechanism("python_function", "forward"))
        own = self._own_launches(row, python=True)
        self._inside(row)
        self.found += own

    def _inside(self, row: int) -> None:
        for child in self.children[row]:
            if self.phases[child] == Phase.BACKWARD:
                self._op(child)
            else:
                self.visit(child)

    def _wraps(self, row: int) -> bool:
        """Whether an op costs and launches what those inside it do."""
        return bool(self.children[row]) and (self.names[row] not in self.model.ops or row in self.around_itself)

    def _op(self, row: int, *, outermost: bool = False) -> None:
        name = self.names[row]
        if self.table.kinds[row].host_class is HostClass.COLLECTIVE:
            self._collective(row)
            return
        if self._wraps(row):
            own = self._own_launches(row, python=False)
            for child in self.children[row]:
                self._op(child)
            self.found += own
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
        kind = _CALLS.get(collective_kind(self.names[row]), "")
        known = f"collective_call {kind}" in self.model.around
        cost = (
            self.model.mechanism("collective_call", kind)
            if known
            else HostCost(self.model.classes[HostClass.COLLECTIVE].cpu_ns)
        )
        # Waiting for a collective is recorded under the same name and only orders streams.
        if self.children[row] or self.names[row].startswith("c10d::"):
            self.add(Piece.COLLECTIVE, row, cost, 1.0, _COLLECTIVES)
        elif self.names[row] == "record_param_comms":
            self.add(Piece.STREAM_WAIT, row, self.model.mechanism("stream_wait", "stream_wait"))

    def _own_launches(self, row: int, *, python: bool) -> list[_Found]:
        """What an op launches besides the ops in it; Python's own launches take several times as long, before each of them."""
        count = self.own[row]
        if not count:
            return []
        cost = self.model.mechanism("table_batched", "forward_sgd") if python else HostCost(0.0, self.model.launch_ns)
        coldness = self._coldness(row)
        cost = cost.times(count - 1.0 + coldness)
        return [_Found(Piece.OWN_LAUNCHES, row, cost, count, Division(coldness, 1.0, 0.0))]

    def _launches(self, row: int) -> float:
        """Launches of an op that is charged as a whole."""
        if self.given is not None:
            return self._given(row)
        return 0.0 if self.table.arguments[row].on_cpu else self.model.op(self.names[row])[0].launches

    def _all_launches(self, row: int) -> float:
        """Launches of all ops within one whose cost was measured as a whole; of itself where they are given."""
        if self.given is not None:
            return self._given(row)
        inside = self.children[row]
        return sum(self._all_launches(child) if self._wraps(child) else self._launches(child) for child in inside)

    def _coldness(self, row: int) -> float:
        """How many times as long a call takes: more where it is the first of its op in this phase of this step."""
        key = (self.table.steps[row], self.phases[row], self.names[row])
        if key in self.called:
            return 1.0
        self.called.add(key)
        return self.model.first_call

    def _given(self, row: int) -> float:
        return self.own[row] + sum(self._given(child) for child in self.children[row])

    def _nested(self, row: int) -> Iterator[str]:
        for child in self.children[row]:
            yield self.names[child]
            yield from self._nested(child)

    def _parameters(self) -> int:
        """Parameters that one optimiser clears: gradients that the backward pass takes over, the same number for each."""
        clears = sum(name.startswith("Optimizer.zero_grad") for name in self.names)
        return self.names.count(_ACCUMULATE) // max(1, clears)


def _divided(cpu_ns: FloatColumn, launches: FloatColumn, weights: FloatColumn) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """CPU work before the first launch, between launches and after the last one; less than one launch counts as one."""
    weights = weights * np.stack([np.ones_like(launches), np.maximum(launches - 1.0, 0.0), launches > 0.0], axis=1)
    between_ns, after_ns = (cpu_ns * weights[:, index] / weights.sum(axis=1) for index in (1, 2))
    return cpu_ns - between_ns - after_ns, between_ns, after_ns


def _is_python(name: str) -> bool:
    """Whether a node's function is written in Python: built-in ones end in a number (AddmmBackward0)."""
    return name.endswith("Backward") or not name[-1:].isdigit()
