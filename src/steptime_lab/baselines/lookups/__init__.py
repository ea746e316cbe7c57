"""What lookup models are compared with, each fitted on the same rows: rules in use, published forms, and trees on sizes alone.

They know the conditions of a lookup that their sources do not (rows in cache, optimiser, type, part of a GPU), so that none is
beaten by what it was never told. Which rows are looked up is told only as far as its source says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy.typing as npt

from steptime._models.engine.stored import Arrays
from steptime._models.lookups.forms import LookupForm
from steptime_lab.baselines.lookups import bytes_over_bandwidth, hit_rate, published, size_only
from steptime_lab.measurements.lookups import MeasuredLookups


class Baseline(LookupForm, Protocol):
    """A fitted baseline."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What its rule loads the same from."""
        ...


class BaselineRule(Protocol):
    """What makes baselines."""

    def fit(self, measured: MeasuredLookups, seed: int, /) -> Baseline:
        """Fits to the rows of the split `fit`; none is of `test`."""
        ...

    def load(self, arrays: Arrays) -> Baseline:
        """The baseline that the arrays were taken from."""
        ...


BASELINES: Final[Mapping[str, BaselineRule]] = {
    "bytes over bandwidth": bytes_over_bandwidth,
    "hit rate of bags": hit_rate.BAGS,
    "hit rate of rows": hit_rate.ROWS,
    "published network": published,
    "trees on sizes": size_only,
}
