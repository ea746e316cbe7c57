"""ATen's reduction kernel: its blocks and grid from sizes and strides, and a memset where several blocks share an output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from steptime._models.kernels.call import contiguous
from steptime._models.kernels.launches import Gpu, Launch, Operand, fresh
from steptime._models.kernels.launches.copies import memset
from steptime._models.kernels.launches.iteration import Iteration, iterate
from steptime._models.kernels.launches.names import REDUCE

# ATen's reduction: threads of a block, lanes of a warp, values a thread has before blocks share an output.
_THREADS, _WARP, _MANY_VALUES, _FEW_VALUES = 512, 32, 256, 16
# Elements along which inputs are read as vectors.
_VECTOR_LEAST = 128
_SEMAPHORE_BYTES = 4
# Nanoseconds of one dependent load of a chain, the smallest of the multiples that are fitted (seen: 20 to 400).
_LOAD_NS = 25.0


@dataclass(frozen=True, slots=True)
class _Grid:
    count: int  # outputs
    each: int  # elements that become one output
    values: int  # that one thread reduces, one after the other
    width: int
    height: int
    blocks: int
    split: int  # blocks that share an output
    outputs: int  # that one thread holds side by side
    vector: bool
    along: bool  # whether the fastest dimension is reduced
    height_reduces: bool


def reduction(x: Operand, axes: Iterable[int], gpu: Gpu, *, outputs: int = 1, tag: str = "", path: str = "") -> list[Launch]:
    """What reduces `x` along `axes` into `outputs` tensors: the kernel, after a memset where several blocks share an output."""
    rank = len(x.shape)
    gone = {axis % rank for axis in axes} if rank else set()
    kept = tuple(1 if axis in gone else size for axis, size in enumerate(x.shape))
    strides = tuple(0 if axis in gone else stride for axis, stride in enumerate(contiguous(kept)))
    walk = iterate(x.shape, (replace(fresh(kept, x.dtype), strides=strides), x), reduced=True)
    count = max(1, math.prod(kept))
    reduced = len(walk.sizes) if count == 1 else sum(stride == 0 for stride in walk.strides[0])
    each = max(1, x.numel // count)
    grid = _grid(walk, reduced, count, each, x.item_bytes, gpu)
    kernel = _kernel(x, walk, reduced, grid, outputs, gpu, tag=tag, path=path)
    return [memset(_SEMAPHORE_BYTES * (grid.blocks // grid.split)), kernel] if grid.split > 1 else [kernel]


def _vector(item: int) -> int:
    return 8 if item == 2 else 4


def _grid(walk: Iteration, reduced: int, count: int, each: int, item: int, gpu: Gpu) -> _Grid:
    """ATen's choice: which dimension lies along threads, which along rows of threads, and whether blocks share an output."""
    every = len(walk.sizes)
    along = reduced == every or walk.strides[1][0] < walk.strides[1][reduced]
    across, down = (each, count) if along else (count, each)
    vector, held = False, 1
    if walk.strides[1][0 if along else reduced] == item:
        if along and across > _VECTOR_LEAST and every == 1:
            vector = True
            across //= _vector(item)
        elif not along:
            held = _held(walk, reduced, item)
            across //= held
    width, height = _block(across, down, _THREADS // held)
    step_in, step_out = (width, 1) if along else (1, width)
    values = -(-each // step_in)
    height_reduces = values >= height * _FEW_VALUES or values >= _MANY_VALUES
    step_in, step_out = (step_in * height, step_out) if height_reduces else (step_in, step_out * height)
    values = -(-each // step_in)
    target = gpu.sms * (gpu.threads_per_sm // (width * height))
    blocks = -(-(count // held) // step_out)
    split = 1
    if height_reduces and values >= _MANY_VALUES and blocks <= target:
        split = max(min(-(-target // blocks), -(-values // _FEW_VALUES)), -(-values // _MANY_VALUES))
        values = -(-each // (step_in * split))
    return _Grid(count, each, values, width, height, blocks * split, split, held, vector, along, height_reduces)


def _held(walk: Iteration, reduced: int, item: int) -> int:
    """Neighbouring outputs of one thread: 4, 2 or 1, whichever divides the size and every other stride."""
    held = 4
    others = [stride // item for index, stride in enumerate(walk.strides[1]) if index != reduced]
    for number in (walk.sizes[reduced], *others):
        while held > 1 and number % held:
            held //= 2
    return held


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    widest, tallest = min(_power(across), most), min(_power(down), most)
    width = min(widest, _WARP)
    height = min(tallest, most // width)
    return min(widest, most // height), height


def _power(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def _kernel(x: Operand, walk: Iteration, reduced: int, grid: _Grid, outputs: int, gpu: Gpu, *, tag: str, path: str) -> Launch:
    resident = gpu.sms * max(1.0, gpu.threads_per_sm / max(_WARP, grid.width * grid.height))
    facts: dict[str, float] = {
        "outputs": grid.count,
        "reduced": grid.each,
        "along": grid.along,
        "values": grid.values,
        "block_width": grid.width,
        "block_height": grid.height,
        "blocks": grid.blocks,
        "split": grid.split,
        "held": grid.outputs,
        "vector": grid.vector,
        "waves": grid.blocks / resident,
        "dimensions": len(walk.sizes),
        "reduced_dimensions": reduced,
        "height_reduces": grid.height_reduces,
        "size_0": walk.sizes[0],
        "tail": grid.each % _vector(x.item_bytes) != 0,
        "chain_ns": max(1.0, grid.blocks / resident) * grid.values * _LOAD_NS,
    }
    grids = ((float(grid.blocks), float(grid.values * grid.outputs)), (float(grid.blocks), float(grid.values)))
    result = fresh((grid.count,), x.dtype)
    return Launch(REDUCE, x.numel, (x,), (result,) * outputs, facts, grids, _path(grid, reduced) + path, tag)


def _path(grid: _Grid, reduced: int) -> str:
    if grid.vector:
        return "vector"
    if grid.along:
        return "along" if reduced == 1 else "along-many"
    return f"across-{grid.outputs}"
