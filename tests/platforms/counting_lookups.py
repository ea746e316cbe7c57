"""A device whose lookup models count: forward takes a microsecond a lookup, backward one a distinct row, on a part longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import read_device
from steptime._lookups.table import TableStatistics, table_statistics
from steptime._lookups.workload import StepLookups
from steptime._models.engine.splits import Residuals
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.fitted import LookupModels
from steptime._models.lookups.forms import FORMS, LookupTimes, total_only
from steptime._models.lookups.question import Lookups
from steptime._platforms.device import Device

RESIDUALS = Residuals.of(["anything"] * 100, np.full(100, 1e3), np.linspace(900, 1100, 100))
# Lookups of one table that the models were fitted to.
MOST_LOOKUPS = 1_000_000


class Counting:
    """A form that is asked for many lookups at once, and says how often it was."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def times(self, lookups: Lookups) -> LookupTimes:
        self.asked.append(len(lookups))
        tables = lookups.pool.tables
        counted = lookups.sums(tables.lookups if lookups.direction == "forward" else tables.unique)
        beside = 1.0 + (lookups.others == OTHERS.index("same"))
        inside = lookups.maxima(tables.lookups) <= MOST_LOOKUPS
        return total_only("counted", 1e3 * counted * lookups.share * beside, 1.0, inside)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {}


def counting_models(form: Counting | None = None) -> LookupModels:
    one = form or Counting()
    return LookupModels(dict.fromkeys(FORMS, one), RESIDUALS, {})


def counting_device(name: str = "h200", form: Counting | None = None) -> Device:
    return Device(read_device(name), KernelModels({}, RESIDUALS, {}), counting_models(form))


def looked_up(lookups: int, unique: int, table: str = "t0", batch: int = 2) -> TableStatistics:
    """A large table with so many lookups of so many distinct rows."""
    indices = np.arange(lookups, dtype=np.int64) % unique
    offsets = np.linspace(0, lookups, batch + 1).astype(np.int64)
    return table_statistics(indices, offsets, rows=1 << 22, dim=4, table=table)


def steps_of(*counts: tuple[int, int]) -> StepLookups:
    """Iterations of one table: lookups and distinct rows of each."""
    return StepLookups(tuple((looked_up(lookups, unique),) for lookups, unique in counts))
