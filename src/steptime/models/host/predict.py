"""What the host spends on one step of a program, by phase: its ops, its launches, and what lies between ops.

A measured op costs what it was measured at, with all inside it. One that only wraps others costs what they do: a composite,
a label, an op under autocast around itself. A leaf that was never measured costs as much as its class, and is said. Every
launch costs one launch, or a launch from Python where an op written in Python makes it. Each node of the backward pass costs
what the engine spends on it besides; an optimiser's step, DDP's hooks and its buckets cost what was measured of them as a
whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from steptime.errors import InputError
from steptime.graph.collectives import collective_kind
from steptime.graph.program import Phase, Program, Tensor, Value
from steptime.models.host.model import COLLECTIVE, FOREACH, HostModel, class_of
from steptime.models.host.optimizers import optimizer_cost, zero_grad_cost
from steptime.models.host.speed import STEP, HostCost, Speed

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


# An op called by another saves the Python binding, but never more than three quarters of what a call from Python takes.
LEAST_INSIDE = 0.25


class Part(StrEnum):
    """What a piece of host time is spent on."""

    OPS = "ops"
    LAUNCHES = "launches"
    BETWEEN = "between"  # Python, autograd engine, recording the graph
    OPTIMIZER = "optimizer"
    DATA_PARALLEL = "data_parallel"  # DDP and calling collectives


@dataclass(frozen=True)
class HostTime:
    """Cost by phase and part; what is unknown is said in `warnings`."""

    costs: Mapping[tuple[Phase, Part], HostCost]
    launches: float
    warnings: tuple[str, ...] = ()

    def phase_ns(self, speed: Speed = STEP) -> dict[Phase, float]:
        """Nanoseconds of every phase."""
        found = dict.fromkeys(Phase, 0.0)
        for (phase, _), cost in self.costs.items():
            found[phase] += speed.time_ns(cost)
        return found

    def part_ns(self, speed: Speed = STEP) -> dict[Part, float]:
        """Nanoseconds of every part."""
        found = dict.fromkeys(Part, 0.0)
        for (_, part), cost in self.costs.items():
            found[part] += speed.time_ns(cost)
        return found

    def total_ns(self, speed: Speed = STEP) -> float:
        """Nanoseconds of the step: forward and backward take turns, so that they add up."""
        return sum(self.phase_ns(speed).values())


def host_time(program: Program, model: HostModel, launches: Mapping[str, float] | None = None) -> HostTime:
    """What one step of a program costs the host.

    `launches`: per name of an op, how many kernels, copies and memsets all its calls in the step launch themselves; without it
    each op launches as many as it usually does.
    """
    if not len(program.ops):
        raise InputError(f"{program.source or f'rank {program.rank}'}: holds no ops, so that nothing can be said of its host")
    walk = _Walk(program, model, launches)
    for row in walk.children[-1]:
        walk.visit(row)
    if walk.nodes:
        walk.add(Phase.BACKWARD, Part.BETWEEN, model.mechanism("backward_call", "all"))
    return walk.result()


@dataclass
class _Walk:
    program: Program
    model: HostModel
    given: Mapping[str, float] | None
    sums: dict[tuple[Phase, Part], list[float]] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    called: set[tuple[int, Phase, str]] = field(default_factory=set)
    nodes: int = 0
    launched: float = 0.0

    def __post_init__(self) -> None:
        ops = self.program.ops
        steps = max(1, len(self.program.steps))
        self.share = 1.0 / steps
        self.names: list[str] = [self.program.names[name] for name in ops.name.tolist()]
        known = {int(phase): phase for phase in Phase}
        self.phases: list[Phase] = [known[value] for value in ops.phase.tolist()]
        self.children: dict[int, list[int]] = {-1: []}
        for row, parent in enumerate(ops.parent.tolist()):
            self.children.setdefault(parent, []).append(row)
        self.each = self._per_call()

    def _per_call(self) -> dict[str, float]:
        """Launches of one call of each op: the step's over its calls, an op around itself not counted."""
        if self.given is None:
            return {}
        calls: Counter[str] = Counter()
        for row, name in enumerate(self.names):
            calls[name] += not self._wraps_itself(row)
        return {name: count / (calls[name] * self.share) for name, count in self.given.items() if calls[name]}

    def add(self, phase: Phase, part: Part, cost: HostCost) -> None:
        sums = self.sums.setdefault((phase, part), [0.0, 0.0])
        sums[0] += cost.cpu_ns
        sums[1] += cost.launch_ns

    def result(self) -> HostTime:
        costs = {key: HostCost(*sums).times(self.share) for key, sums in self.sums.items()}
        warnings: tuple[str, ...] = ()
        if self.unknown:
            most = ", ".join(f"{name} ({count})" for name, count in self.unknown.most_common(5))
            warnings = (f"host costs of {len(self.unknown)} ops were never measured and are those of their class: {most}",)
        return HostTime(costs, self.launched * self.share, warnings)

    def visit(self, row: int) -> None:
        """One op in its phase, with all inside it."""
        name, phase = self.names[row], self.phases[row]
        if name.startswith("Optimizer.step"):
            inside = [(self.names[child], self._listed(child)) for child in self.children.get(row, ())]
            cost, note = optimizer_cost(self.model, name, inside, frozenset(self._nested(row)))
            self.add(phase, Part.OPTIMIZER, cost)
            self.unknown.update([note] if note else [])
        elif name.startswith("Optimizer.zero_grad"):
            self.add(phase, Part.OPTIMIZER, zero_grad_cost(self.model, self._parameters()))
        elif name.startswith(_ENGINE):
            self.nodes += 1
            self.add(phase, Part.BETWEEN, self.model.mechanism("engine", "node"))
            for child in self.children.get(row, ()):
                self._visit_node(child)
        elif name.startswith(_DDP_FORWARD):
            self.add(phase, Part.DATA_PARALLEL, self.model.mechanism("ddp_forward_fixed", "ddp"))
            self._inside(row)
        elif name == _DDP_COPY or name.startswith("##"):
            return
        elif "::" not in name and not name.startswith("detach"):
            self._python(row)
        else:
            if phase == Phase.FORWARD:
                self.add(phase, Part.BETWEEN, self.model.mechanism("between", "forward"))
                self.add(phase, Part.BETWEEN, self.model.mechanism("record", "graph"))
            self._op(row, outermost=phase != Phase.BACKWARD)

    def _visit_node(self, row: int) -> None:
        """What a node of the backward pass does: its function, then hooks and sums of gradients."""
        name, phase = self.names[row], self.phases[row]
        if name == _DDP_GRADIENT:
            self.add(phase, Part.DATA_PARALLEL, self.model.mechanism("ddp_backward", "ddp"))
        elif collective_kind(name) == "all_reduce":
            self.add(phase, Part.DATA_PARALLEL, self.model.mechanism("ddp_bucket", "ddp"))
        elif name.startswith("aten::"):
            self._op(row)
        else:
            self._launch(row, python=_is_python(name))
            self._inside(row)

    def _python(self, row: int) -> None:
        """A function written in Python, or a label: what it calls, and the call itself where it stands for a function."""
        if self.phases[row] == Phase.FORWARD:
            self.add(self.phases[row], Part.BETWEEN, self.model.mechanism("python_function", "forward"))
        self._launch(row, python=True)
        self._inside(row)

    def _inside(self, row: int) -> None:
        for child in self.children.get(row, ()):
            if self.phases[child] == Phase.BACKWARD:
                self._op(child)
            else:
                self.visit(child)

    def _wraps_itself(self, row: int) -> bool:
        return any(self.names[child] == self.names[row] for child in self.children.get(row, ()))

    def _op(self, row: int, *, outermost: bool = False) -> None:
        name, phase, inside = self.names[row], self.phases[row], self.children.get(row, ())
        if class_of(name) == COLLECTIVE:
            self._collective(row)
            return
        known = name in self.model.ops
        if inside and (not known or self._wraps_itself(row)):
            self._launch(row, python=False)
            for child in inside:
                self._op(child)
            return
        cost, measured = self.model.op(name)
        if not measured and "::" in name:
            self.unknown[name] += 1
        tensors = self._listed(row) if class_of(name) == FOREACH else 0
        binding_ns = 0.0 if outermost else min(self.model.binding_ns, (1.0 - LEAST_INSIDE) * cost.cpu_ns)
        own = HostCost(cost.cpu_ns - binding_ns + tensors * cost.per_tensor_ns)
        factor = self._coldness(row)
        self.add(phase, Part.OPS, own.times(factor))
        self._launches(row, cost.launches, factor)

    def _collective(self, row: int) -> None:
        kind = _CALLS.get(collective_kind(self.names[row]), "")
        known = f"collective_call {kind}" in self.model.around
        cost = self.model.mechanism("collective_call", kind) if known else HostCost(self.model.classes[COLLECTIVE].cpu_ns)
        # Waiting for a collective is recorded under the same name and only orders streams.
        if self.children.get(row) or self.names[row].startswith("c10d::"):
            self.add(self.phases[row], Part.DATA_PARALLEL, cost)
        elif self.names[row] == "record_param_comms":
            self.add(self.phases[row], Part.DATA_PARALLEL, self.model.mechanism("stream_wait", "stream_wait"))

    def _launch(self, row: int, *, python: bool) -> None:
        """What an op launches besides the ops in it; Python's own launches take several times as long."""
        count = 0.0 if self._wraps_itself(row) else self.each.get(self.names[row], 0.0)
        self.launched += count
        if not count:
            return
        cost = self.model.mechanism("table_batched", "forward_sgd") if python else HostCost(0.0, self.model.launch_ns)
        self.add(self.phases[row], Part.LAUNCHES, cost.times(count - 1.0 + self._coldness(row)))

    def _launches(self, row: int, usual: float, factor: float) -> None:
        """Launches of an op and of all inside it."""
        count = usual if self.given is None and not self._on_cpu(row) else self._given(row)
        self.launched += count
        self.add(self.phases[row], Part.LAUNCHES, HostCost(0.0, self.model.launch_ns * count * factor))

    def _coldness(self, row: int) -> float:
        """How many times as long a call takes: more where it is the first of its op in this phase of this step."""
        key = (int(self.program.ops.step[row]), self.phases[row], self.names[row])
        if key in self.called:
            return 1.0
        self.called.add(key)
        return self.model.first_call

    def _given(self, row: int) -> float:
        own = 0.0 if self._wraps_itself(row) else self.each.get(self.names[row], 0.0)
        return own + sum(self._given(child) for child in self.children.get(row, ()))

    def _inputs(self, row: int) -> Sequence[Value]:
        signature = int(self.program.ops.signature[row])
        return self.program.signatures[signature].inputs if signature >= 0 else ()

    def _listed(self, row: int) -> int:
        """Tensors in the longest list of an op's arguments; 1 without lists."""
        lengths = [len(value) for value in self._inputs(row) if isinstance(value, tuple)]
        return max([1, *lengths])

    def _on_cpu(self, row: int) -> bool:
        """Whether an op works on tensors of the CPU alone: those launch nothing."""
        tensors = [value for value in self._inputs(row) if isinstance(value, Tensor)]
        return bool(tensors) and all(tensor.device == "cpu" for tensor in tensors)

    def _nested(self, row: int) -> Iterator[str]:
        for child in self.children.get(row, ()):
            yield self.names[child]
            yield from self._nested(child)

    def _parameters(self) -> int:
        """Parameters that one optimiser clears: gradients that the backward pass takes over, the same number for each."""
        clears = sum(name.startswith("Optimizer.zero_grad") for name in self.names)
        return self.names.count(_ACCUMULATE) // max(1, clears)


def _is_python(name: str) -> bool:
    """Whether a node's function is written in Python: built-in ones end in a number (AddmmBackward0)."""
    return name.endswith("Backward") or not name[-1:].isdigit()
