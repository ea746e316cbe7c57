"""`LapReadings`: what all ranks read in the passes over some cases so far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from steptime._calibrate.collectives.cases import CollectiveCase
from steptime._calibrate.collectives.timing import Reading, result_of


class LapReadings:
    """Readings of some cases; a pass adds one of each, with that of the sentinel in the same block."""

    def __init__(self, cases: Sequence[CollectiveCase], ranks: int, passes: int) -> None:
        self.cases = cases
        # (ranks, cases, passes, own | sentinel, fields of a reading)
        self._readings = np.full((ranks, len(cases), passes, 2, len(Reading())), math.nan)

    def add(self, repeat: int, readings: np.ndarray) -> None:
        """One pass, of shape (ranks, cases, 2, fields); NaN where it was not a case's turn."""
        self._readings[:, :, repeat] = readings

    def results(self) -> Iterator[tuple[CollectiveCase, dict[str, Any] | None]]:
        """Every case with the measured columns of its row."""
        for number, case in enumerate(self.cases):
            own, beside = self._readings[:, number, :, 0], self._readings[:, number, :, 1]
            # NaN where the sentinel is not timed; it begins at 0.
            yield case, result_of(case, own, reference_ns=beside[:, :, 1].max(axis=0))

    def sentinels(self) -> np.ndarray:
        """What the sentinel took in each block, in order, of shape (ranks, blocks, fields)."""
        flat = np.moveaxis(self._readings[:, :, :, 1], 2, 1).reshape(len(self._readings), -1, len(Reading()))
        known = flat[:, ~np.isnan(flat[:, :, 1]).any(axis=0)]
        # All cases of a block carry the same one.
        _, first = np.unique(known[0, :, 1], return_index=True)
        result: np.ndarray = known[:, np.sort(first)]
        return result
