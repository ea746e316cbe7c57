"""Measured lookups as questions in columns with their answers, and which of them a fit may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.lookups.batch import Lookups


@dataclass(frozen=True)
class MeasuredLookups:
    """Lookups of one implementation and direction, and what was measured of each."""

    lookups: Lookups
    time_ns: Floats  # [lookups]
    spread: Floats  # [lookups] (90th - 10th percentile) / median of its repeats
    split: npt.NDArray[np.str_]  # [lookups] fit | validation | test
    series: npt.NDArray[np.str_]  # [lookups] those of one series differ in which rows are looked up alone; "" for none
    kernel_names: list[tuple[str, ...]]  # [lookups] in launch order
    kernel_ns: list[tuple[float, ...]]  # [lookups]
    times_ns: list[tuple[float, ...]]  # [lookups] repeats

    def __len__(self) -> int:
        """How many there are."""
        return len(self.time_ns)

    def take(self, places: npt.NDArray[Any]) -> MeasuredLookups:
        """Some of them; `places` may be a mask."""
        chosen = np.arange(len(self))[places]
        return MeasuredLookups(
            self.lookups.take(chosen),
            self.time_ns[chosen],
            self.spread[chosen],
            self.split[chosen],
            self.series[chosen],
            [self.kernel_names[place] for place in chosen],
            [self.kernel_ns[place] for place in chosen],
            [self.times_ns[place] for place in chosen],
        )

    def of(self, *splits: str) -> MeasuredLookups:
        """Those of some splits."""
        return self.take(np.isin(self.split, splits))
