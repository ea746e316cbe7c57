"""`Estimate`: a predicted duration, how sure it is, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Source(Enum):
    """Where a duration comes from, best first."""

    MEASURED = "measured"
    FITTED = "fitted"
    ANALYTIC = "analytic"  # from a datasheet
    FALLBACK = "fallback"  # no model answers for it: a labelled guess


@dataclass(frozen=True, slots=True)
class Estimate:
    """A duration with the interval that holds nine of ten measured ones."""

    time_ns: float
    low_ns: float
    high_ns: float
    source: Source
    inside: bool  # whether the question lies in the range the model was fitted on
