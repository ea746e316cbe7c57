"""Embeddings: rows by token forward and backward, and pooled bags of rows forward and backward.

Lookups with realistic index streams are a measured set of their own; here indices are uniform.
"""

from __future__ import annotations

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.draw import (
    SEQUENCES,
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    Shape,
    chance,
    floating,
    indices,
    log_int,
    mixture,
    pick,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.embedding import launches

_MOST_ELEMENTS = USUAL_BYTES // 4
_SUM, _MEAN, _MAX = 0, 1, 2  # values of `mode` in ATen


def _tokens(rng: Rng) -> tuple[int, int, Shape]:
    """Rows and features of the table, and the shape of the tokens."""
    if chance(rng, 0.6):
        rows, features = pick(rng, (*VOCABULARIES, 512, 1024, 2)), pick(rng, (128, 256, 512, 768, 1024))
        shape: Shape = (log_int(rng, 1, 32), pick(rng, SEQUENCES))
    else:
        features = width(rng, 8, 1024)
        rows, shape = log_int(rng, 16, min(1_000_000, _MOST_ELEMENTS // features)), (log_int(rng, 16, 65_536),)
    return rows, features, shape


def _forward(rng: Rng) -> Call | None:
    rows, features, shape = _tokens(rng)
    call = Call("aten::embedding.default", (TensorArg((rows, features), floating(rng)), indices(shape, rows)), written=(1,))
    return call if _result_elements(shape, features) <= _MOST_ELEMENTS else None


def _backward(rng: Rng) -> Call | None:
    rows, features, shape = _tokens(rng)
    gradient = TensorArg((*shape, features), floating(rng))
    padding = pick(rng, (-1, 0))
    call = Call("aten::embedding_dense_backward.default", (gradient, indices(shape, rows), rows, padding, False))
    return call if max(gradient.numel, rows * features) <= _MOST_ELEMENTS else None


def _result_elements(shape: Shape, features: int) -> int:
    count = features
    for length in shape:
        count *= length
    return count


def _bags(rng: Rng) -> tuple[int, int, int, int]:
    """Rows and features of the table, bags and rows per bag."""
    features = pick(rng, (8, 16, 32, 64, 128, 256))
    rows = log_int(rng, 100, min(2_000_000, _MOST_ELEMENTS // features))
    bags, pooled = log_int(rng, 32, 32_768), log_int(rng, 1, 128)
    return rows, features, min(bags, 2_000_000 // pooled), pooled


def _bag(rng: Rng) -> Call:
    rows, features, bags, pooled = _bags(rng)
    dtype, mode = floating(rng), pick(rng, (_SUM, _MEAN, _MAX), (0.75, 0.15, 0.1))
    table, asked = TensorArg((rows, features), dtype), bags * pooled
    offsets = TensorArg((bags,), "int64", high=asked, values="offsets")
    weights = TensorArg((asked,), dtype) if mode == _SUM and chance(rng, 0.2) else None
    sparse = mode != _MAX and chance(rng, 0.5)
    arguments = (table, indices((asked,), rows), offsets, False, mode, sparse, weights, False, -1)
    return Call("aten::_embedding_bag.default", arguments, written=(1,))


def _bag_backward(rng: Rng) -> Call:
    """A sparse gradient, or a dense one of the whole table; pooled by sum, so that the maximum indices are not read."""
    rows, features, bags, pooled = _bags(rng)
    asked = bags * pooled
    bag_of_each = indices((asked,), bags)
    bag_sizes, no_maxima = indices((bags,), pooled + 1), TensorArg((0,), "int64", high=1)
    gradient, index = TensorArg((bags, features), floating(rng)), indices((asked,), rows)
    if chance(rng, 0.4):
        arguments: tuple[Argument, ...] = (gradient, index, bag_of_each, bag_sizes, no_maxima, rows, False, _SUM, None, -1)
        return Call("aten::_embedding_bag_dense_backward.default", arguments)
    offsets = TensorArg((bags,), "int64", high=asked, values="offsets")
    arguments = (gradient, index, offsets, bag_of_each, bag_sizes, no_maxima, rows, False, _SUM, True, None, -1)
    return Call("aten::_embedding_bag_backward.default", arguments)


FAMILY = Family(
    name="embedding",
    ops=(
        *("aten::embedding.default", "aten::embedding_dense_backward.default"),
        *("aten::_embedding_bag.default", "aten::_embedding_bag_backward.default"),
        "aten::_embedding_bag_dense_backward.default",
    ),
    sweep=mixture((1, _forward), (1, _backward), (1, _bag), (0.8, _bag_backward)),
    weight=3.5,
    rules=launches,
)
