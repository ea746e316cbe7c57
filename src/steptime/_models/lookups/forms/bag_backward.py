"""Sparse gradients with the optimiser's update: `nn.EmbeddingBag` and `nn.Embedding`, kernels of a kind taken together.

SGD adds a gradient for every lookup to its row, so updates of hot rows wait for each other. Adagrad first sorts the lookups and
sums the gradients of each row, one thread after the other along a row's, and then goes over the rows several times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.lookups.forms.kernel_sum import Columns, KernelSizes, KernelSum, Kind, gradient_bytes
from steptime._models.lookups.forms.one_table import RATE, SPLIT_BYTES, over

_SORT_TILE = 2048.0  # lookups that a block sorts; passes then merge two by two, as the kernel counts of fitted rows show
_UPDATE_KERNELS = 10.0
_KEPT_SHARPNESS = 4.0  # of the share of gradients that is still in the cache when they are summed, over their bytes


def _gathers(sizes: KernelSizes) -> Floats:
    """A gradient for every lookup, copied from its bag's; lookups without bags have their own."""
    result: Floats = np.ceil(sizes.gradients / SPLIT_BYTES) if sizes.bag else np.zeros(len(sizes.lookups))
    return result


def _gather(sizes: KernelSizes) -> tuple[Columns, Columns]:
    some, moved = sizes.lookups / 10, sizes.gradients / RATE
    beyond = over(sizes.gradients, sizes.l2_kept) / RATE
    bags = sizes.one.batch * sizes.row / RATE
    pieces = some * np.ceil(sizes.row / 512)
    crowd = sizes.share * sizes.crowded
    stream = sizes.share * sizes.streaming
    return (
        [sizes.fixed, sizes.fixed * sizes.cold, some, moved, beyond, bags * sizes.cold, pieces],
        [some * sizes.share, moved * crowd, beyond * crowd, pieces * sizes.share, beyond * stream, bags * stream],
    )


def _weights(sizes: KernelSizes) -> tuple[Columns, Columns]:
    some, moved = sizes.lookups / 10, sizes.gradients / RATE
    beyond = over(sizes.gradients, sizes.l2_kept) / RATE
    elements = sizes.lookups * sizes.dim / 100 * sizes.half
    crowd = sizes.share * sizes.crowded
    return (
        [sizes.fixed, moved, beyond, some, elements],
        [
            moved * sizes.share, moved * crowd, beyond * crowd, some * sizes.share, beyond * sizes.share * sizes.streaming,
            elements * sizes.share,
        ],
    )  # fmt: skip


def _step(sizes: KernelSizes) -> Floats:
    """Nanoseconds of an addition to a row that waits for the one before.

    Additions to one place in the cache wait for each other, by sectors; every 256 bytes of a row are another place, of which
    those of a wide row mostly fall together in twos. The numbers are medians by bytes of a row, over rows of embedding_bag in
    the split `fit` in which the hottest row has more than half of the lookups; half precision and 256 bytes lie between their
    two times, 6.2 and 10.9.
    """
    full = np.interp(sizes.row, (64, 128, 192, 256, 512, 640, 768, 1024), (1.78, 2.45, 4.1, 4.8, 4.95, 7.3, 9.9, 10.1))
    half = np.interp(sizes.row, (32, 64, 128, 256, 512), (3.53, 3.55, 6.05, 7.5, 10.9))
    result: Floats = np.where(sizes.half > 0, half, full) * np.maximum(sizes.row / np.where(sizes.half > 0, 512, 1024), 1.0)
    return result


def _one_row(sizes: KernelSizes) -> Floats:
    """Of the hottest row."""
    return sizes.hot[:, 0] * _step(sizes)


def _add(sizes: KernelSizes) -> tuple[Columns, Columns]:
    """Atomic additions, an element each: throughput, and hot rows beside the hottest."""
    moved, elements = sizes.gradients / RATE, sizes.lookups * sizes.dim / 100
    beyond, rows = over(sizes.gradients, sizes.l2_kept) / RATE, sizes.updated / RATE
    far = over(sizes.updated, sizes.l2_kept) / RATE
    missed = sizes.lookups * sizes.traffic.second * sizes.row / RATE
    step = _step(sizes)
    terms = [
        sizes.fixed, sizes.fixed * sizes.cold, sizes.lookups / 10, moved, moved * sizes.cold, beyond, rows, far, missed,
        elements * sizes.half, moved * sizes.half, *(sizes.hot[:, index] * step for index in (1, 3, 4)),
    ]  # fmt: skip
    crowd = sizes.share * sizes.crowded
    waiting = _one_row(sizes)
    more = [
        elements * sizes.share, moved * crowd, beyond * crowd, waiting * crowd, waiting * sizes.crowded, rows * crowd,
        over(sizes.updated, sizes.l2_kept / sizes.share) / RATE * crowd, missed * crowd, missed * sizes.share * sizes.streaming,
        elements * sizes.half * sizes.share,
    ]  # fmt: skip
    return terms, more


def _passes(sizes: KernelSizes) -> Floats:
    result: Floats = np.maximum(np.ceil(np.log2(sizes.lookups / _SORT_TILE)), 0.0)
    return result


def _sort(sizes: KernelSizes) -> tuple[Columns, Columns]:
    some, passes = sizes.lookups / 10, _passes(sizes)
    each = sizes.lookups * passes / 100
    return (
        [sizes.fixed, sizes.fixed * passes, some, each],
        [
            each * sizes.share, some * sizes.share, passes * sizes.fixed * sizes.crowded, sizes.fixed * sizes.crowded,
            passes * sizes.fixed * sizes.streaming,
        ],
    )  # fmt: skip


def _unique(sizes: KernelSizes) -> tuple[Columns, Columns]:
    some = sizes.lookups / 10
    return (
        [sizes.fixed, some, sizes.unique / 10],
        [sizes.fixed * sizes.crowded, some * sizes.share, sizes.fixed * sizes.streaming],
    )


def _coalesce(sizes: KernelSizes) -> tuple[Columns, Columns]:
    steps, next_steps = sizes.hot[:, 0] * 10, sizes.hot[:, 3] * 10
    kept = sizes.device.summed_kept_bytes / np.where(sizes.crowded > 0, sizes.share, 1.0)
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


def _update(sizes: KernelSizes) -> tuple[Columns, Columns]:
    rows, elements = sizes.updated / RATE, sizes.unique * sizes.dim / 100
    crowd = sizes.share * sizes.crowded
    terms = [
        sizes.fixed, sizes.unique / 10, rows, rows * sizes.cold,
        *(over(sizes.updated, limit) / RATE for limit in (3e6, 1e7, 3e7)), elements, elements * sizes.half,
    ]  # fmt: skip
    more = [
        rows * sizes.share, rows * crowd, over(sizes.updated * sizes.share, sizes.l2_kept) / RATE * sizes.crowded,
        sizes.fixed * sizes.crowded, sizes.fixed * sizes.streaming, rows * sizes.share * sizes.streaming,
        sizes.unique / 10 * sizes.share,
    ]  # fmt: skip
    return terms, more


@dataclass(frozen=True)
class BagBackward(KernelSum):
    """Gathered and weighted gradients are added to the rows (SGD), or sorted, summed and applied row by row (Adagrad)."""

    KERNELS: ClassVar[Mapping[str, Kind]] = {
        "gather": Kind(_gathers, _gather, moved=gradient_bytes),
        "weights": Kind(lambda sizes: sizes.one.weighted * sizes.bag, _weights),
        "add": Kind(lambda sizes: 1.0 - sizes.adagrad, _add, serial=_one_row),
        "sort": Kind(lambda sizes: sizes.adagrad * (4.0 + 2.0 * _passes(sizes)), _sort),
        "unique": Kind(lambda sizes: 3.0 * sizes.adagrad, _unique),
        "coalesce": Kind(lambda sizes: sizes.adagrad, _coalesce, spread=False),
        "update": Kind(lambda sizes: _UPDATE_KERNELS * sizes.adagrad, _update),
    }
