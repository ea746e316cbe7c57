"""From measured rows to the kernel models of a device: every form fitted, its residuals kept, with its recipe."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from importlib import import_module
from itertools import chain
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from steptime import __version__
from steptime._hardware.device import DeviceLimits
from steptime._models.engine.splits import FIT, TEST, VALIDATION, Residuals, group_of
from steptime._models.kernels.family import families
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms import KernelForm
from steptime.errors import InputError
from steptime_lab.measurements.kernels import Row, of, rows_of

# What a recipe takes over from the rows.
_RECIPE = ("device", "driver", "torch", "cuda", "cudnn", "triton")


class FormFitter(Protocol):
    """The module here that fits a form. One that learns from validation rows as well has `LEARNS_FROM_VALIDATION = True`."""

    def fit(self, rows: Sequence[Row], seed: int, limits: DeviceLimits, /) -> KernelForm:
        """Fits to the rows of the split `fit`, choosing on those of `validation` if there are any; none is of `test`."""
        ...


def fitter(form: str) -> FormFitter:
    """The module of a form, by its name in this folder."""
    module: Any = import_module(f"steptime_lab.fit.kernels.{form}")
    result: FormFitter = module
    return result


def fit_kernels(
    table: pa.Table,
    limits: DeviceLimits,
    seed: int = 0,
    *,
    forms: Sequence[str] | None = None,
    report: Callable[[str], None] = lambda _: None,
    executor: Executor | None = None,
) -> KernelModels:
    """Fits every form to its families' rows, side by side where there is an executor; `test` rows are never looked at."""
    if not table.num_rows:
        raise InputError("no kernel rows to fit; `steptime measure kernels` makes some")
    seen = [row for row in rows_of(table) if row.split != TEST]
    by_form: dict[str, list[Row]] = defaultdict(list)
    for row in seen:
        if row.family in families():
            by_form[families()[row.family].form].append(row)
    names = sorted(by_form if forms is None else set(forms), key=lambda form: -len(by_form[form]))
    for form in names:
        report(f"{form}: {len(by_form[form]):,} rows")
    each = map if executor is None else executor.map
    count = len(names)
    fitted = list(each(_fit, names, [by_form[form] for form in names], [seed] * count, [limits] * count))
    groups, predicted, measured = (list(chain.from_iterable(part)) for part in zip(*(rows for _, rows in fitted), strict=True))
    residuals = Residuals.of(groups, np.asarray(predicted), np.asarray(measured))
    models = {name: form for name, (form, _) in zip(names, fitted, strict=True)}
    return KernelModels(models, residuals, _recipe(table, seen, seed))


# Of validation rows: the group of each, what a model that was not fitted to it predicts, what was measured.
_Validated = tuple[list[str], list[float], list[float]]


def _fit(form: str, rows: Sequence[Row], seed: int, limits: DeviceLimits) -> tuple[KernelForm, _Validated]:
    """The form, and how it does on validation rows; one that learns from those as well is fitted without them for that."""
    module = fitter(form)
    fitted = module.fit(rows, seed, limits)
    learns = getattr(module, "LEARNS_FROM_VALIDATION", False)
    apart = module.fit(of(rows, FIT), seed, limits) if learns else fitted
    validated = of(rows, VALIDATION)
    answers = apart.answers([row.question for row in validated])
    groups = [group_of(row.family, row.question.share) for row in validated]
    return fitted, (groups, [answer.time_ns for answer in answers], [row.time_ns for row in validated])


def _recipe(table: pa.Table, rows: Sequence[Row], seed: int) -> dict[str, Any]:
    text = {name: sorted({str(value) for value in table[name].unique().to_pylist()}) for name in _RECIPE}
    dates = sorted(str(date) for date in table["date"].unique().to_pylist())
    return {
        **text,
        "measured": [dates[0], dates[-1]],
        "rows": dict(Counter(row.split for row in rows)),
        "seed": seed,
        "steptime": __version__,
        "command": "steptime fit",
    }
