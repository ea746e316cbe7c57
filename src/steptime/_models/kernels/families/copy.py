"""Copies on the device: plain ones, transposes made contiguous, slices, expansions, and conversions between dtypes."""

from __future__ import annotations

from dataclasses import replace

from steptime._models.kernels.call import DtypeArg, TensorArg
from steptime._models.kernels.families import transfer
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import GpuCall, Launch, Operand, fresh
from steptime._models.kernels.launches.iterator import copies, empty_like
from steptime._models.kernels.launches.lists import over_lists
from steptime._models.kernels.sweep import FLOATS, SEQUENCES, USUAL_ELEMENTS, Draw, Drawn, KernelSweep, indices

_INTO = "copy_(target, *source)"


def _into_dense(source: TensorArg) -> Drawn:
    return {"source": source, "target": TensorArg(source.shape, source.dtype)}


def _draw_matrix(draw: Draw) -> Drawn:
    """A transposed matrix, or a batch of them, made contiguous."""
    rows = draw.tokens()
    source = TensorArg((rows, min(draw.width(8), USUAL_ELEMENTS // rows)), draw.floating())
    if draw.chance(0.3):
        source = TensorArg((draw.log_int(2, 256), draw.size(8, 512), draw.size(8, 512)), draw.floating())
    return _into_dense(source.transposed())


def _draw_heads(draw: Draw) -> Drawn:
    """Heads moved in front of the sequence or back behind it."""
    batch, sequence = draw.log_int(1, 64), draw.pick(SEQUENCES)
    heads, dim = draw.pick((4, 8, 12, 16)), draw.pick((32, 64, 128))
    stored = (batch, sequence, heads, dim) if draw.chance(0.5) else (batch, heads, sequence, dim)
    return _into_dense(TensorArg(stored, draw.floating()).permuted(0, 2, 1, 3))


def _draw_images(draw: Draw) -> Drawn:
    """From channels first to channels last, or back."""
    side, channels = draw.pick((7, 14, 17, 28, 35, 56, 112, 224)), draw.pick((3, 64, 128, 256, 512, 1024))
    batch = draw.log_int(1, max(1, min(128, USUAL_ELEMENTS // (channels * side * side))))
    first = TensorArg((batch, channels, side, side), draw.floating())
    draw.floating()  # a dtype that is not used: without it the calls would not be those that were measured
    source, target = (first, first.channels_last()) if draw.chance(0.5) else (first.channels_last(), first)
    return {"source": source, "target": target}


def _draw_part(draw: Draw) -> Drawn:
    """A slice of the features out of wider rows, or into them."""
    rows, features, parts = draw.tokens(), draw.width(8, 2048), draw.pick((2, 3, 4))
    dense = TensorArg((min(rows, USUAL_ELEMENTS // (parts * features)), features), draw.floating())
    within = replace(dense, strides=(parts * features, 1))
    source, target = (within, dense) if draw.chance(0.6) else (dense, within)
    return {"source": source, "target": target}


def _draw_expanded(draw: Draw) -> Drawn:
    """A row or a column repeated."""
    rows, columns = draw.tokens(), draw.width(8)
    target = TensorArg((rows, min(columns, USUAL_ELEMENTS // rows)), draw.floating())
    return {"source": replace(target, strides=draw.pick(((0, 1), (1, 0), (0, 0)))), "target": target}


def _draw_converted(draw: Draw) -> Drawn:
    """Autocast's conversions of activations, and of weights once per step."""
    dtype, wanted = draw.floating(), draw.pick(FLOATS)
    if dtype == wanted:
        wanted = "bfloat16" if dtype == "float32" else "float32"
    x = TensorArg(draw.activation_shape(), dtype)
    x = x.transposed() if len(x.shape) == 2 and draw.chance(0.2) else x
    return {"source": x, "target": TensorArg(x.shape, wanted), "dtype": DtypeArg(wanted)}


def _draw_converted_integers(draw: Draw) -> Drawn:
    count = draw.log_int(64, 4_000_000)
    whole, mask = indices((count,), 1000), TensorArg((count,), "bool", values="mask")
    source, dtype = draw.pick(((whole, "float32"), (mask, "float32"), (whole, "int32")))
    return {"source": source, "dtype": DtypeArg(dtype)}


def _draw_lists(draw: Draw) -> Drawn:
    """Many tensors in one call: gradients into buckets, parameters into what is gathered."""
    shapes = [(draw.log_int(16, 1_000_000),) for _ in range(draw.log_int(2, 64))]
    target, source = ("float32", draw.pick(("float32", "bfloat16"))) if draw.chance(0.7) else ("bfloat16", "float32")
    dtypes = {"targets": target, "sources": source}
    return {name: tuple(TensorArg(shape, dtype) for shape in shapes) for name, dtype in dtypes.items()}


# What copies on the device launch: of one tensor, of a list, with or without a new dtype.


def _target(call: GpuCall, x: Operand) -> Operand:
    dtype = call.dtype_keyword(x.dtype)
    return fresh(x.shape, dtype) if call.keyword("memory_format") == "contiguous_format" else empty_like(x, dtype)


def _copy_into(call: GpuCall) -> list[Launch]:
    target, source = call.tensor(0), call.tensor(1)
    return copies(target, source) if target.device == source.device == "device" else transfer.between(call)


def _clone(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    return copies(_target(call, x), x)


def _to_copy(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    if call.keyword("device", x.device) == x.device:
        return copies(_target(call, x), x)
    # From the host, or to it, the bytes cross first; a conversion is the host's or comes on top.
    arrived = TensorArg(x.shape, x.dtype, device="device" if x.device != "device" else "pageable")
    return transfer.between(replace(call, op="aten::copy_.default", args=(arrived, call.args[0]), kwargs=()))


def _copy_lists(call: GpuCall) -> list[Launch]:
    targets, sources = call.tensor_list(0), call.tensor_list(1)
    return over_lists(targets, call.gpu.sms, depth=2, reads=sources[:1], writes=[fresh((), targets[0].dtype)])


FAMILY = Family(
    name="copy",
    sweep=KernelSweep(
        (1.2, lambda draw: {"x": draw.activation()}, (0.5, "clone(*x)"), (0.5, "copy_(x, *x)")),
        *((1.2, _draw_matrix, _INTO), (1.2, _draw_heads, _INTO), (0.7, _draw_images, _INTO), (0.7, _draw_part, _INTO)),
        (0.5, _draw_expanded, _INTO),
        (1.8, _draw_converted, (0.6, "_to_copy(*source, dtype=dtype)"), (0.4, _INTO)),
        (0.3, _draw_converted_integers, "_to_copy(*source, dtype=dtype)"),
        (0.4, _draw_lists, "_foreach_copy_(targets, *sources)"),
    ),
    weight=5.5,
    rules={"copy_": _copy_into, "clone": _clone, "_to_copy": _to_copy, "_foreach_copy_": _copy_lists},
)
