"""Matrix products: a mixture over the kernels cuBLAS may choose, each timed by its tiles, waves and bytes."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._models.kernels.forms import Arrays
from steptime._models.kernels.forms.matmul.fitting import fit_arrays
from steptime._models.kernels.forms.matmul.model import Matmul
from steptime._models.kernels.forms.matmul.training import Schedule
from steptime._models.kernels.rows import Row

__all__ = ["Matmul", "Schedule", "fit", "load"]


def fit(rows: Sequence[Row], seed: int, schedule: Schedule | None = None) -> Matmul:
    """The form fitted to rows on whole GPUs and on parts."""
    return Matmul(fit_arrays(rows, seed, schedule or Schedule()))


def load(arrays: Arrays) -> Matmul:
    """The form that `arrays` were taken from."""
    return Matmul(arrays)
