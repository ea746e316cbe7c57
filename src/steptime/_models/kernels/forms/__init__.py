"""Ways of modelling kernels, one module or package each: what a form is kept as, and how it answers.

A module here has `FORM`, a frozen dataclass whose fields are what is fitted (`engine.stored` saves and loads it) and whose
`answers` needs NumPy alone. `steptime_lab.fit.kernels` has a module of the same name that fits it. A family names the form
that answers for it; a form may answer for many families.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from steptime._models.engine.stored import Arrays, unpack
from steptime._models.kernels.question import Answer, Question


class KernelForm(Protocol):
    """A fitted model: it exists, so it can answer."""

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches and how long that takes. Raises InputError for a call that cannot be."""
        ...


def load_form(name: str, arrays: Arrays) -> KernelForm:
    """The form of that name whose arrays these are."""
    form: KernelForm = unpack(import_module(f"{__name__}.{name}").FORM, arrays)
    return form
