"""Matrix products: linear layers forward and both backward products, batched products of attention and of DLRM.

`forms.matmul` models them: the precision and the alignment of the leading dimensions say which of cuBLAS's kernels can run (an
odd leading dimension costs half precision a factor of 3 to 6); among those, times by tiles, waves, bytes and split k are mixed
by how likely each kernel is chosen. It is least sure where the library does not choose the fastest: vectors, odd sizes with a
long k, single precision's large-k kernel; products next to such a switch can be off by a factor of two.
"""

from __future__ import annotations

import math

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    chance,
    fits,
    floating,
    log_int,
    mixture,
    options,
    pick,
    size,
    tokens,
    transposed,
    width,
)
from steptime._models.kernels.family import Family

# About 3 ms on an H200: 50 TFLOP/s in single precision, 700 TFLOP/s in half.
_MOST_FLOP = {"float32": 150e9, "bfloat16": 2e12, "float16": 2e12}

_Layer = tuple[int, int, int, str]  # rows, inputs, outputs, dtype


def _affordable(layer: _Layer) -> _Layer:
    """The layer with as many rows as a few milliseconds and the usual bytes allow."""
    rows, inputs, outputs, dtype = layer
    by_flop = _MOST_FLOP[dtype] / (2 * inputs * outputs)
    by_bytes = 2 * USUAL_BYTES / (4 * (inputs + outputs))
    return max(1, min(rows, int(by_flop), int(by_bytes))), inputs, outputs, dtype


def _layer(rng: Rng) -> _Layer:
    """A linear layer: of a Transformer or of a DLRM's multi-layer perceptron, a classifier's, or one of any size."""
    dtype = floating(rng)
    kind = rng.random()
    if kind < 0.08:  # the language-model head
        return _affordable((log_int(rng, 64, 8192), pick(rng, (512, 768, 1024, 1280, 2048)), pick(rng, VOCABULARIES), dtype))
    if kind < 0.3:  # DLRM: 13 dense features (Criteo) in, one click probability out
        narrow = pick(rng, ((13, 512), (512, 256), (256, 64), (1024, 1024), (1024, 1), (256, 1), (479, 1024), (367, 512)))
        inputs, outputs = narrow if chance(rng, 0.5) else (size(rng, 8, 4096), size(rng, 1, 2048))
        return _affordable((log_int(rng, 32, 65536), inputs, outputs, dtype))
    if kind < 0.85:
        return _affordable((tokens(rng), width(rng, 16), width(rng, 16), dtype))
    return _affordable((log_int(rng, 1, 16384), log_int(rng, 1, 16384), log_int(rng, 1, 16384), dtype))


def _forward(rng: Rng) -> Call | None:
    rows, inputs, outputs, dtype = _layer(rng)
    x = TensorArg((rows, inputs), dtype)
    stored = chance(rng, 0.85)  # nn.Linear keeps (outputs, inputs); GPT-2's Conv1D keeps (inputs, outputs)
    weight = transposed(TensorArg((outputs, inputs), dtype)) if stored else TensorArg((inputs, outputs), dtype)
    if chance(rng, 0.7):
        return fits(Call("aten::addmm.default", (TensorArg((outputs,), dtype), x, weight), written=(1,)))
    return fits(Call("aten::mm.default", (x, weight)))


def _input_gradient(rng: Rng) -> Call | None:
    rows, inputs, outputs, dtype = _layer(rng)
    stored = chance(rng, 0.85)
    weight = TensorArg((outputs, inputs), dtype) if stored else transposed(TensorArg((inputs, outputs), dtype))
    return fits(Call("aten::mm.default", (TensorArg((rows, outputs), dtype), weight)))


def _weight_gradient(rng: Rng) -> Call | None:
    rows, inputs, outputs, dtype = _layer(rng)
    x, dy = TensorArg((rows, inputs), dtype), TensorArg((rows, outputs), dtype)
    if chance(rng, 0.85):
        return fits(Call("aten::mm.default", (transposed(dy), x)))
    return fits(Call("aten::mm.default", (transposed(x), dy), written=(1,)))


def _orientation(rng: Rng, left: TensorArg, right: TensorArg) -> tuple[TensorArg, TensorArg]:
    """The same product with each operand stored as it is or transposed."""
    batch, rows, inner = left.shape
    outputs = right.shape[2]
    first = left if chance(rng, 0.6) else transposed(TensorArg((batch, inner, rows), left.dtype))
    second = right if chance(rng, 0.5) else transposed(TensorArg((batch, outputs, inner), right.dtype))
    return first, second


def _pair(rng: Rng) -> tuple[TensorArg, TensorArg] | None:
    """Operands of a batched product: scores and context of attention, DLRM's interaction, or any."""
    dtype = floating(rng)
    kind = rng.random()
    if kind < 0.45:
        heads, sequence, dim = log_int(rng, 4, 1024), size(rng, 16, 1024), pick(rng, (32, 64, 64, 80, 96, 128))
        rows, inner, outputs = pick(rng, ((sequence, dim, sequence), (sequence, sequence, dim), (dim, sequence, sequence)))
        batch = heads
    elif kind < 0.8:
        batch, features, dim = log_int(rng, 32, 16384), log_int(rng, 4, 64), pick(rng, (8, 16, 32, 64, 128))
        rows, inner, outputs = pick(rng, ((features, dim, features), (features, features, dim)))
    else:
        batch, rows, inner, outputs = (log_int(rng, 1, high) for high in (512, 2048, 2048, 2048))
    biggest = 4 * batch * max(rows * inner, inner * outputs, rows * outputs)
    if 2.0 * batch * rows * inner * outputs > _MOST_FLOP[dtype] or biggest > USUAL_BYTES:
        return None
    return _orientation(rng, TensorArg((batch, rows, inner), dtype), TensorArg((batch, inner, outputs), dtype))


def _batched(rng: Rng) -> Call | None:
    operands = _pair(rng)
    return None if operands is None else Call("aten::bmm.default", operands)


def _batched_with_bias(rng: Rng) -> Call | None:
    operands = _pair(rng)
    if operands is None:
        return None
    left, right = operands
    bias = TensorArg((pick(rng, (1, left.shape[0])), left.shape[1], right.shape[2]), left.dtype)
    scale = options(alpha=1.0 / math.sqrt(left.shape[2]), beta=pick(rng, (0, 1)))
    return Call("aten::baddbmm.default", (bias, left, right), scale, written=(1, 2))


FAMILY = Family(
    name="matmul",
    form="matmul",
    ops=("aten::mm.default", "aten::addmm.default", "aten::bmm.default", "aten::baddbmm.default"),
    sweep=mixture((3, _forward), (2.2, _input_gradient), (2.2, _weight_gradient), (2, _batched), (0.6, _batched_with_bias)),
    weight=18.0,
    # The same kernels run warm and cold (2,691 of 2,691 pairs), and their ratio follows the bytes that are warm.
    warm=0.4,
)
