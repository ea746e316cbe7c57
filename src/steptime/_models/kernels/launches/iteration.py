"""How ATen's iterator walks tensors: dimensions sorted by stride, fastest first, and joined where every operand allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steptime._models.kernels.launches import Operand

# Bytes of an element of an output that does not exist yet: only whether its strides join matters.
_FRESH_ITEM = 4


@dataclass(frozen=True, slots=True)
class Iteration:
    """Dimensions that are left, fastest first; `strides` in bytes, one tuple per operand in the order given."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that these broadcast to."""
    if len(set(shapes)) == 1:
        return shapes[0]
    result = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for index, size in enumerate(reversed(shape)):
            if size != 1:
                result[-1 - index] = size
    return tuple(result)


def iterate(shape: tuple[int, ...], operands: Sequence[Operand | None], *, reduced: bool = False) -> Iteration:
    """The walk over `shape`, outputs first; None is a new output, which takes the order of the others.

    `reduced` means that the first operand is the output of a reduction, with stride 0 along what is reduced.
    """
    given = [None if operand is None else _byte_strides(shape, operand) for operand in operands]
    order = _order(shape, given, reduced)
    sizes = [shape[axis] for axis in order]
    strides = []
    for item in given:
        strides.append(_packed(sizes) if item is None else [item[axis] for axis in order])
    return _joined(sizes, strides, operands)


def _byte_strides(shape: tuple[int, ...], one: Operand) -> list[int]:
    missing, item = len(shape) - len(one.shape), one.item_bytes
    own = [0 if size == 1 and shape[missing + axis] != 1 else one.strides[axis] * item for axis, size in enumerate(one.shape)]
    return [0] * missing + own


def _packed(sizes: Sequence[int]) -> list[int]:
    step, strides = _FRESH_ITEM, []
    for size in sizes:
        strides.append(step)
        step *= size
    return strides


def _order(shape: tuple[int, ...], given: Sequence[list[int] | None], reduced: bool) -> list[int]:
    """An insertion sort of the axes that stops where two cannot be told apart, as ATen's does."""
    order = list(range(len(shape) - 1, -1, -1))
    for start in range(1, len(order)):
        later = start
        for earlier in range(start - 1, -1, -1):
            compared = _compared(order[earlier], order[later], shape, given, reduced)
            if compared > 0:
                order[earlier], order[later] = order[later], order[earlier]
                later = earlier
            elif compared < 0:
                break
    return order


def _compared(left: int, right: int, shape: tuple[int, ...], given: Sequence[list[int] | None], reduced: bool) -> int:
    """1 where two axes have to be swapped, -1 where they are in order, 0 where no operand decides."""
    for index, strides in enumerate(given):
        if strides is None:
            continue
        first, second = strides[left], strides[right]
        if reduced and index == 0 and (first == 0) != (second == 0):
            return 1 if second == 0 else -1
        if first == 0 or second == 0:
            continue
        if first != second:
            return -1 if first < second else 1
        if shape[left] > shape[right]:
            return 1
    return 0


def _joined(sizes: Sequence[int], strides: Sequence[list[int]], operands: Sequence[Operand | None]) -> Iteration:
    if not sizes:
        items = tuple((item.item_bytes if item is not None else _FRESH_ITEM,) for item in operands)
        return Iteration((1,), items)
    left = [sizes[0]]
    kept = [[entry[0]] for entry in strides]
    for axis in range(1, len(sizes)):
        size = sizes[axis]
        if (
            left[-1] == 1
            or size == 1
            or all(entry[-1] * left[-1] == item[axis] for entry, item in zip(kept, strides, strict=True))
        ):
            if left[-1] == 1:
                for entry, item in zip(kept, strides, strict=True):
                    entry[-1] = item[axis]
            left[-1] *= size
        else:
            left.append(size)
            for entry, item in zip(kept, strides, strict=True):
                entry.append(item[axis])
    return Iteration(tuple(left), tuple(map(tuple, kept)))
