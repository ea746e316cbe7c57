"""Attention: flash, cuDNN, memory-efficient and plain, by the book (tiles of scores over the SMs, bytes) times a learned ratio.

Trees and networks learn the ratio for all kernels together; parts of a GPU are learned on top. Launch lists are those of the
nearest measured call. The plain form is one call here; a traced step has its products and softmax as ops of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.call import Call
from steptime._models.kernels.forms import Arrays
from steptime._models.kernels.forms.attention.features import table
from steptime._models.kernels.forms.attention.heads import Heads, heads_of
from steptime._models.kernels.forms.blend import Blend, part, prefixed
from steptime._models.kernels.forms.convolution.passes import short_name
from steptime._models.kernels.forms.lists import Lists
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._models.kernels.rows import Row

Floats = npt.NDArray[np.float64]

_WHOLE, _PARTS = "whole", "parts"
_SLACK = 0.02  # how far beyond the fitted range a feature may lie, in shares of it, and still be inside

# Everything was chosen before; there are few rows.
LEARNS_FROM_VALIDATION = True


@lru_cache(maxsize=1 << 16)
def _heads(call: Call) -> Heads:
    return heads_of(call)


@dataclass(frozen=True)
class Attention:
    """The fitted form."""

    blends: dict[str, Blend]  # for the whole GPU, and what parts of one add
    lists: Lists
    low: Floats  # feature -> range of the fitted rows
    high: Floats

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches."""
        if not questions:
            return []
        calls = [_heads(question.call) for question in questions]
        features, base = table(calls, questions)
        times = base * np.exp(_ratios(self.blends, questions, features))
        margin = _SLACK * (self.high - self.low)
        within: npt.NDArray[np.bool_] = np.all((features >= self.low - margin) & (features <= self.high + margin), axis=1)
        near = self.lists.nearest([_kind(heads) for heads in calls], _place(calls))
        answers = []
        for place, (time, heads, inside) in enumerate(zip(times, calls, within & near.known, strict=True)):
            names, shares = near.launches(place) if near.known[place] else ((_group(heads),), np.ones(1))
            launches = tuple(LaunchTime(name, float(time * share)) for name, share in zip(names, shares, strict=True))
            answers.append(Answer(launches, bool(inside)))
        return answers

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from."""
        kept = {"low": self.low, "high": self.high, **prefixed(self.lists.arrays(), "lists")}
        for name, blend in self.blends.items():
            kept |= prefixed(blend.arrays(), f"blend.{name}")
        return kept


def fit(rows: Sequence[Row], seed: int) -> Attention:
    """Fits to measured attention calls."""
    calls = [_heads(row.question.call) for row in rows]
    questions = [row.question for row in rows]
    features, base = table(calls, questions)
    target = np.log(np.array([sum(row.kernel_ns) for row in rows]) / base)
    shared = np.asarray([question.share > 1 for question in questions])  # scatter five times as much: fitted apart
    blends: dict[str, Blend] = {}
    if not shared.all():
        blends[_WHOLE] = Blend.fit(features[~shared], target[~shared], seed, networks=4, weight=0.75, num_leaves=15)
    if shared.any():
        known = _ratios(blends, questions, features)
        both = np.column_stack([features, known])[shared]
        blends[_PARTS] = Blend.fit(both, (target - known)[shared], seed, networks=0, rounds=150, num_leaves=15)
    names = [[short_name(name) for name in row.kernel_names] for row in rows]
    lists = Lists.fit([_kind(heads) for heads in calls], _place(calls), names, [row.kernel_ns for row in rows], target)
    return Attention(blends, lists, features.min(axis=0), features.max(axis=0))


def load(arrays: Arrays) -> Attention:
    """The form that `arrays` were taken from."""
    kept = part(arrays, "blend")
    blends = {name: Blend.load(part(kept, name)) for name in sorted({name.split(".")[0] for name in kept})}
    return Attention(blends, Lists.load(part(arrays, "lists")), arrays["low"], arrays["high"])


def _ratios(blends: dict[str, Blend], questions: Sequence[Question], features: Floats) -> Floats:
    """Logarithm of how much longer each call takes than by the book."""
    ratios = blends[_WHOLE].values(features) if _WHOLE in blends else np.zeros(len(questions))
    shared = np.asarray([question.share > 1 for question in questions])
    if _PARTS in blends and shared.any():
        ratios[shared] += blends[_PARTS].values(np.column_stack([features, ratios])[shared])
    return ratios


def _group(heads: Heads) -> str:
    return f"{heads.kind}_{'backward' if heads.backward else 'forward'}"


def _kind(heads: Heads) -> str:
    """What has to agree for two calls to launch alike."""
    flags = (
        heads.causal and heads.kind == "math",
        heads.dropout,
        heads.bias,
        heads.spaced,
        heads.heads * heads.dim == heads.stride,
    )
    return f"{_group(heads)} {heads.dtype} {heads.asked} {' '.join(str(int(flag)) for flag in flags)}"


def _place(calls: Sequence[Heads]) -> Floats:
    return np.array([_coordinates(heads) for heads in calls], dtype=np.float64).reshape(len(calls), -1)


@lru_cache(maxsize=1 << 16)
def _coordinates(heads: Heads) -> tuple[float, ...]:
    """Where a call lies among those of its kind."""
    sizes = (heads.batch * heads.heads, heads.queries, heads.keys, heads.dim)
    return (*(math.log(size) for size in sizes), 2.0 * (heads.keys % 8 == 0), float(heads.causal), 3.0 * (heads.batch == 1))
