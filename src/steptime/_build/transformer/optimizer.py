"""An optimiser's step as PyTorch records it: AdamW by lists of tensors or fused, SGD; with fp32 masters of fp16 weights.

`adamw` and `sgd` are PyTorch's defaults on a GPU (foreach). fp16 weights are updated as by Megatron-LM and DeepSpeed: gradients
are copied to fp32 and their norm is taken, the masters are updated, and the weights are copied from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from steptime._build.emit.layers import DTYPE_NUMBERS
from steptime._build.transformer.emit import GroupEmitter
from steptime._program.program import Tensor

# AdamW's coefficients and the bias corrections of a third step, rounded as traces are; no time depends on them.
_DECAY, _FIRST, _SECOND, _EPSILON, _RATE = 1.0, 0.1, 0.999, 0.0, 0.0001
_CORRECTION, _STEP_SIZE = 0.054745, -0.000185


class Optimizer:
    """Updates parameters in place; its state is there before the step."""

    def __init__(self, emit: GroupEmitter, kind: str, weights: Sequence[Tensor]) -> None:
        self._emit, self._kind = emit, kind
        self._weights = tuple(weights)
        self._mixed = bool(weights) and weights[0].dtype == "float16"
        dtype = None if not self._mixed else "float32"
        self._masters = self._like(dtype) if self._mixed else self._weights
        self._moments = (self._like(dtype), self._like(dtype)) if kind != "sgd" else ((), ())
        self._counts = tuple(emit.tensor((), device=None if kind == "adamw_fused" else "cpu") for _ in weights)

    def _like(self, dtype: str | None) -> tuple[Tensor, ...]:
        return tuple(self._emit.tensor(each.shape, dtype or each.dtype, strides=each.strides) for each in self._weights)

    @property
    def _label(self) -> str:
        return "SGD" if self._kind == "sgd" else "AdamW"

    def zero_grad(self) -> None:
        """Lets go of the gradients."""
        self._emit.op(f"Optimizer.zero_grad#{self._label}.zero_grad")

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Writes one update."""
        emit, ways = self._emit, {"sgd": self._sgd, "adamw": self._adamw, "adamw_fused": self._fused}
        update: Callable[[tuple[Tensor, ...]], None] = ways[self._kind]
        with emit.around(f"Optimizer.step#{self._label}.step"):
            if not self._mixed:
                update(tuple(gradients))
                return
            wide = self._like("float32")
            emit.op("aten::_foreach_copy_", (wide, tuple(gradients), False))
            emit.op("aten::_foreach_norm", (wide, 2, None), (tuple(emit.tensor(()) for _ in wide),))
            update(wide)
            emit.op("aten::_foreach_copy_", (self._weights, self._masters, False))

    def _sgd(self, gradients: tuple[Tensor, ...]) -> None:
        self._emit.op("aten::_foreach_add_", (self._masters, gradients, -_RATE))

    def _fused(self, gradients: tuple[Tensor, ...]) -> None:
        first, second = self._moments
        self._emit.op("aten::_foreach_add_", (self._counts, 1))
        rest = (_RATE, 0.9, 0.999, 0.01, _EPSILON, False, False, None, None)
        self._emit.op("aten::_fused_adamw_", (self._masters, gradients, first, second, (), self._counts, *rest))

    def _adamw(self, gradients: tuple[Tensor, ...]) -> None:
        emit, (first, second), count = self._emit, self._moments, len(self._masters)
        item = emit.tensor((), device="cpu")
        emit.op("aten::empty", ((), 6, 0, "cpu", False, None), (item,))
        emit.op("aten::to", (item, "cpu", 6, False, False, None), (item,))
        emit.op("aten::lift_fresh", (item,), (item,))
        with emit.around("aten::detach_", (item,), (item,)):
            emit.op("detach_", (item,))
        with emit.around("aten::_foreach_add_", (self._counts, item, 1.0)):
            for each in self._counts:
                emit.op("aten::add_", (each, item, 1.0), (each,))
        emit.op("aten::_foreach_mul_", (self._masters, _DECAY))
        emit.op("aten::_foreach_lerp_", (first, gradients, _FIRST))
        emit.op("aten::_foreach_mul_", (second, _SECOND))
        emit.op("aten::_foreach_addcmul_", (second, gradients, gradients, round(1.0 - _SECOND, 6)))
        for each in (*self._counts, *self._counts):  # once for each of the two bias corrections
            with emit.around("aten::item", (each,), (3.0,)):
                emit.op("aten::_local_scalar_dense", (each,), (3.0,))
        roots = tuple(emit.tensor(each.shape, each.dtype, strides=each.strides) for each in second)
        with emit.around("aten::_foreach_sqrt", (second,), (roots,)):
            for each in roots:
                laid = (each.shape, each.strides, DTYPE_NUMBERS[each.dtype], 0, emit.device, None)
                emit.op("aten::empty_strided", laid, (each,))
        emit.op("aten::_foreach_div_", (roots, (_CORRECTION,) * count))
        emit.op("aten::_foreach_add_", (roots, _EPSILON))
        emit.op("aten::_foreach_addcdiv_", (self._masters, first, roots, (_STEP_SIZE,) * count))
