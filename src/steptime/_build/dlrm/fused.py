"""Dense layers of a DLRM as libraries made for recommenders run them: 16-bit, and everything that can be fused is.

HugeCTR (NVIDIA-Merlin/HugeCTR, HugeCTR/src/layers/{mlp_layer,multi_cross_layer}.cu, v24.06) adds biases, applies ReLU, and sums
gradients of biases in the epilogues of products, has one kernel in each direction for what a cross layer does beside its
products, keeps all gradients in one buffer that is reduced once, while tables are updated, and updates fp32 masters in one
kernel, of which the 16-bit weights are a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from steptime._build.dlrm.model import Dlrm
from steptime._build.emit.emitter import Emitter
from steptime._build.emit.gradients import step_of
from steptime._build.emit.scaling import LossScaler
from steptime._build.emit.tape import Gradients, Tape
from steptime._program.program import Tensor

_KINDS = {"sgd": ("_fused_sgd_", "SGD", 0), "adagrad": ("_fused_adagrad_", "Adagrad", 1), "adam": ("_fused_adam_", "Adam", 2)}
_RATE = 1e-6


class FusedOptimizer:
    """Updates all weights of a buffer in one kernel."""

    def __init__(self, emit: Emitter, kind: str) -> None:
        self._emit = emit
        self._op, self._label, self._moments = _KINDS[kind]

    def step(self, weights: Tensor, gradients: Tensor, copied: Tensor | None = None) -> None:
        """Writes one update, and a copy of the weights in their own type."""
        emit = self._emit
        lists: list[tuple[Tensor, ...]] = [(weights,), (gradients,)]
        lists += [(emit.tensor(weights.shape),) for _ in range(self._moments)] or [()]
        lists += [()] if self._op == "_fused_adam_" else []
        lists += [(emit.tensor(()),)] if self._moments else []
        with step_of(emit, self._label):
            emit.op(self._op, (*lists, _RATE, 0.0, 0.0, 0.0, False, None, None))
            if copied is not None:
                emit.op("copy_", (copied, weights, False), (copied,))


class FusedGradients:
    """The gradients of all dense layers in one buffer, and the optimiser of what they belong to."""

    def __init__(self, tape: Tape, optimizer: str, dtype: str) -> None:
        self._tape, self._dtype, self._optimizer = tape, dtype, FusedOptimizer(tape.emit, optimizer)
        self._size, self._number = 0, 0

    def weight(self, *shape: int) -> Tensor:
        """A weight or a bias, whose gradient has its place in the buffer."""
        result = self._tape.parameter(self._tape.emit.tensor(shape, self._dtype))
        self._size += result.numel
        return result

    def reduce(self) -> None:
        """All gradients are there: starts to add them up over the ranks."""
        if self._tape.emit.world_size > 1:
            self._number = self._tape.emit.all_reduce((self._tape.emit.tensor((self._size,), self._dtype),))

    def update(self) -> None:
        """The step of the optimiser over masters, and the weights anew from them."""
        emit = self._tape.emit
        if emit.world_size > 1:
            emit.wait(self._number)
        masters, gradients = emit.tensor((self._size,)), emit.tensor((self._size,))
        self._optimizer.step(masters, gradients, emit.tensor((self._size,), self._dtype))


class FusedDense:
    """Both MLPs of a model, with its cross layers, and their optimiser."""

    def __init__(self, tape: Tape, model: Dlrm, top_width: int) -> None:
        self._gradients = FusedGradients(tape, model.dense_optimizer, model.vector_dtype)
        self.bottom = FusedLayers(tape, self._gradients, (model.dense_features, *model.bottom), first=True)
        layers = model.cross_layers if model.interaction == "dcnv2" else 0
        widths = (top_width, *model.top)
        self.top = FusedLayers(tape, self._gradients, widths, cross_layers=layers, cross_rank=model.cross_rank)

    def clear(self) -> None:
        """Gradients are written over."""

    def update(self, _: LossScaler | None) -> None:
        """The optimiser's step; it scales by itself."""
        self._gradients.update()


class FusedLayers:
    """Cross layers, where there are some, and linear layers with ReLU after each but perhaps the last: one node of autograd.

    `first`: the layers whose backward pass comes last, with which all gradients are there.
    """

    def __init__(
        self,
        tape: Tape,
        gradients: FusedGradients,
        widths: Sequence[int],
        *,
        cross_layers: int = 0,
        cross_rank: int | None = None,
        first: bool = False,
    ) -> None:
        self._tape, self._gradients, self._first = tape, gradients, first
        inner, width = cross_rank or widths[0], widths[0]
        self._narrow = [gradients.weight(inner, width) for _ in range(cross_layers)] if cross_rank else []
        self._wide = [(gradients.weight(width, inner), gradients.weight(width)) for _ in range(cross_layers)]
        self._layers = [(gradients.weight(after, before), gradients.weight(after)) for before, after in pairwise(widths)]

    def __call__(self, x: Tensor) -> Tensor:
        """Forward; what the backward pass needs is kept."""
        emit, inputs, crossed = self._tape.emit, x, []
        with emit.write("FusedLayers", (x,), sequence=emit.sequence):
            for layer, (wide, bias) in enumerate(self._wide):
                inner = _product(emit, x, emit.turned(self._narrow[layer])) if self._narrow else x
                scaled = _with_bias(emit, bias, inner, emit.turned(wide))
                crossed.append((x, inner, scaled))
                x = emit.new("addcmul", (x, inputs, scaled, 1))
            through = [x]
            for weight, bias in self._layers:
                through.append(_with_bias(emit, bias, through[-1], emit.turned(weight)))

        def backward(gradient: Tensor) -> Gradients:
            result = self._linear_backward(gradient, through)
            result = self._cross_backward(result, inputs, crossed) if crossed else result
            if self._first:
                self._gradients.reduce()
            return (result, *(None for _ in parameters))

        parameters = [tensor for pair in (*self._wide, *self._layers) for tensor in pair] + self._narrow
        return self._tape.node("FusedLayersBackward", (inputs, *parameters), through[-1], backward)

    def _linear_backward(self, gradient: Tensor, through: Sequence[Tensor]) -> Tensor:
        emit = self._tape.emit
        for number in reversed(range(len(self._layers))):
            _product(emit, emit.turned(gradient), through[number])
            if number or self._wide or not self._first:
                gradient = _product(emit, gradient, self._layers[number][0])
        return gradient

    def _cross_backward(self, gradient: Tensor, first: Tensor, crossed: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Of x0 * u + x: x0 gets u's share of the gradient from every layer, and x what comes through the products too."""
        emit, of_first = self._tape.emit, None
        for layer in reversed(range(len(crossed))):
            x, inner, scaled = crossed[layer]
            of_scaled = emit.new("mul", (gradient, first))
            if of_first is None:
                of_first = emit.new("mul", (gradient, scaled))
            else:
                emit.op("addcmul_", (of_first, gradient, scaled, 1), (of_first,))
            _product(emit, emit.turned(of_scaled), inner)
            wide = self._wide[layer][0]
            if self._narrow:
                of_scaled = _product(emit, of_scaled, wide)
                _product(emit, emit.turned(of_scaled), x)
                wide = self._narrow[layer]
            gradient = _product(emit, of_scaled, wide)  # which adds to the gradient that came
        emit.op("add_", (gradient, of_first, 1), (gradient,))
        return gradient


def _product(emit: Emitter, left: Tensor, right: Tensor) -> Tensor:
    return emit.new("mm", (left, right), (left.shape[0], right.shape[1]))


def _with_bias(emit: Emitter, bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return emit.new("addmm", (bias, left, right, 1, 1), (left.shape[0], right.shape[1]))
