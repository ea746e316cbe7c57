"""Memory of a step of which a sample is at hand: what each section takes and gives back, added up in the order of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.memory.allocator import BLOCK_BYTES, rounded
from steptime._models.memory.lifetimes import MemoryKind, Storage
from steptime._program.repetition import Repetition

Bytes = npt.NDArray[np.int64]
_KINDS = tuple(MemoryKind)


@dataclass(frozen=True, eq=False)
class _Sections:
    """Bytes by section and kind."""

    net: Bytes  # what is held when it ends and was not when it began
    most: Bytes  # what is held beyond its beginning at the moment when that is most


def most_of(passing: Sequence[Storage], repetition: Repetition, ops: int) -> Mapping[MemoryKind, int]:
    """What a step holds beside what stays, by kind, at the moment when that is most."""
    sections = _sections(passing, repetition, ops)
    order = np.array(repetition.order, dtype=np.int64)
    net = sections.net[order]
    before = np.cumsum(net, axis=0) - net
    held = before + sections.most[order]
    moment = held[int(held.sum(axis=1).argmax())]
    return dict(zip(_KINDS, moment.tolist(), strict=True))


def _sections(passing: Sequence[Storage], repetition: Repetition, ops: int) -> _Sections:
    """Walks the sample: what is made at an op is there before anything goes that the op is the last to take."""
    place = {kind: number for number, kind in enumerate(_KINDS)}
    events: list[tuple[int, int, int, int]] = []  # row, 0 for births and 1 for deaths, kind, bytes
    for storage in passing:
        kind, nbytes = place[storage.kind], rounded(max(storage.nbytes, 1), BLOCK_BYTES)
        events.append((storage.born, 0, kind, nbytes))
        if storage.dies < ops:
            events.append((storage.dies, 1, kind, -nbytes))
    events.sort()
    count = len(repetition.starts)
    net, most, highest = np.zeros((count, len(_KINDS)), np.int64), np.zeros((count, len(_KINDS)), np.int64), [0] * count
    of_event = np.searchsorted(repetition.starts, [row for row, *_ in events], side="right") - 1
    held = [0] * count
    for section, (_, _, kind, nbytes) in zip(of_event.tolist(), events, strict=True):
        net[section, kind] += nbytes
        held[section] += nbytes
        if held[section] > highest[section]:
            highest[section] = held[section]
            most[section] = net[section]
    return _Sections(net, most)
