"""How many operations an op takes at least, by the shapes of its arguments: for rooflines and for ops without a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Protocol

from steptime._ops.table import arguments_of
from steptime._program.program import Signature


class Shaped(Protocol):
    """A tensor of a call or of a recorded op."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    @property
    def numel(self) -> int:
        """Elements."""


# From positional arguments and the tensors among all of them to operations; None where the shapes do not tell.
Count = Callable[[Sequence[object], Sequence[Shaped]], float | None]

_AT_LEAST_A_MATRIX = 2
_WINDOWS = (11, 15)  # where flash attention takes how far back a window reaches, forward and backward
_PACKED = "float4x2"  # a byte holds two elements of a row


def operations_of(name: str, args: Sequence[object], tensors: Sequence[Shaped]) -> float:
    """Multiplications and additions of products, convolutions and attention; one operation per element of anything else.

    `name` is without overload. Ops that are not in the table are counted by what their name says they do.
    """
    count = _COUNTS.get(name) or next((rule for pattern, rule in _BY_NAME if pattern.search(name)), None)
    operations = None if count is None else count(args, tensors)
    if operations is not None:
        return operations
    return float(max((tensor.numel for tensor in tensors), default=0))


def is_product(name: str) -> bool:
    """Whether an op is a product, a convolution or attention whose operations are known exactly."""
    return name.partition(".")[0] in _COUNTS


def products_of(calls: Sequence[tuple[str, Signature]]) -> list[float | None]:
    """Multiplications and additions of products, convolutions and attention, by name and arguments; None of anything else."""
    counts = [(_COUNTS.get(name.partition(".")[0]), signature) for name, signature in calls]
    return [None if count is None else count(each.inputs, arguments_of(each).inputs) for count, each in counts]


def _product(_: Sequence[object], tensors: Sequence[Shaped], first: int = 0) -> float | None:
    """Of two operands; what stands before them is added, what stands behind is where the result goes."""
    if len(tensors) < first + 2:
        return None
    left, right = tensors[first : first + 2]
    if len(left.shape) < _AT_LEAST_A_MATRIX or len(right.shape) < _AT_LEAST_A_MATRIX:
        return None
    return 2.0 * math.prod(left.shape) * right.shape[-1]


def _any_product(_: Sequence[object], tensors: Sequence[Shaped]) -> float | None:
    """Of the two largest matrices that can be multiplied: biases, scales and offsets stand beside them."""
    matrices = [tensor for tensor in tensors if len(tensor.shape) >= _AT_LEAST_A_MATRIX]
    packed = 2.0 if matrices and getattr(matrices[0], "dtype", "") == _PACKED else 1.0
    counts = [
        2.0 * packed * left.numel * (right.shape[-1] if left.shape[-1] == right.shape[-2] else right.shape[-2])
        for left, right in combinations(matrices, 2)
        if left.shape[-1] in right.shape[-2:]
    ]
    return max(counts, default=None)


def _convolution(args: Sequence[object], tensors: Sequence[Shaped]) -> float | None:
    """Every element of the weight meets every output position of every sample."""
    if len(tensors) < 2:
        return None
    inputs, weight = tensors[0], tensors[1]
    stride = args[3] if len(args) > 3 else None
    if not isinstance(stride, tuple) or len(inputs.shape) < 3:
        return None
    if len(args) > 6 and args[6] is True:  # transposed: every element of the input meets every one of its filters
        return 2.0 * inputs.shape[0] * math.prod(inputs.shape[2:]) * weight.numel
    positions = math.prod(
        max(1, size // int(step)) for size, step in zip(inputs.shape[2:], stride, strict=False) if isinstance(step, int)
    )
    return 2.0 * inputs.shape[0] * positions * weight.numel


def _any_convolution(_: Sequence[object], tensors: Sequence[Shaped]) -> float | None:
    """Of an image and a filter that come first, at a stride of one."""
    images = [tensor for tensor in tensors if len(tensor.shape) >= 3]
    if len(images) < 2:
        return None
    return 2.0 * images[0].shape[0] * math.prod(images[0].shape[2:]) * images[1].numel


def _convolution_backward(args: Sequence[object], tensors: Sequence[Shaped]) -> float | None:
    """Two products of the forward's size: one for the input, one for the weight."""
    if len(tensors) < 3 or len(tensors[0].shape) < 3:
        return None
    transposed = len(args) > 7 and args[7] is True
    gradient, weight = tensors[1 if transposed else 0], tensors[2]
    positions = gradient.shape[0] * math.prod(gradient.shape[2:])
    mask = args[-1]
    wanted = sum(bool(each) for each in mask[:2]) if isinstance(mask, tuple) else 2
    return 2.0 * wanted * positions * weight.numel


def _attention(_: Sequence[object], tensors: Sequence[Shaped], first: int = 0, products: int = 2) -> float | None:
    """Scores and their sum with the values: queries and keys come first."""
    shaped = [tensor for tensor in tensors if len(tensor.shape) == 4]
    if len(shaped) < 3:
        return None
    query, key = shaped[first : first + 2]
    return 2.0 * products * query.numel * key.shape[2] if key.shape[0] * key.shape[1] else 0.0


def _packed_attention(args: Sequence[object], tensors: Sequence[Shaped], first: int = 0, products: int = 2) -> float | None:
    """The same of samples one after the other, whose lengths are not known: as if all were as long; a window is all it sees."""
    if len(tensors) < first + 2 or len(tensors[first].shape) < 3:
        return None
    query, key = tensors[first : first + 2]
    starts = [tensor for tensor in tensors[first + 3 :] if len(tensor.shape) == 1]
    samples = starts[0].numel - 1 if starts else query.shape[0]
    seen = math.prod(key.shape[:-2]) / max(1, samples)
    left = args[_WINDOWS[first]] if len(args) > _WINDOWS[first] else None
    if isinstance(left, int) and not isinstance(left, bool) and left >= 0:
        seen = min(seen, left + 1)
    return 2.0 * products * query.numel * seen


def _recurrent(args: Sequence[object], tensors: Sequence[Shaped], products: int = 1) -> float | None:
    """Every weight meets every row of the input."""
    weights = args[1] if len(args) > 1 and isinstance(args[1], tuple) else ()
    rows = math.prod(tensors[0].shape[:-1]) if tensors else 0
    numbers = [math.prod(shape) for each in weights if len(shape := getattr(each, "shape", ())) == _AT_LEAST_A_MATRIX]
    return 2.0 * products * rows * sum(numbers) if numbers else None


# Five such products instead of two; the gradient comes before queries and keys.
_attention_backward = partial(_attention, first=1, products=5)
# Ops whose output is the product of two operands, and how many dimensions those have.
PRODUCTS = {"aten::mm": 2, "aten::addmm": 2, "aten::bmm": 3, "aten::baddbmm": 3}
# PyTorch lets convolutions of float32 use TF32 unless told otherwise, and no matrix product.
TF32_BY_DEFAULT = ("aten::convolution", "aten::convolution_backward")
_ATTENTION = "aten::_scaled_dot_product_{}_attention"
_BACK_ENDS = ("flash", "efficient", "cudnn")
_COUNTS: dict[str, Count] = {
    **dict.fromkeys(("aten::mm", "aten::bmm"), _product),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), partial(_product, first=1)),
    **dict.fromkeys(("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm"), _any_product),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": partial(_recurrent, products=2),  # one for the inputs, one for the weights
    **{f"aten::_{name}_attention_forward": _packed_attention for name in _BACK_ENDS[:2]},
    **{f"aten::_{name}_attention_backward": partial(_packed_attention, first=1, products=5) for name in _BACK_ENDS[:2]},
    **{_ATTENTION.format(name): _attention for name in _BACK_ENDS},
    **{f"{_ATTENTION.format(name)}_backward": _attention_backward for name in _BACK_ENDS},
}
# What anything else is by its name; the first that fits wins.
_BY_NAME: tuple[tuple[re.Pattern[str], Count], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), count)
    for pattern, count in (
        (r"(?:attention|attn|fmha).*backward|(?:attention|attn|fmha)_?bwd", _attention_backward),
        (r"(?:attention|attn|fmha)(?!_math)", _attention),
        (r"conv(?:\d|olution)\w*backward", _convolution_backward),
        (r"conv(?:\d|_|olution)", _any_convolution),
        (r"(?:::|_)\w*mm(?:_\w+)?$|matmul|linear$|einsum|gemm", _any_product),
    )
)
