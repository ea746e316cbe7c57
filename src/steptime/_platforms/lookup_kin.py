"""Table-batched lookups that nobody measured, by the nearest ones that were: 8-bit rows, 16-bit rows with a state, and states
of every weight (Adagrad, Adam).

The nearest moves other bytes. As between devices (`transfer`), what bytes take and what no limit shows go on at once in part.
So squares add up, and only the first changes:

    time^2 = book^2 + (time of the nearest^2 - book of the nearest^2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from steptime._hardware.device import DeviceLimits
from steptime._lookups.workload import STATE_PER_WEIGHT
from steptime._models.estimate import Estimate, Source
from steptime._models.lookups.fitted import LookupEstimate
from steptime._models.lookups.question import TABLE_BATCHED, Lookup
from steptime._platforms.transfer import lookup_works

# How far the time of what was never measured itself may be off, to either side, by the model of its kin.
KIN_FACTOR = 2.0
_FLOAT, _HALF = "float32", "float16"
_MEASURED_DTYPES = (_FLOAT, _HALF, "bfloat16")
_ROWWISE = "rowwise_adagrad"


def nearest_measured(lookup: Lookup) -> Lookup:
    """The lookup that models are asked in place of this one: itself where such lookups were measured."""
    if lookup.implementation != TABLE_BATCHED:
        return lookup
    optimizer, dtype = lookup.optimizer, lookup.dtype
    if optimizer in STATE_PER_WEIGHT:  # element by element, as SGD; a state of rows is that of a sum over each first
        optimizer = "sgd"
    if optimizer == _ROWWISE:  # which was measured in single precision alone
        dtype = _FLOAT
    elif dtype not in _MEASURED_DTYPES:
        dtype = _HALF
    same = (optimizer, dtype) == (lookup.optimizer, lookup.dtype)
    return lookup if same else replace(lookup, optimizer=optimizer, dtype=dtype)


def by_nearest(
    lookups: Sequence[Lookup], nearest: Sequence[Lookup], known: Sequence[LookupEstimate], limits: DeviceLimits
) -> list[LookupEstimate]:
    """What lookups take on the device whose models answered for the nearest ones."""
    if all(lookup is other for lookup, other in zip(lookups, nearest, strict=True)):
        return list(known)
    asked, answered = (lookup_works(each, limits.cache_bytes.value) for each in (lookups, nearest))
    rate = limits.reach.bandwidth.value * limits.bandwidth_bytes_per_s.value / limits.share
    results = []
    for lookup, other, item, work, known_work in zip(lookups, nearest, known, asked, answered, strict=True):
        if lookup is other or not item.estimate.time_ns:
            results.append(item)
            continue
        book, known_book = (limits.reach.start_ns.value + 1e9 * each.memory_bytes / rate for each in (work, known_work))
        results.append(_rescaled(item, book, known_book))
    return results


def _rescaled(known: LookupEstimate, book_ns: float, known_book_ns: float) -> LookupEstimate:
    before = known.estimate.time_ns
    after = before * book_ns / known_book_ns
    if before > known_book_ns:
        after = math.sqrt(book_ns**2 + before**2 - known_book_ns**2)
    launches = tuple(replace(launch, time_ns=launch.time_ns * after / before) for launch in known.launches)
    estimate = Estimate(after, after / KIN_FACTOR, after * KIN_FACTOR, Source.ANALYTIC, inside=False)
    return LookupEstimate(estimate, launches)
