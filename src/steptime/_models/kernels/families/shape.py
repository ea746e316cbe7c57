"""Ops that put tensors together or take them apart: cat, stack, split, and the backward of slices and selections."""

from __future__ import annotations

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.draw import (
    SEQUENCES,
    USUAL_BYTES,
    Rng,
    activation_shape,
    chance,
    fits,
    floating,
    log_int,
    mixture,
    pick,
    size,
    tokens,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.shape import launches

_MOST_BYTES = 2 * USUAL_BYTES


def _interaction(rng: Rng) -> Call | None:
    """DLRM: dense features and one looked-up vector per table, side by side; behind the interaction, features and triangle."""
    batch, dim = log_int(rng, 64, 65536), pick(rng, (8, 16, 32, 64, 128))
    dtype = floating(rng)
    if chance(rng, 0.3):
        pairs = log_int(rng, 10, 1500)
        parts: tuple[TensorArg, ...] = TensorArg((batch, dim), dtype), TensorArg((batch, pairs), dtype)
    else:
        parts = (TensorArg((batch, dim), dtype),) * log_int(rng, 2, 64)
    return fits(Call("aten::cat.default", (parts, 1)), most_bytes=_MOST_BYTES)


def _branches(rng: Rng) -> Call | None:
    """Inception's branches along the channels, or gradients of query, key and value along the features."""
    dtype = floating(rng)
    if chance(rng, 0.5):
        batch, side = log_int(rng, 1, 128), pick(rng, (8, 17, 35))
        channels = [pick(rng, (32, 64, 96, 192, 320, 384)) for _ in range(int(rng.integers(2, 6)))]
        parts = tuple(TensorArg((batch, count, side, side), dtype) for count in channels)
        return fits(Call("aten::cat.default", (parts, 1)), most_bytes=_MOST_BYTES)
    part = TensorArg((log_int(rng, 1, 64), pick(rng, SEQUENCES), width(rng, 64, 2048)), dtype)
    return fits(Call("aten::cat.default", ((part,) * pick(rng, (2, 3)), -1)), most_bytes=_MOST_BYTES)


def _flattened(rng: Rng) -> Call | None:
    """Gradients of many sizes in one flat buffer."""
    parts = tuple(TensorArg((log_int(rng, 16, 2_000_000),), "float32") for _ in range(log_int(rng, 2, 128)))
    return fits(Call("aten::cat.default", (parts, 0)), most_bytes=_MOST_BYTES)


def _stacked(rng: Rng) -> Call | None:
    part = TensorArg(activation_shape(rng, 4_000_000), floating(rng))
    axis = pick(rng, (0, 0, 1 if len(part.shape) > 1 else 0))
    return fits(Call("aten::stack.default", ((part,) * log_int(rng, 2, 32), axis)), most_bytes=_MOST_BYTES)


def _split(rng: Rng) -> Call | None:
    """Parts copied out of one buffer, as sharded data parallelism does after it gathered its parameters."""
    parts = tuple(log_int(rng, 8, 4096) for _ in range(log_int(rng, 2, 32)))
    ranks = pick(rng, (1, 2, 4, 8)) if chance(rng, 0.5) else log_int(rng, 16, 8192)
    whole = TensorArg((ranks, sum(parts)), floating(rng))
    return fits(Call("aten::split_with_sizes_copy.default", (whole, parts, 1)), most_bytes=_MOST_BYTES)


def _slice_gradient(rng: Rng) -> Call | None:
    """A slice's gradient in zeros of the whole's shape: one third of a projection, or the tokens before the last."""
    rows, features = tokens(rng), width(rng, 16)
    dtype = floating(rng)
    if chance(rng, 0.5):
        parts = pick(rng, (2, 3, 4))
        place = int(rng.integers(parts)) * features
        arguments: tuple[Argument, ...] = (
            TensorArg((rows, features), dtype),
            (rows, parts * features),
            1,
            place,
            place + features,
            1,
        )
    else:
        batch, sequence = log_int(rng, 1, 32), pick(rng, SEQUENCES)
        kept = TensorArg((batch, sequence - 1, features), dtype)
        arguments = (kept, (batch, sequence, features), 1, 0, sequence - 1, 1)
    op = "aten::slice_backward.default"
    return _with_whole(op, arguments, dtype)


def _selection_gradient(rng: Rng) -> Call | None:
    """One token's gradient (BERT's pooler takes the first) in zeros of the whole's shape."""
    batch, sequence, features = log_int(rng, 1, 128), pick(rng, SEQUENCES), width(rng, 16)
    dtype = floating(rng)
    arguments = (TensorArg((batch, features), dtype), (batch, sequence, features), 1, int(rng.integers(sequence)))
    return _with_whole("aten::select_backward.default", arguments, dtype)


def _with_whole(op: str, arguments: tuple[Argument, ...], dtype: str) -> Call | None:
    whole = arguments[1]
    assert isinstance(whole, tuple)
    shape = tuple(length for length in whole if isinstance(length, int))
    return fits(Call(op, arguments), (shape, dtype), most_bytes=USUAL_BYTES)


def _rearranged(rng: Rng) -> Call | None:
    """Padding, repeating, rolling, flipping and triangles of masks."""
    dtype = floating(rng)
    kind = pick(rng, ("pad", "repeat", "roll", "flip", "tril"))
    if kind == "pad":
        x = TensorArg((log_int(rng, 1, 128), size(rng, 3, 512), *(log_int(rng, 7, 112),) * 2), dtype)
        return fits(Call("aten::constant_pad_nd.default", (x, (1, 1, 1, 1), 0.0)), most_bytes=USUAL_BYTES)
    if kind == "tril":
        side = log_int(rng, 16, 4096)
        return Call(pick(rng, ("aten::tril.default", "aten::triu.default")), (TensorArg((side, side), dtype),))
    x = TensorArg((tokens(rng, 8192), width(rng, 16, 2048)), dtype)
    if kind == "repeat":
        return Call("aten::repeat.default", (x, (pick(rng, (2, 3, 4)), 1)))
    if kind == "roll":
        return Call("aten::roll.default", (x, (pick(rng, (1, 3, 7)),), (int(rng.integers(2)),)))
    return Call("aten::flip.default", (x, (int(rng.integers(2)),)))


FAMILY = Family(
    name="shape",
    ops=(
        *("aten::cat.default", "aten::stack.default", "aten::split_with_sizes_copy.default"),
        *("aten::slice_backward.default", "aten::select_backward.default", "aten::constant_pad_nd.default"),
        *("aten::repeat.default", "aten::roll.default", "aten::flip.default", "aten::tril.default", "aten::triu.default"),
    ),
    sweep=mixture(
        *((1.5, _interaction), (1, _branches), (0.5, _flattened), (0.8, _stacked), (0.8, _split)),
        *((1, _slice_gradient), (0.5, _selection_gradient), (0.6, _rearranged)),
    ),
    weight=4.5,
    rules=launches,
)
