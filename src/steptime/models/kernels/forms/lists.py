"""Launch lists learned from measured calls: an unseen call launches what the nearest measured one of its kind did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.models.kernels.forms import text_array

Floats = npt.NDArray[np.float64]

_BETWEEN = "\n"  # between the kernels of one list, where lists are kept as text
# How many neighbours say a level (a measured call is there cold and warm), and the distance within which they count alike.
_NEAR, _SOFTENING = 6, 0.3
_TWIN, _TWIN_REACH = 0.9, 0.05  # how far a measured twin is believed, and the distance over which that fades


@dataclass(frozen=True)
class Lists:
    """Measured lists with the share of the time that each kernel of them took, found by kind and then by distance."""

    kinds: npt.NDArray[np.str_]  # list -> kind: what has to agree; sorted
    places: Floats  # list -> where it lies, shape (lists, coordinates)
    kernels: npt.NDArray[np.str_]  # list -> names of its kernels, in order
    shares: Floats  # list -> share of each kernel, shape (lists, longest list)
    levels: Floats  # list -> logarithm of its time over the time by the book

    @classmethod
    def fit(
        cls,
        kinds: Sequence[str],
        places: Floats,
        kernels: Sequence[Sequence[str]],
        times_ns: Sequence[Sequence[float]],
        levels: Floats,
    ) -> Lists:
        """Keeps the lists; of calls of one kind that lie at one place, the first."""
        seen: dict[tuple[str, bytes], int] = {}
        for row, (kind, place) in enumerate(zip(kinds, places, strict=True)):
            seen.setdefault((kind, place.tobytes()), row)
        kept = sorted(seen.values(), key=lambda row: (kinds[row], row))
        shares = np.zeros((len(kept), max((len(times_ns[row]) for row in kept), default=1)))
        for order, row in enumerate(kept):
            shares[order, : len(times_ns[row])] = np.asarray(times_ns[row]) / sum(times_ns[row])
        names = text_array([_BETWEEN.join(kernels[row]) for row in kept])
        return cls(text_array([kinds[row] for row in kept]), places[kept], names, shares, levels[kept])

    def nearest(self, kinds: Sequence[str], places: Floats) -> Near:
        """The lists that lie nearest to each of the places among those of its kind."""
        lists = np.full((len(kinds), _NEAR), -1)
        distances = np.full((len(kinds), _NEAR), np.inf)
        asked = np.asarray(kinds, dtype=np.str_)
        for kind in sorted(set(kinds)):
            rows = np.flatnonzero(asked == kind)
            first, last = (int(np.searchsorted(self.kinds, kind, side=side)) for side in ("left", "right"))
            apart = np.abs(places[rows, None, :] - self.places[None, first:last, :]).sum(axis=2)
            order = apart.argsort(axis=1, kind="stable")[:, :_NEAR]
            count = order.shape[1]
            lists[rows, :count] = first + order
            distances[rows, :count] = np.take_along_axis(apart, order, axis=1)
        return Near(self, lists, distances)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same lists from."""
        return {name: getattr(self, name) for name in ("kinds", "places", "kernels", "shares", "levels")}

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Lists:
        """The lists that `arrays` were taken from."""
        return cls(arrays["kinds"], arrays["places"], arrays["kernels"], arrays["shares"], arrays["levels"])


@dataclass(frozen=True)
class Near:
    """The nearest lists of some calls, nearest first; -1 where there are no more of that kind."""

    lists: Lists
    found: npt.NDArray[np.int_]
    distances: Floats

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Whether a call's kind was measured at all."""
        known: npt.NDArray[np.bool_] = self.found[:, 0] >= 0
        return known

    def launches(self, call: int) -> tuple[tuple[str, ...], Floats]:
        """Names and shares of the list nearest to a call whose kind is known."""
        near = self.found[call, 0]
        names = tuple(str(self.lists.kernels[near]).split(_BETWEEN))
        return names, self.lists.shares[near, : len(names)]

    def twins(self) -> tuple[Floats, Floats]:
        """What the nearest list of each call says, and how far to believe it: only where it lies at the very same place."""
        belief: Floats = _TWIN * np.exp(-self.distances[:, 0] / _TWIN_REACH)
        return self.lists.levels[self.found[:, 0]], belief

    def levels(self) -> Floats:
        """What the neighbours of each call say, the nearer the louder; 0 where there are none."""
        loud = np.where(self.found >= 0, (self.distances + _SOFTENING) ** -2.0, 0.0)
        total = loud.sum(axis=1)
        said: Floats = (loud * self.lists.levels[self.found]).sum(axis=1) / np.where(total > 0, total, 1.0)
        return said
