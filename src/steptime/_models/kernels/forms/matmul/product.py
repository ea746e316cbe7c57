"""`Products`: matrix products as columns of numbers, from calls or from arrays, with what cuBLAS looks at when it chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.call import Argument, Call, TensorArg, contiguous
from steptime._models.kernels.question import OTHERS, Question
from steptime._units import dtype_bytes
from steptime.errors import InputError

Column = npt.NDArray[Any]

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
OPERATIONS = ("mm", "addmm", "bmm", "baddbmm")
# How the first and the second operand are stored: n by rows, t by columns.
LAYOUTS = ("nn", "tn", "nt", "tt")
# What is added: nothing, one row for all rows, one matrix, one matrix per product of the batch.
BIASES = ("none", "row", "matrix", "batch")

_OF_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_SECTOR_BYTES = 32  # the least a GPU reads of memory
_HALF = PRECISIONS.index("fp16")  # and what follows: 2 bytes per element
_DEFAULTS = {"batch": 1, "layout": 0, "operation": 0, "bias": 0, "precision": 0, "share": 1, "others": 0}
_CODES = {"layout": LAYOUTS, "operation": OPERATIONS, "bias": BIASES, "precision": PRECISIONS, "others": OTHERS}


@dataclass(frozen=True)
class Products:
    """(m x k) times (k x n), `batch` of them; every field is an array of one length, codes are places in the tuples above."""

    m: Column
    n: Column
    k: Column
    batch: Column
    layout: Column
    leading_a: Column  # elements from one row (layout t: column) of the first operand to the next
    leading_b: Column
    precision: Column
    operation: Column
    bias: Column  # none where its factor `beta` is 0
    copied: Column  # how many operands no layout describes: they are copied first
    copied_bytes: Column  # what those copies move
    hot_a: Column  # whether the first operand was written just before
    hot_b: Column
    share: Column
    others: Column

    def __len__(self) -> int:
        return len(self.m)

    def take(self, index: Column | slice) -> Products:
        """Some of them."""
        return Products(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def element_bytes(self) -> Column:
        """Bytes per element."""
        return np.where(self.precision >= _HALF, 2, 4)


@dataclass(frozen=True, slots=True)
class _Matrix:
    batch: int
    rows: int
    columns: int
    transposed: int
    leading: int
    copied_bytes: int = 0


def _matrix(call: Call, tensor: Argument) -> _Matrix:
    dims = 3 if "bmm" in call.op else 2
    if not isinstance(tensor, TensorArg) or len(tensor.shape) != dims:
        given = tensor.shape if isinstance(tensor, TensorArg) else tensor
        raise InputError(f"{call.op}: an operand is {given!r}, expected a tensor of {dims} dimensions")
    rows, columns = tensor.shape[-2:]
    strides = tensor.strides if tensor.strides is not None else contiguous(tensor.shape)
    by_row, by_column = strides[-2:]
    batch = tensor.shape[0] if dims == 3 else 1
    # ATen hands cuBLAS whatever has unit steps one way and whole lines the other; anything else it copies first.
    if by_column == 1 and by_row >= max(1, columns):
        return _Matrix(batch, rows, columns, 0, by_row)
    if by_row == 1 and by_column >= max(1, rows):
        return _Matrix(batch, rows, columns, 1, by_column)
    size = dtype_bytes(tensor.dtype)
    moved = batch * rows * columns * (size + min(_SECTOR_BYTES, max(1, by_column) * size))
    return _Matrix(batch, rows, columns, 0, columns, moved)


def _bias_code(call: Call, product: tuple[int, ...]) -> int:
    bias, beta = call.args[0], dict(call.kwargs).get("beta", 1)
    if not isinstance(bias, TensorArg):
        raise InputError(f"{call.op}: the bias is {bias!r}, expected a tensor")
    given = bias.shape[::-1]  # broadcasting goes by the last dimensions
    if len(given) > len(product) or any(have not in (1, want) for have, want in zip(given, product[::-1], strict=False)):
        raise InputError(f"{call.op}: a bias of shape {bias.shape} cannot be added to a result of shape {product}")
    if beta == 0:
        return 0
    if len(given) <= 1:
        return 1
    return 3 if len(given) == 3 and bias.shape[0] > 1 else 2


def _operands(call: Call, first: int) -> tuple[_Matrix, _Matrix]:
    if len(call.args) < first + 2:
        raise InputError(f"{call.op} has {len(call.args)} arguments, expected {first + 2}")
    dtypes = {tensor.dtype for tensor in call.tensors()}
    if len(dtypes) != 1 or not dtypes <= set(_OF_DTYPE):
        raise InputError(f"{call.op}: no fit for dtype {', '.join(sorted(dtypes))}; there are {', '.join(_OF_DTYPE)}")
    left, right = (_matrix(call, argument) for argument in call.args[first : first + 2])
    shapes = [tensor.shape for tensor in call.tensors()][first : first + 2]
    if left.columns != right.rows or left.batch != right.batch:
        raise InputError(f"{call.op}: operands of shapes {shapes[0]} and {shapes[1]} cannot be multiplied")
    if min(left.rows, left.columns, right.columns, left.batch) < 0:
        raise InputError(f"{call.op}: operands of shapes {shapes[0]} and {shapes[1]} have a negative size")
    return left, right


@lru_cache(maxsize=65536)
def _numbers(call: Call) -> tuple[int, ...]:
    """The fields of `Products` up to `hot_b`, of one call."""
    name = call.op.partition("::")[2].partition(".")[0]
    if name not in OPERATIONS:
        raise InputError(f"{call.op} is no matrix product that is modelled; these are: {', '.join(OPERATIONS)}")
    first = 1 if name in ("addmm", "baddbmm") else 0
    left, right = _operands(call, first)
    result = (left.batch, left.rows, right.columns) if "bmm" in name else (left.rows, right.columns)
    return (
        *(left.rows, right.columns, left.columns, left.batch, left.transposed + 2 * right.transposed),
        *(left.leading, right.leading, PRECISIONS.index(_OF_DTYPE[call.dtype]), OPERATIONS.index(name)),
        _bias_code(call, result) if first else 0,
        *(int(left.copied_bytes > 0) + int(right.copied_bytes > 0), left.copied_bytes + right.copied_bytes),
        *(int(first in call.written), int(first + 1 in call.written)),
    )


def of_questions(questions: Sequence[Question]) -> Products:
    """The products that questions are about."""
    table = np.array([_numbers(question.call) for question in questions], dtype=np.int64).reshape(len(questions), 14).T
    m, n, k, batch, layout, leading_a, leading_b, precision, operation, bias, copied, copied_bytes, hot_a, hot_b = table
    tf32, warm = (np.array([getattr(q, name) for q in questions], dtype=bool) for name in ("tf32", "warm"))
    for question in questions:
        if question.others not in OTHERS or question.share < 1:
            raise InputError(f"{question.call.op} on 1/{question.share} of a GPU beside {question.others!r}: not modelled")
    return Products(
        *(m, n, k, batch, layout, leading_a, leading_b),
        precision=np.where(tf32 & (precision == 0), 1, precision),
        operation=operation,
        bias=bias,
        copied=copied,
        copied_bytes=copied_bytes,
        hot_a=hot_a * warm,
        hot_b=hot_b * warm,
        share=np.array([question.share for question in questions], dtype=np.int64),
        others=np.array([OTHERS.index(question.others) for question in questions], dtype=np.int64),
    )


def _codes(name: str, values: Any, length: int) -> Column:
    """Codes from codes or from words, one or an array of them."""
    given = np.asarray(values)
    if given.dtype.kind in "US":
        words = _CODES[name]
        result = np.full(given.shape, -1, dtype=np.int64)
        for index, word in enumerate(words):
            result[given == word] = index
        if (result < 0).any():
            unknown = given[result < 0].flat[0]
            raise InputError(f"a matrix product's {name} is {str(unknown)!r}, which is not one of {', '.join(words)}")
        given = result
    return np.broadcast_to(given, length)


def of_columns(columns: Mapping[str, Any]) -> Products:
    """Products from arrays `m`, `n`, `k` and what differs from a contiguous cold `mm` of fp32 on a whole GPU."""
    names = {field.name for field in fields(Products)}
    if unknown := set(columns) - names:
        raise InputError(f"a matrix product has no column {sorted(unknown)[0]!r}; it has {', '.join(sorted(names))}")
    if missing := {"m", "n", "k"} - set(columns):
        raise InputError(f"a matrix product needs the column {sorted(missing)[0]!r}")
    m = np.asarray(columns["m"])
    result = {name: _codes(name, columns.get(name, _DEFAULTS.get(name, 0)), len(m)) for name in sorted(names)}
    if len(m) and min(int(result[name].min()) for name in ("m", "n", "k", "batch")) < 1:
        raise InputError("a matrix product has sizes m, n, k and batch of at least 1")
    if "leading_a" not in columns:
        result["leading_a"] = np.where(result["layout"] & 1, result["m"], result["k"])
    if "leading_b" not in columns:
        result["leading_b"] = np.where(result["layout"] & 2, result["k"], result["n"])
    return Products(**result)
