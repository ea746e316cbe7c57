"""The parts of the table-batched backward pass: which kernels belong to each, how many they are, what rows measured of it."""

from __future__ import annotations

import numpy as np

from steptime._lookups.columns import Floats
from steptime._models.lookups.forms.batched_backward.sizes import Sizes
from steptime._models.lookups.rows import MeasuredLookups

LINEARIZE, PREPARE, PASSES, GATHER, UPDATE, LEVELS = range(6)
PARTS = ("linearize", "sort_prepare", "sort_passes", "gather", "update", "update_levels")
"""Keys of all lookups; what a sort does around its passes; the passes; infos in sorted order; the first level; all others."""

# What kernels of a part have in their names, first match first; all other kernels are around the passes of the sort.
_WORDS = (
    ("table_batched_linearize", LINEARIZE),
    ("table_batched_update", UPDATE),
    ("_scatter_gather_elementwise_kernel", GATHER),
    ("DeviceRadixSortOnesweepKernel", PASSES),
    ("radixSortKVInPlace", PASSES),
)


def part_of(name: str) -> int:
    """The part of a kernel; that of the update kernel is its first level's."""
    return next((part for word, part in _WORDS if word in name), PREPARE)


def measured_parts(measured: MeasuredLookups) -> Floats:
    """Time of each part, ns, [lookups, parts]; parts without a kernel have 0.

    Kernels are measured by their medians, which add up to the median of the whole but for a percent: here they do.
    """
    found = np.zeros((len(measured), len(PARTS)))
    known: dict[str, int] = {}
    for row, names, times in zip(found, measured.kernel_names, measured.kernel_ns, strict=True):
        walked = False
        for name, time in zip(names, times, strict=True):
            part = known.setdefault(name, part_of(name))
            row[LEVELS if part == UPDATE and walked else part] += time
            walked = walked or part == UPDATE
    scaled: Floats = found * (measured.time_ns / np.maximum(found.sum(axis=1), 1.0))[:, None]
    return scaled


def numbers(sizes: Sizes) -> Floats:
    """Kernels of each part, [lookups, parts]: none at all where nothing is looked up."""
    one, small = np.ones_like(sizes.lookups), sizes.small_sort
    # A pass sorts by eight bits of the keys; memory is set before each, and twice before the first.
    passes = np.where(small > 0, 1.0, 4.0 * (1 + sizes.long_keys))
    # Three copies and a fill; or a copy, a fill, two settings, a histogram and its sums.
    prepare = np.where(small > 0, 4.0, 6.0 + passes)
    found = np.stack([one, prepare, passes, one + sizes.weighted, one, sizes.levels - 1], axis=1)
    return found * sizes.any[:, None]
