"""Launch lists learned from measured calls: an unseen call launches what the nearest measured one of its kind did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.stored import Floats, stored
from steptime.errors import InputError

Reals = npt.NDArray[np.floating[Any]]  # kept as precisely as the places that lists are fitted to
Ints = npt.NDArray[np.int_]

# How far a measured twin is believed, and the distance over which that fades: chosen on validation rows of convolutions, where
# more than one neighbour, or one that is believed from further away, errs more.
_TWIN, _TWIN_REACH = 0.9, 0.2
_BLOCK = 1 << 17  # distances computed at once: what a second-level cache holds


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, one behind the other."""

    values: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    starts: Ints

    @classmethod
    def of(cls, values: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Ragged:
        """The rows that lie in `values`, so many in each."""
        return cls(values, lengths.astype(np.int32), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]).astype(int))

    def row(self, place: int) -> npt.NDArray[Any]:
        """One of the rows."""
        start = self.starts[place]
        return self.values[start : start + self.lengths[place]]


@dataclass(frozen=True)
class Lists:
    """Measured lists with the share of the time that each kernel of them took, found by kind and then by distance."""

    kinds: npt.NDArray[np.str_]  # kind -> its name: what has to agree; sorted
    places: Reals  # where each list lies, shape (coordinates, lists)
    names: npt.NDArray[np.str_]  # kernel -> name
    which: npt.NDArray[np.int32]  # list -> distinct list
    levels: Reals  # logarithm of the time over the time by the book, shape (lists, states)
    kernels: npt.NDArray[np.int32]  # of the distinct lists, one behind the other
    shares: Reals  # of every list, the share of each kernel in its time
    bounds: Ints = field(metadata=stored(dtype=np.int32))  # kind -> its first list, then how many there are
    kernel_counts: npt.NDArray[np.int32] = field(metadata=stored(key="kernels.lengths"))  # distinct list -> how many kernels
    share_counts: npt.NDArray[np.int32] = field(metadata=stored(key="shares.lengths"))

    @cached_property
    def _kernels(self) -> Ragged:
        return Ragged.of(self.kernels, self.kernel_counts)

    @cached_property
    def _shares(self) -> Ragged:
        return Ragged.of(self.shares, self.share_counts)

    def nearest(self, kinds: Sequence[str], places: Reals, states: Sequence[int] | None = None) -> Near:
        """The list that lies nearest to each of the places among those of its kind."""
        if len(kinds) and len(self.which) and places.shape[1] != len(self.places):
            raise InputError(
                f"lists at {len(self.places)} coordinates were asked with {places.shape[1]}: fit these models again"
            )
        result, distances = np.full(len(kinds), -1), np.full(len(kinds), np.inf)
        for rows, first, last in self._asked(kinds):
            step = max(1, _BLOCK // (last - first))
            for start in range(0, len(rows), step):
                here = rows[start : start + step]
                apart = _apart(places[here], self.places[:, first:last])
                result[here] = first + apart.argmin(axis=1)  # of equal ones the first
                distances[here] = apart.min(axis=1)
        asked = np.zeros(len(kinds), dtype=int) if states is None else np.asarray(states, dtype=int)
        return Near(self, result, distances, np.minimum(asked, self.levels.shape[1] - 1))

    def _asked(self, kinds: Sequence[str]) -> Iterator[tuple[Ints, int, int]]:
        """For each kind that is both asked for and known: who asks, and the range of its lists."""
        asked, kind_of = np.unique(np.asarray(kinds, dtype=np.str_), return_inverse=True)
        by_kind = np.split(np.argsort(kind_of, kind="stable"), np.cumsum(np.bincount(kind_of, minlength=len(asked)))[:-1])
        for kind, rows in zip(asked, by_kind, strict=True):
            index = int(np.searchsorted(self.kinds, kind))
            if index < len(self.kinds) and self.kinds[index] == kind:
                yield rows, int(self.bounds[index]), int(self.bounds[index + 1])

    def launches(self, row: int) -> tuple[tuple[str, ...], Floats]:
        """Names and shares of the kernels of one list."""
        names = tuple(self.names[self._kernels.row(self.which[row])].tolist())
        return names, self._shares.row(row).astype(np.float64)


def _apart(asked: Reals, known: Reals) -> Reals:
    """Distances, shape (asked, known), coordinate by coordinate: all at once would not fit a cache."""
    apart = np.zeros((len(asked), known.shape[1]), dtype=known.dtype)
    for here, there in zip(asked.astype(known.dtype).T, known, strict=True):
        apart += np.abs(here[:, None] - there)
    return apart


@dataclass(frozen=True)
class Near:
    """The nearest list of each of some calls; -1 where there is none of its kind."""

    lists: Lists
    found: Ints
    distances: Floats
    states: Ints  # call -> its state

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Whether a call's kind was measured at all."""
        known: npt.NDArray[np.bool_] = self.found >= 0
        return known

    def launches(self, call: int) -> tuple[tuple[str, ...], Floats]:
        """Names and shares of the list nearest to a call whose kind is known."""
        return self.lists.launches(int(self.found[call]))

    def twins(self) -> tuple[Floats, Floats]:
        """What the nearest list of each call says, and how far to believe it: hardly, unless it lies at the very same place."""
        belief: Floats = _TWIN * np.exp(-self.distances / _TWIN_REACH)
        return self.lists.levels[self.found, self.states].astype(np.float64), belief
