"""What ops take from the allocator for themselves while they run, of which no argument tells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from steptime._hardware.device import DeviceLimits
from steptime._models.memory.tensors import item_bytes
from steptime._ops.catalogue import Scratch
from steptime._ops.table import OpTable
from steptime._program.program import Signature, Tensor

_TENSORS_OF_CONVOLUTION = 3
_POSITION_BYTES = 8
# Of a filter of one pixel, channels up to which gradients are plain products of images as they lie: 8 of the 9 measured calls.
_FEW_CHANNELS = 4
# Reductions of PyTorch (aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig): threads of a block, elements that a thread adds
# at least and at most, columns that a thread takes at once; sums of shorter floats are kept in 32 bits.
_BLOCK_THREADS, _WARP = 512, 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
_COLUMNS_AT_ONCE = 4
_ACCUMULATED_BYTES = 4


def scratch(table: OpTable, device: DeviceLimits) -> Iterator[tuple[int, int, int]]:
    """From which op to which, and how many bytes."""
    for row, kind in enumerate(table.kinds):
        if kind.scratch is Scratch.NONE:
            continue
        if kind.scratch is Scratch.COALESCE:
            yield from _coalesce(table, row)
        elif kind.scratch is Scratch.CONVOLUTION_BACKWARD:
            yield from _convolution_backward(table.signatures[row], row, table.last[row])
        else:
            yield row, table.last[row], _SCRATCH[kind.scratch](table.signatures[row], device)


def _coalesce(table: OpTable, row: int) -> Iterator[tuple[int, int, int]]:
    """A sort of the rows of a sparse gradient and of their positions, which takes another copy of both (as `_sort`); it ends
    before the summed rows are made (aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu, _coalesce_sparse_cuda)."""
    count, end = 0, table.last[row]
    for inside in range(row + 1, table.last[row] + 1):
        if table.names[inside].endswith("::_nnz"):
            count = next((value for value in table.signatures[inside].outputs if isinstance(value, int)), count)
        if table.names[inside].endswith("::resize_"):
            end = inside - 1
            break
    if count:
        yield row, end, 2 * _POSITION_BYTES * count


def _sort(signature: Signature, _: DeviceLimits) -> int:
    """Positions of 64 bits to sort along, and room for another copy of keys and positions, which a radix sort goes back and
    forth between (aten/src/ATen/native/cuda/Sort.cpp, cub::DeviceRadixSort)."""
    keys = _first(signature.inputs)
    return (2 * _POSITION_BYTES + item_bytes(keys)) * keys.numel if keys is not None else 0


def _sum(signature: Signature, device: DeviceLimits) -> int:
    """What blocks hand to one another where several add up one output. Only columns matter: there every lane has its own."""
    source, result = _first(signature.inputs), _first(signature.outputs)
    if source is None or result is None or not result.numel or not source.shape:
        return 0
    reduced = signature.inputs[1] if len(signature.inputs) > 1 else None
    dims = {dim % len(source.shape) for dim in reduced if isinstance(dim, int)} if isinstance(reduced, tuple) else set()
    if not dims or len(source.shape) - 1 in dims:
        return 0
    return column_sum_bytes(source.numel // result.numel, result.numel, device)


def column_sum_bytes(rows: int, columns: int, device: DeviceLimits) -> int:
    """What a sum over the rows of a matrix takes, whose rows lie one after the other; less on a device with fewer SMs."""
    if not rows:
        return 0
    at_once = math.gcd(_COLUMNS_AT_ONCE, columns)
    threads = _BLOCK_THREADS // at_once
    wide = min(_power_of_two(columns // at_once), threads)
    high = min(_power_of_two(rows), threads, threads // min(wide, _WARP))
    wide = min(wide, threads // high)
    if rows < min(high * _LEAST_VALUES, _MOST_VALUES):
        return 0
    values = -(-rows // high)
    blocks = -(-(columns // at_once) // wide)
    fitting = int(device.sms.value) * (int(device.threads_per_sm.value) // (wide * high))
    if values < _MOST_VALUES or blocks > fitting:
        return 0
    parts = max(min(-(-fitting // blocks), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return _ACCUMULATED_BYTES * columns * parts * wide * at_once if parts > 1 else 0


def _convolution(signature: Signature, _: DeviceLimits) -> int:
    """cuDNN's kernels want channels last: where they come first, it works on copies. Seen on an H200 (cuDNN 9.19, fp32 and
    bf16): of image, filter and result where the filter is wider than a pixel, of the image where it is not but skips pixels."""
    outcome = _channels_first(signature.inputs[:2], signature.outputs[:1])
    if outcome is None:
        return 0
    image, filters, result = outcome
    if math.prod(filters.shape[2:]) > 1:
        return _nbytes(image) + _nbytes(filters) + _nbytes(result)
    return _nbytes(image) if image.shape[2:] != result.shape[2:] else 0


def _convolution_backward(signature: Signature, row: int, last: int) -> Iterator[tuple[int, int, int]]:
    """The gradient of the image on copies as above, then that of the filter, which is added up in parts: seen were 2 to 4 more
    filters of 32 bits. Where one op stands for both, it takes the larger of the two: one is dropped before the other."""
    outcome = _channels_first(signature.inputs[1:3], signature.inputs[:1])
    if outcome is None:
        return
    image, filters, result = outcome
    plain = math.prod(filters.shape[2:]) == 1 and min(filters.shape[:2]) <= _FEW_CHANNELS
    both = 0 if plain else _nbytes(image) + _nbytes(result)
    of_image = both + (_nbytes(filters) if math.prod(filters.shape[2:]) > 1 else 0)
    of_filters = both + 2 * _ACCUMULATED_BYTES * filters.numel
    if row == last:
        yield row, row, max(of_image, of_filters)
    else:
        yield row, row, of_image
        yield last, last, of_filters


def _channels_first(operands: Sequence[object], result: Sequence[object]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Image, filter and result of a convolution, if channels come before pixels."""
    results = [value for value in (*operands, *result) if isinstance(value, Tensor)]
    if (
        len(results) != _TENSORS_OF_CONVOLUTION
        or len(results[0].shape) <= 2
        or results[0].strides is None
        or results[0].strides[1] == 1
    ):
        return None
    return results[0], results[1], results[2]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel * item_bytes(tensor)


def _power_of_two(count: int) -> int:
    """The largest that is not above."""
    return 1 << (count.bit_length() - 1)


def _first(values: tuple[object, ...]) -> Tensor | None:
    """The first tensor on a device."""
    result = next((value for value in values if isinstance(value, Tensor)), None)
    return result if result is not None and (result.device or "").startswith("cuda") else None


_SCRATCH: dict[Scratch, Callable[[Signature, DeviceLimits], int]] = {
    Scratch.SORT: _sort,
    Scratch.SUM: _sum,
    Scratch.CONVOLUTION: _convolution,
}
