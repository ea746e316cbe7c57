"""An optimiser's step as a whole: which of the measured ones it is, and how many parameters it has."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._models.host.model import HostModel
from steptime._models.host.speed import HostCost

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
