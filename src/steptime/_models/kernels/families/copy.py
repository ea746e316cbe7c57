"""Copies on the device: plain ones, transposes made contiguous, slices, expansions, and conversions between dtypes."""

from __future__ import annotations

from steptime._models.kernels.call import Call, DtypeArg, TensorArg
from steptime._models.kernels.draw import (
    FLOATS,
    SEQUENCES,
    USUAL_BYTES,
    Rng,
    activation,
    activation_shape,
    chance,
    channels_last,
    floating,
    indices,
    log_int,
    mixture,
    permuted,
    pick,
    size,
    tokens,
    transposed,
    width,
)
from steptime._models.kernels.families import transfer
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import GpuCall, Launch, Operand, fresh
from steptime._models.kernels.launches.arguments import base_name, dtype_keyword, keyword, tensor, tensor_list, value
from steptime._models.kernels.launches.chunks import over_lists
from steptime._models.kernels.launches.copies import copies, empty_like
from steptime.errors import InputError

_MOST_ELEMENTS = USUAL_BYTES // 4


def _draw_plain(rng: Rng) -> Call:
    x = activation(rng)
    if chance(rng, 0.5):
        return Call("aten::clone.default", (x,))
    return Call("aten::copy_.default", (x, x), written=(1,))


def _draw_matrix(rng: Rng) -> Call:
    """A transposed matrix, or a batch of them, made contiguous."""
    rows = tokens(rng)
    columns = min(width(rng, 8), _MOST_ELEMENTS // rows)
    source = transposed(TensorArg((rows, columns), floating(rng)))
    if chance(rng, 0.3):
        batch, left, right = log_int(rng, 2, 256), size(rng, 8, 512), size(rng, 8, 512)
        source = transposed(TensorArg((batch, left, right), floating(rng)))
    return Call("aten::copy_.default", (TensorArg(source.shape, source.dtype), source), written=(1,))


def _draw_heads(rng: Rng) -> Call:
    """Heads moved in front of the sequence or back behind it."""
    batch, sequence, heads, dim = log_int(rng, 1, 64), pick(rng, SEQUENCES), pick(rng, (4, 8, 12, 16)), pick(rng, (32, 64, 128))
    stored = (batch, sequence, heads, dim) if chance(rng, 0.5) else (batch, heads, sequence, dim)
    source = permuted(TensorArg(stored, floating(rng)), (0, 2, 1, 3))
    return Call("aten::copy_.default", (TensorArg(source.shape, source.dtype), source), written=(1,))


def _draw_images(rng: Rng) -> Call:
    """From channels first to channels last, or back."""
    side, channels = pick(rng, (7, 14, 17, 28, 35, 56, 112, 224)), pick(rng, (3, 64, 128, 256, 512, 1024))
    shape = (log_int(rng, 1, max(1, min(128, _MOST_ELEMENTS // (channels * side * side)))), channels, side, side)
    first, last = TensorArg(shape, floating(rng)), channels_last(shape, floating(rng))
    last = TensorArg(shape, first.dtype, last.strides)
    return Call("aten::copy_.default", (last, first) if chance(rng, 0.5) else (first, last), written=(1,))


def _draw_part(rng: Rng) -> Call:
    """A slice of the features out of wider rows, or into them."""
    rows, features, parts = tokens(rng), width(rng, 8, 2048), pick(rng, (2, 3, 4))
    rows = min(rows, _MOST_ELEMENTS // (parts * features))
    dense = TensorArg((rows, features), floating(rng))
    within = TensorArg(dense.shape, dense.dtype, (parts * features, 1))
    return Call("aten::copy_.default", (dense, within) if chance(rng, 0.6) else (within, dense), written=(1,))


def _draw_expanded(rng: Rng) -> Call:
    """A row or a column repeated."""
    rows, columns = tokens(rng), width(rng, 8)
    target = TensorArg((rows, min(columns, _MOST_ELEMENTS // rows)), floating(rng))
    strides = pick(rng, ((0, 1), (1, 0), (0, 0)))
    return Call("aten::copy_.default", (target, TensorArg(target.shape, target.dtype, strides)), written=(1,))


def _draw_converted(rng: Rng) -> Call:
    """Autocast's conversions of activations, and of weights once per step."""
    source, target = floating(rng), pick(rng, FLOATS)
    if source == target:
        target = "bfloat16" if source == "float32" else "float32"
    shape = activation_shape(rng)
    x = transposed(TensorArg(shape, source)) if len(shape) == 2 and chance(rng, 0.2) else TensorArg(shape, source)
    if chance(rng, 0.6):
        return Call("aten::_to_copy.default", (x,), (("dtype", DtypeArg(target)),))
    return Call("aten::copy_.default", (TensorArg(x.shape, target), x), written=(1,))


def _draw_converted_integers(rng: Rng) -> Call:
    count = log_int(rng, 64, 4_000_000)
    mask = TensorArg((count,), "bool", values="mask")
    source, target = pick(rng, ((indices((count,), 1000), "float32"), (mask, "float32"), (indices((count,), 1000), "int32")))
    return Call("aten::_to_copy.default", (source,), (("dtype", DtypeArg(target)),))


def _draw_lists(rng: Rng) -> Call:
    """Many tensors in one call: gradients into buckets, parameters into what is gathered."""
    parts = tuple((log_int(rng, 16, 1_000_000),) for _ in range(log_int(rng, 2, 64)))
    target, source = ("float32", pick(rng, ("float32", "bfloat16"))) if chance(rng, 0.7) else ("bfloat16", "float32")
    lists = tuple(TensorArg(shape, target) for shape in parts), tuple(TensorArg(shape, source) for shape in parts)
    return Call("aten::_foreach_copy_.default", lists, written=(1,))


# What copies on the device launch: of one tensor, of a list, with or without a new dtype.


def launches(call: GpuCall) -> list[Launch]:
    """The kernels or copies of one op of the family."""
    name = base_name(call.op)
    if name == "copy_":
        target, source = tensor(call, 0), tensor(call, 1)
        return copies(target, source) if target.device == source.device == "device" else transfer.launches(call)
    if name == "clone":
        x = tensor(call, 0)
        return copies(_target(call, x), x)
    if name == "_to_copy":
        x = tensor(call, 0)
        given = value(call, 0)
        # From the host, or to it, the bytes cross first; a conversion is the host's or comes on top.
        if isinstance(given, TensorArg) and keyword(call, "device", x.device) != x.device:
            arrived = TensorArg(x.shape, x.dtype, device="device" if x.device != "device" else "pageable")
            return transfer.launches(Call("aten::copy_.default", (arrived, given)))
        return copies(_target(call, x), x)
    if name == "_foreach_copy_":
        targets, sources = tensor_list(call, 0), tensor_list(call, 1)
        return over_lists(targets, call.gpu.sms, depth=2, reads=sources[:1], writes=[fresh((), targets[0].dtype)])
    raise InputError(f"{call.op}: no rule says what it launches")


def _target(call: Call, x: Operand) -> Operand:
    dtype = dtype_keyword(call, x.dtype)
    if keyword(call, "memory_format") == "contiguous_format":
        return fresh(x.shape, dtype)
    return empty_like(x, dtype)


FAMILY = Family(
    name="copy",
    ops=("aten::copy_.default", "aten::clone.default", "aten::_to_copy.default", "aten::_foreach_copy_.default"),
    sweep=mixture(
        *((1.2, _draw_plain), (1.2, _draw_matrix), (1.2, _draw_heads), (0.7, _draw_images), (0.7, _draw_part)),
        *((0.5, _draw_expanded), (1.8, _draw_converted), (0.3, _draw_converted_integers), (0.4, _draw_lists)),
    ),
    weight=5.5,
    rules=launches,
)
