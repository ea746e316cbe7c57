"""Softmax and log-softmax over attention scores, vocabularies and classes, forward and backward."""

from __future__ import annotations

from steptime._models.kernels.call import Call, DtypeArg, TensorArg
from steptime._models.kernels.draw import (
    SEQUENCES,
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    Shape,
    chance,
    floating,
    log_int,
    mixture,
    pick,
    size,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.softmax import launches

_MOST_ELEMENTS = USUAL_BYTES // 4


def _scores(rng: Rng) -> Shape:
    """Batch, heads, queries, keys."""
    sequence = pick(rng, SEQUENCES) if chance(rng, 0.6) else size(rng, 16, 2048)
    heads = pick(rng, (1, 4, 8, 12, 16))
    most = max(1, _MOST_ELEMENTS // (heads * sequence * sequence))
    return log_int(rng, 1, min(128, most)), heads, sequence, sequence


def _classes(rng: Rng) -> Shape:
    """Rows, classes."""
    classes = pick(rng, (*VOCABULARIES, 10, 1000)) if chance(rng, 0.5) else size(rng, 2, 65536)
    return log_int(rng, 8, min(65536, _MOST_ELEMENTS // classes)), classes


def _case(rng: Rng, scores_share: float) -> tuple[Shape, int]:
    """A shape and the axis to normalise, seldom another than the last."""
    shape = _scores(rng) if chance(rng, scores_share) else _classes(rng)
    return shape, (1 if len(shape) == 4 and chance(rng, 0.08) else -1)


def _forward(rng: Rng) -> Call:
    logarithmic = chance(rng, 0.4)
    shape, axis = _case(rng, 0.1 if logarithmic else 0.85)
    widened = chance(rng, 0.12)  # softmax(x, dtype=torch.float32) of a float16 input: the kernel widens what it reads
    dtype = "float16" if widened else floating(rng)
    op = "aten::_log_softmax.default" if logarithmic else "aten::_softmax.default"
    return Call(op, (TensorArg(shape, dtype), axis, widened))


def _safe(rng: Rng) -> Call:
    """As the plain form of attention takes it: rows that are masked out altogether give zeros."""
    return Call("aten::_safe_softmax.default", (TensorArg(_scores(rng), floating(rng)), -1))


def _backward(rng: Rng) -> Call:
    logarithmic = chance(rng, 0.4)
    shape, axis = _case(rng, 0.1 if logarithmic else 0.85)
    widened = chance(rng, 0.12)
    input_dtype = "float16" if widened else floating(rng)
    dtype = "float32" if widened else input_dtype
    op = "aten::_log_softmax_backward_data.default" if logarithmic else "aten::_softmax_backward_data.default"
    y = TensorArg(shape, dtype, values="normal" if logarithmic else "unit")
    return Call(op, (TensorArg(shape, dtype), y, axis, DtypeArg(input_dtype)))


FAMILY = Family(
    name="softmax",
    ops=(
        "aten::_softmax.default",
        "aten::_log_softmax.default",
        "aten::_softmax_backward_data.default",
        "aten::_log_softmax_backward_data.default",
        "aten::_safe_softmax.default",
    ),
    sweep=mixture((1, _forward), (1, _backward), (0.1, _safe)),
    weight=3.5,
    rules=launches,
)
