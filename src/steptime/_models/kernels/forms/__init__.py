"""Ways of modelling kernels, one module or package each: what a form is kept as, and how it answers.

A module here has `FORM`, a frozen dataclass whose fields are what is fitted (`engine.stored` saves and loads it) and whose
`answers` needs NumPy alone. `steptime_lab.fit.kernels` has a module of the same name that fits it. A family names the form
that answers for it; a form may answer for many families.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steptime._models.engine.stored import Arrays, Longs, unpack
from steptime._models.kernels.question import OTHERS, Answer, Question
from steptime.errors import InputError


class KernelForm(Protocol):
    """A fitted model: it exists, so it can answer."""

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches and how long that takes. Raises InputError for a call that cannot be."""
        ...


def load_form(name: str, arrays: Arrays) -> KernelForm:
    """The form of that name whose arrays these are."""
    form: KernelForm = unpack(import_module(f"{__name__}.{name}").FORM, arrays)
    return form


@dataclass(frozen=True)
class SettingColumns:
    """What questions say besides their calls, a column each."""

    tf32: npt.NDArray[np.bool_]
    warm: npt.NDArray[np.bool_]
    share: Longs
    others: Longs  # places in OTHERS


def settings_of(questions: Sequence[Question]) -> SettingColumns:
    """The settings of questions; InputError for a share of a GPU or a company that cannot be."""
    for question in questions:
        if question.share < 1:
            raise InputError(f"{question.call.op}: share {question.share} of a GPU, expected 1 or more")
        if question.others not in OTHERS:
            raise InputError(f"{question.call.op}: others {question.others!r}, expected one of {', '.join(OTHERS)}")
    return SettingColumns(
        np.array([question.tf32 for question in questions], dtype=bool),
        np.array([question.warm for question in questions], dtype=bool),
        np.array([question.share for question in questions], dtype=np.int64),
        np.array([OTHERS.index(question.others) for question in questions], dtype=np.int64),
    )


def shape_text(lengths: Sequence[int]) -> str:
    """A shape in a message."""
    return "x".join(map(str, lengths))
