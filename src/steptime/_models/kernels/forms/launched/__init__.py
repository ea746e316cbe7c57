"""Kernels whose launches follow from rules: each launch is a sum of what it has to do, corrected by trees.

time(call) = sum over its launches of max(least of its kernel, terms . weights of its finest measured group) * exp(trees)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from steptime._models.engine.stored import stored
from steptime._models.kernels.call import Call
from steptime._models.kernels.family import family_of, launches_of
from steptime._models.kernels.forms.launched.groups import groups_of
from steptime._models.kernels.forms.launched.model import Batch, LaunchedModel
from steptime._models.kernels.forms.launched.shares import others_code
from steptime._models.kernels.question import OTHERS, Answer, LaunchTime, Question
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The launches of a call as rows of numbers."""

    kernels: tuple[str, ...]
    numbers: list[list[float]]
    groups: list[tuple[int, int]]
    codes: list[tuple[float, float, float]]
    inside: bool
    corrected: bool


@dataclass(frozen=True)
class LaunchedForm:
    """The fitted form: one model for whole GPUs, one that has seen shares of them as well."""

    whole: LaunchedModel
    shared: LaunchedModel | None = field(default=None, metadata=stored(prefix="parts."))

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches and how long that takes. Raises InputError for a call that cannot be."""
        for question in questions:
            _check(question)
        whole = iter(self._answers(self.whole, [question for question in questions if question.share == 1]))
        shared = iter(self._answers(self.shared or self.whole, [question for question in questions if question.share > 1]))
        return [next(whole if question.share == 1 else shared) for question in questions]

    def _answers(self, model: LaunchedModel, questions: Sequence[Question]) -> list[Answer]:
        if not questions:
            return []
        prepared = [_prepared(model, question.call, question.warm) for question in questions]
        counts = np.asarray([len(item.kernels) for item in prepared])
        groups = np.asarray([group for item in prepared for group in item.groups], dtype=np.int64).reshape(-1, 2)
        batch = Batch(
            np.asarray([row for item in prepared for row in item.numbers]).reshape(-1, model.columns.width),
            groups[:, 0],
            groups[:, 1],
            np.asarray([codes for item in prepared for codes in item.codes]).reshape(-1, 3),
            np.repeat(np.asarray([float(question.share) for question in questions]), counts),
            np.repeat(np.asarray([others_code(question) for question in questions]), counts),
        )
        corrected = np.repeat(np.asarray([item.corrected for item in prepared]), counts)
        times = iter(model.time_ns(batch, corrected).tolist())
        return [Answer(tuple(LaunchTime(name, next(times)) for name in item.kernels), item.inside) for item in prepared]


def _prepared(model: LaunchedModel, call: Call, warm: bool) -> _Prepared:
    launches = launches_of(call, model.device.gpu)
    names = [groups_of(call.op, launch) for launch in launches]
    return _Prepared(
        tuple(launch.kernel for launch in launches),
        model.columns.rows(call, launches, warm),
        [model.group_of(name) for name in names],
        [model.codes_of(name) for name in names],
        all(model.inside(name, launch.elements) for name, launch in zip(names, launches, strict=True)),
        family_of(call.op) not in model.uncorrected,
    )


def _check(question: Question) -> None:
    """Raises InputError for settings that cannot be."""
    if question.share < 1:
        raise InputError(f"{question.call.op}: share {question.share} of a GPU, expected 1 or more")
    if question.others not in OTHERS:
        raise InputError(f"{question.call.op}: others {question.others!r}, expected one of {', '.join(OTHERS)}")


FORM = LaunchedForm
