"""The table-batched lookup's backward pass with its fused update (SGD, row-wise Adagrad): a sequence of kernels, by stage.

Keys of all lookups are written, sorted, and their gradients' places gathered in sorted order; an update kernel then sums runs
of equal keys, chunk by chunk, and walks what crosses chunks once more until one chunk is left. Every stage has physical terms
with factors that are not negative and a few trees; all stages' trees read the same features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.engine.stored import stored
from steptime._models.lookups.batch import Flags, Lookups, Shares
from steptime._models.lookups.correction import Correction
from steptime._models.lookups.device import LookupConstants, reference_lookups
from steptime._models.lookups.forms import LookupTimes, inside_of
from steptime._models.lookups.forms.batched_backward.sizes import BackwardSizes, sizes_of
from steptime._models.lookups.forms.batched_backward.terms import StageTerms, features_of, terms_of
from steptime._models.lookups.question import OPTIMIZERS
from steptime.errors import InputError

STAGES = ("linearize", "sort_prepare", "sort_passes", "gather", "update", "update_levels")
"""Keys of all lookups; what a sort does around its passes; the passes; infos in sorted order; the first level; all others."""

_UPDATES = ("sgd", "rowwise_adagrad")
# Columns of `share_terms` that count without measured rows of shares: all of the work, on so many fewer multiprocessors.
_UNFITTED = np.array([1.0, 1.0, 1.0])


@dataclass(frozen=True)
class StageTime:
    """Of a stage, ns, [lookups]: what does not depend on how many multiprocessors there are, and what does."""

    fixed: Floats
    divided: Floats  # on a whole GPU
    reduced: Floats  # on the lookup's share of it

    @property
    def whole(self) -> Floats:
        """On a whole GPU."""
        return self.fixed + self.divided

    def take(self, places: Flags) -> StageTime:
        """Of some lookups."""
        return StageTime(self.fixed[places], self.divided[places], self.reduced[places])


@dataclass(frozen=True)
class Stage:
    """One stage on a whole GPU: factors of its terms, and trees on what they leave."""

    factors: Floats  # [terms]
    correction: Correction

    def time(self, terms: StageTerms, features: Floats) -> StageTime:
        """What the time is made of."""
        factor, fixed = self.correction.factors(features), terms.fixed.shape[1]
        among = (terms.divided, terms.reduced)
        return StageTime(terms.fixed @ self.factors[:fixed] * factor, *(item @ self.factors[fixed:] * factor for item in among))


@dataclass(frozen=True)
class OnShares:
    """The pass on a share of a GPU: each stage by factors of its own, their sum by one correction."""

    factors: Floats  # [stages, terms]
    correction: Correction | None = None  # None where too few such rows were fitted

    @classmethod
    def unfitted(cls) -> OnShares:
        """Without rows to fit."""
        return cls(np.tile(_UNFITTED, (len(STAGES), 1)))

    def times(self, shares: Shares, stages: Sequence[StageTime], features: Floats) -> Floats:
        """Of each lookup and stage, ns."""
        width = self.factors.shape[1]
        terms = [share_terms(shares, stage)[:, :width] for stage in stages]
        times = np.stack([term @ factors for term, factors in zip(terms, self.factors, strict=True)], axis=1)
        if self.correction is None:
            return times
        return times * self.correction.factors(np.column_stack([features, shares.columns()]))[:, None]


def share_terms(shares: Shares, stage: StageTime) -> Floats:
    """Both times, and what the second grows by for want of multiprocessors; others that are busy slow all of it down."""
    fixed, divided, missing = stage.fixed, stage.divided, stage.reduced - stage.divided
    same, streaming = shares.same, shares.streaming
    busy = same | streaming
    columns = [
        fixed, divided, missing, fixed * (shares.count - 1), fixed * busy, divided * busy, missing * same, missing * streaming,
        divided * streaming, fixed * streaming,
    ]  # fmt: skip
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class BatchedBackward:
    """A fitted model."""

    stages: Mapping[str, Stage] = field(metadata=stored(prefix="", names=STAGES))  # on a whole GPU
    shares: OnShares = field(metadata=stored(prefix="beside."))
    low: Floats  # smallest and largest sizes of fitted rows (`extent`)
    high: Floats
    device: LookupConstants = field(default_factory=reference_lookups)

    def times(self, lookups: Lookups) -> LookupTimes:
        """By stage. Where nothing is looked up nothing is launched: a nanosecond, not 0, so that it divides."""
        _check(lookups)
        sizes = sizes_of(lookups, self.device)
        features = features_of(sizes)
        stages = stage_times(self.stages, sizes, features, lookups.share)
        times = np.stack([stage.whole for stage in stages], axis=1)
        shared = lookups.shares.divided
        if shared.any():
            on_shares = [stage.take(shared) for stage in stages]
            times[shared] = self.shares.times(lookups.shares.take(shared), on_shares, features[shared])
        times[sizes.any == 0] = np.eye(len(STAGES))[STAGES.index("linearize")]
        inside = inside_of(self.low, self.high, extent(sizes)) & (sizes.long_keys == 0) & (sizes.any > 0)
        return LookupTimes(STAGES, numbers(sizes), times, inside)


def stage_times(stages: Mapping[str, Stage], sizes: BackwardSizes, features: Floats, share: Floats) -> list[StageTime]:
    """Of lookups that have one of so many equal shares of a GPU each."""
    return [stages[name].time(terms, features) for name, terms in zip(STAGES, terms_of(sizes, share), strict=True)]


def numbers(sizes: BackwardSizes) -> Floats:
    """Kernels of each stage, [lookups, stages]: none at all where nothing is looked up."""
    item, small = np.ones_like(sizes.lookups), sizes.small_sort
    # A pass sorts by eight bits of the keys; memory is set before each, and twice before the first.
    passes = np.where(small > 0, 1.0, 4.0 * (1 + sizes.long_keys))
    # Three copies and a fill; or a copy, a fill, two settings, a histogram and its sums.
    prepare = np.where(small > 0, 4.0, 6.0 + passes)
    result = np.stack([item, prepare, passes, item + sizes.weighted, item, sizes.levels - 1], axis=1)
    return result * sizes.any[:, None]


def extent(sizes: BackwardSizes) -> Floats:
    """What makes a lookup like those that were fitted, [lookups, sizes]."""
    return np.stack([sizes.lookups, sizes.batch, sizes.tables, sizes.widest, sizes.unique, sizes.quads], axis=1)


def _check(lookups: Lookups) -> None:
    known = np.isin(lookups.optimizer, [OPTIMIZERS.index(name) for name in _UPDATES])
    if not known.all():
        name = OPTIMIZERS[int(lookups.optimizer[np.argmin(known)])]
        raise InputError(f"table_batched backward: optimizer is {name!r}; expected {' or '.join(_UPDATES)}.")
