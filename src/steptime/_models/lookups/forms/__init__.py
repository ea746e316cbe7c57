"""Models of lookups, a module for each implementation and direction.

A form answers with parts: kernels of one kind taken together, how many of them are launched and how long they take in all.
What is stored of one are the fields of its class (`engine.stored`); `steptime_lab.fit.lookups` fits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.engine.regression import Trees
from steptime._models.engine.stored import Arrays, stored, unpack
from steptime._models.lookups.question import Flags, Lookups


@dataclass(frozen=True)
class LookupTimes:
    """Of each lookup, by part: how many kernels and their time together. `inside`: whether it is like what was fitted."""

    parts: Sequence[str]
    number: Floats  # [lookups, parts]
    ns: Floats  # [lookups, parts]
    inside: Flags  # [lookups]

    @property
    def time_ns(self) -> Floats:
        """Of each lookup, all parts."""
        total: Floats = self.ns.sum(axis=1)
        return total


@dataclass(frozen=True)
class Correction:
    """What physics leaves, ln(measured / physics), by boosted trees: factors within the range that fitted rows showed."""

    trees: Trees = field(metadata=stored(prefix=""))
    range: Floats  # [2] of logarithms

    @classmethod
    def none(cls) -> Correction:
        """Where nothing is known: physics as it is."""
        return cls(Trees.constant(0.0), np.zeros(2))

    def factors(self, features: Floats) -> Floats:
        """What to multiply the physics of each row by."""
        return np.exp(np.clip(self.trees.values(features), *self.range))


class LookupForm(Protocol):
    """A fitted model of one implementation and direction: a dataclass of what is stored."""

    def times(self, lookups: Lookups) -> LookupTimes:
        """How long each lookup takes; the order of its tables does not matter."""
        ...


# Which module and class answers for an implementation and direction.
FORMS = {
    ("table_batched", "forward"): ("batched_forward", "BatchedForward"),
    ("table_batched", "backward"): ("batched_backward", "BatchedBackward"),
    ("embedding_bag", "forward"): ("bag_forward", "BagForward"),
    ("embedding_bag_dense", "forward"): ("bag_forward", "BagForward"),
    ("embedding_bag", "backward"): ("bag_backward", "BagBackward"),
    ("embedding_bag_dense", "backward"): ("dense_backward", "DenseBackward"),
    ("embedding_dense", "forward"): ("kernel_sum", "RowsForward"),
    ("embedding_sparse", "forward"): ("kernel_sum", "RowsForward"),
    ("embedding_dense", "backward"): ("dense_backward", "DenseBackward"),
    ("embedding_sparse", "backward"): ("bag_backward", "BagBackward"),
}


def load_form(kind: tuple[str, str], arrays: Arrays) -> LookupForm:
    """The form of an implementation and direction that the arrays were taken from."""
    module, name = FORMS[kind]
    form: LookupForm = unpack(getattr(import_module(f"{__name__}.{module}"), name), arrays)
    return form


def inside_of(low: Floats, high: Floats, sizes: Floats) -> Flags:
    """Whether each row of sizes lies between what fitted rows had, within a factor of two; `low` and `high` are [sizes]."""
    between: Flags = (sizes >= low / 2) & (sizes <= high * 2)
    inside: Flags = np.logical_and.reduce(between, axis=1)
    return inside


def total_only(part: str, time_ns: Floats, number: float, inside: Flags) -> LookupTimes:
    """Times of lookups that are one kernel, or as many kernels as one number says."""
    return LookupTimes((part,), np.full((len(time_ns), 1), number), time_ns[:, None], inside)
