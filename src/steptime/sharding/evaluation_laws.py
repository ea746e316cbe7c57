"""What ranks do to each other's lookups and exchanges besides waiting: laws that a step played kernel by kernel leaves out.

Both have a form that was found on measured sharding tasks and constants that come from other measured sets. Steps whose plans
are balanced hardly tell the ways of sharing a GPU apart: of lookups in profiled steps, `all busy` is off by 7 % on average and
`shared memory` by 12; under the uneven plans of the sharding tasks, whole steps are off by 5.5 and 3.6 % (`validate sharding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime.build.dlrm import Dlrm
from steptime.build.table_lookups import table_lookups
from steptime.errors import InputError
from steptime.hardware.device import DeviceLimits

Floats = npt.NDArray[np.float64]

SHARED, BUSY, ALONE = "shared memory", "all busy", "separate GPUs"
COMPANY = (SHARED, BUSY, ALONE)
"""What ranks on parts of one GPU are to each other's lookups."""

# Of a whole GPU, what reading and writing rows at random places takes: 295 us with SGD for 7.4 million distinct rows of 64
# bytes, 365 us more with row-wise Adagrad, by the terms for distinct rows of the fitted table-batched backward pass on an H200
# (4.8e12 bytes a second on paper). A quarter of it alone takes hardly longer: 1.16 times in the measured lookups beside idle
# parts, against 4.4 times for all other work of the update.
_REACHED = 3.2e12 / 4.8e12
_SECTOR = 32.0
_ADAGRAD_BYTES = 158.0
# What an exchange takes less after the last arrival where all other ranks have been there for long, as a fraction: their parts
# lie in buffers by then. Rows of the set `collectives` with one rank 1 ms late, 1 MiB, against the same together (2026-11-15).
_BUFFERED: Mapping[str, Mapping[int, float]] = {"loopback": {2: 0.43, 4: 0.34, 8: 0.57}}


@dataclass(frozen=True, slots=True)
class Laws:
    """Which of them hold. `company`: see `COMPANY`; it says nothing where every rank has a GPU of its own."""

    company: str = SHARED
    buffered: bool = True  # exchanges are shorter for ranks that come late

    def __post_init__(self) -> None:
        if self.company not in COMPANY:
            raise InputError(f"company of ranks on one GPU is {self.company!r}; expected one of {', '.join(COMPANY)}")

    @property
    def others(self) -> str:
        """What lookup models are asked to take the other parts of the GPU to do."""
        return "same" if self.company == BUSY else "idle"


AS_PLAYED = Laws(BUSY, buffered=False)
"""None: what `predict` assumes."""


def memory_ns(model: Dlrm, limits: DeviceLimits) -> tuple[Floats, Floats]:
    """[tables] of a whole GPU's memory, what the distinct rows of a table take forward and backward."""
    known = [table_lookups(table, model.batch) for table in model.tables]
    rows = np.array([float(one.unique) for one in known])
    row = np.ceil(np.array([4.0 * one.dim for one in known]) / _SECTOR) * _SECTOR
    state = _ADAGRAD_BYTES if model.optimizer == "rowwise_adagrad" else 0.0
    reached = _REACHED * limits.bandwidth_bytes_per_s.value / 1e9
    return rows * row / reached, rows * (2.0 * row + state) / reached


def shared_ns(own: Floats) -> Floats:
    """What sharing a memory adds to each rank that needs it for so long, [plans, ranks], all beginning at once.

    Equal shares for everybody who still needs it: while one needs it, each other one takes as long as both need it.
    """
    found: Floats = np.minimum(own[:, :, None], own[:, None, :]).sum(axis=2) - own
    return found


def buffered_fraction(fabric: str, ranks: int) -> float:
    """What an exchange of so many ranks takes less where all but one have been there for long; 0 where nobody measured it."""
    return _BUFFERED.get(fabric, {}).get(ranks, 0.0)
