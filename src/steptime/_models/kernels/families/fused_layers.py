"""Kernels of Transformer Engine, and of torchao as compiled: a pass over memory for what PyTorch takes several for.

Nobody measured them here: each is taken for PyTorch's kernel of the same pass (a row at a time, element by element), with the
bytes that it moves.
"""

from __future__ import annotations

from dataclasses import replace

from steptime._models.kernels.call import contiguous
from steptime._models.kernels.families.norm import norm_rows
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import GpuCall, Launch, Operand, Rule, fresh, hot
from steptime._models.kernels.launches.iterator import pointwise, reduction
from steptime._models.kernels.sweep import KernelSweep

_ENGINE = "transformer_engine::"
# Rows of partial sums that a norm's backward leaves per SM (transformer_engine/common/normalization: a block of an SM).
_PARTS_PER_SM = 1


def _dense(x: Operand) -> Operand:
    """The same bytes without strides: these kernels walk heads and rows as they lie."""
    return replace(x, strides=contiguous(x.shape))


def _norm(call: GpuCall) -> list[Launch]:
    x = _dense(call.tensor(0))
    return [norm_rows("vectorized_layer_norm_kernel", (x,), (fresh(x.shape, x.dtype),), x.shape[-1], call.gpu)]


def _norm_backward(call: GpuCall) -> list[Launch]:
    """Gradients of input and weights in one pass; blocks leave their sums of rows, which are added up."""
    gradient, x = _dense(call.tensor(0)), _dense(call.tensor(1))
    columns, sums = x.shape[-1], 1 if "rms" in call.name else 2
    kernel = "layer_norm_grad_input_kernel_vectorized"
    first = norm_rows(kernel, (gradient, x), (fresh(x.shape, x.dtype),), columns, call.gpu)
    parts = hot((_PARTS_PER_SM * call.gpu.sms, sums * columns), "float32", x.nbytes)
    return [first, *reduction(parts, (0,), call.gpu, tag="partial")]


def _same(call: GpuCall) -> list[Launch]:
    """A kernel that reads what is as large as its first argument, and writes one such tensor."""
    x = _dense(call.tensor(0))
    reads = [_dense(each) for each in call.operands() if each.numel >= x.numel]
    return [pointwise(reads, fresh(x.shape, x.dtype), tag=x.dtype)]


def _gated(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    half = fresh((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    return [pointwise((replace(half, origin=x.origin, argument=0), half), half, tag=x.dtype)]


def _gated_backward(call: GpuCall) -> list[Launch]:
    gradient = _dense(call.tensor(0))
    half = fresh(gradient.shape, gradient.dtype)
    return [replace(pointwise((gradient, half, half), half, tag=half.dtype), writes=(half, half))]


def _keys_and_values(call: GpuCall) -> list[Launch]:
    """Heads read and written once: with the end that they share, or without it on the way back."""
    x, other, end = (_dense(call.tensor(index)) for index in range(3))
    width = x.shape[-1] + other.shape[-1] - (0 if call.name.endswith("forward") else end.shape[-1])
    made = fresh((*x.shape[:-1], width), x.dtype)
    return [replace(pointwise((made,), made, tag=x.dtype), reads=(x, other))]


def _permuted(call: GpuCall) -> list[Launch]:
    """Rows read once and written as often as asked."""
    x = _dense(call.tensor(0))
    made = fresh((call.integer(1, 1), x.shape[-1]), x.dtype)
    larger = max(x, made, key=lambda each: each.numel)
    return [replace(pointwise((larger,), fresh(larger.shape, x.dtype), tag=x.dtype), reads=(x,), writes=(made,))]


def _dropped(call: GpuCall) -> list[Launch]:
    (launch,) = _same(call)
    mask = (fresh(call.tensor(0).shape, "bool"),) if call.value(2) else ()
    return [replace(launch, writes=(*launch.writes, *mask))]


def _scores(call: GpuCall) -> list[Launch]:
    """Rows of scores gone over once; by the second kernel the gradient is written over them."""
    x = _dense(call.tensor(0))
    writes = (fresh(x.shape, x.dtype),) if call.name == "cross_entropy" else ()
    return [norm_rows("vectorized_layer_norm_kernel", (x,), writes, x.shape[-1], call.gpu)]


def _quantized(call: GpuCall) -> list[Launch]:
    """A matrix cast, one way or both, in one pass; a scale per block is written beside it.

    Not as PyTorch's copies cast, an element at a time: these kernels load and store whole vectors.
    """
    x, ways, block = _dense(call.tensor(0)), call.integer(1, 1), call.integer(2, 0)
    launch = pointwise((x,), fresh(x.shape, x.dtype), tag=x.dtype)
    scales = (fresh((x.numel // block,), "uint8"),) if block else ()
    return [replace(launch, writes=(fresh(x.shape, "float8"), *scales) * ways)]


def _largest(call: GpuCall) -> list[Launch]:
    x = _dense(call.tensor(0))
    return reduction(x, range(len(x.shape)), call.gpu, tag=x.dtype)


_RULES: dict[str, tuple[str, Rule]] = {
    "rmsnorm_fwd": ("T T f", _norm),
    "layernorm_fwd": ("T T T f", _norm),
    "rmsnorm_bwd": ("T T T T", _norm_backward),
    "layernorm_bwd": ("T T T T T", _norm_backward),
    "fused_rope_forward": ("T T", _same),
    "fused_rope_backward": ("T T", _same),
    "mla_rope_kv_forward": ("T T T", _keys_and_values),
    "mla_rope_kv_backward": ("T T T", _keys_and_values),
    "moe_permute": ("T i", _permuted),
    "moe_unpermute": ("T i", _permuted),
    "swiglu": ("T", _gated),
    "dswiglu": ("T T", _gated_backward),
    "gelu": ("T", _same),
    "dgelu": ("T T", _same),
    "dropout_add": ("T T f", _dropped),
    "dropout_bwd": ("T T", _same),
    "online_softmax": ("T T", _scores),
    "cross_entropy": ("T! T T", _scores),
    "element_mul": ("T! T", _same),
    "quantize": ("T i i", _quantized),
    "compute_amax": ("T", _largest),
    "fp8_transpose": ("T", _same),
}
_TORCHAO = ("quantize", "compute_amax")

FAMILY = Family(
    name="fused_layers",
    sweep=KernelSweep(),
    weight=0.0,
    warm=0.0,
    rules={name: rule for name, (_, rule) in _RULES.items()},
    declares="\n".join(
        f"{library}{name}.default {_RULES[name][0]}"
        for library, names in ((_ENGINE, _RULES), ("torchao::", _TORCHAO))
        for name in names
    ),
)
