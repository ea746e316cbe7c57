"""`F.embedding` forward: one kernel that copies a row for every lookup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.lookups.forms.kernel_sum import Columns, KernelSizes, KernelSum, Kind, gradient_bytes
from steptime._models.lookups.forms.one_table import RATE, SPLIT_BYTES, over


def _gathers(sizes: KernelSizes) -> Floats:
    result: Floats = np.ceil(sizes.gradients / SPLIT_BYTES)
    return result


def _gather(sizes: KernelSizes) -> tuple[Columns, Columns]:
    """A block copies a row, 512 bytes at a time; rows come from memory where caches do not have them."""
    some, moved = sizes.lookups / 10, sizes.gradients / RATE
    beyond = over(sizes.gradients, sizes.l2_kept) / RATE
    sectors = sizes.one.sectors / RATE * sizes.lookups
    met, cold = sectors * sizes.traffic.met, sizes.fixed * sizes.cold
    pieces = some * np.ceil(sizes.row / 512)
    crowd, stream = sizes.share * sizes.crowded, sizes.share * sizes.streaming
    return (
        [sizes.fixed, cold, some, moved, beyond, met, pieces, cold * sizes.traffic.second],
        [some * sizes.share, moved * crowd, beyond * crowd, met * crowd, met * stream, pieces * sizes.share],
    )


@dataclass(frozen=True)
class RowsForward(KernelSum):
    """One kernel, or two where the result is large."""

    KERNELS: ClassVar[Mapping[str, Kind]] = {"gather": Kind(_gathers, _gather, moved=gradient_bytes)}
