"""Layers as PyTorch records them on a GPU, forward and backward: each writes its ops and records its nodes on a `Tape`.

Ops and their order inside a layer are those of the execution traces of PyTorch 2.11 that come with the package, in fp32 and
under autocast, which shows an op twice: around the casts of its arguments, and as it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from steptime._build.emit.emitter import CONTIGUOUS, Emitter, compact_strides
from steptime._build.emit.tape import Gradients, Saved, Tape
from steptime._build.emit.views import lowered, reshape, to_dtype, turn, view
from steptime._build.emit.writer import strides_of
from steptime._program.program import Tensor, Value

# From here on cuBLASLt does not add the bias itself (aten/src/ATen/native/cuda/Blas.cpp, addmm_out_cuda_impl).
_MOST_FOR_EPILOGUE = 65535 * 32
# Up to here gradients of embeddings are added without sorting (aten/src/ATen/native/cuda/Embedding.cu).
_MOST_UNSORTED = 3072
# A thread adds so many rows: there is a part for every row found, and one for so many lookups (EmbeddingBackwardKernel.cu).
_ROWS_PER_THREAD = 10

# Products


def linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`: the weight lies as [out, in]."""
    emit, rows, width, matrix = tape.emit, x.numel // x.shape[-1], x.shape[-1], len(x.shape) == 2
    flat = emit.tensor((rows, weight.shape[0]), tape.autocast or x.dtype)
    y = flat if matrix else emit.view(flat, (*x.shape[:-1], weight.shape[0]))
    with tape.casting("linear", (x, weight, bias), y):
        # Arguments of a C++ call are cast from the last to the first.
        bias = None if bias is None else lowered(tape, bias)
        weight, x = lowered(tape, weight), lowered(tape, x)
        saved_x, saved_weight = tape.save(x), tape.save(weight)
        saved = (
            saved_x if matrix else lambda: emit.view(saved_x(), (rows, width)),
            lambda: emit.view(saved_weight(), weight.shape[::-1], (1, width)),
        )
        with emit.op("linear", (x, weight, bias), (y,), node=True):
            if bias is not None:
                _addmm(tape, bias, x if matrix else view(tape, x, (rows, width)), turn(tape, weight), flat, saved)
                return y if matrix else _raised(tape, flat, y, "view", "ViewBackward0")
            other = turn(tape, weight)
            with emit.op("matmul", (x, other), (y,), node=True):
                _mm(tape, x if matrix else reshape(tape, x, (rows, width)), other, flat, saved)
                return y if matrix else _raised(tape, flat, y, "_unsafe_view", "UnsafeViewBackward0")


def _raised(tape: Tape, flat: Tensor, y: Tensor, name: str, node: str) -> Tensor:
    """The rows of a product in the shape of what went in."""
    tape.emit.op(name, (flat, y.shape), (y,), node=True)
    return tape.node(node, (flat,), y, lambda gradient: tape.emit.reshaped(gradient, flat.shape))


def conv1d(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Hugging Face's `Conv1D`: a linear layer whose weight lies as [in, out]."""
    rows, width = x.numel // x.shape[-1], weight.shape[1]
    matrix = view(tape, x, (rows, x.shape[-1]), (-1, x.shape[-1]))
    flat = tape.emit.tensor((rows, width), tape.autocast or x.dtype)
    with tape.casting("addmm", (bias, matrix, weight, 1, 1), flat):
        weight, matrix, bias = lowered(tape, weight), lowered(tape, matrix), lowered(tape, bias)
        _addmm(tape, bias, matrix, weight, flat, (tape.save(matrix), tape.save(weight)))
    return view(tape, flat, (*x.shape[:-1], width))


def _addmm(tape: Tape, bias: Tensor, x: Tensor, weight: Tensor, y: Tensor, saved: tuple[Saved, Saved]) -> None:
    """`bias + x @ weight`; both factors are saved."""
    with tape.emit.op("addmm", (bias, x, weight, 1, 1), (y,), node=True):
        if 1 in weight.shape or max(*x.shape, *weight.shape) >= _MOST_FOR_EPILOGUE:
            tape.emit.expanded(bias, y.shape, (0, 1))

    def backward(gradient: Tensor) -> Gradients:
        of_x = _product(tape.emit, gradient, tape.emit.turned(saved[1]())) if tape.needs(x) else None
        of_weight = _of_weight(tape.emit, gradient, saved[0](), weight) if tape.needs(weight) else None
        return gradient if tape.needs(bias) else None, of_x, of_weight

    tape.node("AddmmBackward0", (bias, x, weight), y, backward)


def _mm(tape: Tape, x: Tensor, weight: Tensor, y: Tensor, saved: tuple[Saved, Saved]) -> None:
    """`x @ weight`; both factors are saved."""
    tape.emit.op("mm", (x, weight), (y,), node=True)

    def backward(gradient: Tensor) -> Gradients:
        # Derivatives are computed in the alphabetical order of the arguments' names: mat2, then self.
        of_weight = _of_weight(tape.emit, gradient, saved[0](), weight) if tape.needs(weight) else None
        return _product(tape.emit, gradient, tape.emit.turned(saved[1]())) if tape.needs(x) else None, of_weight

    tape.node("MmBackward0", (x, weight), y, backward)


def _of_weight(emit: Emitter, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the second matrix, laid as that is (torch/csrc/autograd/FunctionsManual.cpp, mm_mat2_backward)."""
    if weight.strides == (1, weight.shape[0]):
        return emit.turned(_product(emit, emit.turned(gradient), x))
    return _product(emit, emit.turned(x), gradient)


def _product(emit: Emitter, left: Tensor, right: Tensor) -> Tensor:
    return emit.new("mm", (left, right), (left.shape[0], right.shape[1]))


def bmm(tape: Tape, left: Tensor, right: Tensor) -> Tensor:
    """`torch.bmm`."""
    emit = tape.emit
    y = emit.tensor((left.shape[0], left.shape[1], right.shape[2]), tape.autocast or left.dtype)
    with tape.casting("bmm", (left, right), y):
        right, left = lowered(tape, right), lowered(tape, left)
        saved_left, saved_right = tape.save(left), tape.save(right)
        emit.op("bmm", (left, right), (y,), node=True)

    def backward(gradient: Tensor) -> Gradients:
        of_right = _batched(emit, emit.transposed(saved_left(), 1, 2), gradient)
        return _batched(emit, gradient, emit.transposed(saved_right(), 1, 2)), of_right

    return tape.node("BmmBackward0", (left, right), y, backward)


def _batched(emit: Emitter, left: Tensor, right: Tensor) -> Tensor:
    return emit.new("bmm", (left, right), (left.shape[0], left.shape[1], right.shape[2]))


# Elementwise


class _Activation(NamedTuple):
    """An elementwise function: what its backward is called, and which of its tensors that takes."""

    node: str
    backward: str
    arguments: tuple[Value, ...] = ()  # of both, behind the tensors
    saves_output: bool = False
    backward_arguments: tuple[Value, ...] = ()
    inside: tuple[str, tuple[Value, ...]] | None = None  # the op that it calls


_ACTIVATIONS = {
    "gelu": _Activation("GeluBackward0", "gelu_backward", ("none",)),
    "silu": _Activation("SiluBackward0", "silu_backward"),
    "tanh": _Activation("TanhBackward0", "tanh_backward", saves_output=True),
    "sigmoid": _Activation("SigmoidBackward0", "sigmoid_backward", saves_output=True),
    "relu": _Activation(
        "ReluBackward0", "threshold_backward", saves_output=True, backward_arguments=(0,), inside=("clamp_min", (0,))
    ),
}


def activation(tape: Tape, name: str, x: Tensor) -> Tensor:
    """`functional.gelu` and the like, by name."""
    emit, kind = tape.emit, _ACTIVATIONS[name]
    saved_x = None if kind.saves_output else tape.save(x)
    y = emit.tensor(x.shape, x.dtype)
    with emit.op(name, (x, *kind.arguments), (y,), node=True):
        if kind.inside is not None:
            emit.op(kind.inside[0], (x, *kind.inside[1]), (y,))
    saved = saved_x or tape.save(y)

    def backward(gradient: Tensor) -> Tensor:
        known = emit.view(saved()) if kind.saves_output else saved()
        return emit.new(kind.backward, (gradient, known, *kind.arguments, *kind.backward_arguments))

    return tape.node(kind.node, (x,), y, backward)


def promoted(left: Tensor, right: Tensor) -> str:
    """The dtype of an elementwise result; one of two floating dtypes is fp32 where they differ here."""
    return left.dtype if left.dtype == right.dtype else "float32"


def add(tape: Tape, left: Tensor, right: Tensor) -> Tensor:
    """`left + right`; a gradient of what was broadcast is summed by the engine."""
    laid = compact_strides(left) if len(left.shape) >= len(right.shape) else None
    shape = max(left.shape, right.shape, key=len)
    y = tape.emit.new("add", (left, right, 1), shape, promoted(left, right), strides=laid, node=True)
    return tape.node("AddBackward0", (left, right), y, lambda gradient: (gradient, gradient))


def mul(tape: Tape, left: Tensor, right: Tensor) -> Tensor:
    """`left * right`, neither of them broadcast in backward."""
    saved_left, saved_right = tape.save(left), tape.save(right)
    y = tape.emit.new("mul", (left, right), left.shape, promoted(left, right), strides=compact_strides(left), node=True)

    def backward(gradient: Tensor) -> Gradients:
        # Derivatives are computed in the alphabetical order of the arguments' names: other, then self.
        of_right = _times(tape.emit, gradient, saved_left()) if tape.needs(right) else None
        return _times(tape.emit, gradient, saved_right()), of_right

    return tape.node("MulBackward0", (left, right), y, backward)


def _times(emit: Emitter, gradient: Tensor, factor: Tensor) -> Tensor:
    dtype = promoted(gradient, factor) if factor.shape else gradient.dtype
    return emit.new("mul", (gradient, factor), dtype=dtype, strides=compact_strides(gradient))


def squared_relu(tape: Tape, x: Tensor) -> Tensor:
    """`functional.relu(x).square()`, as in Nemotron's models."""
    emit, y = tape.emit, activation(tape, "relu", x)
    saved = tape.save(y)
    result = emit.tensor(y.shape, y.dtype)
    with emit.op("square", (y,), (result,), node=True):
        emit.power(y, 2, result)

    def backward(gradient: Tensor) -> Tensor:
        return _times(emit, gradient, emit.new("mul", (saved(), emit.number())))

    return tape.node("PowBackward0", (y,), result, backward)


def gelu_new(tape: Tape, x: Tensor) -> Tensor:
    """Hugging Face's `NewGELUActivation`: the approximation by tanh, op by op."""
    half = scaled(tape, x)
    inner = add(tape, x, scaled(tape, _cubed(tape, x)))
    curved = activation(tape, "tanh", scaled(tape, inner))
    shifted = tape.emit.new("add", (curved, tape.emit.number(), 1), node=True)  # + 1.0
    return mul(tape, half, tape.node("AddBackward0", (curved,), shifted, lambda gradient: gradient))


def curved(tape: Tape, name: str, x: Tensor) -> Tensor:
    """An activation of one input by its name in configs."""
    made = {"gelu_new": gelu_new, "relu_squared": squared_relu}.get(name)
    return activation(tape, name, x) if made is None else made(tape, x)


def scaled(tape: Tape, x: Tensor) -> Tensor:
    """`x * 0.5` and the like."""
    factor = tape.emit.number()
    y = tape.emit.new("mul", (x, factor), node=True)
    return tape.node("MulBackward0", (x,), y, lambda gradient: _times(tape.emit, gradient, factor))


def _cubed(tape: Tape, x: Tensor) -> Tensor:
    """`torch.pow(x, 3.0)`, which autocast runs in fp32."""
    emit = tape.emit
    y = emit.tensor(x.shape, "float32" if tape.autocast else x.dtype)
    with tape.casting("pow", (x, 3.0), y):
        base = to_dtype(tape, x, y.dtype)
        emit.power(base, 3.0, y, node=True)
    saved = tape.save(base)

    def backward(gradient: Tensor) -> Tensor:
        tripled = emit.tensor(base.shape, base.dtype)
        squared = emit.power(saved(), 2.0, node=True)
        with emit.op("mul", (squared, 3.0), (tripled,)):
            emit.op("mul", (squared, emit.number()), (tripled,))
        return _times(emit, gradient, tripled)

    return tape.node("PowBackward0", (base,), y, backward)


def dropout(tape: Tape, x: Tensor, probability: float) -> Tensor:
    """`functional.dropout` in training; nothing where the probability is 0."""
    if not probability:
        return x
    emit = tape.emit
    y, mask = emit.tensor(x.shape, x.dtype), emit.tensor(x.shape, "bool")
    with (
        emit.op("dropout", (x, probability, True), (y,), node=True),
        emit.op("native_dropout", (x, probability, True), (y, mask), node=True),
    ):
        emit.empty_like(x, mask, emit.options(mask))
        emit.empty_like(x, y)
    saved = tape.save(mask)

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(x.shape, gradient.dtype)
        with emit.op("native_dropout_backward", (gradient, saved(), round(1.0 / (1.0 - probability), 6)), (result,)):
            emit.empty_like(gradient, result, memory_format=CONTIGUOUS)
        return result

    return tape.node("NativeDropoutBackward0", (x,), y, backward)


def cat(tape: Tape, tensors: Sequence[Tensor]) -> Tensor:
    """`torch.cat` of matrices side by side; one alone, and those of several dtypes, are copied one by one to their places."""
    emit, rows = tape.emit, tensors[0].shape[0]
    alike = len({tensor.dtype for tensor in tensors}) == 1
    *starts, width = accumulate((tensor.shape[1] for tensor in tensors), initial=0)
    y = emit.tensor((rows, width), tensors[0].dtype if alike else "float32")
    with emit.op("cat", (tuple(tensors), 1), (y,), node=True):
        for start, tensor in zip(starts, tensors, strict=True) if not alike or len(tensors) == 1 else ():
            emit.sliced(y, 1, start, start + tensor.shape[1], narrow=True)

    def backward(gradient: Tensor) -> Gradients:
        return tuple(
            emit.sliced(gradient, 1, start, start + tensor.shape[1], narrow=True) if tape.needs(tensor) else None
            for start, tensor in zip(starts, tensors, strict=True)
        )

    return tape.node("CatBackward0", tensors, y, backward)


# Norms


def layer_norm(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """`functional.layer_norm` over the last dimension; autocast runs it in fp32."""
    y = tape.emit.tensor(x.shape, "float32" if tape.autocast else x.dtype)
    with tape.casting("layer_norm", (x, (x.shape[-1],), weight, bias, epsilon, True), y):
        return _layer_norm(tape, to_dtype(tape, x, y.dtype), weight, bias, y, epsilon)


def _layer_norm(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, epsilon: float) -> Tensor:
    emit, width, rows = tape.emit, (x.shape[-1],), x.numel // x.shape[-1]
    mean, deviation = emit.tensor((rows,)), emit.tensor((rows,))
    means, deviations = (emit.view(each, (*x.shape[:-1], 1)) for each in (mean, deviation))
    saved_x = tape.save(x)
    with (
        emit.op("layer_norm", (x, width, weight, bias, epsilon, True), (y,), node=True),
        emit.op("native_layer_norm", (x, width, weight, bias, epsilon), (y, means, deviations), node=True),
    ):
        emit.empty(y, memory_format=CONTIGUOUS)
        for flat in (mean, deviation):
            emit.empty(flat)
        for flat, column in ((mean, means), (deviation, deviations)):
            emit.op("view", (flat, column.shape), (column,))
    saved_means, saved_deviations = tape.save(means), tape.save(deviations)

    def backward(gradient: Tensor) -> Gradients:
        wanted = tuple(tape.needs(each) for each in (x, weight, bias))
        of_x, of_weight, of_bias = (
            emit.tensor(shape, each.dtype) if want else None
            for want, shape, each in zip(wanted, (x.shape, width, width), (x, weight, bias), strict=True)
        )
        call = (gradient, saved_x(), width, saved_means(), saved_deviations(), weight, bias, wanted)
        with emit.op("native_layer_norm_backward", call, (of_x, of_weight, of_bias)):
            for each in (of_x, of_weight, of_bias):
                if each is not None:
                    emit.empty(each, memory_format=CONTIGUOUS)
        return of_x, of_weight, of_bias

    return tape.node("NativeLayerNormBackward0", (x, weight, bias), y, backward)


def rms_norm(tape: Tape, x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    """`functional.rms_norm` over the last dimension, in one kernel as since PyTorch 2.9."""
    emit, width = tape.emit, (x.shape[-1],)
    y, deviations = emit.tensor(x.shape, x.dtype), emit.tensor((*x.shape[:-1], 1))
    saved_x = tape.save(x)
    with emit.op("rms_norm", (x, width, weight, epsilon), (y,), node=True):
        emit.op("_fused_rms_norm", (x, width, weight, epsilon), (y, deviations), node=True)
    saved_deviations = tape.save(deviations)

    def backward(gradient: Tensor) -> Gradients:
        wanted = tape.needs(x), tape.needs(weight)
        of_x = emit.tensor(x.shape, x.dtype) if wanted[0] else None
        results = of_x, emit.tensor(width, weight.dtype) if wanted[1] else None
        emit.op("_fused_rms_norm_backward", (gradient, saved_x(), width, saved_deviations(), weight, wanted), results)
        return results

    return tape.node("FusedRmsNormBackward0", (x, weight), y, backward)


# Embeddings


def embedding(tape: Tape, weight: Tensor, indices: Tensor) -> Tensor:
    """`functional.embedding`, with the memory that the sort of its backward takes."""
    emit, (rows, width), count = tape.emit, weight.shape, indices.numel
    flat = emit.tensor((count, width), weight.dtype)
    y = flat if len(indices.shape) == 1 else emit.view(flat, (*indices.shape, width))
    with emit.op("embedding", (weight, indices, -1, False, False), (y,), node=True):
        emit.index_select(weight, indices if y is flat else emit.reshaped(indices, (count,), (-1,)), flat)
        if y is not flat:
            emit.op("view", (flat, y.shape), (y,))

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(weight.shape, weight.dtype)
        call = (gradient, indices, rows, -1, False)
        with (
            emit.op("embedding_backward", (*call, False), (result,)),
            emit.op("embedding_dense_backward", call, (result,)),
        ):
            _rows_added(emit, gradient, indices, result)
        return result

    return tape.node("EmbeddingBackward0", (weight,), y, backward)


def _rows_added(emit: Emitter, gradient: Tensor, indices: Tensor, result: Tensor) -> None:
    """What the backward does before its kernels: it sorts the indices unless they are few."""
    (rows, width), count = result.shape, indices.numel
    sorts = count > _MOST_UNSORTED
    if sorts and 0 in strides_of(indices):
        indices = emit.contiguous(indices)
    emit.op("view", (gradient, (count, width)), (emit.view(gradient, (count, width)),))
    if sorts:
        for _ in ("sorted indices", "their order"):
            emit.empty_like(indices, emit.tensor(indices.shape, "int64"), memory_format=CONTIGUOUS)
        emit.arange(count)
    emit.zeros(result)
    if sorts:
        distinct = min(rows, count)
        parts = distinct + count // _ROWS_PER_THREAD
        for shape in ((count,), (), (distinct,), (distinct,), (), (parts,)):
            emit.empty(emit.tensor(shape, "int64"))
        emit.empty(emit.tensor((parts, width)))
