"""What is learned: boosted trees, small neural networks, and both on the same features, averaged; evaluated with NumPy.

Trees know corners, networks what lies between. On validation rows of convolutions both err about equally and their mean errs
least; of attention, networks err less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from steptime._models.engine.stored import Floats, Ints, Longs
from steptime.errors import InputError

# Rows evaluated at once times trees: what a second-level cache holds.
_CHUNK = 1 << 16
# Standard deviations beyond which a network sees no further: it answers as at the edge.
REACH = 4.0
# Rows evaluated at once: what the hidden layers of a few networks take in a third-level cache.
_ROWS = 1 << 11


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


@dataclass(frozen=True)
class Networks:
    """Networks of two hidden layers, evaluated together. First axis: network."""

    centre: Floats
    scale: Floats
    weights: tuple[Floats, Floats, Floats]
    offsets: tuple[Floats, Floats, Floats]

    def values(self, features: Floats) -> Floats:
        """The mean over the networks, for each row."""
        result = np.empty(len(features))
        for first in range(0, len(features), _ROWS):
            result[first : first + _ROWS] = self._means(features[first : first + _ROWS])
        return result

    def _means(self, features: Floats) -> Floats:
        hidden = np.clip((features - self.centre) / self.scale, -REACH, REACH)[None]
        for index in (0, 1):
            linear = hidden @ self.weights[index] + self.offsets[index][:, None, :]
            hidden = linear / (1.0 + np.exp(-linear))
        result: Floats = (hidden @ self.weights[2] + self.offsets[2][:, None, :])[..., 0].mean(axis=0)
        return result


@dataclass(frozen=True)
class Guess:
    """Trees that tell ways of doing a thing apart, one sum for each way: the largest says which one is likeliest.

    The trees of all ways lie behind each other, because few arrays read faster.
    """

    feature: Ints
    threshold: Floats
    children: Ints
    value: Floats
    roots: Ints
    depth: Longs  # way -> of its trees
    columns: Longs
    nodes: Longs  # way -> how many nodes and trees are its
    rounds: Longs

    @cached_property
    def ways(self) -> tuple[Trees, ...]:
        """The trees of each way."""
        nodes, rounds = np.cumsum(self.nodes)[:-1], np.cumsum(self.rounds)[:-1]
        columns = [np.split(getattr(self, name), nodes) for name in ("feature", "threshold", "value")]
        children, roots = np.split(self.children, 2 * nodes), np.split(self.roots, rounds)
        each = zip(*columns, children, roots, self.depth.tolist(), self.columns.tolist(), strict=True)
        return tuple(Trees(feature, threshold, child, value, *rest) for feature, threshold, value, child, *rest in each)

    def likeliest(self, features: Floats) -> npt.NDArray[np.intp]:
        """The place of the likeliest way, for each row."""
        likeliest: npt.NDArray[np.intp] = np.argmax([trees.values(features) for trees in self.ways], axis=0)
        return likeliest

    def flags(self, features: Floats) -> Floats:
        """A column for each way: 1 where it is the likeliest, else 0."""
        flags: Floats = np.eye(len(self.ways))[self.likeliest(features)]
        return flags


@dataclass(frozen=True)
class Choice:
    """Which of the things that were seen, by their numbers, is the likeliest for a row."""

    NARROW: ClassVar[bool] = True

    seen: Longs  # ascending
    guess: Guess | None  # None where only one was

    def likeliest(self, features: Floats) -> Longs:
        """The number of the likeliest thing, for each row."""
        places = np.zeros(len(features), dtype=int) if self.guess is None else self.guess.likeliest(features)
        return self.seen[places]


@dataclass(frozen=True)
class Blend:
    """Trees and, where it has any, networks with their weight beside the trees'; trees may go by a guess besides."""

    NARROW: ClassVar[bool] = True  # stored in half the bytes where nothing is lost

    trees: tuple[Trees, ...]
    networks: Networks | None
    weight: float = 0.5
    guess: Guess | None = None

    def values(self, features: Floats) -> Floats:
        """What the blend says for each row of `features`."""
        voices = self.voices(features)
        return voices[0] if len(voices) == 1 else (1 - self.weight) * voices[0] + self.weight * voices[1]

    def voices(self, features: Floats) -> list[Floats]:
        """What the trees say for each row and, where there are any, what the networks say."""
        if not len(features):
            return [np.zeros(0)]
        seen = features if self.guess is None else np.column_stack([features, self.guess.flags(features)])
        grown: Floats = sum((trees.values(seen) for trees in self.trees), np.zeros(len(seen))) / len(self.trees)
        return [grown] if self.networks is None else [grown, self.networks.values(features)]
