"""Launch lists learned from measured calls: an unseen call launches what the nearest measured one of its kind did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.stored import Floats, stored
from steptime._models.kernels.question import LaunchTime
from steptime.errors import InputError

Reals = npt.NDArray[np.floating[Any]]  # kept as precisely as the places that lists are fitted to
Ints = npt.NDArray[np.int_]

# How far a measured twin is believed, and the distance over which that fades: chosen on validation rows of convolutions, where
# more than one neighbour, or one that is believed from further away, errs more.
_TWIN, _TWIN_REACH = 0.9, 0.2
_BLOCK = 1 << 17  # distances computed at once: what a second-level cache holds
_ELSEWHERE = 1e6  # further than any two lists lie apart
_SLACK = 0.02  # how far beyond the fitted range a feature may lie, in shares of it, and still be inside


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
    def _of_kind(self) -> dict[str, tuple[int, int]]:
        """The first list of each kind and the one behind its last."""
        return dict(zip(self.kinds.tolist(), pairwise(self.bounds.tolist()), strict=True))

    @cached_property
    def _ends(self) -> tuple[Ints, Ints]:
        """Where the kernels of each distinct list and the shares of each list end."""
        return np.cumsum(self.kernel_counts, dtype=np.int64), np.cumsum(self.share_counts, dtype=np.int64)

    def nearest(
        self, kinds: Sequence[str], places: Reals, states: Sequence[int] | None = None, counts: Ints | None = None
    ) -> Near:
        """The list that lies nearest to each of the places among those of its kind, and of its count if there is one.

        `counts` are how many kernels each is to have; 0: any.
        """
        if len(kinds) and len(self.which) and places.shape[1] != len(self.places):
            raise InputError(
                f"lists at {len(self.places)} coordinates were asked with {places.shape[1]}: fit these models again"
            )
        calls: dict[str, list[int]] = defaultdict(list)
        for call, kind in enumerate(kinds):
            if kind in self._of_kind:
                calls[kind].append(call)
        nearest, distances = np.full(len(kinds), -1), np.full(len(kinds), np.inf)
        for kind, members in calls.items():
            first, last = self._of_kind[kind]
            step = max(1, _BLOCK // (last - first))
            for start in range(0, len(members), step):
                here = members[start : start + step]
                apart = _apart(places[here], self.places[:, first:last])
                if counts is not None:
                    wanted = counts[here][:, None]
                    apart += _ELSEWHERE * ((wanted > 0) & (self.share_counts[first:last] != wanted))
                nearest[here] = first + apart.argmin(axis=1)  # of equal ones the first
                distances[here] = apart.min(axis=1)
        of_calls = np.zeros(len(kinds), dtype=int) if states is None else np.asarray(states, dtype=int)
        return Near(self, nearest, distances, np.minimum(of_calls, self.levels.shape[1] - 1))

    def launches(self, row: int) -> tuple[tuple[str, ...], Floats]:
        """Names and shares of the kernels of one list."""
        which, (kernel_ends, share_ends) = self.which[row], self._ends
        kernels = self.kernels[kernel_ends[which] - self.kernel_counts[which] : kernel_ends[which]]
        shares = self.shares[share_ends[row] - self.share_counts[row] : share_ends[row]]
        return tuple(self.names[kernels].tolist()), shares.astype(np.float64)


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
    nearest: Ints
    distances: Floats
    states: Ints  # call -> its state

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Whether a call's kind was measured at all."""
        known: npt.NDArray[np.bool_] = self.nearest >= 0
        return known

    def launches(self, call: int, time_ns: float, otherwise: str) -> list[LaunchTime]:
        """What a call of so many ns launches; one kernel, named `otherwise`, where its kind was not measured."""
        if self.nearest[call] < 0:
            return [LaunchTime(otherwise, float(time_ns))]
        names, shares = self.lists.launches(int(self.nearest[call]))
        return [LaunchTime(name, float(time_ns * share)) for name, share in zip(names, shares, strict=True)]

    def twins(self) -> tuple[Floats, Floats]:
        """What the nearest list of each call says, and how far to believe it: hardly, unless it lies at the very same place."""
        belief: Floats = _TWIN * np.exp(-self.distances / _TWIN_REACH)
        return self.lists.levels[self.nearest, self.states].astype(np.float64), belief


def inside_of(features: Floats, low: Floats, high: Floats) -> npt.NDArray[np.bool_]:
    """Which rows lie in the range of those that a form was fitted to."""
    margin = _SLACK * (high - low)
    inside: npt.NDArray[np.bool_] = np.all((features >= low - margin) & (features <= high + margin), axis=1)
    return inside
