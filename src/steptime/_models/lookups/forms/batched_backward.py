"""The table-batched lookup's backward pass with its fused update (SGD, row-wise Adagrad): a sequence of kernels, by stage.

Keys of all lookups are written, sorted, and their gradients' places gathered in sorted order; an update kernel then sums runs
of equal keys, chunk by chunk, and walks what crosses chunks once more until one chunk is left. Every stage has physical terms
with factors that are not negative and a few trees; all stages' trees read the same features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.engine.stored import stored
from steptime._models.lookups.caches import LookupConstants, reference_lookups
from steptime._models.lookups.forms import Correction, LookupTimes, inside_of
from steptime._models.lookups.forms.backward_sizes import CHUNK, COUNTED, SMALL_SORT, BackwardSizes, sizes_of
from steptime._models.lookups.question import OPTIMIZERS, Flags, Lookups, Shares
from steptime.errors import InputError

STAGES = ("linearize", "sort_prepare", "sort_passes", "gather", "update", "update_levels")
"""Keys of all lookups; what a sort does around its passes; the passes; infos in sorted order; the first level; all others."""

_UPDATES = ("sgd", "rowwise_adagrad")
# Columns of `share_terms` that count without measured rows of shares: all of the work, on so many fewer multiprocessors.
_UNFITTED = np.array([1.0, 1.0, 1.0])
# Lookups from which more of them cost more each, as more blocks, caches, memory are needed (set by hand).
_KNOTS = (3e4, 2.5e5, 1e6, 4e6)
# Warps of the update that run on one multiprocessor at a time, SGD and row-wise Adagrad: where there are more than 12 or 8
# times the multiprocessors, the median jumps by half or more (warm fit and validation rows of the whole GPU, both levels).
_RESIDENT = (12.0, 8.0)
# Rows of 16-bit elements shorter than so many bytes take as long as such rows to update: 0.11 to 0.13 ns from 32 to 256 bytes
# (fit and validation rows of the whole GPU with more than 1,500 programs).
_SHORT, _FLOAT = 256.0, 4.0


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
class BackwardStage:
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

    stages: Mapping[str, BackwardStage] = field(metadata=stored(prefix="", names=STAGES))  # on a whole GPU
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


def stage_times(stages: Mapping[str, BackwardStage], sizes: BackwardSizes, features: Floats, share: Floats) -> list[StageTime]:
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


@dataclass(frozen=True)
class StageTerms:
    """Of one stage: what does not depend on how many multiprocessors there are, and what is divided among them."""

    fixed: Floats  # [lookups, terms]
    divided: Floats  # [lookups, terms] among all
    reduced: Floats  # [lookups, terms] among those of the lookup's share of the GPU

    @property
    def whole(self) -> Floats:
        """On a whole GPU, [lookups, terms]."""
        return np.concatenate([self.fixed, self.divided], axis=1)


def terms_of(sizes: BackwardSizes, share: Floats) -> list[StageTerms]:
    """In the order of `STAGES`; each lookup has one of so many equal shares of the GPU."""
    first, later = (_update(sizes), 0), (_levels(sizes), 1)
    rest = [(stage(sizes), None) for stage in (_linearize, _prepare, _passes, _gather)]
    results = []
    for (fixed, divided), level in (*rest, first, later):
        columns = np.stack(divided, axis=1)
        among = [_among(sizes, columns, level, count) for count in (np.ones_like(share), share)]
        results.append(StageTerms(np.stack(fixed, axis=1), *among))
    return results


def _among(sizes: BackwardSizes, divided: Floats, level: int | None, share: Floats) -> Floats:
    """Terms where all multiprocessors are so many times as many as there are; `level` is the update's whose waves count."""
    scaled = divided * share[:, None]
    if level is None:
        return scaled
    return np.concatenate([scaled, np.stack(_by_optimizer(sizes, _waves(_full(sizes, level) * share)), axis=1)], axis=1)


def _linearize(sizes: BackwardSizes) -> tuple[list[Floats], list[Floats]]:
    item, cold, lookups = np.ones_like(sizes.lookups), sizes.cold, sizes.lookups
    bags = sizes.batch * sizes.tables
    fixed = [item * 1e3, cold * 1e3, sizes.longest * 1e2, sizes.longest * 1e2 * cold]
    beyond = [np.maximum(lookups - knot, 0.0) / 200 for knot in _KNOTS[2:]]
    return fixed, [sizes.steps / 10, sizes.steps / 10 * cold, lookups / 500, lookups / 200 * cold, bags / 10, *beyond]


def _knots(lookups: Floats) -> list[Floats]:
    return [lookups / 100, *(np.maximum(lookups - knot, 0.0) / 100 for knot in _KNOTS)]


def _prepare(sizes: BackwardSizes) -> tuple[list[Floats], list[Floats]]:
    item, small = np.ones_like(sizes.lookups), sizes.small_sort
    longer = 1 + sizes.long_keys
    return [item * 1e3, (1 - small) * longer * 1e3, sizes.cold * 1e3], [longer * knot for knot in _knots(sizes.lookups)]


def _passes(sizes: BackwardSizes) -> tuple[list[Floats], list[Floats]]:
    item, small = np.ones_like(sizes.lookups), sizes.small_sort
    # Twice the passes over 16 bytes an entry instead of 12; no measured row has such keys.
    longer = 1 + 1.7 * sizes.long_keys
    fixed = [item * 1e3, small * sizes.lookups, (1 - small) * longer * 1e3]
    fixed.append((1 - small) * longer * 1e3 * np.log(np.maximum(sizes.lookups / SMALL_SORT, 1.0)))
    return fixed, [longer * (1 - small) * knot for knot in _knots(sizes.lookups)]


def _gather(sizes: BackwardSizes) -> tuple[list[Floats], list[Floats]]:
    item, lookups, weighted = np.ones_like(sizes.lookups), sizes.lookups, sizes.weighted
    fixed = [item * 1e3, weighted * 1e3, 1e3 * np.log(np.maximum(lookups / 1e3, 1.0))]
    beyond = [np.maximum(lookups - knot, 0.0) / 1e3 for knot in _KNOTS[2:]]
    divided = [lookups / 1e3, sizes.info_sectors / 1e3, sizes.far_sectors / 1e3, *beyond]
    return fixed, [*divided, *(weighted * term for term in divided)]


def _by_optimizer(sizes: BackwardSizes, terms: list[Floats]) -> list[Floats]:
    """Adagrad does what SGD does and more, so that what was fitted to one says something of the other."""
    return [*terms, *(term * sizes.adagrad for term in terms)]


def _update(sizes: BackwardSizes) -> tuple[list[Floats], list[Floats]]:
    item, cold, several = np.ones_like(sizes.lookups), sizes.cold, sizes.wide / 64
    fixed = _by_optimizer(sizes, [item * 1e3, cold * 1e3, np.where(several > 1, 1e3, 0.0), sizes.weighted * 1e3])
    ended, ended_bytes = sizes.ended[:, 0], sizes.ended_bytes[:, 0]
    padded = np.ceil(sizes.lookups / CHUNK) * CHUNK * sizes.stride
    work = [
        padded / 1e3, sizes.elements / 1e3, ended / 1e2, ended_bytes / 2e3, sizes.entries[:, 1] / 100,
        sizes.entry_elements[:, 1] / 500, sizes.lookups / 200,
    ]  # fmt: skip
    touched = sizes.row_bytes + sizes.gradient_bytes
    missed = np.maximum(1 - sizes.device.l2_kept_bytes / np.maximum(touched, 1.0), 0.0)
    short = np.where(sizes.item < _FLOAT, np.maximum(1 - ended_bytes / np.maximum(ended, 1e-9) / _SHORT, 0.0), 0.0)
    memory = [
        ended * short / 100, ended_bytes * missed / 2e3, sizes.far / 1e3,
        sizes.gradient_bytes * cold / 3e3, sizes.row_bytes * cold / 3e3,
    ]  # fmt: skip
    return fixed, [*_by_optimizer(sizes, work), *memory]


def _full(sizes: BackwardSizes, level: int) -> Floats:
    """Programs of a level over those that run at once."""
    resident = np.where(sizes.adagrad > 0, _RESIDENT[1], _RESIDENT[0])
    full: Floats = sizes.programs[:, level] * (sizes.wide / 64) / (sizes.device.sms * resident)
    return full


def _waves(full: Floats) -> list[Floats]:
    """One wave of programs after another: whole ones at first, which get out of step later."""
    return [full * 1e3, np.maximum(full - 1, 0.0) * 1e3, *(np.where(full > wave, 1e3, 0.0) for wave in (1.0, 2.0, 3.0))]


def _levels(sizes: BackwardSizes) -> tuple[list[Floats], list[Floats]]:
    live, programs = sizes.live[:, 1:], sizes.programs[:, 1:]
    several = sizes.wide / 64
    filled = np.minimum(sizes.count[:, 1:] / CHUNK, 1.0) * live
    inside = live[:, : COUNTED - 1]
    entries = sizes.entries[:, 1:] * inside
    met = -np.expm1(-entries)  # whether anything is left to do
    full = np.minimum(entries / np.maximum(sizes.count[:, 1:COUNTED], 1.0), 1.0) * inside
    levels = [live.sum(1), filled.sum(1), met.sum(1), full.sum(1), live.sum(1) * sizes.cold]
    fixed = [
        *levels,
        np.where(several > 1, live.sum(1), 0.0),
        filled.sum(1) * sizes.stride / 64,
        met.sum(1) * sizes.stride / 64,
    ]
    work = [
        (programs.sum(1) * sizes.wide) / 30,
        (sizes.entry_elements[:, 1:] * inside).sum(1) / 1e3, entries.sum(1) / 100,
        (sizes.ended_bytes[:, 1:] * inside).sum(1) / 2e3, (sizes.ended[:, 1:] * inside).sum(1) / 100,
    ]  # fmt: skip
    return _by_optimizer(sizes, [term * 1e3 for term in fixed]), _by_optimizer(sizes, work)


def features_of(sizes: BackwardSizes) -> Floats:
    """[lookups, features], the same for all stages."""
    lookups, log = sizes.lookups, np.log
    second = sizes.count[:, 1]
    columns = [
        log(lookups), log(sizes.batch + 1), log(sizes.batch * sizes.tables + 1), log(sizes.unique),
        sizes.unique / lookups, sizes.stride, sizes.wide / sizes.stride, sizes.widest,
        sizes.elements / lookups / (4 * sizes.stride), sizes.elements / lookups, sizes.adagrad, sizes.item, sizes.weighted,
        sizes.cold, log(sizes.elements), log(sizes.row_bytes), log(sizes.gradient_bytes + 1), log(sizes.own_gradient + 1),
        sizes.far / sizes.elements, log(sizes.row_bytes + sizes.gradient_bytes), log(sizes.quads + 1),
        log(sizes.programs[:, 0]), _full(sizes, 0), _full(sizes, 1), _full(sizes, 2), sizes.levels,
        log(sizes.steps + 1), log(sizes.longest + 1), log(sizes.hottest + 1), sizes.hottest / lookups,
        log(lookups) / log(16.0) % 1.0, lookups / np.maximum(sizes.batch * sizes.tables, 1.0),
        *(sizes.entries[:, level] / lookups for level in range(1, COUNTED)),
        *(sizes.ended[:, level] / lookups for level in range(COUNTED)),
        log(sizes.ended_bytes[:, 0] + 1), log(sizes.ended_bytes[:, 1] + 1), log(sizes.entry_elements[:, 1] + 1),
        sizes.entries[:, 1] / np.maximum(second, 1.0), sizes.info_sectors / lookups, sizes.far_sectors / lookups,
    ]  # fmt: skip
    return np.stack(columns, axis=1)
