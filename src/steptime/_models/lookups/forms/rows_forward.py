"""`F.embedding` forward: one kernel that copies a row for every lookup."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays
from steptime._models.lookups.forms.bag_kernels import L2_BYTES, Columns, KernelSum, Kind, Sizes, first_match, gradient_bytes
from steptime._models.lookups.forms.bag_parts import RATE, SPLIT_BYTES, over
from steptime._models.lookups.forms.bag_timed import FEW, Growth
from steptime._models.lookups.rows import MeasuredLookups

_MARKS = {"vectorized_gather": "gather"}


def fit(measured: MeasuredLookups, seed: int) -> KernelSum:
    """Fits to the rows of the split `fit`."""
    return KernelSum.fit(_KINDS, kinds_of, measured, seed)


def load(arrays: Arrays) -> KernelSum:
    """The form that `arrays` were taken from."""
    return KernelSum.load(_KINDS, arrays)


def kinds_of(names: Sequence[str]) -> list[str]:
    """Of a lookup's kernels."""
    return [first_match(name, _MARKS) for name in names]


def _gathers(sizes: Sizes) -> Floats:
    found: Floats = np.ceil(sizes.gradients / SPLIT_BYTES)
    return found


def _gather(sizes: Sizes) -> tuple[Columns, Columns]:
    """A block copies a row, 512 bytes at a time; rows come from memory where caches do not have them."""
    some, moved = sizes.lookups / 10, sizes.gradients / RATE
    beyond = over(sizes.gradients, L2_BYTES) / RATE
    sectors = sizes.one.sectors / RATE * sizes.lookups
    met, cold = sectors * sizes.traffic.met, sizes.fixed * sizes.cold
    pieces = some * np.ceil(sizes.row / 512)
    crowd, stream = sizes.share * sizes.crowded, sizes.share * sizes.streaming
    return (
        [sizes.fixed, cold, some, moved, beyond, met, pieces, cold * sizes.traffic.second],
        [some * sizes.share, moved * crowd, beyond * crowd, met * crowd, met * stream, pieces * sizes.share],
    )


_KINDS = {"gather": Kind(_gathers, _gather, Growth(FEW), moved=gradient_bytes)}
