"""The fitted numbers of the form and what they say about launches: a sum of terms, corrected by trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms import Arrays, text_array
from steptime._models.kernels.forms.launched.columns import PAIRS, Columns, Numbers
from steptime._models.kernels.forms.launched.groups import CODE_LEVELS, finest
from steptime._models.kernels.forms.launched.parts import parts_of
from steptime._models.kernels.forms.launched.terms import Traffic, terms, traffic
from steptime._models.kernels.forms.launched.weights import Weights
from steptime._models.kernels.forms.trees import Trees

# The most that trees may change a time, as a natural logarithm.
MOST = 1.2
# How far what it computes may move a time from that of the same code: validation rows lie within 0.6 and 2.4, and beyond 2 a
# group of few rows is used far from them.
_MOST_APART = 2.0
# What a launch costs beside its bytes where its kernel was never measured (the usual floor of a small cold one).
_FLOOR_NS = 1000.0
# The datasheet's memory bandwidth in bytes per nanosecond, and its L2: what is beyond that cannot be faster.
_PEAK_RATE, _CACHE_BYTES = 4800.0, 50e6
# Pairs of a grid that trees see.
_SEEN_PAIRS = 3


@dataclass(frozen=True)
class Batch:
    """Launches to be timed, from any number of questions."""

    numbers: Numbers  # launches x columns
    group: npt.NDArray[np.int64]  # row of the weights; -1 where no group is known
    code: npt.NDArray[np.int64]  # that of the group of launches that run the same code, whatever it computes
    codes: Numbers  # launches x (path, op, tag)
    share: Numbers
    others: npt.NDArray[np.int64]

    def take(self, used: npt.NDArray[np.int64]) -> Batch:
        """Some of the launches."""
        groups = self.group[used], self.code[used]
        return Batch(self.numbers[used], *groups, self.codes[used], self.share[used], self.others[used])


@dataclass(frozen=True)
class Codes:
    """How far launches of a path, an op, a tag are from the sum of terms on average: text as a number for the trees."""

    values: Mapping[str, float]

    def of(self, names: tuple[str, ...]) -> tuple[float, float, float]:
        """The numbers of a launch by the names of its groups; 0 for what was never measured."""
        found = self.values.get
        return found(names[1], 0.0), found(names[3], 0.0), found(names[4], 0.0)


@dataclass(frozen=True)
class Model:
    """All that is fitted."""

    columns: Columns
    weights: Weights
    scales: Numbers
    codes: Codes
    trees: Trees
    uncorrected: frozenset[str]  # families whose validation rows the trees do not help
    ranges: Mapping[str, tuple[float, float]]  # group of a path -> least and most elements measured
    known: Mapping[str, int] = field(default_factory=dict)

    def group_of(self, names: tuple[str, ...]) -> tuple[int, int]:
        """The rows of the weights that a launch uses: of its own group, and of the same code."""
        return finest(names, self.known), finest(names[:CODE_LEVELS], self.known)

    def inside(self, names: tuple[str, ...], elements: float) -> bool:
        """Whether launches of this kernel and path were measured below and above this size."""
        least, most = self.ranges.get(names[1], (np.inf, 0.0))
        return least <= elements <= most

    def time_ns(self, batch: Batch, corrected: npt.NDArray[np.bool_]) -> Numbers:
        """How long every launch takes."""
        found, moved = base_ns(self.columns, self.weights, self.scales, batch)
        if corrected.any():
            seen = features(self.columns, batch, moved, found)[corrected]
            found[corrected] *= np.exp(np.clip(self.trees.values(seen), -MOST, MOST))
        return np.maximum(found, _at_peak_ns(moved))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load_model` makes the same from."""
        return {
            "facts": text_array(self.columns.facts),
            "groups": text_array(self.weights.names),
            "weights": self.weights.values,
            "least_ns": self.weights.least_ns,
            "scales": self.scales,
            "code_names": text_array(tuple(self.codes.values)),
            "codes": np.asarray(list(self.codes.values.values())),
            "uncorrected": text_array(sorted(self.uncorrected)),
            "range_names": text_array(tuple(self.ranges)),
            "ranges": np.asarray(list(self.ranges.values())).reshape(-1, 2),
            **{f"trees_{name}": array for name, array in self.trees.arrays().items()},
        }


def load_model(arrays: Arrays) -> Model:
    """The model that `arrays` were taken from."""
    names = tuple(map(str, arrays["groups"]))
    trees = {name.removeprefix("trees_"): array for name, array in arrays.items() if name.startswith("trees_")}
    return Model(
        Columns(tuple(map(str, arrays["facts"]))),
        Weights(names, arrays["weights"], arrays["least_ns"]),
        arrays["scales"],
        Codes(dict(zip(map(str, arrays["code_names"]), arrays["codes"].tolist(), strict=True))),
        Trees.load(trees),
        frozenset(map(str, arrays["uncorrected"])),
        {str(name): (low, high) for name, (low, high) in zip(arrays["range_names"], arrays["ranges"].tolist(), strict=True)},
        {name: place for place, name in enumerate(names)},
    )


def base_ns(columns: Columns, weights: Weights, scales: Numbers, batch: Batch) -> tuple[Numbers, Traffic]:
    """The weighted sum of terms of every launch, and where its bytes are."""
    parts = parts_of(batch.share, batch.others, scales)
    moved = traffic(batch.numbers, parts)
    worked = terms(columns, batch.numbers, moved, parts)
    found = np.einsum("lt,lt->l", worked, weights.values[batch.group])
    usual = np.einsum("lt,lt->l", worked, weights.values[batch.code])
    found = np.clip(found, usual / _MOST_APART, usual * _MOST_APART)
    found = np.where(batch.group < 0, _FLOOR_NS + moved.least_ns(parts), found)
    return np.maximum(found, weights.least_ns[batch.group]), moved


def _at_peak_ns(moved: Traffic) -> Numbers:
    found: Numbers = np.maximum(0.0, moved.memory_bytes + moved.written_bytes - _CACHE_BYTES) / _PEAK_RATE
    return found


def features(columns: Columns, batch: Batch, moved: Traffic, base: Numbers) -> Numbers:
    """What trees see of every launch."""
    grid = batch.numbers[:, columns.features :]
    blocks, work = grid[:, :_SEEN_PAIRS], grid[:, PAIRS : PAIRS + _SEEN_PAIRS]
    bytes_seen = (moved.memory_bytes, moved.cache_bytes, moved.cold_share)
    part_seen = (base, base * batch.share, batch.share, batch.others, batch.codes)
    own = np.column_stack([*bytes_seen, *part_seen, blocks, work, blocks * work])
    return np.hstack([batch.numbers[:, : columns.features], own])
