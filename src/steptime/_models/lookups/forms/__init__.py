"""Models of lookups, a module for each implementation and direction: `fit(measured, seed) -> LookupForm`, `load(arrays)`.

A form answers with parts: kernels of one kind taken together, how many of them are launched and how long they take in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays
from steptime._models.lookups.batch import Flags, Lookups
from steptime._models.lookups.rows import MeasuredLookups


@dataclass(frozen=True)
class LookupTimes:
    """Of each lookup, by part: how many kernels and their time together. `inside`: whether it is like what was fitted."""

    parts: Sequence[str]
    number: Floats  # [lookups, parts]
    ns: Floats  # [lookups, parts]
    inside: Flags  # [lookups]

    @property
    def time_ns(self) -> Floats:
        """[lookups] of all parts."""
        total: Floats = self.ns.sum(axis=1)
        return total


class LookupForm(Protocol):
    """A fitted model of one implementation and direction."""

    def times(self, lookups: Lookups) -> LookupTimes:
        """How long each lookup takes; the order of its tables does not matter."""
        ...

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from: numbers and text."""
        ...


class LookupMaker(Protocol):
    """The module of a form."""

    def fit(self, measured: MeasuredLookups, seed: int, /) -> LookupForm:
        """Fits to the rows of the split `fit` (choices of form are made on `validation` beforehand); none is of `test`."""
        ...

    def load(self, arrays: Arrays) -> LookupForm:
        """The form that `arrays` were taken from."""
        ...


# Which module answers for an implementation and direction.
FORMS = {
    ("table_batched", "forward"): "batched_forward",
    ("table_batched", "backward"): "batched_backward",
    ("embedding_bag", "forward"): "bag_forward",
    ("embedding_bag_dense", "forward"): "bag_forward",
    ("embedding_bag", "backward"): "bag_backward",
    ("embedding_bag_dense", "backward"): "dense_backward",
    ("embedding_dense", "forward"): "rows_forward",
    ("embedding_sparse", "forward"): "rows_forward",
    ("embedding_dense", "backward"): "dense_backward",
    ("embedding_sparse", "backward"): "bag_backward",
}


def maker(name: str) -> LookupMaker:
    """The module of a form, by its name in this folder."""
    module: Any = import_module(f"{__name__}.{name}")
    made: LookupMaker = module
    return made


def inside_of(low: Floats, high: Floats, sizes: Floats) -> Flags:
    """Whether each row of sizes lies between what fitted rows had, within a factor of two; `low` and `high` are [sizes]."""
    between: Flags = (sizes >= low / 2) & (sizes <= high * 2)
    found: Flags = np.logical_and.reduce(between, axis=1)
    return found


def total_only(part: str, time_ns: Floats, number: float, inside: Flags) -> LookupTimes:
    """Times of lookups that are one kernel, or as many kernels as one number says."""
    return LookupTimes((part,), np.full((len(time_ns), 1), number), time_ns[:, None], inside)
