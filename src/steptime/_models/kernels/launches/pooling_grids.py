"""How pooling kernels divide their work: a thread per output, or tiles of threads where channels lie side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Pairs of blocks and of what one does, as a launch has them.
Grids = tuple[tuple[float, float], ...]

_THREADS, _WARP, _SECTOR_BYTES = 256, 32, 32
# Channels-last grids: threads of a block, places of a thread along each side. Those that explain the measured times best:
# forward as in ATen, backward of the maximum, backward of adaptive means.
FORWARD = ((1024, 2), (512, 2))
BACKWARD = ((256, 16), (256, 8), (1024, 2))
SPREAD = ((1024, 2), (512, 4))


@dataclass(frozen=True, slots=True)
class Pool:
    """Samples, channels, sides of input and output, window and stride, and whether channels lie side by side."""

    samples: int
    channels: int
    side: tuple[int, int]
    result: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    last: bool
    item: int

    @property
    def planes(self) -> int:
        """Images of one channel."""
        return self.samples * self.channels

    @property
    def inputs(self) -> int:
        """Elements of an input plane."""
        return self.side[0] * self.side[1]

    @property
    def outputs(self) -> int:
        """Elements of an output plane."""
        return self.result[0] * self.result[1]

    @property
    def cell(self) -> float:
        """Inputs for each output."""
        return self.inputs / self.outputs

    @property
    def taps(self) -> int:
        """Elements of a window."""
        return self.window[0] * self.window[1]

    @property
    def overlap(self) -> float:
        """Windows that an input lies in, at least one."""
        return max(1.0, self.window[0] / self.stride[0]) * max(1.0, self.window[1] / self.stride[1])

    @property
    def facts(self) -> dict[str, float]:
        """Sizes."""
        return {
            "plane": self.inputs,
            "result_plane": self.outputs,
            "planes": self.planes,
            "columns": self.channels,
            "samples": self.samples,
            "window": self.window[0],
            "stride": self.stride[0],
            "ratio": self.side[0] / self.result[0],
            "side": self.side[0],
            "result_side": self.result[0],
            "last": self.last,
        }


def threads(pool: Pool) -> Grids:
    """A thread per output walks its window."""
    blocks = pool.planes * pool.outputs / _THREADS
    return ((blocks, float(pool.taps)), (blocks, 1.0))


def threads_backward(pool: Pool) -> Grids:
    """A thread per input meets the windows that it lies in."""
    blocks = pool.planes * pool.inputs / _THREADS
    return ((blocks, pool.overlap), (blocks, 1.0), (pool.inputs / _THREADS, float(pool.planes)))


def _longest(length: int, result: int) -> int:
    """The longest stretch of `length` that becomes one of `result`: they overlap where it does not divide."""
    return max(-(-(place + 1) * length // result) - place * length // result for place in range(result))


def adaptive_threads(pool: Pool) -> Grids:
    """A block of 32 x 8 threads per plane, several where channels are few; a thread per output walks its cell row by row."""
    high, wide = (_longest(pool.side[axis], pool.result[axis]) for axis in (0, 1))
    spread = max(1, 16 // pool.channels)
    passes = math.ceil(pool.result[1] / _WARP) * math.ceil(pool.result[0] / (8 * spread))
    blocks, sectors = float(pool.planes * spread), high * math.ceil(wide * pool.item / _SECTOR_BYTES)
    return (
        (blocks, float(sectors * passes)),
        (float(pool.planes * pool.result[0]), float(high)),
        (blocks, pool.cell),
        (float(pool.planes), float(pool.inputs)),
    )


def adaptive_threads_backward(pool: Pool) -> Grids:
    """The same threads add to every input of their cells."""
    planes = float(pool.planes)
    return (
        (planes * max(1.0, pool.outputs / _THREADS), pool.cell),
        (planes, pool.inputs / _THREADS),
        (planes * pool.outputs / _THREADS, pool.cell),
    )


def average_tiles(pool: Pool) -> Grids:
    """Channels-last means, forward and backward: several ways in which threads may share samples, channels and places."""
    samples, lanes = float(pool.samples), pool.samples * pool.channels / _WARP
    return (
        (samples, float(pool.outputs * pool.taps)),
        (samples * pool.outputs, float(pool.taps)),
        (lanes, float(pool.outputs)),
        (lanes, float(pool.inputs)),
        (samples, float(pool.inputs)),
        (samples, float(pool.result[0] * pool.taps)),
        (pool.planes * pool.outputs / 512, float(pool.taps)),
        (lanes, pool.cell),
    )


def _power(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def tiles(pool: Pool, side: tuple[int, int], each: float, ways: tuple[tuple[int, int], ...], *, widened: bool = False) -> Grids:
    """Channels-last kernels: tiles of threads over channels and both sides of the image, each with a few of every kind.

    `ways` are threads of a block at most and places of a thread along each side.
    """
    results = []
    for most, places in ways:
        blocks, serial = _tile(pool, side, most, places, widened)
        results.append((blocks, serial * each))
    blocks, serial = _tile(pool, side, *ways[0], widened)
    return (*results, (blocks, serial), (blocks, 1.0), (pool.planes * pool.inputs / 1024, 1.0))


def _tile(pool: Pool, side: tuple[int, int], most: int, places: int, widened: bool) -> tuple[float, float]:
    """Blocks, and how many channels times places a thread of one takes.

    `widened` says that threads which small sides leave over go along channels.
    """
    width = min(_power(pool.channels), _WARP)
    height = min(_power(side[1]), most // width)
    depth = max(1, min(_power(side[0]), most // width // height))
    if widened:
        width = min(_power(pool.channels), most // height // depth)
    groups = math.ceil(pool.channels / (width * 4))
    channels = math.ceil(pool.channels / (width * groups))
    across, down = math.ceil(side[1] / (height * places)), math.ceil(side[0] / (depth * places))
    serial = channels * math.ceil(side[1] / (across * height)) * math.ceil(side[0] / (down * depth))
    return float(pool.samples * groups * across * down), float(serial)
