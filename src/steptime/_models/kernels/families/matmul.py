"""Matrix products: linear layers forward and both backward products, batched products of attention and of DLRM.

`forms.matmul` models them: the precision and the alignment of the leading dimensions say which of cuBLAS's kernels can run (an
odd leading dimension costs half precision a factor of 3 to 6); among those, times by tiles, waves, bytes and split k are mixed
by how likely each kernel is chosen. It is least sure where the library does not choose the fastest: vectors, odd sizes with a
long k, single precision's large-k kernel; products next to such a switch can be off by a factor of two.
"""

from __future__ import annotations

import math

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.family import Family
from steptime._models.kernels.sweep import MOST_BYTES, USUAL_BYTES, VOCABULARIES, Draw, Drawn, KernelSweep

# About 3 ms on an H200: 50 TFLOP/s in single precision, 700 TFLOP/s in half.
MOST_FLOP = {"float32": 150e9, "bfloat16": 2e12, "float16": 2e12}
# DLRM: 13 dense features (Criteo) in, one click probability out.
_DLRM = ((13, 512), (512, 256), (256, 64), (1024, 1024), (1024, 1), (256, 1), (479, 1024), (367, 512))


def _draw_layer(draw: Draw) -> tuple[int, int, int, str]:
    """A linear layer: of a Transformer or of a DLRM's multi-layer perceptron, a classifier's, or one of any size.

    Rows, as many as a few milliseconds and the usual bytes allow, inputs, outputs, dtype.
    """
    dtype, kind = draw.floating(), draw.rng.random()
    if kind < 0.08:  # the language-model head
        rows, inputs, outputs = draw.log_int(64, 8192), draw.pick((512, 768, 1024, 1280, 2048)), draw.pick(VOCABULARIES)
    elif kind < 0.3:
        narrow = draw.pick(_DLRM)
        inputs, outputs = narrow if draw.chance(0.5) else (draw.size(8, 4096), draw.size(1, 2048))
        rows = draw.log_int(32, 65536)
    elif kind < 0.85:
        rows, inputs, outputs = draw.tokens(), draw.width(16), draw.width(16)
    else:
        rows, inputs, outputs = (draw.log_int(1, 16384) for _ in range(3))
    by_flop, by_bytes = MOST_FLOP[dtype] / (2 * inputs * outputs), 2 * USUAL_BYTES / (4 * (inputs + outputs))
    return max(1, min(rows, int(by_flop), int(by_bytes))), inputs, outputs, dtype


def _draw_linear(draw: Draw) -> Drawn:
    """A layer's input, the gradient of its output, and its weight as the forward and as the backward product takes it."""
    rows, inputs, outputs, dtype = _draw_layer(draw)
    if draw.chance(0.85):  # nn.Linear keeps (outputs, inputs); GPT-2's Conv1D keeps (inputs, outputs)
        backward = TensorArg((outputs, inputs), dtype)
        forward = backward.transposed()
    else:
        forward = TensorArg((inputs, outputs), dtype)
        backward = forward.transposed()
    return {
        "x": TensorArg((rows, inputs), dtype),
        "dy": TensorArg((rows, outputs), dtype),
        "bias": TensorArg((outputs,), dtype),
        "weight": forward,
        "weight_back": backward,
    }


def _draw_weight_gradient(draw: Draw) -> Drawn:
    rows, inputs, outputs, dtype = _draw_layer(draw)
    x, dy = TensorArg((rows, inputs), dtype), TensorArg((rows, outputs), dtype)
    return {"x": x, "dy": dy, "x_turned": x.transposed(), "dy_turned": dy.transposed()}


def _draw_pair(draw: Draw) -> Drawn | None:
    """Operands of a batched product, each stored as it is or transposed: attention's, DLRM's interaction, or any."""
    dtype, kind = draw.floating(), draw.rng.random()
    if kind < 0.45:  # scores and context of attention
        batch, sequence, dim = draw.log_int(4, 1024), draw.size(16, 1024), draw.pick((32, 64, 64, 80, 96, 128))
        sizes = draw.pick(((sequence, dim, sequence), (sequence, sequence, dim), (dim, sequence, sequence)))
    elif kind < 0.8:
        batch, features, dim = draw.log_int(32, 16384), draw.log_int(4, 64), draw.pick((8, 16, 32, 64, 128))
        sizes = draw.pick(((features, dim, features), (features, features, dim)))
    else:
        batch = draw.log_int(1, 512)
        sizes = draw.log_int(1, 2048), draw.log_int(1, 2048), draw.log_int(1, 2048)
    rows, inner, outputs = sizes
    biggest = 4 * batch * max(rows * inner, inner * outputs, rows * outputs)
    if 2.0 * batch * rows * inner * outputs > MOST_FLOP[dtype] or biggest > USUAL_BYTES:
        return None
    left, right = TensorArg((batch, rows, inner), dtype), TensorArg((batch, inner, outputs), dtype)
    left = left if draw.chance(0.6) else TensorArg((batch, inner, rows), dtype).transposed()
    right = right if draw.chance(0.5) else TensorArg((batch, outputs, inner), dtype).transposed()
    if "baddbmm" not in draw.form():
        return {"left": left, "right": right}
    bias = TensorArg((draw.pick((1, batch)), rows, outputs), dtype)
    return {"left": left, "right": right, "bias": bias, "alpha": 1.0 / math.sqrt(inner), "beta": draw.pick((0, 1))}


FAMILY = Family(
    name="matmul",
    form="matmul",
    sweep=KernelSweep(
        (3, _draw_linear, (0.7, "addmm(bias, *x, weight)"), (0.3, "mm(*x, weight)")),
        (2.2, _draw_linear, "mm(*dy, weight_back)"),
        (2.2, _draw_weight_gradient, (0.85, "mm(*dy_turned, x)"), (0.15, "mm(x_turned, *dy)")),
        (2, _draw_pair, "bmm(*left, right)"),
        (0.6, _draw_pair, "baddbmm(bias, *left, *right, alpha=alpha, beta=beta)"),
        most_bytes=MOST_BYTES,
    ),
    weight=18.0,
    # The same kernels run warm and cold (2,691 of 2,691 pairs), and their ratio follows the bytes that are warm.
    warm=0.4,
    kin="addmm.out baddbmm.out bmm.out mm.out",
)
