"""What ranks do to each other's lookups and exchanges besides waiting: laws that a step played kernel by kernel leaves out.

Forms and constants come from measurements of their own (benchmarks/h200/ranks_together.py), of tables and exchanges that no
sharding task has: `models.kernels.lookups.company` and `models.collectives.flows` say how well they hold there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.table_lookups import table_lookups
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]

SHARED, BUSY, ALONE = "shared memory", "all busy", "separate GPUs"
COMPANY = (SHARED, BUSY, ALONE)
"""What ranks on parts of one GPU are to each other's lookups."""

IDLE, COPYING = "idle", "streaming"
"""What other parts of a GPU do, as lookup models are asked (`models.kernels.question.OTHERS`)."""

# Of memory, what is read or written at once; and of a row's optimiser state, which lies by itself, read and written.
_SECTOR = 32.0


@dataclass(frozen=True, slots=True)
class Laws:
    """Which of them hold. `company`: see `COMPANY`; it says nothing where every rank has a GPU of its own."""

    company: str = SHARED
    one_by_one: bool = True  # ranks leave an exchange as they are done, and find work done that came late

    def __post_init__(self) -> None:
        if self.company not in COMPANY:
            raise InputError(f"company of ranks on one GPU is {self.company!r}; expected one of {', '.join(COMPANY)}")

    @property
    def others(self) -> tuple[str, ...]:
        """What lookup models are asked to take the other parts of the GPU to do."""
        return {SHARED: (IDLE, COPYING), BUSY: ("same",), ALONE: (IDLE,)}[self.company]


AS_PLAYED = Laws(BUSY, one_by_one=False)
"""None: what `predict` assumes."""


def row_bytes(model: Dlrm) -> tuple[Floats, Floats]:
    """[tables] bytes at random places that the distinct rows of a table take forward and backward."""
    known = [table_lookups(table, model.batch) for table in model.tables]
    rows = np.array([float(one.unique) for one in known])
    row = np.ceil(np.array([4.0 * one.dim for one in known]) / _SECTOR) * _SECTOR
    state = 2.0 * _SECTOR if model.optimizer == "rowwise_adagrad" else 0.0
    return rows * row, rows * (2.0 * row + state)
