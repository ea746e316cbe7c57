"""Products of groups of rows with a matrix each, in one launch (`_grouped_mm`): by the tiles of CUTLASS's kernels.

A kernel prepares the groups' shapes and addresses; then blocks take tile after tile of all groups. Tiles are 128 x 256 where a
group's result is larger than 128 both ways, else 64 x 128 (aten/src/ATen/native/cuda/GroupMM.cu), and two blocks, one below the
other, work on neighbours: a group's rows count in pairs of tiles. Groups are taken for even.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._models.kernels.forms.matmul.products import Column, Products
from steptime._models.kernels.question import Answer, LaunchTime

_PREPARE, _MAIN = "prepare_grouped_gemm_data", "grouped_gemm"
_SAME = 2  # of `others`: they do the same, and memory is divided too
_LARGE_ABOVE = 128
_LARGE, _SMALL = (128, 256, 64), (64, 128, 128)  # rows and columns of a tile, and terms of a step
_CLUSTER = 2
_SHARPNESS = 4.0  # how soon the longer of two bounds counts alone


@dataclass(frozen=True)
class GroupedConstants:
    """Of the device that the kernels run on."""

    sms: float
    prepare_ns: float
    launch_ns: float
    group_ns: float
    bytes_per_ns: float
    large_step_ns: float  # of a block: one step of a tile, and what a tile takes besides
    large_tile_ns: float
    small_step_ns: float
    small_tile_ns: float


def answers_of(products: Products, device: GroupedConstants) -> list[Answer]:
    """What each launches and how long that takes; all have a batch of even groups."""
    times = _main_ns(products, device)
    return [Answer((LaunchTime(_PREPARE, device.prepare_ns), LaunchTime(_MAIN, float(each)))) for each in times]


def _main_ns(products: Products, device: GroupedConstants) -> Column:
    m, n, k, groups = (each.astype(np.float64) for each in (products.m, products.n, products.k, products.batch))
    large = np.minimum(m, n) > _LARGE_ABOVE
    high, wide, deep = (np.where(large, *sizes) for sizes in zip(_LARGE, _SMALL, strict=True))
    tiles = groups * np.ceil(m / (_CLUSTER * high)) * _CLUSTER * np.ceil(n / wide)
    step = np.where(large, device.large_step_ns, device.small_step_ns)
    each = np.ceil(k / deep) * step + np.where(large, device.large_tile_ns, device.small_tile_ns)
    computed = np.ceil(tiles / np.maximum(1.0, device.sms // products.share)) * each
    nbytes = groups * (m * k + k * n + m * n) * products.element_bytes
    moved = nbytes * np.where(products.others == _SAME, products.share, 1) / device.bytes_per_ns
    bound: Column = (computed**_SHARPNESS + moved**_SHARPNESS) ** (1 / _SHARPNESS)
    return device.launch_ns + device.group_ns * groups + bound
