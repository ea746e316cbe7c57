"""Sections of calls that the families' sweeps hardly draw, by name and by how much they matter to unseen models."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from steptime._models.kernels.call import Call
from steptime._models.kernels.families.grouped_products import FAMILY as GROUPED_PRODUCTS
from steptime._models.kernels.sweep import KernelSweep
from steptime_lab.measure.kernels import images, layers, layouts, many_rows, many_samples, sequences

# Shares of the calls of all sections together; a run cut short has had as much of each.
SECTIONS: dict[str, tuple[float, KernelSweep]] = {
    "layouts": (5.0, layouts.LAYOUTS),
    "convolutions": (4.0, layers.CONVOLUTIONS),
    "odd_products": (2.5, layers.PRODUCTS),
    "eight_bits_and_groups": (1.0, GROUPED_PRODUCTS.sweep),
    "casts": (0.4, layers.CASTS),
    "norms": (1.5, layers.NORMS),
    "heads": (1.2, layers.ATTENTION),
    "tables": (1.2, layers.OPTIMIZERS),
    "scans": (0.8, layouts.SCANS),
    "scatters": (0.8, layouts.SCATTERS),
    "images_and_signals": (0.8, layouts.IMAGES_AND_SIGNALS),
    "filters": (6.0, sequences.FILTERS),
    "recurrent": (1.2, sequences.RECURRENT),
    "transforms": (1.5, sequences.TRANSFORMS),
    "batch_norms": (2.0, layers.BATCH_NORMS),
    "many_lookups": (2.0, many_rows.LOOKUPS),
    "masked_heads": (0.5, layers.MASKED),
    "sorts": (0.6, many_rows.SORTS),
    "small": (2.0, many_rows.SMALL_CALLS),
    "windows": (5.0, images.WINDOWS),
    "patches": (0.5, images.PATCHES),
    "short_heads": (2.0, many_samples.SHORT_HEADS),
    "vocabularies": (1.0, many_samples.VOCABULARIES),
    "narrow_products": (1.5, many_samples.NARROW),
}


def section_calls(names: Sequence[str], count: int, seed: int) -> Iterator[Call]:
    """So many calls of some sections, each by its share, spread evenly from the first to the last."""
    total = sum(SECTIONS[name][0] for name in names)
    placed = []
    for name in names:
        share, sweep = SECTIONS[name]
        each = max(1, round(count * share / total))
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        placed += [((place + 0.5) / each, name, call) for place, call in enumerate(sweep(random, each))]
    for _, _, call in sorted(placed, key=lambda item: item[:2]):
        yield call
