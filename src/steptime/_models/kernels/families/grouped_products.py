"""Products of eight-bit floats and products of many groups in one launch, as `forms.matmul` sees them.

A product of eight-bit operands moves the bytes and fills the tensor cores' cycles of a 16-bit one with half the inner length:
tensor cores take so many bytes of a row at once. Groups of rows with a matrix each have kernels of their own, for even groups.
"""

from __future__ import annotations

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.families.matmul import MOST_FLOP
from steptime._models.kernels.family import Family
from steptime._models.kernels.sweep import MOST_BYTES, Draw, Drawn, KernelSweep

# What cuBLAS asks of every size of an eight-bit product.
_STEP = 16
_EIGHT_BITS = "float8"


def _size(draw: Draw, low: int, high: int) -> int:
    return max(_STEP, draw.width(low, high) // _STEP * _STEP)


def _draw_scaled(draw: Draw) -> Drawn:
    """A linear layer in eight bits: one scale for each operand, or one for each of its rows."""
    inputs, outputs = _size(draw, 64, 16384), _size(draw, 64, 32768)
    rows = max(_STEP, min(draw.tokens(), int(MOST_FLOP["bfloat16"] / (2 * inputs * outputs))) // _STEP * _STEP)
    by_row = draw.chance(0.5)
    return {
        "x": TensorArg((rows, inputs), _EIGHT_BITS),
        "weight": TensorArg((outputs, inputs), _EIGHT_BITS).transposed(),
        "scale_x": TensorArg((rows, 1) if by_row else (), values="positive"),
        "scale_weight": TensorArg((1, outputs) if by_row else (), values="positive"),
        "fast": draw.chance(0.5),
    }


def _draw_experts(draw: Draw) -> Drawn:
    """Tokens sorted by expert, evenly, and a matrix of every expert: forward, and the gradient of the tokens."""
    experts, inputs, outputs = draw.pick((4, 8, 16, 32, 64)), _size(draw, 256, 4096), _size(draw, 256, 8192)
    each = min(draw.size(16, 4096), int(MOST_FLOP["bfloat16"] / (2 * experts * inputs * outputs)))
    rows = experts * max(_STEP, each // _STEP * _STEP)
    stored = TensorArg((experts, inputs, outputs), "bfloat16")
    turned = TensorArg((experts, outputs, inputs), "bfloat16").transposed()
    return {
        "x": TensorArg((rows, inputs), "bfloat16"),
        "weight": stored if draw.chance(0.5) else turned,
        "ends": TensorArg((experts,), "int32", high=rows, values="ends"),
    }


def _draw_expert_gradients(draw: Draw) -> Drawn | None:
    """The gradients of those matrices: what is summed over is divided among the experts."""
    drawn = _draw_experts(draw)
    x, weight = drawn["x"], drawn["weight"]
    assert isinstance(x, TensorArg) and isinstance(weight, TensorArg)
    gradient = TensorArg((x.shape[0], weight.shape[2]), x.dtype)
    if x.nbytes + gradient.nbytes + weight.nbytes > MOST_BYTES:
        return None
    return {**drawn, "x": x.transposed(), "gradient": gradient}


FAMILY = Family(
    name="grouped_products",
    form="matmul",
    sweep=KernelSweep(
        (1, _draw_scaled, "_scaled_mm(*x, weight, scale_x, scale_weight, None, None, bfloat16, fast)"),
        (1, _draw_experts, "_grouped_mm(*x, weight, ends)"),
        (0.5, _draw_expert_gradients, "_grouped_mm(*x, *gradient, ends)"),
        most_bytes=MOST_BYTES,
    ),
    weight=1.0,
    warm=0.0,  # no element-wise kernel writes eight-bit floats, so nothing makes their input warm
    kin="_scaled_grouped_mm",
    declares="""_scaled_mm.default T T T T T?=None T?=None dtype?=None b=False
_grouped_mm.default T T T?=None T?=None dtype?=None
_scaled_grouped_mm.default T T T T T?=None T?=None T?=None dtype?=None b=False""",
)
