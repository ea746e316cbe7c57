"""What lookup models are compared with, each fitted on the same rows: rules in use, published forms, and trees on sizes alone.

They know the conditions of a lookup that their sources do not (rows in cache, optimiser, type, part of a GPU), so that none is
beaten by what it was never told. Which rows are looked up is told only as far as its source says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steptime._models.lookups.forms import LookupMaker
from steptime_lab.baselines.lookups import bytes_over_bandwidth, hit_rate, published, size_only

BASELINES: Final[Mapping[str, LookupMaker]] = {
    "bytes over bandwidth": bytes_over_bandwidth,
    "hit rate of bags": hit_rate.BAGS,
    "hit rate of rows": hit_rate.ROWS,
    "published network": published,
    "trees on sizes": size_only,
}
