"""Matrix products at the limits of a device: tiles of the result, one after another on every SM, or a bit of each on all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steptime._hardware.device import DeviceLimits
from steptime._platforms.analytic.work import Product


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: int
    columns: int
    reached: float  # of the rate that the largest tiles reach


# Sizes in the kernel names of libraries for both architectures. A small tile loads more per operation; the fractions are the
# operations per byte of its operands against the largest tile's, to the power of 1/3.
_SIZES = (
    (256, 128),
    (128, 256),
    (192, 128),
    (128, 192),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
    (32, 32),
)
_LARGEST = 256 * 128 / (256 + 128)
_TILES = tuple(_Tile(a, b, (a * b / (a + b) / _LARGEST) ** (1 / 3)) for a, b in _SIZES)
# Blocks that share the sum over k of one tile, where the tiles are fewer than the SMs.
_SPLITS = (1, 2, 4, 8, 16)
_LEAST_K = 128  # of each of them


def product_ns(
    limits: DeviceLimits, product: Product, flop_per_s: float, cache_bytes_per_s: float, *, whole_waves: bool
) -> float:
    """What the operations take with the tile that takes the least.

    With `whole_waves` the last round of tiles over the SMs takes as long as a full one; else tiles are divided until all SMs
    end together, as libraries for Hopper do.
    """
    sms = limits.sms.value
    of_one_sm = flop_per_s / sms
    result = math.inf
    for tile in _TILES:
        tiles = product.batch * math.ceil(product.m / tile.rows) * math.ceil(product.n / tile.columns)
        for split in _SPLITS:
            if split > 1 and (product.k < split * _LEAST_K or tiles * split > 2 * sms):
                break
            waves = tiles * split / sms
            rounds = math.ceil(waves) if whole_waves else max(1.0, waves)
            each_s = 2.0 * tile.rows * tile.columns * math.ceil(product.k / split) / (of_one_sm * tile.reached)
            # Partial sums in single precision, written and read once.
            joined_s = 0.0 if split == 1 else 8.0 * split * product.batch * product.m * product.n / cache_bytes_per_s
            result = min(result, rounds * each_s + joined_s)
    return 1e9 * result * product.share
