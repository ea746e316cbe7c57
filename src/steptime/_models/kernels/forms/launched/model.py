"""The fitted numbers of the form and what they say about launches: a sum of terms, corrected by trees."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from steptime._models.engine.constants import reference_constants
from steptime._models.engine.stored import stored
from steptime._models.engine.trees import Trees
from steptime._models.kernels.forms.launched.columns import PAIRS, LaunchColumns, Numbers
from steptime._models.kernels.forms.launched.groups import CODE_LEVELS, coded, finest
from steptime._models.kernels.forms.launched.shares import shares_of
from steptime._models.kernels.forms.launched.terms import LaunchConstants, LaunchTraffic, terms, traffic

# The most that trees may change a time, as a natural logarithm.
MOST = 1.2
# How far what it computes may move a time from that of the same code: validation rows lie within 0.6 and 2.4, and beyond 2 a
# group of few rows is used far from them.
_MOST_APART = 2.0
# What a launch costs beside its bytes where its kernel was never measured (the usual floor of a small cold one).
_FLOOR_NS = 1000.0
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
class LaunchedModel:
    """All that is fitted: weights of terms per group of launches, scales of shares of a GPU, and trees."""

    facts: tuple[str, ...]
    groups: tuple[str, ...]
    weights: Numbers  # groups x terms
    least_ns: Numbers  # groups: nothing of its kernel runs shorter
    scales: Numbers
    # How far launches of a path, an op, a tag are from the sum of terms on average: text as a number for the trees.
    code_names: tuple[str, ...]
    codes: Numbers
    uncorrected: frozenset[str]  # families whose validation rows the trees do not help
    range_names: tuple[str, ...]  # groups of a path
    ranges: Numbers  # least and most elements measured of each
    trees: Trees = field(metadata=stored(prefix="trees_"))
    device: LaunchConstants = field(default_factory=partial(reference_constants, "launched", LaunchConstants))

    @cached_property
    def columns(self) -> LaunchColumns:
        """The numbers of a launch."""
        return LaunchColumns(self.facts)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.groups)}

    @cached_property
    def _codes(self) -> dict[str, float]:
        return dict(zip(self.code_names, self.codes.tolist(), strict=True))

    @cached_property
    def _ranges(self) -> dict[str, tuple[float, float]]:
        return {name: (low, high) for name, (low, high) in zip(self.range_names, self.ranges.tolist(), strict=True)}

    def group_of(self, names: tuple[str, ...]) -> tuple[int, int]:
        """The rows of the weights that a launch uses: of its own group, and of the same code."""
        return finest(names, self._rows), finest(names[:CODE_LEVELS], self._rows)

    def codes_of(self, names: tuple[str, ...]) -> tuple[float, float, float]:
        """The numbers of a launch by the names of its groups; 0 for what was never measured."""
        path, op, tag = coded(names)
        return self._codes.get(path, 0.0), self._codes.get(op, 0.0), self._codes.get(tag, 0.0)

    def inside(self, names: tuple[str, ...], elements: float) -> bool:
        """Whether launches of this kernel and path were measured below and above this size."""
        least, most = self._ranges.get(names[1], (np.inf, 0.0))
        return least <= elements <= most

    def time_ns(self, batch: Batch, corrected: npt.NDArray[np.bool_]) -> Numbers:
        """How long every launch takes."""
        result, moved = base_ns(self, batch)
        if corrected.any():
            seen = features(self.columns, batch, moved, result)[corrected]
            result[corrected] *= np.exp(np.clip(self.trees.values(seen), -MOST, MOST))
        return np.maximum(result, moved.at_peak_ns(self.device))


def base_ns(model: LaunchedModel, batch: Batch) -> tuple[Numbers, LaunchTraffic]:
    """The weighted sum of terms of every launch, and where its bytes are."""
    device = model.device
    shares = shares_of(device.sms, batch.share, batch.others, model.scales)
    moved = traffic(batch.numbers, device, shares)
    worked = terms(model.columns, batch.numbers, moved, device, shares)
    result = np.einsum("lt,lt->l", worked, model.weights[batch.group])
    usual = np.einsum("lt,lt->l", worked, model.weights[batch.code])
    result = np.clip(result, usual / _MOST_APART, usual * _MOST_APART)
    result = np.where(batch.group < 0, _FLOOR_NS + moved.least_ns(device, shares), result)
    return np.maximum(result, model.least_ns[batch.group]), moved


def features(columns: LaunchColumns, batch: Batch, moved: LaunchTraffic, base: Numbers) -> Numbers:
    """What trees see of every launch."""
    grid = batch.numbers[:, columns.features :]
    blocks, work = grid[:, :_SEEN_PAIRS], grid[:, PAIRS : PAIRS + _SEEN_PAIRS]
    bytes_seen = (moved.memory_bytes, moved.cache_bytes, moved.cold_share)
    part_seen = (base, base * batch.share, batch.share, batch.others, batch.codes)
    own = np.column_stack([*bytes_seen, *part_seen, blocks, work, blocks * work])
    return np.hstack([batch.numbers[:, : columns.features], own])
