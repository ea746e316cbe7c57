"""Kernels whose launches follow from rules: each launch is a sum of what it has to do, corrected by trees.

time(call) = sum over its launches of max(least of its kernel, terms . weights of its finest measured group) * exp(trees)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.error import GMAE_FLOOR
from steptime._models.kernels.call import Call
from steptime._models.kernels.family import family_of
from steptime._models.kernels.forms import Arrays
from steptime._models.kernels.forms.launched.fitting import fit_model
from steptime._models.kernels.forms.launched.groups import groups_of
from steptime._models.kernels.forms.launched.model import Batch, Model, load_model
from steptime._models.kernels.forms.launched.parts import others_code
from steptime._models.kernels.forms.launched.table import checked, launches_of
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._models.kernels.rows import VALIDATION, Row, of
from steptime.errors import InputError

# Questions whose answers are kept: several steps' worth of distinct ones.
_KEPT = 50_000
_WHOLE, _PARTS = "whole", "parts"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The launches of a call as rows of numbers."""

    kernels: tuple[str, ...]
    numbers: list[list[float]]
    groups: list[tuple[int, int]]
    codes: list[tuple[float, float, float]]
    inside: bool
    corrected: bool


class Launched:
    """The fitted form: one model for whole GPUs, one that has seen parts of them as well."""

    def __init__(self, whole: Model, parts: Model | None = None) -> None:
        """A form that answers by `whole`, and by `parts` for parts of a GPU."""
        self._whole, self._parts = whole, parts
        self._known: dict[Question, Answer] = {}

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches and how long that takes. Raises InputError for a call that cannot be."""
        found = [self._known.get(question) for question in questions]
        missing: dict[Question, list[int]] = {}
        for place, question in enumerate(questions):
            if found[place] is None:
                missing.setdefault(question, []).append(place)
        if len(self._known) + len(missing) > _KEPT:
            self._known.clear()
        asked = list(missing)
        for question, places, answer in zip(asked, missing.values(), self._new(asked), strict=True):
            self._known[question] = answer
            for place in places:
                found[place] = answer
        return [answer for answer in found if answer is not None]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from."""
        kept = {_WHOLE: self._whole} | ({} if self._parts is None else {_PARTS: self._parts})
        return {f"{part}.{name}": array for part, model in kept.items() for name, array in model.arrays().items()}

    def _new(self, questions: Sequence[Question]) -> list[Answer]:
        found: list[Answer | None] = [None] * len(questions)
        for question in questions:
            checked(question)
        for model, of_part in ((self._whole, False), (self._parts or self._whole, True)):
            places = [place for place, question in enumerate(questions) if (question.share > 1) == of_part]
            for place, answer in zip(places, self._answers(model, [questions[one] for one in places]), strict=True):
                found[place] = answer
        return [answer for answer in found if answer is not None]

    def _answers(self, model: Model, questions: Sequence[Question]) -> list[Answer]:
        if not questions:
            return []
        prepared = [_prepared(model, question.call, question.warm) for question in questions]
        counts = np.asarray([len(one.kernels) for one in prepared])
        groups = np.asarray([group for one in prepared for group in one.groups], dtype=np.int64).reshape(-1, 2)
        batch = Batch(
            np.asarray([row for one in prepared for row in one.numbers]).reshape(-1, model.columns.width),
            groups[:, 0],
            groups[:, 1],
            np.asarray([codes for one in prepared for codes in one.codes]).reshape(-1, 3),
            np.repeat(np.asarray([float(question.share) for question in questions]), counts),
            np.repeat(np.asarray([others_code(question) for question in questions]), counts),
        )
        corrected = np.repeat(np.asarray([one.corrected for one in prepared]), counts)
        times = iter(model.time_ns(batch, corrected).tolist())
        return [Answer(tuple(LaunchTime(name, next(times)) for name in one.kernels), one.inside) for one in prepared]


def fit(rows: Sequence[Row], seed: int) -> Launched:
    """Fits to the rows of the split `fit`; families that the trees make worse on `validation` rows go without them."""
    whole = [row for row in rows if row.question.share == 1]
    parts = [row for row in rows if row.question.share > 1]
    if not whole or not parts:
        return Launched(_chosen(rows, rows, seed))
    return Launched(_chosen(whole, whole, seed), _chosen(rows, parts, seed))


def load(arrays: Arrays) -> Launched:
    """The form that `arrays` were taken from."""
    kept: dict[str, dict[str, npt.NDArray[Any]]] = {part: {} for part in (_WHOLE, _PARTS)}
    for name, array in arrays.items():
        part, _, own = name.partition(".")
        kept[part][own] = array
    return Launched(load_model(kept[_WHOLE]), load_model(kept[_PARTS]) if kept[_PARTS] else None)


def _prepared(model: Model, call: Call, warm: bool) -> _Prepared:
    launches = launches_of(call)
    names = [groups_of(call.op, launch) for launch in launches]
    return _Prepared(
        tuple(launch.kernel for launch in launches),
        model.columns.rows(call, launches, warm),
        [model.group_of(own) for own in names],
        [model.codes.of(own) for own in names],
        all(model.inside(own, launch.elements) for own, launch in zip(names, launches, strict=True)),
        family_of(call.op) not in model.uncorrected,
    )


def _chosen(rows: Sequence[Row], asked: Sequence[Row], seed: int) -> Model:
    model = fit_model(rows, seed)
    return replace(model, uncorrected=_uncorrected(model, of(asked, VALIDATION)))


def _uncorrected(model: Model, rows: Sequence[Row]) -> frozenset[str]:
    rows = [row for row in rows if _answerable(row)]
    every = frozenset(family_of(row.question.call.op) for row in rows)
    if not rows:
        return every
    errors = []
    for form in (Launched(model), Launched(replace(model, uncorrected=every))):
        answers = form.answers([row.question for row in rows])
        errors.append([abs(answer.time_ns / row.time_ns - 1) for answer, row in zip(answers, rows, strict=True)])
    family = np.asarray([family_of(row.question.call.op) for row in rows])
    with_trees, without = (np.log(np.asarray(one) + GMAE_FLOOR) for one in errors)
    return frozenset(name for name in every if with_trees[family == name].mean() > without[family == name].mean())


def _answerable(row: Row) -> bool:
    try:
        return bool(launches_of(row.question.call))
    except InputError:
        return False
