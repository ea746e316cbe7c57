"""Compares the ops of captured steps with those that real steps of the same models call on the CPU, below autograd.

    python benchmarks/capture/real_steps.py NAME ...

NAME is the name of a model in `models.toml`, such as torchvision/swin_t. Batches are of two, without autocast, whose lists
differ on the CPU; optimisers take lists on both. Views and allocations do not count, nor do the host's own counters; fused
attention is one op each way, and dropout one kernel. Prints ops whose counts differ: captured, real.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import steps
import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

import steptime
from steptime._capture import record
from steptime._capture.traits import traits_of
from steptime._capture.vision_ops import declared_when_imported

_FUSED = tuple(f"aten::_scaled_dot_product_{name}_attention" for name in ("efficient", "flash", "cudnn"))
_ATTENTION, _ATTENTION_BACKWARD = "attention", "attention backward"
# Views, allocations, and what only the host has to do with.
_VIEWS = """
    detach view t transpose permute expand unsqueeze squeeze slice select alias _unsafe_view as_strided split unbind
    split_with_sizes empty empty_like empty_strided new_empty new_empty_strided _reshape_alias diagonal unfold lift_fresh
    is_same_size resize_ set_ view_as_real view_as_complex real _local_scalar_dense
"""
_ASIDE = {f"aten::{name}" for name in _VIEWS.split()}
_LARGEST = 2  # samples
_BATCHES = (4, 8, 32)


def step_of(case: steps.Case, device: str) -> Callable[[], None]:
    """A training step with gradients clipped, as in the list."""
    steps.DEVICE = device
    model, losses = steps.model_of(case)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        losses(model).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


def _small(make: Callable[..., torch.Tensor], first: int) -> Callable[..., torch.Tensor]:
    """The same with fewer samples; `first` is the argument that counts them."""

    def made(*args: int) -> torch.Tensor:
        samples = _LARGEST if len(args) > first and args[first] in _BATCHES else None
        return make(*args) if samples is None else make(*args[:first], samples, *args[first + 1 :])

    return made


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ops of a real step: those that PyTorch makes of others on CUDA are counted by what they are made of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        composite = traits_of(func).composite if func.namespace == "aten" else None
        if composite is not None:
            with self:
                return func._op_dk(composite, *args, **(kwargs or {}))
        if func.namespace != "profiler":
            self.ops[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    """Attention as one op each way, whatever the CPU makes of it."""

    @staticmethod
    def forward(
        ctx: Any, counted: _Counted, attention: Callable[..., torch.Tensor], *given: torch.Tensor | None
    ) -> torch.Tensor:
        counted.ops[_ATTENTION] += 1
        with torch._C._DisableTorchDispatch(), torch.enable_grad():
            ctx.given = [each.detach().requires_grad_(each.requires_grad) if each is not None else None for each in given]
            ctx.result = attention(*ctx.given)
            ctx.counted = counted
            return ctx.result.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.counted.ops[_ATTENTION_BACKWARD] += 1
        with torch._C._DisableTorchDispatch():
            wanted = [each for each in ctx.given if each is not None and each.requires_grad]
            found = iter(torch.autograd.grad(ctx.result, wanted, gradients))
        return None, None, *(next(found) if each is not None and each.requires_grad else None for each in ctx.given)


def real(case: steps.Case) -> Counter[str]:
    """What the second of two steps on the CPU calls."""
    functional, counted = torch.nn.functional, _Counted()
    plain = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any) -> Any:
        del dropout_p
        return _Fused.apply(counted, lambda *given: plain(*given, **options), query, key, value, attn_mask)  # type: ignore[no-untyped-call]

    def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if train and 0 < p < 1 and x.numel():
            return torch.ops.aten.native_dropout(x, p, train)[0]  # type: ignore[no-any-return]
        return torch.ops.aten.dropout.default._op_dk(DispatchKey.CompositeImplicitAutograd, x, p, train)  # type: ignore[no-any-return]

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("dropout", dropout, "AutogradCPU")
    functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        step = step_of(case, "cpu")
        step()
        counted.ops.clear()
        with counted:
            step()
    finally:
        functional.scaled_dot_product_attention = plain
        library._destroy()
    counted.ops["aten::_foreach_add_"] -= 1  # of the steps that were made, which the host counts
    return counted.ops


def captured(case: steps.Case) -> Counter[str]:
    """What the captured step calls on the device."""
    seen: list[Counter[str]] = []
    end = record.Recorder.end

    def ended(recorder: record.Recorder) -> None:
        seen.append(Counter(note.name for note in recorder.notes))
        end(recorder)

    record.Recorder.end = ended  # type: ignore[method-assign]
    try:
        steptime.capture(lambda: step_of(case, "cuda"))
    finally:
        record.Recorder.end = end  # type: ignore[method-assign]
    return next(each for each in reversed(seen) if each)


def _plain(name: str) -> str:
    if name.removesuffix("_backward") in _FUSED:
        return _ATTENTION_BACKWARD if name.endswith("_backward") else _ATTENTION
    return name.replace("cudnn_batch_norm", "native_batch_norm")


def differing(ours: Counter[str], theirs: Counter[str]) -> Iterable[tuple[str, int, int]]:
    """Ops and how often each side calls them, where that differs."""
    both: list[Counter[str]] = [Counter(), Counter()]
    for side, counts in zip(both, (ours, theirs), strict=True):
        for name, count in counts.items():
            side[_plain(name)] += count
    names = sorted({*both[0], *both[1]} - _ASIDE)
    return [(name, both[0][name], both[1][name]) for name in names if both[0][name] != both[1][name]]


def main() -> None:
    declared_when_imported()
    steps._images, steps._labels = _small(steps._images, 0), _small(steps._labels, 1)
    listed = {case.name: case for case in steps.cases()}
    for name in sys.argv[1:]:
        case = listed[name]
        found = list(differing(captured(case), real(case)))
        print(name, "the same" if not found else "; ".join(f"{op} {ours}, {theirs}" for op, ours, theirs in found), flush=True)


if __name__ == "__main__":
    main()
