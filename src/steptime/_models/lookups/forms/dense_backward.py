"""Dense gradients with the optimiser's update: `nn.EmbeddingBag` and `nn.Embedding`, kernels of a kind taken together.

The gradient has all rows of the table: it is filled with zeros, lookups are sorted and the gradients of each row are summed in
segments of ten, and the optimiser then goes over the whole table. Few lookups without bags take one kernel instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays
from steptime._models.lookups.forms.bag_kernels import L2_BYTES, Columns, KernelSum, Kind, Sizes, first_match
from steptime._models.lookups.forms.bag_parts import RATE, over
from steptime._models.lookups.forms.bag_timed import FEW, Growth
from steptime._models.lookups.rows import MeasuredLookups

_MARKS = {
    "arange": "sort",
    "radix_sort": "sort",
    "Memset": "sort",
    "FillFunctor": "fill",
    "krn_partial_segment_offset": "offsets",
    "compute_grad_weight": "segments",
    "sum_and_scatter": "scatter",
    "embedding_backward_feature": "features",
    "multi_tensor_apply": "update",
    "unique_by_key": "unique",
    "scan::Device": "unique",
    "krn_partials_per_segment": "unique",
    "compute_num_of_partial_segments": "unique",
}
_UNSORTED = 3072.0  # lookups without bags up to which ATen takes one kernel
_TILE = 2048.0  # lookups that one block sorts by itself: fit rows have up to 1,990 with one block, and 2,760 without
_CHUNK, _CHUNKS = 65536.0, 320.0  # elements of a block of the optimiser's kernels, and blocks of a launch
_ADAGRAD_KERNELS = 5.0
# A step of a row's sum, where the kernel before touched fewer and where it touched more than so many bytes, and how sharply one
# turns into the other: rows in the splits `fit` and `validation` whose hottest row has thousands of lookups.
_NEAR_NS, _FAR_NS = 49.0, 98.0
_NEAR_BYTES, _NEAR_SHARPNESS = 68e6, 6.0


def fit(measured: MeasuredLookups, seed: int) -> KernelSum:
    """Fits to the rows of the split `fit`."""
    return KernelSum.fit(_KINDS, kinds_of, measured, seed)


def load(arrays: Arrays) -> KernelSum:
    """The form that `arrays` were taken from."""
    return KernelSum.load(_KINDS, arrays)


def kinds_of(names: Sequence[str]) -> list[str]:
    """Of a lookup's kernels, in launch order."""
    return [first_match(name, _MARKS) for name in names]


def _table(sizes: Sizes) -> Floats:
    """Bytes of the table."""
    return np.maximum(sizes.one.tables.rows, 1.0) * sizes.row


def _sorted(sizes: Sizes) -> Floats:
    if sizes.bag:
        return np.ones(len(sizes.lookups))
    return (sizes.lookups > _UNSORTED).astype(np.float64)


def _sorts(sizes: Sizes) -> Floats:
    """An arange; then one kernel, or two memsets, a histogram, its sums, and eight passes with a memset each."""
    return _sorted(sizes) * np.where(sizes.lookups <= _TILE, 2.0, 21.0)


def _sort(sizes: Sizes) -> tuple[Columns, Columns]:
    single = (sizes.lookups <= _TILE).astype(np.float64)
    many, some = 1.0 - single, sizes.lookups / 10
    return (
        [
            sizes.fixed * single, sizes.fixed * many, some * single, some * many, over(sizes.lookups, 3e4) / 10,
            over(sizes.lookups, 2.5e5) / 10, np.log(sizes.lookups) * 1e3 * many,
        ],
        [some * many * sizes.share, sizes.fixed * sizes.crowded],
    )  # fmt: skip


def _fills(sizes: Sizes) -> Floats:
    return np.ones(len(sizes.lookups))


def _fill(sizes: Sizes) -> tuple[Columns, Columns]:
    table = _table(sizes)
    filled = table / RATE
    return (
        [sizes.fixed, filled, over(table, 1e7) / RATE, over(table, L2_BYTES) / RATE],
        [filled * sizes.share, filled * sizes.share * sizes.crowded],
    )


def _uniques(sizes: Sizes) -> Floats:
    return 6.0 * _sorted(sizes)


def _unique(sizes: Sizes) -> tuple[Columns, Columns]:
    some = sizes.lookups / 10
    return [sizes.fixed, some, sizes.unique / 10], [some * sizes.share, sizes.fixed * sizes.crowded]


def _segments_of(sizes: Sizes) -> Floats:
    """Of ten lookups of a row, or what is left of them."""
    tables = sizes.one.tables
    counts = tables.bin_lookups / np.maximum(tables.bin_rows, 1e-9)
    # Counts within a bin are of any remainder: half a segment more than the lookups fill, but one of a single lookup is one.
    each = np.where(counts <= 10, 1.0, counts / 10 + 0.45)
    found: Floats = np.maximum((tables.bin_rows * each).sum(axis=1), 1.0)
    return found


def _offsets(sizes: Sizes) -> tuple[Columns, Columns]:
    """A thread writes where a row's segments begin, one after the other."""
    hottest = sizes.hot[:, 0]
    return (
        [sizes.fixed, hottest / 10, sizes.unique / 10, _segments_of(sizes) / 10, over(hottest, 1e4) / 10],
        [hottest / 10 * sizes.crowded, sizes.unique / 10 * sizes.share],
    )


def _most(sizes: Sizes) -> Floats:
    """Rows that could have been looked up: kernels are launched with a block for each."""
    found: Floats = np.minimum(sizes.lookups, sizes.one.tables.rows)
    return found


def _read(sizes: Sizes) -> Floats:
    """Bytes of gradients: of bags, or of lookups without bags."""
    return sizes.one.batch * sizes.row if sizes.bag else sizes.gradients


def _segments(sizes: Sizes) -> tuple[Columns, Columns]:
    """Sums of segments: a block for each that there could be; those there are walk ten lookups."""
    segments, blocks = _segments_of(sizes), sizes.lookups / 10 + _most(sizes)
    moved, sums = sizes.gradients / RATE, segments * sizes.dim * 4 / RATE
    read = _read(sizes)
    return (
        [
            sizes.fixed, blocks, segments, segments * np.ceil(sizes.dim / 128), sizes.lookups / 10, moved, sums,
            read / RATE * sizes.cold, moved * read / (read + L2_BYTES), sizes.fixed * sizes.cold, moved * sizes.half,
            sizes.fixed * np.minimum(sizes.hot[:, 0] / 10, 1.0),
        ],
        [moved * sizes.share, sums * sizes.share, blocks * sizes.share, moved * sizes.share * sizes.crowded],
    )  # fmt: skip


def _hottest_sum(sizes: Sizes) -> Floats:
    """A row's segments are summed one after the other: the hottest row's are waited for."""
    sums = _segments_of(sizes) * np.ceil(sizes.dim / 32) * 128  # float32, of whole warps
    touched = 2 * sums + _read(sizes) + 16 * sizes.lookups
    far = 1.0 / (1.0 + (_NEAR_BYTES / touched) ** _NEAR_SHARPNESS)
    found: Floats = sizes.hot[:, 0] / 10 * (_NEAR_NS + (_FAR_NS - _NEAR_NS) * far)
    return found


def _scatter(sizes: Sizes) -> tuple[Columns, Columns]:
    """A block for each row that there could be, and those that there are walk their segments."""
    blocks, sums = _most(sizes), _segments_of(sizes) * sizes.dim * 4
    rows = sizes.updated / RATE
    return (
        [
            sizes.fixed, blocks, sums / RATE, over(sums, L2_BYTES) / RATE, rows, over(sizes.updated, L2_BYTES) / RATE,
            sizes.unique, sizes.hot[:, 3], sizes.fixed * np.minimum(sizes.hot[:, 0] / 10, 1.0),
        ],
        [rows * sizes.share, blocks * sizes.share, sums / RATE * sizes.share],
    )  # fmt: skip


def _unsorted(sizes: Sizes) -> Floats:
    return 1.0 - _sorted(sizes)


def _features(sizes: Sizes) -> tuple[Columns, Columns]:
    """All lookups one after the other, in a block for 32 elements of a row each; the gradient is read and written."""
    some, rows = sizes.lookups / 10, sizes.unique / 10
    far = _table(sizes) / (_table(sizes) + L2_BYTES)
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


def _launches(sizes: Sizes) -> Floats:
    found: Floats = np.ceil(_table(sizes) / sizes.one.item / (_CHUNK * _CHUNKS))
    return found


def _updates(sizes: Sizes) -> Floats:
    return _launches(sizes) * np.where(sizes.adagrad > 0, _ADAGRAD_KERNELS, 1.0)


def _chilled(sizes: Sizes) -> Floats:
    """How much of what was in the cache before is not when the optimiser begins: what kernels before it touch drives it out."""
    touched = _segments_of(sizes) * sizes.dim * 4 + 40 * sizes.lookups + sizes.gradients * (1.0 - sizes.bag)
    found: Floats = np.maximum(sizes.cold, touched / (touched + L2_BYTES))
    return found


def _update(sizes: Sizes) -> tuple[Columns, Columns]:
    """Blocks of a chunk each: a small table waits for one of them, a large one for memory."""
    table, chilled = _table(sizes), _chilled(sizes)
    elements = table / sizes.one.item
    terms: Columns = []
    path = np.minimum(elements, _CHUNK) / _CHUNK * 1e4
    waves = np.minimum(np.ceil(elements / _CHUNK), _CHUNKS) / sizes.one.sms * 1e4
    for kind in (sizes.adagrad, 1.0 - sizes.adagrad):
        terms += [
            _launches(sizes) * 1e3 * kind, path * kind, table / RATE * kind, over(table, 8e6) / RATE * kind,
            over(table, L2_BYTES) / RATE * kind, np.minimum(table, L2_BYTES) / RATE * chilled * kind, path * chilled * kind,
            waves * kind,
        ]  # fmt: skip
    # Few rows of half precision were measured, fewer of them with Adagrad: what they add is one for both.
    terms += [path * sizes.half, table / RATE * sizes.half]
    return terms, [table / RATE * sizes.share, table / RATE * sizes.share * sizes.crowded]


# A hundred and seventy rows each: only sums of many small kernels gain from trees (validation rows).
_PHYSICS = Growth(None, None)
_KINDS = {
    "sort": Kind(_sorts, _sort, _PHYSICS),
    "fill": Kind(_fills, _fill, _PHYSICS),
    "unique": Kind(_uniques, _unique, Growth(FEW, None)),
    "offsets": Kind(_sorted, _offsets, _PHYSICS, spread=False),
    "segments": Kind(_sorted, _segments, _PHYSICS),
    "scatter": Kind(_sorted, _scatter, _PHYSICS, serial=_hottest_sum),
    "features": Kind(_unsorted, _features, _PHYSICS, spread=False),
    "update": Kind(_updates, _update, _PHYSICS),
}
