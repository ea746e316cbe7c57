"""Matrix products as columns of numbers, with what cuBLAS looks at when it chooses, and the groups of kernels it chooses from.

Groups are by precision and alignment, each with its kernels and tiles, read off the kernel names of the measured rows: within a
group the same kinds always appear, across groups hardly ever. Kernel kinds: `nvjet` (Hopper, half precision), `sm90` (Hopper,
TF32), `tensor80` and `tensor75` (Ampere's and Turing's tensor cores), `wmma` (their small tiles), `xmma_tf32`, `ffma` and
`simt` (single precision without tensor cores), `gemv`, and a few for odd shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.call import Argument, Call, TensorArg, contiguous
from steptime._models.kernels.forms import settings_of
from steptime._models.kernels.question import Question
from steptime._units import dtype_bytes
from steptime.errors import InputError

Column = npt.NDArray[Any]

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
OPERATIONS = ("mm", "addmm", "bmm", "baddbmm")
# Products that are taken for others: of eight-bit floats, and of groups of rows with a matrix each.
SCALED, GROUPED, SCALED_GROUPED = "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"
_ENDS = {GROUPED: 2, SCALED_GROUPED: 4}  # the argument that says where groups end
_PACKED = "float4x2"  # a byte holds two elements of a row
# What is added: nothing, one row for all rows, one matrix, one matrix per product of the batch.
BIASES = ("none", "row", "matrix", "batch")

_WITH_BIAS = ("addmm", "baddbmm")
_COMPLEX, _REAL = "complex64", "float32"
_OF_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
DTYPES = tuple(_OF_DTYPE)
_SECTOR_BYTES = 32  # the least a GPU reads of memory
_HALF = PRECISIONS.index("fp16")  # and what follows: 2 bytes per element


@dataclass(frozen=True)
class Products:
    """(m x k) times (k x n), `batch` of them; every field is an array of one length, codes are places in the tuples above."""

    m: Column
    n: Column
    k: Column
    batch: Column
    layout: Column  # 1 where the first operand is stored by columns, and 2 where the second is
    leading_a: Column  # elements from one row (stored by columns: column) of the first operand to the next
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

    def take(self, index: Column) -> Products:
        """Those at some places."""
        return Products(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def element_bytes(self) -> Column:
        """Bytes per element."""
        return np.where(self.precision >= _HALF, 2, 4)

    @property
    def bias_copied(self) -> Column:
        """Whether the bias is copied into the result first: when it is a matrix, or where cublasLt has no epilogue for it."""
        addmm = self.operation == OPERATIONS.index("addmm")
        copied: Column = (self.bias >= 2) | (addmm & (self.bias == 1) & ((self.k == 1) | (self.n == 1)))
        return copied


def of_questions(questions: Sequence[Question]) -> Products:
    """The products that questions are about."""
    settings = settings_of(questions)
    table = np.array([_numbers(question.call) for question in questions], dtype=np.int64).reshape(len(questions), 14).T
    products = Products(*[*table, settings.share, settings.others])
    return replace(
        products,
        precision=np.where(settings.tf32 & (products.precision == 0), 1, products.precision),
        hot_a=products.hot_a * settings.warm,
        hot_b=products.hot_b * settings.warm,
    )


def in_groups(questions: Sequence[Question]) -> Column:
    """Which of them are of groups of rows with a matrix each."""
    return np.array([question.call.op.partition("::")[2].partition(".")[0] in _ENDS for question in questions], dtype=bool)


@lru_cache(maxsize=65536)
def _numbers(call: Call) -> tuple[int, ...]:
    """The fields of `Products` up to `hot_b`, of one call."""
    call = _plain_product(call)
    name = call.op.partition("::")[2].partition(".")[0]
    if name not in OPERATIONS:
        raise InputError(f"{call.op} is no matrix product that is modelled; these are: {', '.join(OPERATIONS)}")
    first = 1 if name in _WITH_BIAS else 0
    left, right = _operands(call, first)
    result = (left.batch, left.rows, right.columns) if "bmm" in name else (left.rows, right.columns)
    return (
        *(left.rows, right.columns, left.columns, left.batch, left.transposed + 2 * right.transposed),
        *(left.leading, right.leading, PRECISIONS.index(_OF_DTYPE[call.dtype]), OPERATIONS.index(name)),
        _bias_code(call, result) if first else 0,
        *(int(left.copied_bytes > 0) + int(right.copied_bytes > 0), left.copied_bytes + right.copied_bytes),
        *(int(first in call.written), int(first + 1 in call.written)),
    )


def _plain_product(call: Call) -> Call:
    """The product of equal bytes and operations; a call that is none of those taken for others is itself.

    Tensor cores take so many bytes of a row in a cycle: eight-bit operands are 16-bit ones with half the inner length. Groups
    of rows, each with its matrix, are a batch; which rows a group has is not known, so that all have as many. A product of
    complex numbers is four of real ones: one of twice the inner length and twice the columns, or the rows.
    """
    name = call.op.partition("::")[2].partition(".")[0]
    if is_complex(call):
        return replace(call, args=_of_reals(call, first=1 if name in _WITH_BIAS else 0))
    if name not in (SCALED, *_ENDS) or len(call.args) < 2:
        return call
    left, right = call.args[:2]
    if not isinstance(left, TensorArg) or not isinstance(right, TensorArg):
        return call
    if name in (SCALED, SCALED_GROUPED):
        left, right = _halved(left, axis=len(left.shape) - 1), _halved(right, axis=len(right.shape) - 2)
    if name == SCALED:
        return Call("aten::mm.default", (left, right), (), call.written)
    if len(left.shape) == 2 and len(right.shape) == 2:  # gradients of the matrices: the inner length is divided among groups
        ends = call.args[_ENDS[name]] if len(call.args) > _ENDS[name] else None
        groups = ends.numel if isinstance(ends, TensorArg) else 1
        left, right = _in_groups(left, groups, axis=1), _in_groups(right, groups, axis=0)
    elif len(left.shape) == 2:
        left = _in_groups(left, right.shape[0], axis=0)
    elif len(right.shape) == 2:
        right = _in_groups(right, left.shape[0], axis=1)
    return Call("aten::bmm.default", (left, right), (), call.written)


def is_complex(call: Call) -> bool:
    """Whether a product is one of complex numbers."""
    return any(tensor.dtype == _COMPLEX for tensor in call.tensors())


def _of_reals(call: Call, first: int) -> tuple[Argument, ...]:
    """The arguments of a product as of real numbers; an operand that is copied first keeps its bytes."""
    right = call.args[first + 1] if len(call.args) > first + 1 else None
    copied = isinstance(right, TensorArg) and right.strides is not None and 1 not in right.strides[-2:]
    scales = {first: (2, 2) if copied else (1, 2), first + 1: (2, 1) if copied else (2, 2)}
    added = (2, 1) if copied else (1, 2)
    return tuple(
        _widened(value, *scales.get(place, added)) if isinstance(value, TensorArg) else value
        for place, value in enumerate(call.args)
    )


def _widened(x: TensorArg, rows: int, columns: int) -> TensorArg:
    """A tensor of real numbers, so many times as high and as wide, that lies in memory as another does."""
    factors = (*(1 for _ in x.shape[:-2]), *(rows, columns)[-len(x.shape) :])
    shape = tuple(factor * size for factor, size in zip(factors, x.shape, strict=True))
    if x.strides is None:
        return TensorArg(shape, _REAL)
    strides = tuple(step if step == 1 else rows * columns * step for step in x.strides)
    return TensorArg(shape, _REAL, strides)


def _halved(x: TensorArg, axis: int) -> TensorArg:
    """A matrix of eight bits as one of 16, half as long along an axis; four bits are taken for eight, which Hopper has."""
    if len(x.shape) in (2, 3) and x.dtype == _PACKED:
        return TensorArg(x.shape, "bfloat16", x.strides)
    if len(x.shape) not in (2, 3) or dtype_bytes(x.dtype) != 1:
        raise InputError(f"an operand of {x.dtype} {x.shape} is no matrix of eight-bit floats")
    strides = x.strides if x.strides is not None else contiguous(x.shape)
    halved = tuple(-(-size // 2) if place == axis else size for place, size in enumerate(x.shape))
    steps = tuple(step if step == 1 else -(-step // 2) for step in strides)
    return TensorArg(halved, "bfloat16", steps)


def _in_groups(x: TensorArg, groups: int, axis: int) -> TensorArg:
    """A matrix cut evenly along an axis into a batch."""
    if groups < 1:
        raise InputError(f"a product of {groups} groups cannot be")
    strides = x.strides if x.strides is not None else contiguous(x.shape)
    each = -(-x.shape[axis] // groups)
    shape = tuple(each if place == axis else size for place, size in enumerate(x.shape))
    return TensorArg((groups, *shape), x.dtype, (each * strides[axis], *strides))


@dataclass(frozen=True, slots=True)
class _Matrix:
    batch: int
    rows: int
    columns: int
    transposed: int
    leading: int
    copied_bytes: int = 0


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


def _matrix(call: Call, tensor: Argument) -> _Matrix:
    dims = 3 if "bmm" in call.op else 2
    if not isinstance(tensor, TensorArg) or len(tensor.shape) != dims:
        operand = tensor.shape if isinstance(tensor, TensorArg) else tensor
        raise InputError(f"{call.op}: an operand is {operand!r}, expected a tensor of {dims} dimensions")
    rows, columns = tensor.shape[-2:]
    by_row, by_column = (tensor.strides if tensor.strides is not None else contiguous(tensor.shape))[-2:]
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
    backwards = bias.shape[::-1]  # broadcasting goes by the last dimensions
    fits = all(have in (1, want) for have, want in zip(backwards, product[::-1], strict=False))
    if len(backwards) > len(product) or not fits:
        raise InputError(f"{call.op}: a bias of shape {bias.shape} cannot be added to a result of shape {product}")
    if beta == 0:
        return 0
    if len(backwards) <= 1:
        return 1
    return 3 if len(backwards) == 3 and bias.shape[0] > 1 else 2


GROUPS = ("fp32", "tf32_aligned", "tf32_odd", "half_16", "half_4", "half_2", "vector")
FP32, TF32_ALIGNED, TF32_ODD, HALF_16, HALF_4, HALF_2, VECTOR = range(len(GROUPS))
_VECTOR_LOAD_BYTES = 16  # cuBLAS's fast kernels load 16 bytes at once, so every leading dimension has to be a multiple of that


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel: its kind and the part of the result one block makes, as kernel names give it (along n, then along m)."""

    kind: str
    along_n: int
    along_m: int


_SMALL_TENSOR = "64x64 128x64 64x128 128x128 256x64 64x256"
_NVJET = (
    "64x8 64x16 64x24 64x32 64x48 64x64 96x64 128x64 128x96 96x128 128x128 128x160 192x128 128x192 192x192 256x128 128x256"
    " 256x160 320x128 8x64 16x64 32x64 64x96 64x128 64x256 256x64"
)
# Per group, the tiles of each kind of kernel.
_TILES: tuple[dict[str, str], ...] = (
    {
        "ffma": "32x32 64x32 32x64 64x64 128x32 128x64 64x128 128x128 256x64 64x256 256x128",
        "simt": "64x64 128x32 32x128 128x64 64x128 128x128 256x128 128x256",
        "large_k": "32x32",
        "small_n": "64x8",
    },
    {
        "ffma": "32x32",
        "tensor80": f"{_SMALL_TENSOR} 128x256",
        "sm90": "64x64 128x64 64x128 128x128 64x256 256x128 128x256",
    },
    {
        "ffma": "32x32 64x32 64x64",
        "xmma_tf32": "32x32",
        "simt": "128x32",
        "tensor80": f"{_SMALL_TENSOR} 256x128 128x256",
        "small_n": "64x8",
    },
    {"nvjet": _NVJET},
    {"wmma": "16x16 32x32", "tensor80": f"{_SMALL_TENSOR} 256x128 128x256"},
    {"wmma": "16x16 32x32", "tensor75": "64x64 128x64 128x128 256x128 128x256", "small_n": "64x8", "other": "32x32"},
    {"gemv": "1x4 1x16 1x64 1x256"},
)
TILES: tuple[tuple[Tile, ...], ...] = tuple(
    tuple(Tile(kind, *map(int, size.split("x"))) for kind, sizes in kinds.items() for size in sizes.split()) for kinds in _TILES
)


def groups_of(products: Products) -> Column:
    """The group of each product: a place in `GROUPS`."""
    offsets = np.stack([products.leading_a, products.leading_b, products.n]) * products.element_bytes
    aligned = (offsets & -offsets).min(axis=0)  # the largest power of two that divides all of them
    tf32 = np.where(aligned >= _VECTOR_LOAD_BYTES, TF32_ALIGNED, TF32_ODD)
    half = np.where(aligned >= _VECTOR_LOAD_BYTES, HALF_16, np.where(aligned >= 4, HALF_4, HALF_2))
    group = np.where(products.precision == 0, FP32, np.where(products.precision == 1, tf32, half)).astype(np.int8)
    group[((products.m == 1) | (products.n == 1)) & (group != HALF_16)] = VECTOR
    return group


def upright(products: Products) -> Products:
    """Products with one row turned into the same ones with one column: a matrix times a vector either way."""
    turn = (products.m == 1) & (products.n > 1)
    swapped = {
        name: np.where(turn, getattr(products, other), getattr(products, name))
        for name, other in (("m", "n"), ("n", "m"), ("leading_a", "leading_b"), ("hot_a", "hot_b"), ("hot_b", "hot_a"))
    }
    return replace(
        products,
        **swapped,
        precision=np.where(products.precision == 1, 0, products.precision),  # no tensor cores, so no TF32
        # How the vector lies makes no difference.
        layout=np.where(turn, 1 - (products.layout >> 1), products.layout & 1),
        leading_b=np.ones_like(products.leading_b),
    )
