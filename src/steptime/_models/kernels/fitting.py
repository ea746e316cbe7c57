"""From measured rows to the kernel models of a device: every form fitted, its residuals kept, with its recipe."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from steptime import __version__
from steptime._models.kernels.family import families
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms import Form, maker
from steptime._models.kernels.residuals import Residuals, group_of
from steptime._models.kernels.rows import FIT, TEST, VALIDATION, Row, of, rows_of
from steptime.errors import InputError

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
    made = list(each(_fit, asked, [by_form[form] for form in asked], [seed] * len(asked)))
    groups, predicted, measured = (list(chain.from_iterable(part)) for part in zip(*(seen for _, seen in made), strict=True))
    residuals = Residuals.of(groups, np.asarray(predicted), np.asarray(measured))
    return KernelModels({form: one for form, (one, _) in zip(asked, made, strict=True)}, residuals, _recipe(table, seen, seed))


# Of validation rows: the group of each, what a model that was not fitted to it predicts, what was measured.
_Seen = tuple[list[str], list[float], list[float]]


def _fit(form: str, rows: Sequence[Row], seed: int) -> tuple[Form, _Seen]:
    """The form, and how it does on validation rows; one that learns from those as well is fitted without them for that."""
    module = maker(form)
    fitted = module.fit(rows, seed)
    apart = module.fit(of(rows, FIT), seed) if getattr(module, "LEARNS_FROM_VALIDATION", False) else fitted
    asked = of(rows, VALIDATION)
    answers = apart.answers([row.question for row in asked])
    groups = [group_of(row.family, row.question.share) for row in asked]
    return fitted, (groups, [answer.time_ns for answer in answers], [row.time_ns for row in asked])


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
