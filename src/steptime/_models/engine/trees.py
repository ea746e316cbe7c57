"""Boosted trees as flat arrays, evaluated with NumPy for all rows and trees at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.engine.stored import Floats, Ints
from steptime.errors import InputError

# Rows evaluated at once times trees: what a second-level cache holds.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Trees:
    """A sum of decision trees. Nodes of all trees lie in one row; a leaf is its own child on both sides."""

    feature: Ints  # node -> column
    threshold: Floats  # node -> a row goes left where its column is at most this
    children: Ints  # twice the node, plus one where it goes left -> node
    value: Floats  # node -> what a leaf adds
    roots: Ints  # tree -> node
    depth: int
    columns: int = 0  # of the features they were grown on; 0: any

    @classmethod
    def constant(cls, value: float) -> Trees:
        """One leaf: the same value for every row."""
        nowhere = np.zeros(1, dtype=np.int32)
        return cls(nowhere, np.zeros(1), np.zeros(2, dtype=np.int32), np.full(1, value), nowhere, 0)

    def values(self, features: npt.ArrayLike) -> Floats:
        """The sum of the trees for each row of `features`, shape (rows, columns)."""
        table = np.ascontiguousarray(features, dtype=np.float64)
        rows = table.shape[0]
        if self.columns and table.shape[1] != self.columns:
            raise InputError(f"trees grown on {self.columns} features were asked with {table.shape[1]}: fit these models again")
        result = np.empty(rows)
        step = max(1, _CHUNK // self.roots.size)
        for first in range(0, rows, step):
            result[first : first + step] = self._sums(table[first : first + step])
        return result

    def _sums(self, table: Floats) -> Floats:
        rows, width = table.shape
        flat = table.ravel()
        node = np.tile(self.roots, rows)
        start = np.repeat(np.arange(rows, dtype=np.int32) * width, self.roots.size)
        for _ in range(self.depth):
            left = flat.take(start + self.feature.take(node)) <= self.threshold.take(node)
            node = self.children.take(2 * node + left)
        sums: Floats = self.value.take(node).reshape(rows, self.roots.size).sum(axis=1)
        return sums
