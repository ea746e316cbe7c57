"""The table-batched lookup's backward pass with its fused update (SGD, row-wise Adagrad): a sequence of kernels, part by part.

Keys of all lookups are written, sorted, and their gradients' places gathered in sorted order; an update kernel then sums runs
of equal keys, chunk by chunk, and walks what crosses chunks once more until one chunk is left (`steptime_lab.workloads`). Every
part has physical terms with factors that are not negative and a few trees; all parts' trees read the same features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.correction import named, part
from steptime._models.lookups.forms import LookupTimes, inside_of
from steptime._models.lookups.forms.batched_backward.model import Beside, PartModel, Split
from steptime._models.lookups.forms.batched_backward.parts import LINEARIZE, PARTS, measured_parts, numbers
from steptime._models.lookups.forms.batched_backward.sizes import Sizes, sizes_of
from steptime._models.lookups.forms.batched_backward.terms import features_of, terms_of
from steptime._models.lookups.question import OPTIMIZERS
from steptime._models.lookups.rows import MeasuredLookups
from steptime.errors import InputError

# Trees of each part: the more, the more of the time it is (validation rows, whole GPU).
_ROUNDS = (25, 25, 30, 25, 100, 60)
_UPDATES = ("sgd", "rowwise_adagrad")


@dataclass(frozen=True)
class BatchedBackward:
    """A fitted model."""

    parts: tuple[PartModel, ...]  # of `PARTS`, on a whole GPU
    beside: Beside
    low: Floats  # smallest and largest sizes of fitted rows (`_extent`)
    high: Floats

    def times(self, lookups: Lookups) -> LookupTimes:
        """By part. Where nothing is looked up nothing is launched; the time is then a nanosecond, not 0, so that it divides."""
        _check(lookups)
        sizes = sizes_of(lookups)
        features = features_of(sizes)
        split = _split(self.parts, sizes, features, lookups.share)
        found = np.stack([one.whole for one in split], axis=1)
        shared = lookups.share > 1
        if shared.any():
            found[shared] = self.beside.times(lookups.take(shared), [one.take(shared) for one in split], features[shared])
        found[sizes.any == 0] = np.eye(len(PARTS))[LINEARIZE]
        inside = inside_of(self.low, self.high, _extent(sizes)) & (sizes.long_keys == 0) & (sizes.any > 0)
        return LookupTimes(PARTS, numbers(sizes), found, inside)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        found = {"low": self.low, "high": self.high, **named("beside", self.beside.arrays())}
        for name, model in zip(PARTS, self.parts, strict=True):
            found.update(named(name, model.arrays()))
        return found


def fit(measured: MeasuredLookups, seed: int) -> BatchedBackward:
    """Fits to the rows of the split `fit`: the parts to the whole GPU, then parts of GPUs on top."""
    rows = measured.of("fit")
    whole = rows.take(rows.lookups.share == 1)
    if not len(whole):
        raise InputError("table_batched backward: no row of the split fit on a whole GPU; expected hundreds.")
    sizes = sizes_of(whole.lookups)
    features, times = features_of(sizes), measured_parts(whole)
    parts = tuple(
        PartModel.fit(terms, features, own, seed, rounds)
        for terms, own, rounds in zip(terms_of(sizes, whole.lookups.share), times.T, _ROUNDS, strict=True)
    )
    extent = _extent(sizes)
    return BatchedBackward(parts, _beside(rows, parts, seed), extent.min(axis=0), extent.max(axis=0))


def _beside(rows: MeasuredLookups, parts: tuple[PartModel, ...], seed: int) -> Beside:
    shared = rows.take(rows.lookups.share > 1)
    if not len(shared):
        return Beside.unfitted(len(PARTS))
    sizes = sizes_of(shared.lookups)
    features = features_of(sizes)
    split = _split(parts, sizes, features, shared.lookups.share)
    return Beside.fit(shared.lookups, split, features, measured_parts(shared), seed)


def _split(parts: tuple[PartModel, ...], sizes: Sizes, features: Floats, share: Floats) -> list[Split]:
    return [model.split(terms, features) for model, terms in zip(parts, terms_of(sizes, share), strict=True)]


def load(arrays: Arrays) -> BatchedBackward:
    """The form that `arrays` were taken from."""
    parts = tuple(PartModel.load(part(arrays, name)) for name in PARTS)
    return BatchedBackward(parts, Beside.load(part(arrays, "beside")), arrays["low"], arrays["high"])


def _extent(sizes: Sizes) -> Floats:
    """What makes a lookup like those that were fitted, [lookups, sizes]."""
    return np.stack([sizes.lookups, sizes.batch, sizes.tables, sizes.widest, sizes.unique, sizes.quads], axis=1)


def _check(lookups: Lookups) -> None:
    known = np.isin(lookups.optimizer, [OPTIMIZERS.index(name) for name in _UPDATES])
    if not known.all():
        name = OPTIMIZERS[int(lookups.optimizer[np.argmin(known)])]
        raise InputError(f"table_batched backward: optimizer is {name!r}; expected {' or '.join(_UPDATES)}.")
