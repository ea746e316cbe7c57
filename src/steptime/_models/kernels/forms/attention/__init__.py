"""Attention: flash, cuDNN, memory-efficient and plain, by the book (tiles of scores over the SMs, bytes) times a learned ratio.

Trees and networks learn the ratio for all kernels together; parts of a GPU are learned on top. Launch lists are those of the
nearest measured call. The plain form is one call here; a traced step has its products and softmax as ops of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from steptime._models.engine.blend import Blend
from steptime._models.engine.constants import reference_constants
from steptime._models.engine.stored import Floats
from steptime._models.kernels.call import Call
from steptime._models.kernels.forms.attention.features import AttentionConstants, table
from steptime._models.kernels.forms.attention.heads import Heads, heads_of
from steptime._models.kernels.forms.lists import Lists
from steptime._models.kernels.question import Answer, LaunchTime, Question

WHOLE, PARTS = "whole", "parts"
_SLACK = 0.02  # how far beyond the fitted range a feature may lie, in shares of it, and still be inside


@lru_cache(maxsize=1 << 16)
def heads_of_call(call: Call) -> Heads:
    """The attention of a call."""
    return heads_of(call)


@dataclass(frozen=True)
class AttentionForm:
    """The fitted form."""

    blend: dict[str, Blend]  # for the whole GPU, and what shares of one add
    lists: Lists
    low: Floats  # feature -> range of the fitted rows
    high: Floats
    device: AttentionConstants = field(default_factory=partial(reference_constants, "attention", AttentionConstants))

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches."""
        if not questions:
            return []
        calls = [heads_of_call(question.call) for question in questions]
        features, base = table(calls, questions, self.device)
        times = base * np.exp(ratios(self.blend, questions, features))
        margin = _SLACK * (self.high - self.low)
        within: npt.NDArray[np.bool_] = np.all((features >= self.low - margin) & (features <= self.high + margin), axis=1)
        near = self.lists.nearest([kind_of(heads) for heads in calls], coordinates(calls))
        answers = []
        for index, (time, heads, inside) in enumerate(zip(times, calls, within & near.known, strict=True)):
            names, shares = near.launches(index) if near.known[index] else ((_group(heads),), np.ones(1))
            launches = tuple(LaunchTime(name, float(time * share)) for name, share in zip(names, shares, strict=True))
            answers.append(Answer(launches, bool(inside)))
        return answers


def ratios(blends: dict[str, Blend], questions: Sequence[Question], features: Floats) -> Floats:
    """Logarithm of how much longer each call takes than by the book."""
    learned = blends[WHOLE].values(features) if WHOLE in blends else np.zeros(len(questions))
    shared = np.asarray([question.share > 1 for question in questions])
    if PARTS in blends and shared.any():
        learned[shared] += blends[PARTS].values(np.column_stack([features, learned])[shared])
    return learned


def _group(heads: Heads) -> str:
    return f"{heads.kind}_{'backward' if heads.backward else 'forward'}"


def kind_of(heads: Heads) -> str:
    """What has to agree for two calls to launch alike."""
    flags = (
        heads.causal and heads.kind == "math",
        heads.dropout,
        heads.bias,
        heads.spaced,
        heads.heads * heads.dim == heads.stride,
    )
    return f"{_group(heads)} {heads.dtype} {heads.asked} {' '.join(str(int(flag)) for flag in flags)}"


def coordinates(calls: Sequence[Heads]) -> Floats:
    """Where calls lie among those of their kind."""
    return np.array([_point(heads) for heads in calls], dtype=np.float64).reshape(len(calls), -1)


@lru_cache(maxsize=1 << 16)
def _point(heads: Heads) -> tuple[float, ...]:
    sizes = (heads.batch * heads.heads, heads.queries, heads.keys, heads.dim)
    return (*(math.log(size) for size in sizes), 2.0 * (heads.keys % 8 == 0), float(heads.causal), 3.0 * (heads.batch == 1))


FORM = AttentionForm
