"""The products of a linear layer over rows, as Megatron-LM and Transformer Engine call them: forward, of the input's gradient
and of the weight's, which is added to a gradient that is kept in fp32 where there is one.

What goes into products may be cast first; then it is there as its rows and, for the weight's gradient, as its columns.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from steptime._build.emit.emitter import CONTIGUOUS, Emitter, view_strides
from steptime._build.emit.tape import Gradients, Saved, Tape
from steptime._build.emit.writer import strides_of
from steptime._ops.catalogue import ADDS_TO_KEPT
from steptime._program.program import Tensor

Affine = tuple[Tensor, Tensor | None]  # a weight, and a bias where there is one


@dataclass(frozen=True, slots=True)
class Factor:
    """A matrix as products take it."""

    rows: Tensor  # as it multiplies forward
    columns: Tensor  # as it multiplies along its rows; the same memory, or a copy that lies the other way
    scales: tuple[Tensor, ...] = ()  # of rows and of columns, where they are cast to fewer bits


@dataclass(frozen=True, slots=True)
class SavedFactor:
    """What is kept of a layer's input for the backward pass, and how to have it there."""

    columns: Saved
    scales: tuple[Saved, ...] = ()

    @classmethod
    def there(cls, factor: Factor) -> SavedFactor:
        """One that is there already."""
        return cls(lambda: factor.columns, tuple(partial(itself, each) for each in factor.scales[1:]))


def itself(tensor: Tensor) -> Tensor:
    """What is there already, as what gives a saved tensor back."""
    return tensor


class LinearProducts:
    """Products in the precision of what goes in."""

    def __init__(self, tape: Tape) -> None:
        self._tape, self._emit = tape, tape.emit

    def input(self, x: Tensor) -> Factor:
        """What a layer is given, [rows, width]."""
        return Factor(x, x)

    def rows(self, x: Tensor) -> Factor:
        """A part of what a layer is given, in any shape, to be gathered: the gradients' way comes later."""
        return Factor(x, x)

    def gathered(self, part: Factor, rows: Tensor, *, columns: bool = False) -> Factor:
        """The parts of all ranks, [rows, width]; with `columns` as the weight's gradient takes them."""
        del part, columns
        return Factor(rows, rows)

    def gradient(self, gradient: Tensor) -> Factor:
        """The gradient of what it gave."""
        return Factor(gradient, gradient)

    def saved(self, x: Factor) -> SavedFactor:
        """Keeps what the weight's gradient needs of the input."""
        return SavedFactor(self._tape.save(x.columns), tuple(self._tape.save(each) for each in x.scales[1:]))

    def forward(self, x: Factor, weight: Tensor, bias: Tensor | None, y: Tensor, ends: Tensor | None = None) -> None:
        """Writes `x @ weight.t() + bias` into `y`.

        Here and below, with `ends` there is a matrix for every group of rows, and these say where groups end.
        """
        turned = turned_last(self._emit, weight)
        if bias is None:
            self._product(x.rows, turned, y, ends)
        else:
            self._emit.op("addmm", (bias, x.rows, turned, 1, 1), (y,))

    def of_input(self, gradient: Factor, weight: Tensor, ends: Tensor | None = None, *, result: Tensor | None = None) -> Tensor:
        """The gradient of the input, in `result` where it is given."""
        result = result or self._emit.tensor((gradient.rows.shape[0], weight.shape[-1]), gradient.rows.dtype)
        self._product(gradient.rows, weight, result, ends)
        return result

    def of_weight(self, gradient: Factor, x: SavedFactor, weight: Tensor, ends: Tensor | None = None) -> Tensor | None:
        """The gradient of the weight; None where it is added to the one that is kept (apex)."""
        kept = self._tape.mains.get(weight.id or 0)
        result = self._emit.tensor(weight.shape, weight.dtype) if kept is None else kept
        with nullcontext() if kept is None else self._emit.write(ADDS_TO_KEPT, (kept,), (kept,)):
            self._multiply_columns(gradient, x, result, ends)
        if kept is None:
            return result
        self._tape.gradients[weight.id or 0] = kept
        return None

    def _multiply_columns(self, gradient: Factor, x: SavedFactor, result: Tensor, ends: Tensor | None) -> None:
        self._product(self._emit.turned(gradient.columns), x.columns(), result, ends)

    def _product(self, left: Tensor, right: Tensor, result: Tensor, ends: Tensor | None) -> None:
        if ends is None:
            self._emit.op("mm", (left, right), (result,))
        else:
            self._emit.op("_grouped_mm", (left, right, ends, None, None), (result,))


def rows_of(emit: Emitter, x: Tensor) -> Tensor:
    """A row per token."""
    return emit.reshaped(x, (x.numel // x.shape[-1], x.shape[-1]))


def in_one_piece(emit: Emitter, x: Tensor) -> Tensor:
    """`x.contiguous()`, which copies what has gaps."""
    if view_strides(x.shape, strides_of(x), (x.numel,)) is None:
        return emit.contiguous(x)
    emit.op("contiguous", (x, CONTIGUOUS), (x,))
    return x


def turned_last(emit: Emitter, x: Tensor) -> Tensor:
    """A matrix, or each of several, the other way."""
    return emit.turned(x) if len(x.shape) == 2 else emit.transposed(x, 1, 2)


def fused_linear(tape: Tape, products: LinearProducts, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Transformer Engine's `Linear`: one node of autograd; the weight lies as [out, in]."""
    emit, shape = tape.emit, (*x.shape[:-1], weight.shape[0])
    flat = emit.tensor((x.numel // x.shape[-1], weight.shape[0]), x.dtype)
    y = emit.view(flat, shape)
    with emit.write("_Linear", (x, weight, bias), (y,), sequence=emit.sequence):
        factor = products.input(emit.reshaped(x, (flat.shape[0], x.shape[-1])))
        products.forward(factor, weight, bias, flat)
    saved = products.saved(factor) if tape.needs(weight) else None

    def backward(gradient: Tensor) -> Gradients:
        rows = emit.reshaped(gradient, flat.shape)
        given = products.gradient(rows)
        of_x = emit.view(products.of_input(given, weight), x.shape) if tape.needs(x) else None
        of_weight = None if saved is None else products.of_weight(given, saved, weight)
        of_bias = emit.new("sum", (rows, (0,), False, None), bias.shape) if bias is not None and tape.needs(bias) else None
        return of_x, of_weight, of_bias

    return tape.node("_LinearBackward", (x, weight, bias), y, backward)


def fused_grouped_linear(tape: Tape, products: LinearProducts, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Transformer Engine's `GroupedLinear`: rows sorted by group, and of every group a matrix [out, in]."""
    emit, y = tape.emit, tape.emit.tensor((x.shape[0], weight.shape[1]), x.dtype)
    with emit.write("_GroupedLinear", (x, weight, ends), (y,), sequence=emit.sequence):
        factor = products.input(x)
        products.forward(factor, weight, None, y, ends)
    saved = products.saved(factor)

    def backward(gradient: Tensor) -> Gradients:
        given = products.gradient(gradient)
        of_x = products.of_input(given, weight, ends) if tape.needs(x) else None
        return of_x, products.of_weight(given, saved, weight, ends) if tape.needs(weight) else None

    return tape.node("_GroupedLinearBackward", (x, weight), y, backward)
