"""Trees and small neural networks on the same features, averaged: trees know corners, networks what lies between.

On validation rows of convolutions both err about equally and their mean errs least; of attention, networks err less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from steptime._models.engine.stored import Floats, Ints, Longs
from steptime._models.engine.trees import Trees

# Standard deviations beyond which a network sees no further: it answers as at the edge.
REACH = 4.0
# Rows evaluated at once: what the hidden layers of a few networks take in a third-level cache.
_ROWS = 1 << 11


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

    def flags(self, features: Floats) -> Floats:
        """A column for each way: 1 where it is the likeliest, else 0."""
        likeliest = np.argmax([trees.values(features) for trees in self.ways], axis=0)
        flags: Floats = np.eye(len(self.ways))[likeliest]
        return flags


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
