"""What lookup models are compared with, each fitted on the same rows: rules in use, published forms, and trees on sizes alone.

They know the conditions of a lookup that their sources do not (rows in cache, optimiser, type, part of a GPU), so that none is
beaten by what it was never told. Which rows are looked up is told only as far as its source says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from steptime._models.lookups.forms import LookupForm
from steptime_lab.baselines.lookups.learned import PublishedLookupNetwork, SizeTrees
from steptime_lab.baselines.lookups.rules import BytesOverBandwidth, HitRateOfBags, HitRateOfRows
from steptime_lab.measurements.lookups import MeasuredLookups


class LookupBaseline(LookupForm, Protocol):
    """A fitted baseline, kept as `engine.stored` does."""

    @classmethod
    def fit(cls, measured: MeasuredLookups, seed: int, /) -> LookupBaseline:
        """Fits to the rows of the split `fit`; none is of `test`."""
        ...


BASELINES: Final[Mapping[str, type[LookupBaseline]]] = {
    "bytes over bandwidth": BytesOverBandwidth,
    "hit rate of bags": HitRateOfBags,
    "hit rate of rows": HitRateOfRows,
    "published network": PublishedLookupNetwork,
    "trees on sizes": SizeTrees,
}
