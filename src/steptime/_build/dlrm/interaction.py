"""How a DLRM's bottom MLP meets its lookups, as PyTorch records it: side by side, or all pairwise dot products."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.emit.autograd import Gradients, Tape
from steptime._build.emit.ops import Emitter, is_contiguous
from steptime._build.emit.layers import (DTYPE_NUMBERS, STRIDED, cat, contiguous, empty, given, number, transposed_pair, zero)
from steptime._program.program import Tensor

_CONTIGUOUS = 0  # c10::MemoryFormat


class InteractionOps:
    """`dot` interactions index the lower triangle of the products by two rows of one tensor, made before the step."""

    def __init__(self, tape: Tape, *, dot: bool, tables: int, dim: int) -> None:
        self._tape, self._dot, self._dim, self._vectors = tape, dot, dim, tables + 1
        pairs = self._vectors * (self._vectors - 1) // 2
        below = tape.emit.tensor((2, pairs), "int64")
        self._rows, self._columns = (tape.emit.view(below, (pairs,), offset=row * pairs) for row in (0, 1))

    def __call__(self, dense: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """What the top MLP sees, [local batch, width]."""
        side_by_side = cat(self._tape, (dense, *blocks))
        if not self._dot:
            return side_by_side
        vectors = self._as_vectors(side_by_side)
        products = self._products(vectors)
        return cat(self._tape, (dense, self._lower_triangle(products)))

    def _as_vectors(self, flat: Tensor) -> Tensor:
        emit, samples = self._tape.emit, flat.shape[0]
        text = (samples, -1, self._dim)
        vectors = emit.reshaped(flat, (samples, self._vectors, self._dim), text, sequence=emit.sequence)

        def backward(gradients: Gradients) -> Gradients:
            return (_reshape(emit, given(gradients), flat.shape, flat.shape),)

        self._tape.record("ViewBackward0", (flat,), (vectors,), backward)
        return vectors

    def _products(self, vectors: Tensor) -> Tensor:
        emit, tape = self._tape.emit, self._tape
        turned = transposed_pair(emit, vectors, 1, 2, sequence=emit.sequence)
        tape.record("TransposeBackward0", (vectors,), (turned,), lambda found: (transposed_pair(emit, given(found), 1, 2),))
        products = emit.tensor((vectors.shape[0], self._vectors, self._vectors))
        emit.op("aten::bmm", (vectors, turned), (products,), sequence=emit.sequence)

        def backward(gradients: Gradients) -> Gradients:
            gradient = given(gradients)
            of_turned = emit.tensor(turned.shape)
            emit.op("aten::bmm", (transposed_pair(emit, vectors, 1, 2), gradient), (of_turned,))
            of_vectors = emit.tensor(vectors.shape)
            emit.op("aten::bmm", (gradient, transposed_pair(emit, turned, 1, 2)), (of_vectors,))
            return of_vectors, of_turned

        tape.record("BmmBackward0", (vectors, turned), (products,), backward)
        return products

    def _lower_triangle(self, products: Tensor) -> Tensor:
        emit, (pairs,) = self._tape.emit, self._rows.shape
        indices = (None, self._rows, self._columns)
        picked = emit.tensor((products.shape[0], pairs))
        with emit.around("aten::index", (products, indices), (picked,), sequence=emit.sequence):
            emit.as_strided(products, picked.shape, (self._vectors**2, 0))
            for index in (self._rows, self._columns):
                _reshape(emit, index, (1, pairs), (1, pairs))

        def backward(gradients: Gradients) -> Gradients:
            gradient = given(gradients)
            result = _new_zeros(emit, gradient, products.shape)
            with emit.around("aten::_index_put_impl_", (result, indices, gradient, True, True), (result,)):
                self._put(gradient)
            return (result,)

        self._tape.record("IndexBackward0", (products,), (picked,), backward)
        return picked

    def _put(self, gradient: Tensor) -> None:
        """Adds gradients at indices: PyTorch counts places, sorts them and sums (index_put_with_sort_kernel)."""
        emit, (pairs,) = self._tape.emit, self._rows.shape
        places = self._counted(self._rows, self._vectors)
        columns = self._counted(self._columns, 1)
        emit.op("aten::add_", (places, columns, 1), (places,))
        spread = emit.view(gradient)
        with emit.around("aten::expand", (gradient, gradient.shape, False), (spread,)):
            emit.op("aten::as_strided", (gradient, gradient.shape, gradient.strides, None), (spread,))
        if not is_contiguous(spread):
            contiguous(emit, spread)
        flat = _reshape(emit, places, (pairs,), (-1,))
        for _ in ("sorted places", "their order"):
            result = emit.tensor((pairs,), "int64")
            with emit.around("aten::empty_like", (flat, None, None, None, None, _CONTIGUOUS), (result,)):
                empty(emit, result.shape, "int64", memory_format=_CONTIGUOUS, made=result)
        with (
            emit.around("aten::divide_", (flat, 1, "trunc"), (flat,)),
            emit.around("aten::div_", (flat, 1, "trunc"), (flat,)),
        ):
            emit.op("aten::div_", (flat, number(emit, "int64"), "trunc"), (flat,))
        _arange(emit, pairs)

    def _counted(self, index: Tensor, step: int) -> Tensor:
        """Indices along one dimension as places in memory, negative ones brought in."""
        emit = self._tape.emit
        inside, placed = (emit.tensor(index.shape, "int64") for _ in range(2))
        for name, taken, by, item in (
            ("aten::remainder", index, self._vectors, inside),
            ("aten::mul", inside, step, placed),
        ):
            with emit.around(name, (taken, by), (item,)):
                emit.op(name, (taken, number(emit, "int64")), (item,))
        emit.op("aten::to", (placed, None, None, emit.device, None, False, False, None), (placed,))
        return placed


def _reshape(emit: Emitter, x: Tensor, shape: Sequence[int], said: Sequence[int]) -> Tensor:
    """`x.reshape(said)` of a row-major tensor."""
    result = emit.view(x, shape)
    with emit.around("aten::reshape", (x, tuple(said)), (result,)):
        emit.op("aten::view", (x, tuple(said)), (result,))
    return result


def _new_zeros(emit: Emitter, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    result = emit.tensor(shape, like.dtype)
    text = (like, shape, DTYPE_NUMBERS[like.dtype], STRIDED, emit.device, None)
    with emit.around("aten::new_zeros", text, (result,)):
        with emit.around("aten::new_empty", text, (result,)):
            empty(emit, shape, like.dtype, made=result)
        zero(emit, result)
    return result


def _arange(emit: Emitter, count: int) -> Tensor:
    """`torch.arange(count)`: an empty tensor that is grown."""
    result = emit.tensor((count,), "int64")
    nothing = emit.tensor((0,), "int64")
    with emit.around("aten::arange", (count, DTYPE_NUMBERS["int64"], STRIDED, emit.device, None), (result,)):
        empty(emit, (0,), "int64", made=nothing)
        with emit.around("aten::arange", (0, count, 1, nothing), (result,)):
            emit.op("aten::resize_", (nothing, (count,), None), (result,))
    return result
