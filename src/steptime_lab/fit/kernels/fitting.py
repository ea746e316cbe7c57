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
from steptime._models.engine.splits import FIT, OUTSIDE, TEST, VALIDATION, Residuals, group_of
from steptime._models.kernels.family import families, swept_families
from steptime._models.kernels.fitted import LEFT_OUT, KernelModels, answers_of
from steptime._models.kernels.forms import KernelForm
from steptime.errors import InputError
from steptime_lab.measurements.kernels import Row, of, rows_of

# Fewer rows of a family than these say nothing about it, nor about a form.
_LEAST = 20
GENERATED_FORM = "generated"
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
    tried = list(each(_fit, names, [by_form[form] for form in names], [seed] * count, [limits] * count))
    for form, result in zip(names, tried, strict=True):
        if isinstance(result, str):
            report(f"{form} is not fitted: {result}")
    fitted = {form: result for form, result in zip(names, tried, strict=True) if not isinstance(result, str)}
    if not fitted:
        raise InputError(f"no kernels could be fitted: {tried[0]}")
    validated = (rows for _, rows in fitted.values())
    groups, predicted, measured = (list(chain.from_iterable(part)) for part in zip(*validated, strict=True))
    if not groups:
        raise InputError("no kernel row is of the split validation, which intervals come from; measure more of them")
    residuals = Residuals.of(groups, np.asarray(predicted), np.asarray(measured))
    return KernelModels({form: result for form, (result, _) in fitted.items()}, residuals, _recipe(table, seen, seed))


def fit_generated(rows: Sequence[Row], limits: DeviceLimits, seed: int = 0) -> KernelModels:
    """The form of generated kernels alone, of rows of the measured set `generated`; `test` rows are never looked at."""
    fitted = _fit(GENERATED_FORM, [row for row in rows if row.split != TEST], seed, limits)
    if isinstance(fitted, str):
        raise InputError(f"generated kernels are not fitted: {fitted}")
    form, (groups, predicted, measured) = fitted
    if not groups:
        raise InputError(
            "no row of generated kernels is of the split validation, which intervals come from; measure more graphs"
        )
    return KernelModels({GENERATED_FORM: form}, Residuals.of(groups, np.asarray(predicted), np.asarray(measured)), {})


def with_forms(models: KernelModels, fitted: KernelModels) -> KernelModels:
    """Models with the forms of others in place of theirs, and with what those are known to be off by."""
    ours, theirs = models.residuals, fitted.residuals
    # What lies outside is known of all families together, where it is known.
    taken = [at for at, family in enumerate(theirs.families) if family != OUTSIDE or not ours.knows(OUTSIDE)]
    replaced = {theirs.families[at] for at in taken}
    kept = [at for at, family in enumerate(ours.families) if family not in replaced]
    groups = [
        (residuals.families[at], residuals.sizes[at]) for residuals, each in ((ours, kept), (theirs, taken)) for at in each
    ]
    quantiles = np.concatenate([ours.quantiles[kept], theirs.quantiles[taken]])
    order = sorted(range(len(groups)), key=groups.__getitem__)
    families, sizes = zip(*(groups[at] for at in order), strict=True)
    # Those that are replaced are not read: their file may be of an older form.
    forms = {name: models.forms[name] for name in models.forms if name not in fitted.forms}
    return KernelModels({**forms, **fitted.forms}, Residuals(families, sizes, quantiles[order], ours.every), models.recipe)


# Of validation rows: the group of each, what a model that was not fitted to it predicts, what was measured.
_Validated = tuple[list[str], list[float], list[float]]


def _fit(form: str, rows: Sequence[Row], seed: int, limits: DeviceLimits) -> tuple[KernelForm, _Validated] | str:
    """The form, and how it does on validation rows; one that learns from those as well is fitted without them for that.

    Where the rows are too few, why they are.
    """
    module = fitter(form)
    learns = getattr(module, "LEARNS_FROM_VALIDATION", False)
    if len(of(rows, FIT)) < _LEAST:
        return f"{len(of(rows, FIT))} measured calls are too few"
    try:
        fitted = module.fit(rows, seed, limits)
        apart = module.fit(of(rows, FIT), seed, limits) if learns else fitted
    except InputError as error:
        return str(error)
    asked = of(rows, VALIDATION)
    answers = [answer for answer, _ in answers_of(apart, [row.question for row in asked])]
    answered = [(row, answer) for row, answer in zip(asked, answers, strict=True) if answer is not None]
    groups = [group_of(row.family, row.question.share) for row, _ in answered]
    outside = [(row, answer) for row, answer in answered if not answer.inside and row.question.share == 1]
    groups += [OUTSIDE] * len(outside)
    validated = [*answered, *outside]
    return fitted, (groups, [answer.time_ns for _, answer in validated], [row.time_ns for row, _ in validated])


def _recipe(table: pa.Table, rows: Sequence[Row], seed: int) -> dict[str, Any]:
    text = {name: sorted({str(value) for value in table[name].unique().to_pylist()}) for name in _RECIPE}
    counts = Counter(row.family for row in rows)
    dates = sorted(str(date) for date in table["date"].unique().to_pylist())
    return {
        **text,
        "measured": [dates[0], dates[-1]],
        "rows": dict(Counter(row.split for row in rows)),
        LEFT_OUT: sorted(name for name in swept_families() if counts[name] < _LEAST),
        "seed": seed,
        "steptime": __version__,
        "command": "steptime fit",
    }
