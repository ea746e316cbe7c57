"""Sparse gradients with the optimiser's update: `nn.EmbeddingBag` and `nn.Embedding`, kernels of a kind taken together.

SGD adds a gradient for every lookup to its row, so updates of hot rows wait for each other. Adagrad first sorts the lookups and
sums the gradients of each row, one thread after the other along a row's, and then goes over the rows several times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays
from steptime._models.lookups.forms.bag_kernels import L2_BYTES, Columns, KernelSum, Kind, Sizes, first_match, gradient_bytes
from steptime._models.lookups.forms.bag_parts import RATE, SPLIT_BYTES, over
from steptime._models.lookups.forms.bag_timed import FEW, PARTS, Growth
from steptime._models.lookups.rows import MeasuredLookups

# What a kernel's name contains, before the gradients are summed; all kernels behind that are the update's.
_MARKS = {
    "merge_sort": "sort",
    "transform_kernel": "sort",
    "Memcpy DtoD": "sort",
    "unique_by_key": "unique",
    "CompactInit": "unique",
    "Memcpy DtoH": "unique",
    "coalesceValues": "coalesce",
    "vectorized_gather": "gather",
    "elementwise_kernel<128": "weights",
    "indexFunc": "add",
}
_SORT_TILE = 2048.0  # lookups that a block sorts; passes then merge two by two, as the kernel counts of fitted rows show
_UPDATE_KERNELS = 10.0
# Half of gradients of so many bytes is still in the cache when they are summed, and how sharply: a step of a row's thread takes
# 135-175 ns below and 285-330 ns above (fit rows of embedding_bag with Adagrad).
_KEPT_BYTES, _KEPT_SHARPNESS = 28e6, 4.0


def fit(measured: MeasuredLookups, seed: int) -> KernelSum:
    """Fits to the rows of the split `fit`."""
    return KernelSum.fit(_KINDS, kinds_of, measured, seed)


def load(arrays: Arrays) -> KernelSum:
    """The form that `arrays` were taken from."""
    return KernelSum.load(_KINDS, arrays)


def kinds_of(names: Sequence[str]) -> list[str]:
    """Of a lookup's kernels, in launch order."""
    found: list[str] = []
    for name in names:
        found.append("update" if "coalesce" in found else first_match(name, _MARKS))
    return found


def _gathers(sizes: Sizes) -> Floats:
    """A gradient for every lookup, copied from its bag's; lookups without bags have their own."""
    found: Floats = np.ceil(sizes.gradients / SPLIT_BYTES) if sizes.bag else np.zeros(len(sizes.lookups))
    return found


def _gather(sizes: Sizes) -> tuple[Columns, Columns]:
    some, moved = sizes.lookups / 10, sizes.gradients / RATE
    beyond = over(sizes.gradients, L2_BYTES) / RATE
    bags = sizes.one.batch * sizes.row / RATE
    pieces = some * np.ceil(sizes.row / 512)
    crowd = sizes.share * sizes.crowded
    stream = sizes.share * sizes.streaming
    return (
        [sizes.fixed, sizes.fixed * sizes.cold, some, moved, beyond, bags * sizes.cold, pieces],
        [some * sizes.share, moved * crowd, beyond * crowd, pieces * sizes.share, beyond * stream, bags * stream],
    )


def _weighted(sizes: Sizes) -> Floats:
    return sizes.one.weighted if sizes.bag else np.zeros(len(sizes.lookups))


def _weights(sizes: Sizes) -> tuple[Columns, Columns]:
    some, moved = sizes.lookups / 10, sizes.gradients / RATE
    beyond = over(sizes.gradients, L2_BYTES) / RATE
    elements = sizes.lookups * sizes.dim / 100 * sizes.half
    crowd = sizes.share * sizes.crowded
    return (
        [sizes.fixed, moved, beyond, some, elements],
        [
            moved * sizes.share, moved * crowd, beyond * crowd, some * sizes.share, beyond * sizes.share * sizes.streaming,
            elements * sizes.share,
        ],
    )  # fmt: skip


def _adds(sizes: Sizes) -> Floats:
    return 1.0 - sizes.adagrad


def _step(sizes: Sizes) -> Floats:
    """Nanoseconds of an addition to a row that waits for the one before.

    Additions to one place in the cache wait for each other, by sectors; every 256 bytes of a row are another place, of which
    those of a wide row mostly fall together in twos. The numbers are medians by bytes of a row, over rows of embedding_bag in
    the split `fit` in which the hottest row has more than half of the lookups; half precision and 256 bytes lie between their
    two times, 6.2 and 10.9.
    """
    full = np.interp(sizes.row, (64, 128, 192, 256, 512, 640, 768, 1024), (1.78, 2.45, 4.1, 4.8, 4.95, 7.3, 9.9, 10.1))
    half = np.interp(sizes.row, (32, 64, 128, 256, 512), (3.53, 3.55, 6.05, 7.5, 10.9))
    found: Floats = np.where(sizes.half > 0, half, full) * np.maximum(sizes.row / np.where(sizes.half > 0, 512, 1024), 1.0)
    return found


def _one_row(sizes: Sizes) -> Floats:
    """Of the hottest row."""
    return sizes.hot[:, 0] * _step(sizes)


def _add(sizes: Sizes) -> tuple[Columns, Columns]:
    """Atomic additions, an element each: throughput, and hot rows beside the hottest."""
    moved, elements = sizes.gradients / RATE, sizes.lookups * sizes.dim / 100
    beyond, rows = over(sizes.gradients, L2_BYTES) / RATE, sizes.updated / RATE
    far = over(sizes.updated, L2_BYTES) / RATE
    missed = sizes.lookups * sizes.traffic.second * sizes.row / RATE
    step = _step(sizes)
    terms = [
        sizes.fixed, sizes.fixed * sizes.cold, sizes.lookups / 10, moved, moved * sizes.cold, beyond, rows, far, missed,
        elements * sizes.half, moved * sizes.half, *(sizes.hot[:, place] * step for place in (1, 3, 4)),
    ]  # fmt: skip
    crowd = sizes.share * sizes.crowded
    waiting = _one_row(sizes)
    more = [
        elements * sizes.share, moved * crowd, beyond * crowd, waiting * crowd, waiting * sizes.crowded, rows * crowd,
        over(sizes.updated, L2_BYTES / sizes.share) / RATE * crowd, missed * crowd, missed * sizes.share * sizes.streaming,
        elements * sizes.half * sizes.share,
    ]  # fmt: skip
    return terms, more


def _passes(sizes: Sizes) -> Floats:
    found: Floats = np.maximum(np.ceil(np.log2(sizes.lookups / _SORT_TILE)), 0.0)
    return found


def _sorts(sizes: Sizes) -> Floats:
    return sizes.adagrad * (4.0 + 2.0 * _passes(sizes))


def _sort(sizes: Sizes) -> tuple[Columns, Columns]:
    some, passes = sizes.lookups / 10, _passes(sizes)
    each = sizes.lookups * passes / 100
    return (
        [sizes.fixed, sizes.fixed * passes, some, each],
        [
            each * sizes.share, some * sizes.share, passes * sizes.fixed * sizes.crowded, sizes.fixed * sizes.crowded,
            passes * sizes.fixed * sizes.streaming,
        ],
    )  # fmt: skip


def _uniques(sizes: Sizes) -> Floats:
    return 3.0 * sizes.adagrad


def _unique(sizes: Sizes) -> tuple[Columns, Columns]:
    some = sizes.lookups / 10
    return (
        [sizes.fixed, some, sizes.unique / 10],
        [sizes.fixed * sizes.crowded, some * sizes.share, sizes.fixed * sizes.streaming],
    )


def _coalesces(sizes: Sizes) -> Floats:
    return sizes.adagrad


def _coalesce(sizes: Sizes) -> tuple[Columns, Columns]:
    steps, next_steps = sizes.hot[:, 0] * 10, sizes.hot[:, 3] * 10
    kept = _KEPT_BYTES / np.where(sizes.crowded > 0, sizes.share, 1.0)
    far = 1.0 / (1.0 + (kept / sizes.gradients) ** _KEPT_SHARPNESS)
    moved, rows, elements = sizes.gradients / RATE, sizes.updated / RATE, sizes.lookups * sizes.dim / 1e3
    terms = [
        sizes.fixed, steps, steps * far, steps * sizes.cold * (1.0 - sizes.bag), steps * np.ceil(sizes.dim / 128),
        steps * sizes.half, next_steps, elements, moved * far, sizes.lookups / 10, rows, sizes.unique / 10,
    ]  # fmt: skip
    more = [
        elements * sizes.share, moved * sizes.share * far, steps * sizes.crowded, steps * sizes.streaming,
        steps * sizes.streaming * far, next_steps * sizes.share, rows * sizes.share * sizes.crowded,
        sizes.unique / 10 * sizes.share, sizes.unique / 10 * sizes.share * sizes.crowded,
    ]  # fmt: skip
    return terms, more


def _updates(sizes: Sizes) -> Floats:
    return _UPDATE_KERNELS * sizes.adagrad


def _update(sizes: Sizes) -> tuple[Columns, Columns]:
    rows, elements = sizes.updated / RATE, sizes.unique * sizes.dim / 100
    crowd = sizes.share * sizes.crowded
    terms = [
        sizes.fixed, sizes.unique / 10, rows, rows * sizes.cold,
        *(over(sizes.updated, limit) / RATE for limit in (3e6, 1e7, 3e7)), elements, elements * sizes.half,
    ]  # fmt: skip
    more = [
        rows * sizes.share, rows * crowd, over(sizes.updated * sizes.share, L2_BYTES) / RATE * sizes.crowded,
        sizes.fixed * sizes.crowded, sizes.fixed * sizes.streaming, rows * sizes.share * sizes.streaming,
        sizes.unique / 10 * sizes.share,
    ]  # fmt: skip
    return terms, more


# Sums of a row's gradients take one of two times a step, by which half of the cache is nearer: trees would learn that by heart.
_KINDS = {
    "gather": Kind(_gathers, _gather, Growth(None), moved=gradient_bytes),
    "weights": Kind(_weighted, _weights, Growth(FEW)),
    "add": Kind(_adds, _add, serial=_one_row),
    "sort": Kind(_sorts, _sort, Growth(FEW, None)),
    "unique": Kind(_uniques, _unique, Growth(FEW, FEW)),
    "coalesce": Kind(_coalesces, _coalesce, Growth(None, None), spread=False),
    "update": Kind(_updates, _update, Growth(FEW, PARTS)),
}
