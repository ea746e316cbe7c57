"""Ways of modelling kernels, one module or package each: how a form is fitted to rows, kept as arrays, and asked.

A module here has `fit(rows, seed) -> Form` and `load(arrays) -> Form`. A family names the form that answers for it; a form may
answer for many families. Fitting may need the `fit` extra (torch, SciPy, LightGBM); loading and asking need NumPy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.question import Answer, Question
from steptime._models.kernels.rows import Row

# What a form is kept as: numbers and text, never objects, so that a file of them cannot run anything.
Arrays = Mapping[str, npt.NDArray[Any]]


class Form(Protocol):
    """A fitted model: it exists, so it can answer."""

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches and how long that takes. Raises InputError for a call that cannot be."""
        ...

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from."""
        ...


class Maker(Protocol):
    """The module of a form. One that learns from validation rows as well says so: `LEARNS_FROM_VALIDATION = True`."""

    def fit(self, rows: Sequence[Row], seed: int, /) -> Form:
        """Fits to the rows of the split `fit`, choosing on those of `validation` if there are any; none is of `test`."""
        ...

    def load(self, arrays: Arrays) -> Form:
        """The form that `arrays` were taken from."""
        ...


def maker(name: str) -> Maker:
    """The module of a form, by its name in this folder."""
    module: Any = import_module(f"{__name__}.{name}")
    made: Maker = module
    return made


def text_array(texts: Sequence[str]) -> npt.NDArray[np.str_]:
    """Texts as an array of fixed width, which a file holds without pickling."""
    return np.asarray(list(texts), dtype=np.str_)
