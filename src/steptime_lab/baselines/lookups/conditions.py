"""What every baseline is told of a lookup besides its tables: as inputs of what is learned, as factors of what is a rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._lookups.table import Floats, Places
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.batch import Flags, Lookups
from steptime._models.lookups.forms import LookupTimes, inside_of, total_only
from steptime._models.lookups.question import OPTIMIZERS
from steptime_lab.measurements.lookups import MeasuredLookups

# Parts of a GPU that were measured are a half, a quarter and an eighth: 2 to the power of these places.
_SHARES = 4
# Medians of one condition after the other; they stop moving after two or three rounds.
_ROUNDS = 4


def told(lookups: Lookups) -> Floats:
    """The conditions of lookups as inputs, [lookups, inputs]."""
    flags: list[Flags] = [lookups.warm, lookups.weighted]
    flags += [lookups.optimizer == place for place in range(2, len(OPTIMIZERS))]
    flags += [lookups.others == OTHERS.index(name) for name in ("same", "streaming")]
    return np.column_stack([*flags, np.log(lookups.share)]).astype(np.float64)


def typed(lookups: Lookups) -> Floats:
    """The rows' type as inputs, [tables of the pool, inputs]."""
    return np.column_stack([lookups.pool.dtype == place for place in (1, 2)]).astype(np.float64)


@dataclass(frozen=True)
class Factors:
    """Logarithms of factors on a rule's time: for rows in cache, for optimisers, and for parts of a GPU by their company."""

    warm: Floats  # [2]
    optimizer: Floats  # [optimisers]
    part: Floats  # [shares, others]

    @classmethod
    def fit(cls, lookups: Lookups, logs: Floats) -> Factors:
        """Medians of ln(measured / the rule's time) of fitted rows. A part that was not measured is as slow as it is small."""
        parts = np.repeat(np.log(2.0) * np.arange(_SHARES)[:, None], len(OTHERS), axis=1)
        result = cls(np.zeros(2), np.zeros(len(OPTIMIZERS)), parts)
        unmeasured = np.isin(np.arange(parts.size), _places(lookups)[2], invert=True).reshape(parts.shape)
        for _ in range(_ROUNDS):
            for factors, places in zip(result._all(), _places(lookups), strict=True):
                without = logs - result.logs(lookups) + factors[places]
                for index in np.unique(places):
                    factors[index] = np.median(without[places == index])
        result.part[unmeasured] += result.part[0, 0]
        return result

    def logs(self, lookups: Lookups) -> Floats:
        """What is added to the logarithm of a rule's time, [lookups]."""
        result: Floats = np.sum(
            [factors[places] for factors, places in zip(self._all(), _places(lookups), strict=True)], axis=0
        )
        return result

    def _all(self) -> tuple[Floats, Floats, Floats]:
        return self.warm, self.optimizer, self.part.reshape(-1)


def _places(lookups: Lookups) -> tuple[Places, Places, Places]:
    """Where each lookup stands in each kind of factors."""
    share = np.clip(np.rint(np.log2(lookups.share)), 0, _SHARES - 1).astype(np.intp)
    return lookups.warm.astype(np.intp), lookups.optimizer, share * len(OTHERS) + lookups.others


@dataclass(frozen=True)
class Seen:
    """What fitted rows were like: their sizes, and how many kernels they launched."""

    low: Floats  # [sizes]
    high: Floats  # [sizes]
    kernels: float

    @classmethod
    def of(cls, measured: MeasuredLookups) -> Seen:
        """From fitted rows."""
        sizes = _sizes(measured.lookups)
        return cls(sizes.min(axis=0), sizes.max(axis=0), float(np.median([len(names) for names in measured.kernel_names])))

    def times(self, lookups: Lookups, time_ns: Floats) -> LookupTimes:
        """The answer of a form that knows no kernels."""
        return total_only("lookup", time_ns, self.kernels, inside_of(self.low, self.high, _sizes(lookups)))


def _sizes(lookups: Lookups) -> Floats:
    """Tables, samples, lookups and the widest row."""
    tables = lookups.pool.tables
    most = lookups.maxima(np.column_stack([tables.batch, tables.dim]))
    return np.column_stack([lookups.counts, most[:, 0], 1.0 + lookups.sums(tables.lookups), most[:, 1]])
