"""How far apart repeated times are; apart from the store, which needs Parquet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread_of(times_ns: Sequence[float]) -> float:
    """(90th - 10th percentile) / median; 0 for a single repeat."""
    low, middle, high = np.quantile(np.asarray(times_ns, dtype=np.float64), (0.1, 0.5, 0.9))
    return float((high - low) / middle) if middle else 0.0
