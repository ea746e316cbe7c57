"""Parts of a backward pass on a whole GPU, and what becomes of them on a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.batch import Flags, Lookups
from steptime._models.lookups.correction import Correction, named, part
from steptime._models.lookups.forms.batched_backward.terms import Terms

# With fewer rows of parts of GPUs nothing is fitted to them.
_FEWEST = 60
# Trees of the correction of parts of a GPU: 30, 60 and 120 are equally good on validation rows.
_ROUNDS_BESIDE = 40
# Of 16, 24 and 31 leaves the best on validation rows, and on rows of more tables or more skew than were fitted; at a rate of
# 0.15 as good as with a third more trees at 0.1.
_TREES = {"num_leaves": 31, "max_depth": 8, "learning_rate": 0.15}
# Columns of `_beside_terms` that count without measured rows of parts: all of the work, on so many fewer multiprocessors.
_UNFITTED = np.array([1.0, 1.0, 1.0])


@dataclass(frozen=True)
class Split:
    """Times of a part, ns, [lookups]: that does not depend on how many multiprocessors there are, and that does."""

    fixed: Floats
    divided: Floats  # on a whole GPU
    reduced: Floats  # on the lookup's part of it

    @property
    def whole(self) -> Floats:
        """On a whole GPU."""
        return self.fixed + self.divided

    def take(self, places: Flags) -> Split:
        """Of some lookups."""
        return Split(self.fixed[places], self.divided[places], self.reduced[places])


@dataclass(frozen=True)
class PartModel:
    """One part on a whole GPU: factors of its terms, and trees on what they leave."""

    factors: Floats  # [terms]
    correction: Correction

    @classmethod
    def fit(cls, terms: Terms, features: Floats, times: Floats, seed: int, rounds: int) -> PartModel:
        """From rows of the whole GPU; those without a kernel of this part say nothing."""
        from steptime_lab.fit.engine.terms import fit_terms

        there = times > 0
        every = terms.whole[there]
        factors = fit_terms(every, times[there])
        physics = np.maximum(every @ factors, 1.0)
        return cls(factors, Correction.fit(features[there], physics, times[there], seed, rounds=rounds, **_TREES))

    def split(self, terms: Terms, features: Floats) -> Split:
        """What the time is made of."""
        factor, fixed = self.correction.factors(features), terms.fixed.shape[1]
        share = (terms.divided, terms.reduced)
        return Split(terms.fixed @ self.factors[:fixed] * factor, *(one @ self.factors[fixed:] * factor for one in share))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        return {"factors": self.factors, **named("correction", self.correction.arrays())}

    @classmethod
    def load(cls, arrays: Arrays) -> PartModel:
        """The model that `arrays` were taken from."""
        return cls(arrays["factors"], Correction.load(part(arrays, "correction")))


@dataclass(frozen=True)
class Beside:
    """A part of a GPU beside others: each part of the pass by factors of its own, their sum by one correction."""

    factors: Floats  # [parts of the pass, terms]
    correction: Correction | None  # None where too few such rows were fitted

    @classmethod
    def fit(cls, lookups: Lookups, split: Sequence[Split], features: Floats, times: Floats, seed: int) -> Beside:
        """From rows of parts of GPUs and what the whole GPU would take; `times` are [lookups, parts]."""
        from steptime_lab.fit.engine.terms import fit_terms

        if len(lookups) < _FEWEST:
            return cls.unfitted(len(split))
        terms = [_beside_terms(lookups, one) for one in split]
        factors = np.stack([fit_terms(one[own > 0], own[own > 0]) for one, own in zip(terms, times.T, strict=True)])
        whole = sum(one @ own for one, own in zip(terms, factors, strict=True))
        inputs = _beside_features(lookups, features)
        correction = Correction.fit(inputs, np.asarray(whole), times.sum(axis=1), seed, rounds=_ROUNDS_BESIDE)
        return cls(factors, correction)

    @classmethod
    def unfitted(cls, parts: int) -> Beside:
        """Without rows to fit."""
        return cls(np.tile(_UNFITTED, (parts, 1)), None)

    def times(self, lookups: Lookups, split: Sequence[Split], features: Floats) -> Floats:
        """[lookups, parts], ns."""
        width = self.factors.shape[1]
        terms = [_beside_terms(lookups, one)[:, :width] for one in split]
        found = np.stack([one @ own for one, own in zip(terms, self.factors, strict=True)], axis=1)
        if self.correction is None:
            return found
        return found * self.correction.factors(_beside_features(lookups, features))[:, None]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        own = {} if self.correction is None else named("correction", self.correction.arrays())
        return {"factors": self.factors, **own}

    @classmethod
    def load(cls, arrays: Arrays) -> Beside:
        """The model that `arrays` were taken from."""
        correction = part(arrays, "correction")
        return cls(arrays["factors"], Correction.load(correction) if correction else None)


def _beside_terms(lookups: Lookups, split: Split) -> Floats:
    """Both times, and what the second grows by for want of multiprocessors; others that are busy slow all of it down."""
    fixed, divided, missing = split.fixed, split.divided, split.reduced - split.divided
    same = lookups.others == OTHERS.index("same")
    streaming = lookups.others == OTHERS.index("streaming")
    busy = same | streaming
    columns = [
        fixed, divided, missing, fixed * (lookups.share - 1), fixed * busy, divided * busy, missing * same, missing * streaming,
        divided * streaming, fixed * streaming,
    ]  # fmt: skip
    return np.stack(columns, axis=1)


def _beside_features(lookups: Lookups, features: Floats) -> Floats:
    return np.column_stack([features, lookups.share, lookups.others])
