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


@dataclass(frozen=True)
class Lists:
    """Measured lists with the share of the time that each kernel of them took, found by kind and then by distance."""

    kinds: npt.NDArray[np.str_]  # list -> kind: what has to agree
    places: Floats  # list -> where it lies, shape (lists, coordinates)
    kernels: npt.NDArray[np.str_]  # list -> names of its kernels, in order
    shares: Floats  # list -> share of each kernel, shape (lists, longest list)

    @classmethod
    def fit(
        cls, kinds: Sequence[str], places: Floats, kernels: Sequence[Sequence[str]], times_ns: Sequence[Sequence[float]]
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
        return cls(text_array([kinds[row] for row in kept]), places[kept], names, shares)

    def nearest(self, kinds: Sequence[str], places: Floats) -> list[tuple[tuple[str, ...], Floats] | None]:
        """Names and shares of the nearest list of each kind; None where none of that kind was measured."""
        found: list[tuple[tuple[str, ...], Floats] | None] = [None] * len(kinds)
        asked = np.asarray(kinds, dtype=np.str_)
        for kind in sorted(set(kinds)):
            rows = np.flatnonzero(asked == kind)
            first, last = (
                np.searchsorted(self.kinds, [kind, kind], side="left")[0],
                np.searchsorted(self.kinds, kind, side="right"),
            )
            if first == last:
                continue
            distances = np.abs(places[rows, None, :] - self.places[None, first:last, :]).sum(axis=2)
            for row, near in zip(rows, first + distances.argmin(axis=1), strict=True):
                names = tuple(str(self.kernels[near]).split(_BETWEEN))
                found[int(row)] = names, self.shares[near, : len(names)]
        return found

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same lists from."""
        return {"kinds": self.kinds, "places": self.places, "kernels": self.kernels, "shares": self.shares}

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Lists:
        """The lists that `arrays` were taken from."""
        return cls(arrays["kinds"], arrays["places"], arrays["kernels"], arrays["shares"])
