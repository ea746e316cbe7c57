"""Forms that are a sum of kernels by kind: how many of each kind a lookup launches, and how long they take together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.correction import named, part
from steptime._models.lookups.forms import LookupTimes, inside_of
from steptime._models.lookups.forms.bag_parts import OneTable, Traffic, fit_rows, sizes_of, traffic_of
from steptime._models.lookups.forms.bag_timed import Asked, Growth, Timed
from steptime._models.lookups.question import OPTIMIZERS
from steptime._models.lookups.rows import MeasuredLookups
from steptime.errors import InputError

L2_BYTES = 3e7
"""About what the GPU's cache holds of what a kernel before wrote."""

# A kernel of a kind that no fitted row had: about what the shortest kernels of these lists take.
_UNKNOWN_NS = 2e3

# Of an H200: bytes of its cache, and bytes that its memory moves in a nanosecond at most.
_CACHE_BYTES, _PEAK = 5e7, 4.8e3

Columns = list[Floats]


@dataclass(frozen=True)
class Sizes:
    """What kernels of the backward pass depend on, all [lookups]; tables without lookups count as one lookup."""

    one: OneTable
    traffic: Traffic
    bag: bool  # whether gradients are of bags, not of lookups
    adagrad: Floats
    lookups: Floats
    unique: Floats
    dim: Floats
    row: Floats  # bytes
    gradients: Floats  # bytes of a gradient for every lookup
    updated: Floats  # bytes of the distinct rows
    hot: Floats  # [lookups, places]
    cold: Floats
    half: Floats
    full: Floats  # of float32
    share: Floats
    crowded: Floats
    streaming: Floats
    fixed: Floats  # a microsecond

    @classmethod
    def of(cls, lookups: Lookups) -> Sizes:
        """Of lookups of one implementation."""
        one = OneTable.of(lookups)
        total, unique = np.maximum(one.lookups, 1.0), np.maximum(one.unique, 1.0)
        return cls(
            one=one,
            traffic=traffic_of(one),
            bag=lookups.implementation.startswith("embedding_bag"),
            adagrad=(lookups.optimizer > OPTIMIZERS.index("sgd")).astype(np.float64),
            lookups=total,
            unique=unique,
            dim=one.dim,
            row=one.row,
            gradients=total * one.row,
            updated=unique * one.row,
            hot=np.maximum(one.tables.hottest, 1.0),
            cold=1.0 - one.warm,
            half=one.half,
            full=1.0 - one.half,
            share=one.share,
            crowded=one.crowded,
            streaming=(one.others == OTHERS.index("streaming")).astype(np.float64),
            fixed=np.full(len(total), 1e3),
        )

    def features(self) -> Floats:
        """For corrections."""
        one, tables = self.one, self.one.tables
        counts = (tables.bin_lookups**2 / np.maximum(tables.bin_rows, 1.0)).sum(axis=1)
        columns = [
            np.log(self.lookups), np.log(one.batch), self.dim, one.item, np.log(self.gradients), np.log(self.unique),
            self.unique / self.lookups, np.log(self.updated), np.log(one.batch * self.row), one.warm, one.weighted, one.bfloat,
            np.log(self.hot + 1), self.hot[:, 0] / self.lookups, self.hot[:, 3] / self.lookups, np.log(tables.rows * self.row),
            np.log(self.lookups / one.batch), self.traffic.first, self.traffic.second, self.row % 128, self.row % 512, self.row,
            tables.bin_lookups[:, -3:].sum(axis=1) / self.lookups, tables.bin_lookups[:, 8:-3].sum(axis=1) / self.lookups,
            np.log(np.maximum(counts / self.lookups, 1e-3)), tables.locality[:, [6, 10, 14, 18]],
            tables.spread / np.maximum(tables.pooling, 1e-3), np.log(tables.longest + 1),
        ]  # fmt: skip
        return np.column_stack(columns)


@dataclass(frozen=True)
class Kind:
    """Kernels of one kind: their number, their terms (and those of parts of a GPU), and the trees on top."""

    number: Callable[[Sizes], Floats]
    terms: Callable[[Sizes], tuple[Columns, Columns]]
    growth: Growth = field(default_factory=Growth)
    serial: Callable[[Sizes], Floats] | None = None  # nanoseconds of what happens one after the other
    moved: Callable[[Sizes], Floats] | None = None  # bytes that memory moves in any case
    spread: bool = True  # whether all SMs share the work, rather than wait for one of them


@dataclass(frozen=True)
class KernelSum:
    """A fitted form: a `Timed` for each kind that fitted rows had."""

    kinds: Mapping[str, Kind]
    timed: Mapping[str, Timed]
    low: Floats
    high: Floats

    @classmethod
    def fit(
        cls, kinds: Mapping[str, Kind], kind_of: Callable[[Sequence[str]], list[str]], measured: MeasuredLookups, seed: int
    ) -> KernelSum:
        """Fits each kind to its kernels in the rows of the split `fit`; `kind_of` names the kinds of a list of kernels."""
        rows = fit_rows(measured)
        sizes = Sizes.of(rows.lookups)
        features = sizes.features()
        times = _times_by_kind(tuple(kinds), kind_of, rows)
        timed = {}
        for place, (name, kind) in enumerate(kinds.items()):
            has = (kind.number(sizes) > 0) & (times[:, place] > 0)
            if has.any():
                asked = _asked(kind, sizes, features).take(has)
                timed[name] = Timed.fit(asked, times[has, place], seed, kind.growth)
        bounds = sizes_of(sizes.one)
        return cls(kinds, timed, bounds.min(axis=0), bounds.max(axis=0))

    def times(self, lookups: Lookups) -> LookupTimes:
        """By kind."""
        sizes = Sizes.of(lookups)
        features = sizes.features()
        number = np.column_stack([kind.number(sizes) for kind in self.kinds.values()])
        found = number * _UNKNOWN_NS
        inside = inside_of(self.low, self.high, sizes_of(sizes.one))
        for place, (name, kind) in enumerate(self.kinds.items()):
            has = number[:, place] > 0
            if name not in self.timed:
                inside &= ~has
            elif has.any():
                found[has, place] = self.timed[name].ns(_asked(kind, sizes, features).take(has))
        return LookupTimes(tuple(self.kinds), number, found, inside)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from."""
        found: dict[str, npt.NDArray[Any]] = {"low": self.low, "high": self.high, "timed": np.array(list(self.timed))}
        for name, timed in self.timed.items():
            found |= named(name, timed.arrays())
        return found

    @classmethod
    def load(cls, kinds: Mapping[str, Kind], arrays: Arrays) -> KernelSum:
        """The form that `arrays` were taken from."""
        names = [str(name) for name in arrays["timed"]]
        return cls(kinds, {name: Timed.load(part(arrays, name)) for name in names}, arrays["low"], arrays["high"])


def gradient_bytes(sizes: Sizes) -> Floats:
    """That a kernel writes which makes a gradient, or copies a row, for every lookup."""
    return sizes.gradients


def first_match(name: str, marks: Mapping[str, str]) -> str:
    """The kind of a kernel: that of the first mark its name contains."""
    for mark, kind in marks.items():
        if mark in name:
            return kind
    raise InputError(f"kernel {name[:80]!r} is of no kind that lookups are known to launch")


def _asked(kind: Kind, sizes: Sizes, features: Floats) -> Asked:
    terms, more = kind.terms(sizes)
    return Asked.of(
        sizes.one,
        (np.column_stack(terms), np.column_stack(more)),
        features,
        serial=kind.serial(sizes) if kind.serial else None,
        least=np.maximum(kind.moved(sizes) - _CACHE_BYTES, 0.0) / _PEAK if kind.moved else None,
        spread=kind.spread,
    )


def _times_by_kind(kinds: tuple[str, ...], kind_of: Callable[[Sequence[str]], list[str]], rows: MeasuredLookups) -> Floats:
    """[rows, kinds], scaled so that a row's are its time: medians of kernels add up to a little more or less."""
    found = np.zeros((len(rows), len(kinds)))
    places = {name: place for place, name in enumerate(kinds)}
    for row, (names, times) in enumerate(zip(rows.kernel_names, rows.kernel_ns, strict=True)):
        for kind, time in zip(kind_of(names), times, strict=True):
            found[row, places[kind]] += time
    scaled: Floats = found * (rows.time_ns / found.sum(axis=1))[:, None]
    return scaled
