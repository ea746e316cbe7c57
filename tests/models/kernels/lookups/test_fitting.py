"""Rows that lookup models cannot be fitted to are said in one line."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from steptime._hardware.device import reference_device
from steptime._lookups.table import table_statistics
from steptime._models.engine.splits import FIT, TEST, VALIDATION
from steptime._models.lookups.question import Lookup, Lookups
from steptime.errors import InputError
from steptime_lab.fit.lookups import fit_lookups
from steptime_lab.measurements.lookups import MeasuredLookups

_TABLE = table_statistics(np.arange(64), np.arange(0, 65, 4), 100, 32)


def _measured(implementation: str, *splits: str) -> MeasuredLookups:
    lookups = Lookups.of([Lookup(implementation, "forward", (_TABLE,))] * len(splits))
    times = np.linspace(2e3, 3e3, len(splits))
    names: list[tuple[str, ...]] = [("vectorized_gather_kernel",)] * len(splits)
    each: list[tuple[float, ...]] = [(float(time),) for time in times]
    return MeasuredLookups(lookups, times, times * 0, np.array(splits), np.array([""] * len(splits)), names, each, each)


@pytest.mark.parametrize(
    ("implementation", "splits", "said"),
    [
        ("embedding_dense", (FIT, FIT, TEST), "no lookup row is of the split validation"),
        ("table_batched", (VALIDATION, TEST), "no row of table_batched forward is of the split fit"),
    ],
)
def test_without_rows_of_a_split_it_is_said_which(implementation: str, splits: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        fit_lookups(pa.table({}), {(implementation, "forward"): _measured(implementation, *splits)}, reference_device())
