"""The same call with small sizes: what the CPU spends on a call hardly depends on them, and the device never limits.

Calls that shrink to the same one are one question. Shrinking twice changes nothing, so a row measured at recorded sizes
(where the small call would not run) is found by shrinking its call too.
"""

from __future__ import annotations

from dataclasses import replace

from steptime._models.kernels.call import Argument, Call, TensorArg

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
