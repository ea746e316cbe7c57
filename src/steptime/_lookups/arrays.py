"""The few array operations that index streams are made with, so that numpy and torch make the same stream bit for bit.

Everything is int64 and wraps on overflow; operators (`+ * ^ & >> // %`) are those of the arrays themselves. Only what
is called differently in the two libraries is named here.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = Any
"""An int64 vector of one library: `numpy.ndarray` or `torch.Tensor`."""


class Arrays(Protocol):
    """A library of int64 vectors."""

    def arange(self, stop: int) -> Array:
        """0, 1, ..., stop - 1."""
        ...

    def from_numpy(self, values: npt.NDArray[np.int64]) -> Array:
        """The same values where this library keeps its vectors."""
        ...

    def segment_of(self, edges: Array, values: Array) -> Array:
        """For each value the number of `edges` (ascending) that are not above it, less one."""
        ...

    def take(self, table: Array, positions: Array) -> Array:
        """`table[positions]`."""
        ...

    def cumsum(self, values: Array) -> Array:
        """Running sums."""
        ...


class NumpyArrays:
    """`Arrays` of numpy."""

    def arange(self, stop: int) -> Array:
        """0, 1, ..., stop - 1."""
        return np.arange(stop, dtype=np.int64)

    def from_numpy(self, values: npt.NDArray[np.int64]) -> Array:
        """The values themselves."""
        return values

    def segment_of(self, edges: Array, values: Array) -> Array:
        """For each value the number of `edges` (ascending) that are not above it, less one."""
        return np.searchsorted(edges, values, side="right") - 1

    def take(self, table: Array, positions: Array) -> Array:
        """`table[positions]`."""
        return np.take(table, positions)

    def cumsum(self, values: Array) -> Array:
        """Running sums."""
        return np.cumsum(values)


NUMPY: Arrays = NumpyArrays()
