"""`Timed`: the time of kernels of one kind, physics with a correction, on a whole GPU and on parts of one.

The whole GPU is fitted by itself, so that rows of parts cannot make it worse; parts have factors of their own on terms of
their own, and a correction that sees what the whole GPU's says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays
from steptime._models.engine.trees import Trees
from steptime._models.lookups.batch import Flags
from steptime._models.lookups.correction import Correction, named, part
from steptime._models.lookups.forms.bag_parts import OneTable

# Fewer rows than these teach no factors (of terms) or no trees.
_LEAST, _LEAST_TREES = 4, 60
# Rows with a larger share of what is one after the other say little about the rest.
_MOSTLY = 0.8
# Where rows wait for each other, trees know little of more skew than so many of their rows had; so much further, they have no
# say. Chosen on rows of embedding_bag, of fit and validation, that are more skewed than those fitted to.
_WITNESSES, _FADING = 60, 0.25
# No kernel of the measured rows takes less.
_SHORTEST = 600.0
# Chosen on validation rows of embedding_bag and embedding_sparse: for thousands of rows, for hundreds, for parts of a GPU.
MANY: dict[str, Any] = {"rounds": 200, "learning_rate": 0.09}
FEW: dict[str, Any] = {"rounds": 120, "learning_rate": 0.06, "num_leaves": 8}
PARTS: dict[str, Any] = {
    "objective": "huber",  # Beside busy others, repeats differ by several percent.
    "alpha": 0.1,
    "rounds": 200,
    "learning_rate": 0.08,
    "num_leaves": 12,
    "min_data_in_leaf": 5,
}
_MANY_ROWS = 1000


@dataclass(frozen=True)
class Growth:
    """LightGBM's settings for the whole GPU and for parts; none where physics does better by itself."""

    whole: Mapping[str, Any] | None = field(default_factory=lambda: MANY)  # of few rows always as FEW
    parts: Mapping[str, Any] | None = field(default_factory=lambda: PARTS)


@dataclass(frozen=True)
class Asked:
    """What the time of a kind of kernels is made of, a row for each lookup."""

    terms: Floats  # nanoseconds up to a factor
    more: Floats  # further terms that parts of a GPU have
    features: Floats
    places: Floats  # share and others: [lookups, 2]
    skew: Floats  # share of lookups that go to the hottest row
    slower: Floats  # how much longer terms but the first take where no row of a part of a GPU was measured
    serial: Floats  # nanoseconds of what happens one after the other, however many SMs there are
    least: Floats  # nanoseconds that memory takes in any case

    @classmethod
    def of(
        cls,
        one: OneTable,
        terms: tuple[Floats, Floats],
        features: Floats,
        *,
        serial: Floats | None = None,
        least: Floats | None = None,
        spread: bool = False,
    ) -> Asked:
        """Of lookups, with terms (and those of parts) and features of the same rows.

        `spread`: whether terms are of work that all SMs share, and do not say so themselves.
        """
        none = np.zeros(len(features))
        slower = one.share if spread else none + 1.0
        places = np.column_stack([one.share, one.others])
        skew = one.tables.hottest[:, 0] / np.maximum(one.lookups, 1.0)
        return cls(*terms, features, places, skew, slower, none if serial is None else serial, none if least is None else least)

    def take(self, places: Flags) -> Asked:
        """Some of the rows."""
        return Asked(*(getattr(self, name.name)[places] for name in fields(self)))

    @property
    def whole(self) -> Flags:
        """Rows on a whole GPU."""
        found: Flags = self.places[:, 0] == 1.0
        return found

    def physics(self, terms: Floats, factors: Floats) -> Floats:
        """Nanoseconds: what happens side by side and what happens one after the other overlap in part."""
        found: Floats = np.maximum(np.hypot(terms @ factors, self.serial), np.maximum(self.least, _SHORTEST))
        return found


@dataclass(frozen=True)
class Timed:
    """Factors of terms and the corrections on top."""

    factors: Floats
    correction: Correction
    part_factors: Floats  # none without rows of parts
    part_correction: Correction
    skew: float  # that enough fitted rows have

    @classmethod
    def fit(cls, asked: Asked, times: Floats, seed: int, growth: Growth | None = None) -> Timed:
        """From fitted rows. Without rows of parts, parts have the whole GPU's factors, on as many fewer SMs."""
        growth = growth or Growth()
        whole = asked.whole
        known = whole if whole.sum() >= _LEAST else np.ones(len(times), dtype=np.bool_)
        base = asked.take(known)
        factors = _factors(base, base.terms, times[known])
        correction = _correction(base.features, base.physics(base.terms, factors), times[known], seed, growth.whole)
        skew = float(np.sort(base.skew)[-min(_WITNESSES, len(base.skew))])
        found = cls(factors, correction, np.zeros(0), _none(), skew)
        parts, of_parts = asked.take(~whole), times[~whole]
        if len(of_parts) < _LEAST_TREES:
            return found
        found = replace(found, part_factors=_factors(parts, _joined(parts), of_parts))
        physics, features = found._of_parts(parts)
        return replace(found, part_correction=_correction(features, physics, of_parts, seed, growth.parts))

    def ns(self, asked: Asked) -> Floats:
        """[rows]."""
        whole = asked.whole
        found, factors = np.empty(len(whole)), np.empty(len(whole))
        if whole.any():
            rows = asked.take(whole)
            found[whole], factors[whole] = rows.physics(rows.terms, self.factors), self.correction.factors(rows.features)
        if not whole.all():
            found[~whole], features = self._of_parts(asked.take(~whole))
            factors[~whole] = self.part_correction.factors(features)
        further = np.where(asked.serial > 0, asked.skew - self.skew, 0.0) / (_FADING * self.skew + 1e-9)
        found *= factors ** np.clip(1.0 - further, 0.0, 1.0)
        return found

    def _of_parts(self, asked: Asked) -> tuple[Floats, Floats]:
        """Physics and features of rows on parts of a GPU."""
        base = asked.physics(asked.terms, self.factors)
        if self.part_factors.size:
            physics = asked.physics(_joined(asked), self.part_factors)
        else:
            slower = np.column_stack([asked.terms[:, :1], asked.terms[:, 1:] * asked.slower[:, None]])
            physics = asked.physics(slower, self.factors)
        known = self.correction.trees.values(asked.features)
        return physics, np.column_stack([asked.features, asked.places, np.log(physics / base), known])

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        return {
            "factors": self.factors,
            "part_factors": self.part_factors,
            "skew": np.array(self.skew),
            **named("correction", self.correction.arrays()),
            **named("part_correction", self.part_correction.arrays()),
        }

    @classmethod
    def load(cls, arrays: Arrays) -> Timed:
        """What `arrays` were taken from."""
        return cls(
            arrays["factors"],
            Correction.load(part(arrays, "correction")),
            arrays["part_factors"],
            Correction.load(part(arrays, "part_correction")),
            float(arrays["skew"]),
        )


def _joined(asked: Asked) -> Floats:
    return np.concatenate([asked.terms, asked.more], axis=1)


def _factors(asked: Asked, terms: Floats, times: Floats) -> Floats:
    """Fitted to rows of which not most is one after the other, and to what of these is not."""
    from steptime_lab.fit.engine.terms import fit_terms

    side = asked.serial < _MOSTLY * times
    if side.sum() < _LEAST:
        return np.ones(terms.shape[1])
    return fit_terms(terms[side], np.sqrt(times[side] ** 2 - asked.serial[side] ** 2))


def _correction(features: Floats, physics: Floats, times: Floats, seed: int, settings: Mapping[str, Any] | None) -> Correction:
    if settings is None or len(times) < _LEAST_TREES:
        return _none()
    fitting = FEW if settings is MANY and len(times) < _MANY_ROWS else settings
    return Correction.fit(features, physics, times, seed, **fitting)


def _none() -> Correction:
    return Correction(Trees.constant(0.0), 0.0, 0.0)
