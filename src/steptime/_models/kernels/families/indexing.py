"""Gathers and scatters by index: rows of tables, labels of rows, and the triangle of DLRM's interaction with its backward."""

from __future__ import annotations

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    chance,
    fits,
    floating,
    indices,
    log_int,
    mixture,
    options,
    pick,
    size,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.indexing import launches

_MOST_ELEMENTS = USUAL_BYTES // 4


def _table(rng: Rng) -> tuple[TensorArg, int]:
    """Rows of features, and how many of them are asked for."""
    features = pick(rng, (8, 16, 32, 64, 128)) if chance(rng, 0.5) else width(rng, 1, 2048)
    rows = log_int(rng, 16, min(1_000_000, _MOST_ELEMENTS // features))
    return TensorArg((rows, features), floating(rng)), log_int(rng, 16, min(262_144, _MOST_ELEMENTS // features))


def _rows(rng: Rng) -> Call:
    table, asked = _table(rng)
    index = indices((asked,), table.shape[0])
    if chance(rng, 0.6):
        return Call("aten::index_select.default", (table, 0, index), written=(0,))
    return Call("aten::index.Tensor", (table, (index,)))


def _triangle(rng: Rng) -> tuple[TensorArg, tuple[None, TensorArg, TensorArg], TensorArg]:
    """Products of all pairs of features, the row and column of each below the diagonal, and what they select."""
    features = log_int(rng, 3, 65)
    pairs = features * (features - 1) // 2
    batch = log_int(rng, 32, min(32_768, _MOST_ELEMENTS // (features * features)))
    row = TensorArg((pairs,), "int64", high=features, values="lower_row")
    column = TensorArg((pairs,), "int64", high=features, values="lower_column")
    dtype = floating(rng)
    return TensorArg((batch, features, features), dtype), (None, row, column), TensorArg((batch, pairs), dtype)


def _interaction(rng: Rng) -> Call:
    products, places, _ = _triangle(rng)
    return Call("aten::index.Tensor", (products, places))


def _interaction_backward(rng: Rng) -> Call:
    products, places, chosen = _triangle(rng)
    return Call("aten::_index_put_impl_.default", (products, places, chosen, True, True), written=(0, 2))


def _rows_backward(rng: Rng) -> Call:
    """Gradients of rows added where they came from; repeated indices are sorted first."""
    table, asked = _table(rng)
    gradient = TensorArg((asked, table.shape[1]), table.dtype)
    index = indices((asked,), table.shape[0])
    accumulated = chance(rng, 0.7)
    op = pick(rng, ("aten::_index_put_impl_.default", "aten::index_put_.default", "aten::index_put.default"), (2, 2, 1))
    rest = (accumulated, True) if op == "aten::_index_put_impl_.default" else (accumulated,)
    return Call(op, (table, (index,), gradient, *rest), written=(2,))


def _added(rng: Rng) -> Call:
    """`index_add_` of gradients of rows: also what a sparse gradient does to its table."""
    table, asked = _table(rng)
    gradient = TensorArg((asked, table.shape[1]), table.dtype)
    arguments = (table, 0, indices((asked,), table.shape[0]), gradient)
    if chance(rng, 0.8):
        return Call("aten::index_add_.default", arguments, options(alpha=pick(rng, (1, -0.01))), written=(3,))
    return Call("aten::index_add.default", arguments, written=(3,))


def _labelled(rng: Rng) -> tuple[TensorArg, TensorArg]:
    """Scores of rows, and for each row one column or several."""
    columns = pick(rng, VOCABULARIES) if chance(rng, 0.3) else size(rng, 8, 8192)
    rows = log_int(rng, 8, min(65_536, _MOST_ELEMENTS // columns))
    picked = pick(rng, (1, 1, log_int(rng, 1, min(columns, 128)), columns if columns <= 4096 else 1))
    return TensorArg((rows, columns), floating(rng)), indices((rows, picked), columns)


def _gathered(rng: Rng) -> Call | None:
    scores, index = _labelled(rng)
    return fits(Call("aten::gather.default", (scores, 1, index)))


def _scattered(rng: Rng) -> Call | None:
    scores, index = _labelled(rng)
    values = TensorArg(index.shape, scores.dtype)
    forms = ("aten::scatter_.src", "aten::scatter.src", "aten::scatter_add_.default", "aten::scatter_add.default")
    if chance(rng, 0.2):
        return fits(Call("aten::scatter_.value", (scores, 1, index, 1.0)))
    return fits(Call(pick(rng, forms, (1, 0.4, 1.5, 0.6)), (scores, 1, index, values), written=(3,)))


FAMILY = Family(
    name="indexing",
    ops=(
        *("aten::index_select.default", "aten::index.Tensor", "aten::_index_put_impl_.default", "aten::index_put_.default"),
        *("aten::index_put.default", "aten::index_add_.default", "aten::index_add.default", "aten::gather.default"),
        *("aten::scatter_.src", "aten::scatter.src", "aten::scatter_.value"),
        *("aten::scatter_add_.default", "aten::scatter_add.default"),
    ),
    sweep=mixture(
        *((1.2, _rows), (1.2, _interaction), (1.2, _interaction_backward), (0.8, _rows_backward)),
        *((0.6, _added), (0.7, _gathered), (0.9, _scattered)),
    ),
    weight=6.0,
    rules=launches,
)
