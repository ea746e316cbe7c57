"""From measured rows to the kernel models of a device: every form fitted, its residuals kept, with its recipe."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pyarrow as pa

from steptime import __version__
from steptime.errors import InputError
from steptime.models.kernels import families
from steptime.models.kernels.fitted import KernelModels
from steptime.models.kernels.forms import Form, maker
from steptime.models.kernels.residuals import Residuals
from steptime.models.kernels.rows import TEST, VALIDATION, Row, of, rows_of

# What a recipe takes over from the rows.
_RECIPE = ("device", "driver", "torch", "cuda", "cudnn", "triton")


def fit_kernels(
    table: pa.Table,
    seed: int = 0,
    *,
    forms: Sequence[str] | None = None,
    said: Callable[[str], None] = lambda _: None,
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
    asked = sorted(by_form if forms is None else set(forms), key=lambda form: -len(by_form[form]))
    for form in asked:
        said(f"{form}: {len(by_form[form]):,} rows")
    each = map if executor is None else executor.map
    made = each(_fit, asked, [by_form[form] for form in asked], [seed] * len(asked))
    fitted: dict[str, Form] = dict(zip(asked, made, strict=True))
    kept = {form: by_form[form] for form in fitted}
    return KernelModels(fitted, _residuals(fitted, kept), _recipe(table, seen, seed))


def _fit(form: str, rows: Sequence[Row], seed: int) -> Form:
    return maker(form).fit(rows, seed)


def _residuals(fitted: dict[str, Form], rows: dict[str, list[Row]]) -> Residuals:
    """Of the validation rows: the forms were chosen on them, not fitted to them."""
    names: list[str] = []
    predicted: list[float] = []
    measured: list[float] = []
    for form, some in rows.items():
        asked = of(some, VALIDATION)
        for row, answer in zip(asked, fitted[form].answers([row.question for row in asked]), strict=True):
            names.append(row.family)
            predicted.append(answer.time_ns)
            measured.append(row.time_ns)
    return Residuals.of(names, np.asarray(predicted), np.asarray(measured))


def _recipe(table: pa.Table, rows: Sequence[Row], seed: int) -> dict[str, Any]:
    said = {name: sorted({str(value) for value in table[name].unique().to_pylist()}) for name in _RECIPE}
    dates = sorted(str(date) for date in table["date"].unique().to_pylist())
    return {
        **said,
        "measured": [dates[0], dates[-1]],
        "rows": dict(Counter(row.split for row in rows)),
        "seed": seed,
        "steptime": __version__,
        "command": "steptime fit",
    }
