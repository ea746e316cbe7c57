"""Dense gradients with the optimiser's update: `nn.EmbeddingBag` and `nn.Embedding`, kernels of a kind taken together.

The gradient has all rows of the table: it is filled with zeros, lookups are sorted and the gradients of each row are summed in
segments of ten, and the optimiser then goes over the whole table. Few lookups without bags take one kernel instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.lookups.forms.kernel_sum import Columns, KernelSizes, KernelSum, Kind
from steptime._models.lookups.forms.one_table import RATE, over

_UNSORTED = 3072.0  # lookups without bags up to which ATen takes one kernel
_TILE = 2048.0  # lookups that one block sorts by itself: fit rows have up to 1,990 with one block, and 2,760 without
_CHUNK, _CHUNKS = 65536.0, 320.0  # elements of a block of the optimiser's kernels, and blocks of a launch
_ADAGRAD_KERNELS = 5.0
_NEAR_SHARPNESS = 6.0  # of how one time of a step of a row's sum turns into the other, over bytes touched before


def _table(sizes: KernelSizes) -> Floats:
    """Bytes of the table."""
    return np.maximum(sizes.one.tables.rows, 1.0) * sizes.row


def _sorted(sizes: KernelSizes) -> Floats:
    if sizes.bag:
        return np.ones(len(sizes.lookups))
    return (sizes.lookups > _UNSORTED).astype(np.float64)


def _sorts(sizes: KernelSizes) -> Floats:
    """An arange; then one kernel, or two memsets, a histogram, its sums, and eight passes with a memset each."""
    return _sorted(sizes) * np.where(sizes.lookups <= _TILE, 2.0, 21.0)


def _sort(sizes: KernelSizes) -> tuple[Columns, Columns]:
    single = (sizes.lookups <= _TILE).astype(np.float64)
    many, some = 1.0 - single, sizes.lookups / 10
    return (
        [
            sizes.fixed * single, sizes.fixed * many, some * single, some * many, over(sizes.lookups, 3e4) / 10,
            over(sizes.lookups, 2.5e5) / 10, np.log(sizes.lookups) * 1e3 * many,
        ],
        [some * many * sizes.share, sizes.fixed * sizes.crowded],
    )  # fmt: skip


def _fill(sizes: KernelSizes) -> tuple[Columns, Columns]:
    table = _table(sizes)
    filled = table / RATE
    return (
        [sizes.fixed, filled, over(table, 1e7) / RATE, over(table, sizes.l2_kept) / RATE],
        [filled * sizes.share, filled * sizes.share * sizes.crowded],
    )


def _unique(sizes: KernelSizes) -> tuple[Columns, Columns]:
    some = sizes.lookups / 10
    return [sizes.fixed, some, sizes.unique / 10], [some * sizes.share, sizes.fixed * sizes.crowded]


def _segments_of(sizes: KernelSizes) -> Floats:
    """Of ten lookups of a row, or what is left of them."""
    tables = sizes.one.tables
    counts = tables.bin_lookups / np.maximum(tables.bin_rows, 1e-9)
    # Counts within a bin are of any remainder: half a segment more than the lookups fill, but one of a single lookup is one.
    each = np.where(counts <= 10, 1.0, counts / 10 + 0.45)
    result: Floats = np.maximum((tables.bin_rows * each).sum(axis=1), 1.0)
    return result


def _offsets(sizes: KernelSizes) -> tuple[Columns, Columns]:
    """A thread writes where a row's segments begin, one after the other."""
    hottest = sizes.hot[:, 0]
    return (
        [sizes.fixed, hottest / 10, sizes.unique / 10, _segments_of(sizes) / 10, over(hottest, 1e4) / 10],
        [hottest / 10 * sizes.crowded, sizes.unique / 10 * sizes.share],
    )


def _most(sizes: KernelSizes) -> Floats:
    """Rows that could have been looked up: kernels are launched with a block for each."""
    result: Floats = np.minimum(sizes.lookups, sizes.one.tables.rows)
    return result


def _read(sizes: KernelSizes) -> Floats:
    """Bytes of gradients: of bags, or of lookups without bags."""
    return sizes.one.batch * sizes.row if sizes.bag else sizes.gradients


def _segments(sizes: KernelSizes) -> tuple[Columns, Columns]:
    """Sums of segments: a block for each that there could be; those there are walk ten lookups."""
    segments, blocks = _segments_of(sizes), sizes.lookups / 10 + _most(sizes)
    moved, sums = sizes.gradients / RATE, segments * sizes.dim * 4 / RATE
    read = _read(sizes)
    return (
        [
            sizes.fixed, blocks, segments, segments * np.ceil(sizes.dim / 128), sizes.lookups / 10, moved, sums,
            read / RATE * sizes.cold, moved * read / (read + sizes.l2_kept), sizes.fixed * sizes.cold, moved * sizes.half,
            sizes.fixed * np.minimum(sizes.hot[:, 0] / 10, 1.0),
        ],
        [moved * sizes.share, sums * sizes.share, blocks * sizes.share, moved * sizes.share * sizes.crowded],
    )  # fmt: skip


def _hottest_sum(sizes: KernelSizes) -> Floats:
    """A row's segments are summed one after the other: the hottest row's are waited for."""
    sums = _segments_of(sizes) * np.ceil(sizes.dim / 32) * 128  # float32, of whole warps
    touched = 2 * sums + _read(sizes) + 16 * sizes.lookups
    far = 1.0 / (1.0 + (sizes.device.scattered_kept_bytes / touched) ** _NEAR_SHARPNESS)
    result: Floats = sizes.hot[:, 0] / 10 * (sizes.device.near_ns + (sizes.device.far_ns - sizes.device.near_ns) * far)
    return result


def _scatter(sizes: KernelSizes) -> tuple[Columns, Columns]:
    """A block for each row that there could be, and those that there are walk their segments."""
    blocks, sums = _most(sizes), _segments_of(sizes) * sizes.dim * 4
    rows = sizes.updated / RATE
    return (
        [
            sizes.fixed, blocks, sums / RATE, over(sums, sizes.l2_kept) / RATE, rows, over(sizes.updated, sizes.l2_kept) / RATE,
            sizes.unique, sizes.hot[:, 3], sizes.fixed * np.minimum(sizes.hot[:, 0] / 10, 1.0),
        ],
        [rows * sizes.share, blocks * sizes.share, sums / RATE * sizes.share],
    )  # fmt: skip


def _features(sizes: KernelSizes) -> tuple[Columns, Columns]:
    """All lookups one after the other, in a block for 32 elements of a row each; the gradient is read and written."""
    some, rows = sizes.lookups / 10, sizes.unique / 10
    far = _table(sizes) / (_table(sizes) + sizes.l2_kept)
    return (
        [
            sizes.fixed,
            some,
            some * sizes.cold,
            some * far,
            sizes.hot[:, 0] / 10,
            rows,
            rows * far,
            sizes.gradients / RATE,
        ],
        [some * sizes.crowded, sizes.fixed * sizes.crowded],
    )


def _launches(sizes: KernelSizes) -> Floats:
    result: Floats = np.ceil(_table(sizes) / sizes.one.item / (_CHUNK * _CHUNKS))
    return result


def _chilled(sizes: KernelSizes) -> Floats:
    """How much of what was in the cache before is not when the optimiser begins: what kernels before it touch drives it out."""
    touched = _segments_of(sizes) * sizes.dim * 4 + 40 * sizes.lookups + sizes.gradients * (1.0 - sizes.bag)
    result: Floats = np.maximum(sizes.cold, touched / (touched + sizes.l2_kept))
    return result


def _update(sizes: KernelSizes) -> tuple[Columns, Columns]:
    """Blocks of a chunk each: a small table waits for one of them, a large one for memory."""
    table, chilled, kept = _table(sizes), _chilled(sizes), sizes.l2_kept
    elements = table / sizes.one.item
    terms: Columns = []
    path = np.minimum(elements, _CHUNK) / _CHUNK * 1e4
    waves = np.minimum(np.ceil(elements / _CHUNK), _CHUNKS) / sizes.one.sms * 1e4
    for kind in (sizes.adagrad, 1.0 - sizes.adagrad):
        terms += [
            _launches(sizes) * 1e3 * kind, path * kind, table / RATE * kind, over(table, 8e6) / RATE * kind,
            over(table, kept) / RATE * kind, np.minimum(table, kept) / RATE * chilled * kind, path * chilled * kind,
            waves * kind,
        ]  # fmt: skip
    # Few rows of half precision were measured, fewer of them with Adagrad: what they add is one for both.
    terms += [path * sizes.half, table / RATE * sizes.half]
    return terms, [table / RATE * sizes.share, table / RATE * sizes.share * sizes.crowded]


@dataclass(frozen=True)
class DenseBackward(KernelSum):
    """Sorted lookups are summed in segments and scattered; few lookups without bags take one kernel instead."""

    KERNELS: ClassVar[Mapping[str, Kind]] = {
        "sort": Kind(_sorts, _sort),
        "fill": Kind(lambda sizes: np.ones(len(sizes.lookups)), _fill),
        "unique": Kind(lambda sizes: 6.0 * _sorted(sizes), _unique),
        "offsets": Kind(_sorted, _offsets, spread=False),
        "segments": Kind(_sorted, _segments),
        "scatter": Kind(_sorted, _scatter, serial=_hottest_sum),
        "features": Kind(lambda sizes: 1.0 - _sorted(sizes), _features, spread=False),
        "update": Kind(lambda sizes: _launches(sizes) * np.where(sizes.adagrad > 0, _ADAGRAD_KERNELS, 1.0), _update),
    }
