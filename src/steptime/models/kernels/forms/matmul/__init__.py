"""Matrix products: a mixture over the kernels cuBLAS may choose, each timed by its tiles, waves and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError
from steptime.models.kernels.forms import Arrays
from steptime.models.kernels.forms.matmul.beside import fit_lines
from steptime.models.kernels.forms.matmul.features import inputs_of
from steptime.models.kernels.forms.matmul.group import GROUPS, groups_of
from steptime.models.kernels.forms.matmul.model import Matmul, sizes_of
from steptime.models.kernels.forms.matmul.names import COPY, candidates, pattern_of, role
from steptime.models.kernels.forms.matmul.product import of_questions
from steptime.models.kernels.forms.matmul.training import Schedule, Targets, train
from steptime.models.kernels.rows import Row

__all__ = ["Matmul", "Schedule", "fit", "load"]


def _main_ns(row: Row) -> float:
    """What is left of a row's time without copies."""
    copied = sum(time for name, time in zip(row.kernel_names, row.kernel_ns, strict=True) if role(name) == COPY)
    return max(row.time_ns - copied, 1.0)


def fit(rows: Sequence[Row], seed: int, schedule: Schedule | None = None) -> Matmul:
    """The form fitted to rows on whole GPUs and on parts."""
    whole = [row for row in rows if row.question.share == 1]
    products = of_questions([row.question for row in whole])
    groups = groups_of(products)
    arrays: dict[str, npt.NDArray[Any]] = {"lines": fit_lines(whole, products)}
    for group, name in enumerate(GROUPS):
        places = np.flatnonzero(groups == group)
        if len(places) == 0:
            raise InputError(f"no measured matrix products of the group {name}: every group needs some rows to be fitted on")
        inputs = inputs_of(products.take(places), group)
        own = [whole[place] for place in places]
        names = [row.kernel_names for row in own]
        measured = np.log([_main_ns(row) for row in own]).astype(np.float32)
        targets = Targets(measured, candidates(names, group), np.array([pattern_of(one) for one in names]))
        fitted = train(group, inputs, targets, seed, schedule or Schedule())
        sizes = sizes_of(inputs)
        fitted |= {"sizes_low": sizes.min(axis=1), "sizes_high": sizes.max(axis=1)}
        arrays |= {f"{name}.{key}": value for key, value in fitted.items()}
    return Matmul(arrays)


def load(arrays: Arrays) -> Matmul:
    """The form that `arrays` were taken from."""
    return Matmul(arrays)
