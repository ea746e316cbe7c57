"""The forward pass of the table-batched lookup: one kernel, whose programs have several bags of one table each.

Physics, then what it leaves by trees and by a smooth function together, on a whole GPU. Parts of a GPU get powers of their
number in the physics and a correction of their own on top, so that they change nothing for a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.correction import named, part
from steptime._models.lookups.forms import LookupTimes, inside_of, total_only
from steptime._models.lookups.forms.batched_forward.constants import fitted_constants, fitted_parts
from steptime._models.lookups.forms.batched_forward.features import features_of
from steptime._models.lookups.forms.batched_forward.left import Left
from steptime._models.lookups.forms.batched_forward.physics import Constants, Costs, Launch, Parts, launched
from steptime._models.lookups.forms.batched_forward.tables import Tables
from steptime._models.lookups.rows import MeasuredLookups

PART = "table_batched_forward"


@dataclass(frozen=True)
class BatchedForward:
    """Fitted. `low` and `high` are the sizes of fitted launches."""

    constants: Constants
    parts: Parts
    whole: Left
    divided: Left  # of parts of a GPU
    low: Floats
    high: Floats

    def times(self, lookups: Lookups) -> LookupTimes:
        """One kernel each."""
        tables = Tables.of(lookups.pool)
        launch = self._launched(tables, lookups)
        seen = features_of(launch, tables, lookups)
        left = self.whole.values(seen)
        some = lookups.share > 1
        if some.any():
            left = left + np.where(some, self.divided.values(_of_parts(seen, left, lookups)), 0.0)
        time = launch.time * np.exp(left)
        return total_only(PART, time, 1.0, inside_of(self.low, self.high, _sizes(tables, lookups)))

    def _launched(self, tables: Tables, lookups: Lookups) -> Launch:
        return launched(self.constants, self.parts, Costs.of(self.constants, tables), tables, lookups)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from."""
        return {
            "constants": self.constants.values(),
            "parts": self.parts.values(),
            "sizes": np.stack([self.low, self.high]),
            **named("whole", self.whole.arrays()),
            **named("divided", self.divided.arrays()),
        }


def fit(measured: MeasuredLookups, seed: int) -> BatchedForward:
    """Constants, then what they leave: of whole GPUs, then of parts."""
    rows = measured.of("fit")
    tables = Tables.of(rows.lookups.pool)
    whole, parts = rows.take(rows.lookups.share == 1), rows.take(rows.lookups.share > 1)
    constants = fitted_constants(tables, whole)
    powers = fitted_parts(constants, tables, parts)
    sizes = _sizes(tables, rows.lookups)
    unknown = Left.nothing()
    first = BatchedForward(constants, powers, unknown, unknown, sizes.min(axis=0), sizes.max(axis=0))
    launch = first._launched(tables, whole.lookups)
    left = Left.fit(features_of(launch, tables, whole.lookups), np.log(whole.time_ns / launch.time), seed)
    second = BatchedForward(constants, powers, left, unknown, first.low, first.high)
    return BatchedForward(constants, powers, left, _divided(second, tables, parts, seed), first.low, first.high)


def _divided(form: BatchedForward, tables: Tables, rows: MeasuredLookups, seed: int) -> Left:
    """What is left of parts of a GPU; nothing where none were measured."""
    if not len(rows):
        return Left.nothing()
    launch = form._launched(tables, rows.lookups)
    seen = features_of(launch, tables, rows.lookups)
    left = form.whole.values(seen)
    return Left.fit_noisy(_of_parts(seen, left, rows.lookups), np.log(rows.time_ns / launch.time) - left, seed)


def load(arrays: Arrays) -> BatchedForward:
    """The form that `arrays` were taken from."""
    low, high = np.asarray(arrays["sizes"])
    return BatchedForward(
        Constants.of(np.asarray(arrays["constants"])),
        Parts.of(np.asarray(arrays["parts"])),
        Left.load(part(arrays, "whole")),
        Left.load(part(arrays, "divided")),
        low,
        high,
    )


def _of_parts(seen: Floats, left: Floats, lookups: Lookups) -> Floats:
    """What the correction of parts looks at: what that of a whole GPU does, and what it says."""
    others = lookups.others[:, None] == np.arange(1, len(OTHERS))
    return np.concatenate([seen, left[:, None], lookups.share[:, None], others.astype(np.float64)], axis=1)


def _sizes(tables: Tables, lookups: Lookups) -> Floats:
    """By which a launch is known to be like fitted ones, [lookups, sizes]."""
    sums = [lookups.sums(values) for values in (tables.lookups, tables.footprint, tables.programs.number)]
    high = [lookups.maxima(values) for values in (tables.batch, tables.dim, tables.programs.longest)]
    return np.stack([*sums, *high, lookups.counts, lookups.share], axis=1)
