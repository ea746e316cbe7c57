"""Calls on tables that millions of indices look up, rows that are sorted, and tensors so small that a kernel hardly runs."""

from __future__ import annotations

from dataclasses import replace

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.sweep import USUAL_ELEMENTS, Draw, Drawn, KernelSweep, indices


def _draw_lookups(draw: Draw) -> Drawn:
    """Up to three million rows of a table of any length: features of recommenders, nodes of graphs."""
    dim = draw.pick((1, 8, 16, 32, 64, 128, 256))
    rows = draw.log_int(1000, min(20_000_000, USUAL_ELEMENTS // dim))
    count = min(draw.log_int(2000, 3_000_000), USUAL_ELEMENTS // dim)
    dtype = draw.pick(("float32", "bfloat16"), (0.8, 0.2))
    each = draw.pick((1, 2, 8, 20, 40))
    bags = max(1, count // each)
    return {
        "table": TensorArg((rows, dim), dtype),
        "index": indices((count,), rows),
        "gradient": TensorArg((count, dim), dtype),
        "rows": rows,
        "bags": TensorArg((bags, dim), "float32"),
        "wide_table": TensorArg((rows, dim), "float32"),
        "offsets": replace(indices((bags,), bags * each), values="offsets"),
        "of_bags": indices((bags * each,), rows),
        "bag_of_each": indices((bags * each,), bags),
        "bag_sizes": indices((bags,), each + 1),
        "no_maxima": TensorArg((0,), "int64", high=2),
        "keys": indices((count,), rows),
    }


LOOKUPS = KernelSweep(
    (3, _draw_lookups, "embedding_dense_backward(*gradient, index, rows, -1, False)"),
    (1, _draw_lookups, "embedding(table, *index)"),
    (1, _draw_lookups, "_embedding_bag(wide_table, *of_bags, offsets, False, 0, False, None, False, -1)"),
    (
        *(1.5, _draw_lookups),
        "_embedding_bag_dense_backward(*bags, of_bags, bag_of_each, bag_sizes, no_maxima, rows, False, 0, None, -1)",
    ),
    (1, _draw_lookups, "index_add_(table, 0, index, *gradient)", "index_add(table, 0, index, *gradient)"),
    (1, _draw_lookups, "sort(*keys, -1, False)", "_unique2(*keys, True, True, False)", "index_select(table, 0, *index)"),
)


def _draw_ranked(draw: Draw) -> Drawn:
    """Rows of scores and of keys, from many short to few long ones."""
    columns = draw.log_int(8, 200_000)
    rows = max(1, min(draw.log_int(1, 65_536), USUAL_ELEMENTS // 8 // columns))
    x = TensorArg((rows, columns), draw.pick(("float32", "bfloat16", "int64", "int32")), high=100_000)
    return {"x": x, "downwards": draw.chance(0.5), "axis": draw.pick((-1, -1, 0))}


SORTS = KernelSweep(
    (2, _draw_ranked, "sort(*x, axis, downwards)", "sort.stable(*x, stable=True, dim=axis, descending=downwards)"),
)


def _draw_small(draw: Draw) -> Drawn:
    """Tensors of a few kilobytes: cells, heads of small models, losses, parameters one by one."""
    rows, columns = draw.log_int(1, 512), draw.pick((1, 8, 10, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024))
    dtype = draw.pick(("float32", "bfloat16"), (0.8, 0.2))
    x = TensorArg((rows, columns), dtype)
    inner = draw.pick((8, 32, 64, 128, 192, 256, 384, 768))
    part = replace(x, strides=(4 * columns, 1))
    return {
        "x": x,
        "part": part,
        "positive": replace(x, values="positive"),
        "one": TensorArg((), dtype),
        "unit": replace(x, values="unit"),
        "row": TensorArg((columns,), dtype),
        "left": TensorArg((rows, inner), dtype),
        "right": TensorArg((columns, inner), dtype).transposed(),
        "gradient": TensorArg((rows, inner), dtype).transposed(),
        "parts": (x, x),
        "columns": columns,
        "axis": draw.pick((0, 1)),
        "table": TensorArg((draw.log_int(64, 50_000), columns), dtype),
        "classes": indices((rows,), max(1, columns)),
        "index": indices((rows,), 64),
        "tokens": draw.log_int(64, 50_000),
    }


SMALL_CALLS = KernelSweep(
    (
        *(3, _draw_small, "mul.Tensor(*x, *x)", "add.Tensor(*x, *x)", "sigmoid(*x)", "tanh(*x)", "sigmoid(*part)"),
        *("tanh(*part)", "sigmoid_backward(*x, x)", "tanh_backward(*x, x)", "mul.Tensor(*x, part)", "add_.Tensor(*x, *x)"),
        *("gelu(*x)", "gelu_backward(*x, x)", "relu(*x)", "neg(*x)", "div.Tensor(*x, positive)", "pow.Tensor_Scalar(*x, 2)"),
        *(
            "copy_(part, *x)",
            "clone(*part)",
            "fill_.Scalar(x, 0)",
            "zero_(x)",
            "add.Tensor(*x, row)",
            "exp(*x)",
            "log(*positive)",
        ),
    ),
    (
        *(2, _draw_small, "sum.dim_IntList(*x, [axis], False)", "mean(*x)", "sum(*x)", "mean.dim(*x, [axis], False)"),
        *(
            "_softmax(*x, 1, False)",
            "_log_softmax(*x, 1, False)",
            "cat(parts, axis)",
            "native_layer_norm(*x, [columns], None, None, 1e-5)",
        ),
        *("addmm(row, *left, right)", "mm(*left, right)", "mm(*gradient, x)", "embedding(table, *index)"),
        *("embedding_dense_backward(*x, index, tokens, -1, False)", "binary_cross_entropy(*unit, unit)"),
    ),
    (
        *(1, _draw_small, "lerp_.Scalar(x, *x, 0.1)", "addcmul_(*positive, x, x, value=0.1)", "sqrt(*positive)"),
        *(
            "addcdiv_(x, *x, positive, value=-0.01)",
            "mul_.Tensor(*x, 0.9)",
            "add_.Tensor(*positive, 1e-8)",
            "div_.Tensor(*x, 2.0)",
        ),
    ),
)
