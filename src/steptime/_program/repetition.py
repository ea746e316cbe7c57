"""`Repetition`: a step that does the same again and again, written down once.

A model has many equal layers, and a pipeline many equal micro-batches. Its program is then a *sample*: every kind of layer and
of micro-batch in its place, a few of each. The sample's ops are divided into *sections* (the forward pass of one layer, the
backward pass of one layer, a receive), and the step is an *order* of these sections. What is asked about an op is asked once,
however often it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Repetition:
    """Sections of consecutive ops, and the order in which a step runs them."""

    starts: tuple[int, ...]  # per section of the sample, in order: its first op; the first section begins with the first op
    kinds: tuple[int, ...]  # per section: the section that stands for all of its kind, the last of them
    order: tuple[int, ...]  # sections as the step runs them, each one that stands for its kind
    names: tuple[str, ...] = ()  # per section
    twins: Mapping[int, int] = field(default_factory=dict)
    """Storages that the sample leaves out, each with one that a step treats alike: parameters of equal layers."""

    @classmethod
    def of(cls, sections: Sequence[tuple[str, int]], order: Sequence[str], twins: Mapping[int, int]) -> Repetition:
        """From names and first ops of a sample's sections, and the names as the step runs them."""
        names, starts = (tuple(column) for column in zip(*sections, strict=True))
        last = {name: number for number, name in enumerate(names)}
        return cls((0, *starts[1:]), tuple(map(last.__getitem__, names)), (), names, dict(twins)).reordered(order)

    def reordered(self, order: Sequence[str]) -> Repetition:
        """The same sample in another order."""
        last = {name: number for number, name in enumerate(self.names)}
        return replace(self, order=tuple(map(last.__getitem__, order)))

    def section_of(self, op: int) -> int:
        """The section that an op belongs to; sections without ops have none."""
        return int(np.searchsorted(self.starts, op, side="right")) - 1

    def counts(self, ops: int) -> npt.NDArray[np.int64]:
        """Per op of the sample, how often a step runs it."""
        of_section = np.bincount(np.array(self.order, dtype=np.int64), minlength=len(self.starts))
        ends = np.array([*self.starts[1:], ops], dtype=np.int64)
        return np.repeat(of_section, ends - np.array(self.starts, dtype=np.int64))
