"""The plainest baseline: a latency and a bandwidth per kind and rank count, asked like the model it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steptime._models.collectives.fitting import Points
from steptime._models.collectives.message import KINDS, Floats, Messages
from steptime._models.collectives.tier import CollectiveTimes, groups
from steptime.errors import InputError


@dataclass(frozen=True)
class LineModel:
    """Nanoseconds and nanoseconds per byte, by kind and rank count."""

    lines: Mapping[tuple[str, int], tuple[float, float]]

    def times(self, messages: Messages) -> CollectiveTimes:
        """Latency plus bytes over bandwidth; an uneven exchange as an even one of its load. It says nothing of intervals."""
        result = np.zeros(len(messages))
        for kind, ranks, places in groups(messages):
            if ranks > 1:
                latency, per_byte = self._line(kind, ranks)
                result[places] = latency + per_byte * (messages.load if kind == "all_to_all" else messages.bytes)[places]
        return CollectiveTimes(result, result, result, np.ones(len(messages), dtype=np.bool_))

    def _line(self, kind: str, ranks: int) -> tuple[float, float]:
        if (kind, ranks) not in self.lines:
            raise InputError(f"no line for {kind} of {ranks} ranks; there are {_said(self.lines)}")
        return self.lines[kind, ranks]


def fit_line(points: Points) -> LineModel:
    """The least squares of relative errors, neither part below nothing."""
    messages = points.messages
    sizes = np.where(messages.kind == KINDS.index("all_to_all"), messages.load, messages.bytes)
    return LineModel({
        (kind, ranks): _least(sizes[places], points.ns[places])
        for kind, ranks, places in groups(messages)
        if ranks > 1 and len(np.unique(sizes[places])) > 1
    })  # fmt: skip


def _least(sizes: Floats, times: Floats) -> tuple[float, float]:
    terms = np.stack([1.0 / times, sizes / times], axis=1)
    both = np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = (terms.sum(axis=0) / (terms**2).sum(axis=0)).tolist()
    return (alone[0], 0.0) if both[1] < 0 else (0.0, alone[1])


def _said(lines: Mapping[tuple[str, int], object]) -> str:
    return ", ".join(f"{kind} of {ranks}" for kind, ranks in sorted(lines)) or "none"
