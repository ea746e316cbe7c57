"""Which op calls are asked, at small sizes: those that workloads issue, most frequent first, then some that every model has.

What the CPU spends on a call hardly depends on its sizes, and at small ones the device never limits. Calls that shrink to the
same one are one question. Shrinking twice changes nothing, so a row measured at recorded sizes (where the small call would not
run) is found by shrinking its call too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._ops.catalogue import op_kind
from steptime_lab.measure.kernels.cases import FILE_NAME, read_calls

# Sizes up to here stay: broadcast dimensions, small kernels.
KEPT = 4


def shrink(call: Call) -> Call:
    """Equal sizes stay equal, and so do dtypes, ranks, the order of strides and the number of tensors in lists.

    What was in cache before the call is forgotten: the host does not see it.
    """
    sizes = {size for tensor in call.tensors() for size in tensor.shape if size > KEPT}
    return replace(
        call,
        args=tuple(_argument(value, sizes) for value in call.args),
        kwargs=tuple((name, _argument(value, sizes)) for name, value in call.kwargs),
        written=(0,),
    )


def _size(size: int) -> int:
    """32 for multiples of 8, else 33 or 34: whether sizes are aligned or odd stays as it was."""
    if size <= KEPT:
        return size
    if size % 8 == 0:
        return 32
    return 33 if size % 2 else 34


def _argument(value: Argument, sizes: set[int]) -> Argument:
    if isinstance(value, TensorArg):
        return _tensor(value)
    if isinstance(value, tuple):
        return tuple(_argument(item, sizes) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and value in sizes:
        # A number that is also a size of a tensor means that size: of a view, a split, an output.
        return _size(value)
    return value


def _tensor(tensor: TensorArg) -> TensorArg:
    shape = tuple(_size(size) for size in tensor.shape)
    strides = None if tensor.strides is None else _strides(tensor, shape)
    # What integers hold does not matter to the host; nothing is looked up out of range.
    return replace(tensor, shape=shape, strides=strides, high=1 if tensor.high else 0)


def _strides(tensor: TensorArg, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides in the order of the given ones; broadcast dimensions stay so, gaps stay gaps of one step."""
    given = tensor.strides or ()
    order = sorted(range(len(shape)), key=lambda axis: (given[axis], -axis))
    result = [0] * len(shape)
    reached, dense = 1, 1
    for axis in order:
        if given[axis] == 0:
            continue
        if given[axis] > dense and tensor.shape[axis] > 1:
            reached += reached
        result[axis] = reached
        reached *= max(1, shape[axis])
        dense = max(dense, given[axis] * tensor.shape[axis])
    return tuple(result)


# Every op of a small step of each workload, views and allocations included; beside the calls that steps at full size record.
SMALL_FILE = "host_calls.json"
# What takes most of the host's time among ops, in steps of DLRM and of BERT: first among ops that are issued equally often.
FREQUENT = ("t", "mm", "addmm", "view", "empty", "copy_", "sum", "add", "mul", "cat")


@dataclass(frozen=True)
class Issued:
    """One call at small sizes, one that was really issued and shrinks to it, how often, and by whom first."""

    small: Call
    recorded: Call
    count: int
    source: str


def grouped(calls: Iterable[tuple[Call, int, str]]) -> list[Issued]:
    """Calls that shrink to the same one as one, with the most frequent of them; the most issued first."""
    most: dict[str, tuple[Call, Call, int, str]] = {}
    total: dict[str, int] = {}
    for call, count, source in calls:
        small = shrink(call)
        key = small.to_json()
        total[key] = total.get(key, 0) + count
        if key not in most or count > most[key][2]:
            most[key] = (small, call, count, source)
    ranked = {name: place for place, name in enumerate(FREQUENT)}
    order = sorted(most, key=lambda key: (-total[key], ranked.get(op_kind(most[key][0].op).plain, len(FREQUENT))))
    return [Issued(most[key][0], most[key][1], total[key], most[key][3]) for key in order]


def recorded(folder: Path) -> list[tuple[Call, int, str]]:
    """The calls of the workloads' steps, and of their small ones those of ops that the others lack: views, above all."""
    full, small = (read_calls(folder / name) if (folder / name).exists() else {} for name in (FILE_NAME, SMALL_FILE))
    known = {call.op for calls in full.values() for call in calls}
    return [
        *((call, count, source) for source, calls in full.items() for call, count in calls.items()),
        *((call, count, source) for source, calls in small.items() for call, count in calls.items() if call.op not in known),
    ]


def common(dtypes: Sequence[str] = ("float32", "bfloat16")) -> Iterator[tuple[Call, int, str]]:
    """Ops that nearly every training step has, so that this works without a recorded step."""
    for dtype in dtypes:
        for call in _common(dtype):
            yield call, 0, "sweep"


def _common(dtype: str) -> list[Call]:
    square, row = TensorArg((32, 32), dtype), TensorArg((32,), dtype)
    cube, image = TensorArg((8, 32, 32), dtype), TensorArg((8, 16, 8, 8), dtype)
    index = TensorArg((32,), "int64", high=1)
    unary = ("relu", "relu_", "neg", "exp", "sigmoid", "tanh", "gelu", "silu", "sqrt", "zero_", "clone", "sum", "mean", "t",
             "detach", "alias", "zeros_like", "empty_like", "ones_like")  # fmt: skip
    return [
        *(Call(f"aten::{name}.default", (square,)) for name in unary),
        *(Call(f"aten::{name}.Tensor", (square, square)) for name in ("add", "mul", "div", "sub", "add_", "mul_")),
        *(Call(f"aten::{name}.Scalar", (square, 2.0)) for name in ("add", "mul", "add_", "mul_")),
        Call("aten::mm.default", (square, square)),
        Call("aten::addmm.default", (row, square, square)),
        Call("aten::bmm.default", (cube, cube)),
        Call("aten::view.default", (square, (1024,))),
        Call("aten::transpose.int", (square, 0, 1)),
        Call("aten::expand.default", (row, (32, 32))),
        Call("aten::select.int", (square, 0, 0)),
        Call("aten::slice.Tensor", (square, 0, 0, 16)),
        Call("aten::cat.default", ((square, square),)),
        Call("aten::sum.dim_IntList", (square, (0,), True)),
        Call("aten::threshold_backward.default", (square, square, 0)),
        Call("aten::native_layer_norm.default", (square, (32,), row, row, 1e-5)),
        Call("aten::_softmax.default", (square, -1, False)),
        Call("aten::_log_softmax.default", (square, -1, False)),
        Call("aten::native_dropout.default", (square, 0.1, True)),
        Call("aten::embedding.default", (square, index)),
        Call("aten::index_select.default", (square, 0, index)),
        Call("aten::copy_.default", (square, square)),
        Call("aten::fill_.Scalar", (square, 0.0)),
        Call("aten::convolution.default",
             (image, TensorArg((16, 16, 3, 3), dtype), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)),
        Call("aten::max_pool2d_with_indices.default", (image, (2, 2), (2, 2))),
        Call("aten::_foreach_add_.List", ((square,) * 8, (square,) * 8)),
        Call("aten::_foreach_mul_.Scalar", ((square,) * 8, 0.9)),
    ]  # fmt: skip
