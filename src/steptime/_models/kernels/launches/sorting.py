"""Launches of CUB's radix sort of indices, which gradients of looked-up rows begin with."""

from __future__ import annotations

import math

from steptime._models.kernels.launches import Launch, fresh, hot
from steptime._models.kernels.launches.copies import memset

# Keys up to which one block sorts all of them (seen between 2,182 and 2,316 in the measured rows).
_SINGLE_TILE = 2304
# Bits that a pass of CUB sorts by: over many blocks, and within one (seen: another 1.1 us for every 6 bits).
_PASS_BITS, _TILE_PASS_BITS = 8, 6
_TILE = 4096  # keys of a block; only the order of magnitude matters, the weight is fitted


def over_indices(kernel: str, indices: int, *, table_rows: int = 0, path: str = "", serial: float = 1.0) -> Launch:
    """A kernel that does little for every index, which the launch before has written."""
    facts = {"rows": indices, "table_rows": table_rows}
    grids = ((indices / 1024, serial), (indices / _TILE, serial))
    column = (hot((indices,), "int64", 8 * indices),)
    return Launch(kernel, indices, column, (fresh((indices,), "int64"),), facts, grids, path, "indices")


def radix_sort(indices: int, bits: int, high: int) -> list[Launch]:
    """Sorts so many indices by `bits` bits; `high` is what they are below, which leaves the upper digits zero."""
    if indices <= _SINGLE_TILE:
        return [_single_tile(indices, math.ceil(bits / _TILE_PASS_BITS))]
    results = [memset(4 * indices // _TILE + 4), memset(8 << _PASS_BITS)]
    results += [
        over_indices("DeviceRadixSortHistogramKernel", indices, serial=math.ceil(bits / _PASS_BITS)),
        over_indices("DeviceRadixSortExclusiveSumKernel", math.ceil(bits / _PASS_BITS) << _PASS_BITS),
    ]
    for digit in range(math.ceil(bits / _PASS_BITS)):
        varied = high > 1 << (_PASS_BITS * digit)
        path = "first" if digit == 0 else "varied" if varied else "constant"
        results += [memset(4 * indices // _TILE + 4), over_indices("DeviceRadixSortOnesweepKernel", indices, path=path)]
    return results


def _single_tile(indices: int, passes: int) -> Launch:
    """One block of 256 threads with as many keys each as it takes."""
    facts = {"passes": passes, "indices": indices}
    grids = ((1.0, float(passes)), (1.0, passes * indices / 256))
    column = (hot((indices,), "int64", 8 * indices),)
    written = (fresh((indices,), "int64"),)
    return Launch("DeviceRadixSortSingleTileKernel", indices, column, written, facts, grids, "", "indices")


def bits_of(high: int) -> int:
    """Bits that tell so many numbers apart, at least one."""
    return max(1, math.ceil(math.log2(max(2, high))))
