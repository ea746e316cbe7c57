"""Launch lists learned from measured calls: an unseen call launches what the nearest measured one of its kind did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms import text_array
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
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
    bounds: Ints  # kind -> its first list, and behind the last kind the number of lists
    places: Reals  # where each list lies, shape (coordinates, lists)
    names: npt.NDArray[np.str_]  # kernel -> name
    kernels: Ragged  # distinct list -> its kernels, in order
    which: npt.NDArray[np.int32]  # list -> distinct list
    shares: Ragged  # list -> share of each kernel
    levels: Reals  # logarithm of the time over the time by the book, shape (lists, states)

    @classmethod
    def fit(
        cls,
        kinds: Sequence[str],
        places: Reals,
        kernels: Sequence[Sequence[str]],
        times_ns: Sequence[Sequence[float]],
        levels: Floats,
        states: Sequence[int] | None = None,
    ) -> Lists:
        """Keeps the lists; of calls of one kind that lie at one place, the first, and the first level of each state."""
        seen: dict[tuple[str, bytes], dict[int, int]] = {}  # where -> state -> row
        for row, (kind, place) in enumerate(zip(kinds, places, strict=True)):
            seen.setdefault((kind, place.tobytes()), {}).setdefault(states[row] if states is not None else 0, row)
        firsts = {next(iter(by_state.values())): by_state for by_state in seen.values()}
        kept = sorted(firsts, key=lambda row: (kinds[row], row))
        count = 1 + max(states) if states is not None and len(states) else 1
        # A list that was not measured in some state says what it does in the one that it was measured in.
        chosen = np.array([[firsts[row].get(state, row) for state in range(count)] for row in kept], dtype=int).reshape(
            -1, count
        )
        shares = [np.asarray(times_ns[row]) / sum(times_ns[row]) for row in kept]
        lengths = np.array([len(times_ns[row]) for row in kept], dtype=np.int32)
        held, bounds = (
            np.unique([kinds[row] for row in kept], return_index=True) if kept else (text_array([]), np.zeros(0, int))
        )
        names, distinct, which = _distinct([tuple(kernels[row]) for row in kept])
        return cls(
            kinds=held.astype(np.str_),
            bounds=np.append(bounds, len(kept)),
            places=np.ascontiguousarray(places[kept].T),
            names=names,
            kernels=distinct,
            which=which,
            shares=Ragged.of(np.concatenate([*shares, np.zeros(0)]).astype(places.dtype), lengths),
            levels=levels[chosen].astype(places.dtype),
        )

    def nearest(self, kinds: Sequence[str], places: Reals, states: Sequence[int] | None = None) -> Near:
        """The list that lies nearest to each of the places among those of its kind."""
        if len(kinds) and len(self.which) and places.shape[1] != len(self.places):
            raise InputError(
                f"lists at {len(self.places)} coordinates were asked with {places.shape[1]}: fit these models again"
            )
        found, distances = np.full(len(kinds), -1), np.full(len(kinds), np.inf)
        for rows, first, last in self._asked(kinds):
            step = max(1, _BLOCK // (last - first))
            for start in range(0, len(rows), step):
                here = rows[start : start + step]
                apart = _apart(places[here], self.places[:, first:last])
                found[here] = first + apart.argmin(axis=1)  # of equal ones the first
                distances[here] = apart.min(axis=1)
        asked = np.zeros(len(kinds), dtype=int) if states is None else np.asarray(states, dtype=int)
        return Near(self, found, distances, np.minimum(asked, self.levels.shape[1] - 1))

    def _asked(self, kinds: Sequence[str]) -> Iterator[tuple[Ints, int, int]]:
        """For each kind that is both asked for and known: who asks, and the range of its lists."""
        asked, kind_of = np.unique(np.asarray(kinds, dtype=np.str_), return_inverse=True)
        by_kind = np.split(np.argsort(kind_of, kind="stable"), np.cumsum(np.bincount(kind_of, minlength=len(asked)))[:-1])
        for kind, rows in zip(asked, by_kind, strict=True):
            place = int(np.searchsorted(self.kinds, kind))
            if place < len(self.kinds) and self.kinds[place] == kind:
                yield rows, int(self.bounds[place]), int(self.bounds[place + 1])

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same lists from."""
        plain = {name: getattr(self, name) for name in ("kinds", "places", "names", "which", "levels")}
        ragged = {"kernels": self.kernels, "shares": self.shares}
        return {
            **plain,
            "bounds": self.bounds.astype(np.int32),
            **{name: rows.values for name, rows in ragged.items()},
            **{f"{name}.lengths": rows.lengths for name, rows in ragged.items()},
        }

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Lists:
        """The lists that `arrays` were taken from."""
        return cls(
            kinds=arrays["kinds"],
            bounds=arrays["bounds"].astype(int),
            places=arrays["places"],
            names=arrays["names"],
            kernels=Ragged.of(arrays["kernels"], arrays["kernels.lengths"]),
            which=arrays["which"],
            shares=Ragged.of(arrays["shares"], arrays["shares.lengths"]),
            levels=arrays["levels"],
        )


def _distinct(lists: Sequence[tuple[str, ...]]) -> tuple[npt.NDArray[np.str_], Ragged, npt.NDArray[np.int32]]:
    """The names that occur, the distinct lists, and which of those each list is."""
    seen: dict[tuple[str, ...], int] = {}
    which = np.array([seen.setdefault(one, len(seen)) for one in lists], dtype=np.int32)
    names = sorted({name for one in seen for name in one})
    place_of = {name: place for place, name in enumerate(names)}
    places = np.array([place_of[name] for one in seen for name in one], dtype=np.int32)
    return text_array(names), Ragged.of(places, np.array([len(one) for one in seen], dtype=np.int32)), which


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
        near = self.found[call]
        names = tuple(self.lists.names[self.lists.kernels.row(self.lists.which[near])].tolist())
        return names, self.lists.shares.row(near).astype(np.float64)

    def twins(self) -> tuple[Floats, Floats]:
        """What the nearest list of each call says, and how far to believe it: hardly, unless it lies at the very same place."""
        belief: Floats = _TWIN * np.exp(-self.distances / _TWIN_REACH)
        return self.lists.levels[self.found, self.states].astype(np.float64), belief
