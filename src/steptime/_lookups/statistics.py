"""`Statistics`: what a batch looked up in one table, as far as time depends on it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError

REUSE_EDGES = tuple(1 << power for power in range(16))
"""Upper ends of the first 16 bins, (0, 1], (1, 2], (2, 4] ... (2^14, 2^15]; the 17th is everything above."""

REUSE_BINS = len(REUSE_EDGES) + 1

_DENSE_ROWS_PER_LOOKUP = 32
"""Up to here counting in an array of all rows beats sorting the lookups."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Lookups of one batch in one table.

    `reuse[b]` is the share of *distinct* rows that were looked up so many times as bin b says (method: count accesses per
    distinct index, bins as `REUSE_EDGES`); a table without lookups has 17 zeros.
    """

    rows: int
    batch: int
    lookups: int
    unique: int
    pooling_spread: float  # standard deviation of the bags' lengths
    reuse: tuple[float, ...] = field(hash=False)

    @property
    def pooling(self) -> float:
        """Mean lookups per sample."""
        return self.lookups / self.batch if self.batch else 0.0

    @property
    def mean_reuse(self) -> float:
        """Lookups per distinct row; 0 for a table without lookups."""
        return self.lookups / self.unique if self.unique else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "reuse": list(self.reuse)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Statistics:
        """The statistics that `to_dict` gave."""
        expected = [field.name for field in fields(cls)]
        if sorted(values) != sorted(expected):
            raise InputError(f"Lookup statistics have the fields {sorted(values)}; expected {sorted(expected)}.")
        if len(values["reuse"]) != REUSE_BINS:
            raise InputError(f"Lookup statistics: reuse has {len(values['reuse'])} bins; expected {REUSE_BINS}.")
        return cls(**{**values, "reuse": tuple(float(share) for share in values["reuse"])})

    def to_json(self) -> str:
        """Compact text; the same statistics always give the same text."""
        return json.dumps(self.to_dict(), separators=(",", ":"), sort_keys=True)


def statistics_of(
    indices: npt.NDArray[np.integer[Any]], offsets: npt.NDArray[np.integer[Any]], rows: int, table: str = "table"
) -> Statistics:
    """Statistics of one table's lookups; sample i looks up `indices[offsets[i]:offsets[i + 1]]`."""
    lengths = checked_lengths(indices, offsets, rows, table)
    if rows <= _DENSE_ROWS_PER_LOOKUP * len(indices):
        counts = np.bincount(indices, minlength=rows)
    else:
        counts = np.unique(indices, return_counts=True)[1]
    bins = np.bincount(reuse_bins(counts), minlength=REUSE_BINS + 1)[1:]
    return from_totals(rows, len(lengths), int(lengths.sum()), int(np.square(lengths).sum()), bins)


def reuse_bins(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each access count 1 + its bin in the reuse histogram; 0 for a count of 0."""
    edges = np.array((0, *REUSE_EDGES), dtype=np.int64)
    most = REUSE_EDGES[-1] + 1
    bin_of_count = np.searchsorted(edges, np.arange(most + 1), side="left")
    return bin_of_count[np.minimum(counts, most)]


def from_totals(rows: int, batch: int, lookups: int, squares: int, bins: npt.NDArray[np.int64]) -> Statistics:
    """Statistics from integer totals: sum and sum of squares of the bags' lengths, distinct rows in each reuse bin."""
    unique = int(bins.sum())
    variance = (batch * squares - lookups * lookups) / (batch * batch) if batch else 0.0
    return Statistics(
        rows=rows,
        batch=batch,
        lookups=lookups,
        unique=unique,
        pooling_spread=math.sqrt(variance),
        reuse=tuple(int(count) / unique if unique else 0.0 for count in bins),
    )


def checked_lengths(indices: npt.NDArray[Any], offsets: npt.NDArray[Any], rows: int, table: str) -> npt.NDArray[np.int64]:
    """Lengths of the bags of a table's lookups; what is wrong with them is said with its position."""
    check_vectors(indices, offsets, rows, table)
    check_range(indices, rows, table)
    return lengths_between(offsets, table)


def check_vectors(indices: npt.NDArray[Any], offsets: npt.NDArray[Any], rows: int, table: str) -> None:
    """Whether these can be lookups at all: vectors of integers, the offsets from 0 to the number of indices."""
    if rows < 1:
        raise InputError(f"Table {table}: it has {rows} rows; expected 1 or more.")
    for name, array in (("indices", indices), ("offsets", offsets)):
        if not isinstance(array, np.ndarray):
            raise InputError(f"Table {table}: {name} are a {type(array).__name__}; expected a numpy vector of integers.")
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise InputError(
                f"Table {table}: {name} have shape {array.shape} and dtype {array.dtype}; expected a vector of integers."
            )
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(indices):
        ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else ()
        raise InputError(
            f"Table {table}: offsets start and end at {ends}; expected 0 and the number of indices, {len(indices)}."
        )


def check_range(indices: npt.NDArray[Any], rows: int, table: str, first: int = 0) -> None:
    """Whether every index is a row; positions are counted from `first` on."""
    # Read without a sign, a negative index is larger than any row.
    unsigned = indices.view(np.dtype(f"u{indices.dtype.itemsize}")) if indices.flags.c_contiguous else indices.astype(np.uint64)
    if len(indices) and int(unsigned.max()) >= min(rows, 1 << (8 * indices.dtype.itemsize - 1)):
        bad = np.flatnonzero((indices < 0) | (indices >= rows))
        if len(bad):
            position = int(bad[0])
            raise InputError(
                f"Table {table}: index {int(indices[position])} at position {first + position} is outside its {rows} rows; "
                f"expected 0 to {rows - 1}."
            )


def lengths_between(offsets: npt.NDArray[Any], table: str, first: int = 0) -> npt.NDArray[np.int64]:
    """Lengths of the bags between offsets; positions are counted from `first` on."""
    # Unsigned offsets that fall would wrap around and look long.
    whole = offsets.astype(np.int64, copy=False)
    lengths: npt.NDArray[np.int64] = whole[1:] - whole[:-1]
    if len(lengths) and int(lengths.min()) < 0:
        fall = first + int(np.flatnonzero(lengths < 0)[0])
        raise InputError(f"Table {table}: offset {fall + 1} is below the one before it; expected ascending offsets.")
    return lengths
