"""Reductions over the last, the first, several or all axes: bias gradients, means, maxima, norms, running sums."""

from __future__ import annotations

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._models.kernels.draw import (
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    activation_shape,
    chance,
    floating,
    log_int,
    mixture,
    options,
    pick,
    tokens,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.reduction import launches


def _axes(rng: Rng, rank: int) -> tuple[int, ...]:
    """The last axis, the first, all, or all but the channels."""
    forms = [(-1,), (-1,), (0,), tuple(range(rank))]
    if rank >= 3:
        forms += [(0, *range(2, rank)), tuple(range(rank - 1))]
    return pick(rng, forms)


def _input(rng: Rng) -> TensorArg:
    return TensorArg(activation_shape(rng), floating(rng))


def _bias_gradient(rng: Rng) -> Call:
    """The sum over rows of a linear layer's output gradient, kept as a row."""
    rows, features = tokens(rng), width(rng, 1, 16384)
    features = min(features, USUAL_BYTES // 4 // rows)
    return Call("aten::sum.dim_IntList", (TensorArg((rows, features), floating(rng)), (0,), True))


def _summed(rng: Rng) -> Call:
    x, kept = _input(rng), chance(rng, 0.3)
    widened = options(dtype=DtypeArg("float32")) if x.dtype != "float32" and chance(rng, 0.2) else ()
    op = pick(rng, ("aten::sum.dim_IntList", "aten::mean.dim"))
    return Call(op, (x, _axes(rng, len(x.shape)), kept), widened)


def _whole(rng: Rng) -> Call:
    forms: tuple[tuple[str, tuple[Argument, ...]], ...] = (
        ("aten::sum.default", ()),
        ("aten::mean.default", ()),
        ("aten::max.default", ()),
        ("aten::linalg_vector_norm.default", (2,)),
    )
    op, rest = pick(rng, forms)
    return Call(op, (_input(rng), *rest))


def _greatest(rng: Rng) -> Call:
    x = _input(rng)
    axis = pick(rng, (-1, 0))
    forms: tuple[tuple[str, tuple[Argument, ...]], ...] = (
        ("aten::amax.default", ((axis,), False)),
        ("aten::max.dim", (axis, False)),
        ("aten::argmax.default", (axis,)),
    )
    op, rest = pick(rng, forms)
    return Call(op, (x, *rest))


def _norm(rng: Rng) -> Call:
    x = _input(rng)
    return Call("aten::linalg_vector_norm.default", (x, 2, (-1,), chance(rng, 0.5)))


def _running(rng: Rng) -> Call:
    """Positions from an attention mask, offsets from lengths."""
    if chance(rng, 0.5):
        x = TensorArg((log_int(rng, 1, 512), log_int(rng, 16, 4096)), "int64", high=2)
    else:
        x = TensorArg((log_int(rng, 16, 1_000_000),), pick(rng, ("int64", "float32")), high=100)
    return Call("aten::cumsum.default", (x, -1))


def _predicted(rng: Rng) -> Call:
    """The most likely token of each row, and several of them."""
    classes = pick(rng, (*VOCABULARIES, 1000, 10))
    x = TensorArg((log_int(rng, 1, 1024), classes), floating(rng))
    return Call("aten::argmax.default", (x, -1)) if chance(rng, 0.5) else Call("aten::topk.default", (x, 5, -1))


def _table_rows(rng: Rng) -> Call:
    """Row-wise Adagrad's mean of squares per row of a table."""
    dim = pick(rng, (16, 32, 64, 128))
    return Call("aten::mean.dim", (TensorArg((log_int(rng, 1000, 40_000_000 // dim), dim)), (1,), False))


FAMILY = Family(
    name="reduction",
    ops=(
        *("aten::sum.dim_IntList", "aten::mean.dim", "aten::sum.default", "aten::mean.default", "aten::max.default"),
        *("aten::amax.default", "aten::max.dim", "aten::argmax.default", "aten::linalg_vector_norm.default"),
        *("aten::cumsum.default", "aten::topk.default"),
    ),
    sweep=mixture(
        *((2.5, _bias_gradient), (2, _summed), (1, _whole), (0.8, _greatest)),
        *((0.4, _norm), (0.3, _running), (0.3, _predicted), (0.4, _table_rows)),
    ),
    weight=6.0,
    rules=launches,
)
