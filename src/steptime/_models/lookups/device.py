"""What lookup models take for granted of the device their rows were measured on: `[features.lookups]` of its file."""

from __future__ import annotations

from dataclasses import dataclass

from steptime._models.engine.constants import reference_constants

FORM = "lookups"


@dataclass(frozen=True)
class LookupConstants:
    """SMs, what memory moves in a nanosecond, and bytes that caches keep of what lookups touch."""

    sms: float
    l2_bytes: float
    peak_bytes_per_ns: float
    l1_kept_bytes: float  # of rows, by the cache of an SM
    l2_kept_bytes: float  # of rows and gradients, from one access to the next
    warm_kept_bytes: float  # half of a footprint of so many is there when the same rows are looked up again
    gradient_kept_bytes: float  # of one table's gradient, beside everything else
    summed_kept_bytes: float  # half of gradients of so many is there when they are summed row by row
    scattered_kept_bytes: float  # half of what a dense gradient's kernel before touched is there for its last sums
    near_ns: float  # of a step of such a sum whose segments are in the cache
    far_ns: float  # of one whose segments are not


def reference_lookups() -> LookupConstants:
    """Those of the reference device: files from before constants were kept in them are of it."""
    constants: LookupConstants = reference_constants(FORM, LookupConstants)
    return constants
