"""Linear layers with products of eight or four bits: what is cast when, how it lies, and what ranks gather of it.

Recipes of Transformer Engine cast a tensor once, into its rows and its columns at once (the columns multiply for the weight's
gradient): with scales of the steps before (`delayed`), with the largest value found first (`current`), or with a scale for
every block of a row (`blockwise` 128, `mxfp8` 32, `nvfp4` 16, with one more for the tensor). Weights are cast once in a step;
under FSDP whenever they are gathered. Recipes of torchao (`tensorwise`, `rowwise`) cast what a product takes right before it,
forward and again in backward, and keep 16 bits of the input.

Attention, the head, routers, norms and experts of layers that are not fused stay in 16 bits. Not here: the exchange of
`delayed`'s largest values among ranks (some tens of microseconds a step), layers that a recipe leaves in 16 bits, the random
rotations of `nvfp4`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from steptime._build.emit.emitter import DTYPE_NUMBERS
from steptime._build.emit.products import Factor, LinearProducts, SavedFactor, itself, turned_last
from steptime._build.emit.tape import Tape
from steptime._program.program import Tensor

_ENGINE, _TORCHAO = "transformer_engine::", "torchao::"
_EIGHT, _FOUR = "float8", "float4x2"


@dataclass(frozen=True, slots=True)
class CastRecipe:
    """How operands become eight or four bits."""

    library: str
    finds_largest: bool = False  # a pass over a tensor before it is cast
    block: int = 0  # elements of a row that share a scale; 0: one for the tensor
    by_row: bool = False  # a scale for every row
    dtype: str = _EIGHT

    @property
    def packed(self) -> int:
        """Elements in a byte."""
        return 2 if self.dtype == _FOUR else 1


FEW_BITS = ("fp8", "mxfp8", "nvfp4")
"""Precisions whose products have eight or four bits."""

RECIPES = {
    "delayed": CastRecipe(_ENGINE),
    "current": CastRecipe(_ENGINE, finds_largest=True),
    "blockwise": CastRecipe(_ENGINE, block=128),
    "mxfp8": CastRecipe(_ENGINE, block=32),
    "nvfp4": CastRecipe(_ENGINE, finds_largest=True, block=16, dtype=_FOUR),
    "tensorwise": CastRecipe(_TORCHAO, finds_largest=True),
    "rowwise": CastRecipe(_TORCHAO, by_row=True),
}


class ScaledProducts(LinearProducts):
    """Products of one recipe; with `cast_once` weights are cast when a step begins, where the library keeps what it cast."""

    def __init__(self, tape: Tape, recipe: CastRecipe, *, cast_once: bool) -> None:
        super().__init__(tape)
        self._recipe = recipe
        self._both = recipe.library == _ENGINE  # rows and columns in one pass
        self._once = cast_once and self._both
        self._weights: dict[int, Factor] = {}

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Casts the weights for the whole step."""
        if self._once:
            self._weights = {each.id or 0: self._cast(each, rows=True, columns=True) for each in weights}

    def copies(self, weight: Tensor) -> tuple[Tensor, ...]:
        """What a step keeps of a weight beside itself."""
        known = self._weights.get(weight.id or 0)
        return () if known is None else (known.rows, known.columns, *known.scales)

    # What goes in

    def input(self, x: Tensor) -> Factor:
        """What a layer is given: cast; torchao keeps it as it is for the weight's gradient."""
        if self._both:
            return self._cast(x, rows=True, columns=True)
        return replace(self._cast(x, rows=True), columns=x)

    def rows(self, x: Tensor) -> Factor:
        """A part of it that is cast before ranks gather it."""
        return self._cast(self._emit.reshaped(x, (x.numel // x.shape[-1], x.shape[-1])), rows=True)

    def gathered(self, part: Factor, rows: Tensor, *, columns: bool = False) -> Factor:
        """The parts of all ranks; their columns are copied out of the rows."""
        if not columns:
            return replace(part, rows=rows)
        turned = self._emit.tensor((rows.shape[1] * self._recipe.packed, rows.shape[0] // self._recipe.packed), rows.dtype)
        self._emit.write(f"{_ENGINE}fp8_transpose", (rows,), (turned,))
        return replace(part, rows=rows, columns=turned)

    def gradient(self, gradient: Tensor) -> Factor:
        """The gradient of what it gave."""
        return self._cast(gradient, rows=True, columns=True)

    def _weight(self, weight: Tensor, *, columns: bool) -> Factor:
        known = self._weights.get(weight.id or 0)
        return known if known is not None else self._cast(weight, rows=not columns, columns=columns)

    def _cast(self, x: Tensor, *, rows: bool = False, columns: bool = False) -> Factor:
        """Writes the casts of a matrix, or of one for each group: one for both ways it may lie, or one for each."""
        emit, recipe, (*groups, count, width) = self._emit, self._recipe, x.shape
        if recipe.finds_largest:
            emit.write(f"{recipe.library}compute_amax", (x,), (emit.tensor(()),))
        ways = [shape for wanted, shape in ((rows, (*groups, count, width)), (columns, (*groups, width, count))) if wanted]
        made = [emit.tensor((*shape[:-1], shape[-1] // recipe.packed), recipe.dtype) for shape in ways]
        scales = [self._scales(shape) for shape in ways]
        if self._both:
            emit.write(f"{recipe.library}quantize", (x, len(ways), recipe.block), (*made, *scales))
        else:
            for each, scale in zip(made, scales, strict=True):
                emit.write(f"{recipe.library}quantize", (x, 1, recipe.block), (each, scale))
        return Factor(made[0], made[-1], (scales[0], scales[-1]))

    def _scales(self, shape: tuple[int, ...]) -> Tensor:
        emit, recipe = self._emit, self._recipe
        if recipe.by_row:
            return emit.tensor((*shape[:-1], 1))
        blocks = -(-shape[-1] // recipe.block) if recipe.block else 0
        # Scales of short blocks are bytes (powers of two, or floats of eight bits), others floats.
        short = recipe.block and recipe.block < RECIPES["blockwise"].block
        return emit.tensor((*shape[:-1], blocks) if blocks else (), "uint8" if short else "float32")

    # Products

    def forward(self, x: Factor, weight: Tensor, bias: Tensor | None, y: Tensor, ends: Tensor | None = None) -> None:
        """Writes `x @ weight.t() + bias` into `y`; sums of few bits are enough."""
        factor = self._weight(weight, columns=False)
        self._multiply((x.rows, x.scales[0]), (factor.rows, factor.scales[0]), y, ends, bias, fast=True)

    def of_input(self, gradient: Factor, weight: Tensor, ends: Tensor | None = None, *, result: Tensor | None = None) -> Tensor:
        """The gradient of the input, in `result` where it is given."""
        factor = self._weight(weight, columns=True)
        result = result or self._emit.tensor((gradient.rows.shape[0], weight.shape[-1]), weight.dtype)
        self._multiply((gradient.rows, gradient.scales[0]), (factor.columns, factor.scales[-1]), result, ends)
        return result

    def saved(self, x: Factor) -> SavedFactor:
        """Keeps the columns with their scales."""
        return SavedFactor(self._tape.save(x.columns), (self._tape.save(x.scales[-1]),))

    def _multiply_columns(self, gradient: Factor, x: SavedFactor, result: Tensor, ends: Tensor | None) -> None:
        columns, other = x.columns(), x.scales[0]
        if columns.dtype != self._recipe.dtype:  # torchao's, cast now
            factor = self._cast(columns, columns=True)
            columns, other = factor.columns, partial(itself, factor.scales[-1])
        self._multiply((gradient.columns, gradient.scales[-1]), (columns, other()), result, ends)

    def _multiply(
        self,
        left: tuple[Tensor, Tensor],
        right: tuple[Tensor, Tensor],
        result: Tensor,
        ends: Tensor | None,
        bias: Tensor | None = None,
        *,
        fast: bool = False,
    ) -> None:
        """`_scaled_mm` of two matrices that both lie along what is summed, or `_scaled_grouped_mm` of groups of rows."""
        emit, dtype = self._emit, DTYPE_NUMBERS[result.dtype]
        turned, scale = turned_last(emit, right[0]), right[1]
        if self._recipe.by_row:
            scale = emit.view(scale, (*scale.shape[:-2], 1, scale.shape[-2]))
        operands = (left[0], turned, left[1], scale)
        if ends is None:
            emit.op("_scaled_mm", (*operands, bias, None, dtype, fast), (result,))
        else:
            emit.op("_scaled_grouped_mm", (*operands, ends, None, None, dtype, fast), (result,))
