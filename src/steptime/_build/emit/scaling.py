"""`LossScaler`: PyTorch's `GradScaler` as it is recorded: the loss scaled, gradients unscaled and checked, the scale updated.

An optimiser that is not fused waits for the host to read whether a gradient was infinite; a fused one takes scale and check as
arguments of its kernel (torch/amp/grad_scaler.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.emit.emitter import DTYPE_NUMBERS
from steptime._build.emit.gradients import Optimizer
from steptime._build.emit.tape import Tape
from steptime._program.program import Tensor

# How a scale grows and shrinks, and after how many steps without an infinite gradient; no time depends on them.
_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 1 << 30


class LossScaler:
    """The scale of the loss and how many steps it has been so, on the device."""

    def __init__(self, tape: Tape) -> None:
        self._tape, self._emit = tape, tape.emit
        self._scale, self._steps = tape.emit.tensor(()), tape.emit.tensor((), "int32")

    def scaled(self, loss: Tensor) -> Tensor:
        """`scaler.scale(loss)`."""
        emit, scale = self._emit, self._scale
        emit.placed(scale)
        y = emit.new("mul", (loss, scale), node=True)
        return self._tape.node("MulBackward0", (loss,), y, lambda gradient: emit.new("mul", (gradient, scale)))

    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
        """`scaler.step(optimizer)` and `scaler.update()`."""
        emit = self._emit
        factor = self._number(1.0) if optimizer.fused else self._inverse()
        infinite = self._number(0.0)
        # Each is kept once more for every device that holds gradients.
        infinite, factor = emit.placed_copy(infinite), emit.placed_copy(factor)
        emit.op("_amp_foreach_non_finite_check_and_unscale_", (tuple(gradients), infinite, factor))
        if optimizer.fused:
            emit.placed(infinite)
            found = emit.new("add", (infinite, emit.number("int64"), 1))
            optimizer.step(gradients, (emit.new("mul", (self._scale, emit.number("int64"))), found))
        else:
            with emit.op("item", (infinite,), (0.0,)):
                emit.op("_local_scalar_dense", (infinite,), (0.0,))
            optimizer.step(gradients)
        emit.placed(infinite)
        call = (self._scale, self._steps, infinite, _GROWTH, _BACKOFF, _INTERVAL)
        emit.op("_amp_update_scale_", call, (self._scale,))

    def _inverse(self) -> Tensor:
        emit = self._emit
        return emit.cast(emit.new("reciprocal", (emit.cast(self._scale, "float64"),)), "float32")

    def _number(self, value: float) -> Tensor:
        emit, y = self._emit, self._emit.tensor(())
        with emit.op("full", ((), value, DTYPE_NUMBERS[y.dtype], None, emit.device, False), (y,)):
            emit.empty(y, layout=None, pinned=False)
            emit.op("fill_", (y, value), (y,))
        return y
