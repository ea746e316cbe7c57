"""`Timed`: the time of kernels of one kind, physics with a correction, on a whole GPU and on shares of one.

The whole GPU is fitted by itself, so that rows of shares cannot make it worse; shares have factors of their own on terms of
their own, and a correction that sees what the whole GPU's says.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.engine.stored import stored
from steptime._models.lookups.batch import Flags
from steptime._models.lookups.correction import Correction
from steptime._models.lookups.forms.one_table import OneTable

# Where rows wait for each other, trees know little of more skew than so many of their rows had; so much further, they have no
# say. Chosen on rows of embedding_bag, of fit and validation, that are more skewed than those fitted to.
_FADING = 0.25
# No kernel of the measured rows takes less.
_SHORTEST = 600.0


@dataclass(frozen=True)
class KernelTerms:
    """What the time of a kind of kernels is made of, a row for each lookup."""

    terms: Floats  # nanoseconds up to a factor
    more: Floats  # further terms that shares of a GPU have
    features: Floats
    shares: Floats  # share and others: [lookups, 2]
    skew: Floats  # share of lookups that go to the hottest row
    slower: Floats  # how much longer terms but the first take where no row of a share of a GPU was measured
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
    ) -> KernelTerms:
        """Of lookups, with terms (and those of shares) and features of the same rows.

        `spread`: whether terms are of work that all SMs share, and do not say so themselves.
        """
        none = np.zeros(len(features))
        slower = one.shares.count if spread else none + 1.0
        skew = one.tables.hottest[:, 0] / np.maximum(one.lookups, 1.0)
        return cls(
            *terms,
            features,
            one.shares.columns(),
            skew,
            slower,
            none if serial is None else serial,
            none if least is None else least,
        )

    def take(self, places: Flags) -> KernelTerms:
        """Some of the rows."""
        return KernelTerms(*(getattr(self, column.name)[places] for column in fields(self)))

    @property
    def whole(self) -> Flags:
        """Rows on a whole GPU."""
        result: Flags = self.shares[:, 0] == 1.0
        return result

    @property
    def joined(self) -> Floats:
        """The terms of shares of a GPU."""
        return np.concatenate([self.terms, self.more], axis=1)

    def physics(self, terms: Floats, factors: Floats) -> Floats:
        """Nanoseconds: what happens side by side and what happens one after the other overlap in part."""
        result: Floats = np.maximum(np.hypot(terms @ factors, self.serial), np.maximum(self.least, _SHORTEST))
        return result


@dataclass(frozen=True)
class Timed:
    """Factors of terms and the corrections on top."""

    factors: Floats
    correction: Correction
    share_factors: Floats = field(metadata=stored(key="part_factors"))  # none without rows of shares
    share_correction: Correction = field(metadata=stored(prefix="part_correction."))
    skew: float  # that enough fitted rows have

    def ns(self, terms: KernelTerms) -> Floats:
        """Nanoseconds of each row."""
        whole = terms.whole
        times, factors = np.empty(len(whole)), np.empty(len(whole))
        if whole.any():
            rows = terms.take(whole)
            times[whole], factors[whole] = rows.physics(rows.terms, self.factors), self.correction.factors(rows.features)
        if not whole.all():
            times[~whole], features = self.of_shares(terms.take(~whole))
            factors[~whole] = self.share_correction.factors(features)
        further = np.where(terms.serial > 0, terms.skew - self.skew, 0.0) / (_FADING * self.skew + 1e-9)
        times *= factors ** np.clip(1.0 - further, 0.0, 1.0)
        return times

    def of_shares(self, terms: KernelTerms) -> tuple[Floats, Floats]:
        """Physics and features of rows on shares of a GPU."""
        base = terms.physics(terms.terms, self.factors)
        if self.share_factors.size:
            physics = terms.physics(terms.joined, self.share_factors)
        else:
            slower = np.column_stack([terms.terms[:, :1], terms.terms[:, 1:] * terms.slower[:, None]])
            physics = terms.physics(slower, self.factors)
        known = self.correction.trees.values(terms.features)
        return physics, np.column_stack([terms.features, terms.shares, np.log(physics / base), known])
