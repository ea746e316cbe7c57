"""From measured lookups to the lookup models of a device, and the same forms fitted to some of the rows only.

The latter answer what a fit to all of them cannot: whether a form knows tables, counts of tables and distributions that it has
never seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from steptime import __version__
from steptime._hardware.device import DeviceLimits
from steptime._lookups.table import Floats
from steptime._models.engine.residuals import Residuals
from steptime._models.engine.residuals import group_of as residual_group
from steptime._models.engine.splits import FIT, TEST, VALIDATION
from steptime._models.lookups.fitted import Kind, LookupModels, group_of
from steptime._models.lookups.forms import FORMS, LookupForm
from steptime._models.lookups.forms.bag_backward import BagBackward
from steptime._models.lookups.forms.dense_backward import DenseBackward
from steptime._models.lookups.forms.kernel_sum import RowsForward
from steptime._models.lookups.question import Lookups
from steptime.errors import InputError
from steptime_lab.fit.lookups import batched_backward, batched_forward, kernel_sum
from steptime_lab.measurements.lookups import MeasuredLookups

# What a recipe takes over from the rows.
_RECIPE = ("device", "driver", "torch", "cuda", "triton")
# Held-out tests are of these: the others have too few rows.
_MANY = ("table_batched", "embedding_bag")

MOST_TABLES_FITTED = 20
"""Of the test on unseen table counts: a lookup with more is not fitted to."""

_SKEWED = 0.75
"""Of the test on unseen distributions: lookups beyond this quantile of skew are not fitted to."""


def fit_lookups(
    table: pa.Table,
    measured: Mapping[Kind, MeasuredLookups],
    limits: DeviceLimits,
    seed: int = 0,
    *,
    said: Callable[[str], None] = lambda _: None,
    executor: Executor | None = None,
) -> LookupModels:
    """Fits every form to its rows, side by side where there is an executor; `test` rows are never looked at."""
    seen = {kind: item.of(FIT, VALIDATION) for kind, item in measured.items() if kind in FORMS}
    if not seen:
        raise InputError("no lookup rows to fit; `steptime measure lookups` makes some")
    for kind, item in seen.items():
        said(f"{group_of(kind)}: {len(item):,} rows")
        if not (item.split == FIT).any():
            raise InputError(f"no row of {group_of(kind)} is of the split {FIT}: measure more of them, or leave them out")
    if not any((item.split == VALIDATION).any() for item in seen.values()):
        raise InputError(f"no lookup row is of the split {VALIDATION}, which intervals come from; measure more lookups")
    forms = _fit_all(seen, limits, seed, executor)
    groups: list[str] = []
    predicted, actual = [], []
    for kind, form in forms.items():
        asked = seen[kind].of(VALIDATION)
        groups += [residual_group(group_of(kind), round(share)) for share in asked.lookups.share.tolist()]
        predicted.append(form.times(asked.lookups).time_ns)
        actual.append(asked.time_ns)
    residuals = Residuals.of(groups, np.concatenate(predicted), np.concatenate(actual))
    return LookupModels(forms, residuals, _recipe(table, seen, seed))


def fit_held_out(
    measured: Mapping[Kind, MeasuredLookups], limits: DeviceLimits, seed: int = 0, *, executor: Executor | None = None
) -> dict[str, dict[Kind, LookupForm]]:
    """For every test of `HELD_OUT` the forms that saw none of the lookups it is on."""
    tests = {
        f"{test}/{group_of(kind)}": (kind, item.take(~unseen))
        for test, chosen in HELD_OUT.items()
        for kind, item in measured.items()
        if kind[0] in _MANY and (unseen := chosen(item)).any()
    }
    kinds = {name: kind for name, (kind, _) in tests.items()}
    rows = {name: item.of(FIT) for name, (_, item) in tests.items()}
    each = map if executor is None else executor.map
    count = len(rows)
    forms = each(fit_form, [kinds[name] for name in rows], list(rows.values()), [seed] * count, [limits] * count)
    result: dict[str, dict[Kind, LookupForm]] = {test: {} for test in HELD_OUT}
    for name, form in zip(rows, forms, strict=True):
        result[name.partition("/")[0]][kinds[name]] = form
    return result


def _fit_all(
    seen: Mapping[Kind, MeasuredLookups], limits: DeviceLimits, seed: int, executor: Executor | None
) -> dict[Kind, LookupForm]:
    kinds = sorted(seen, key=lambda kind: -len(seen[kind]))
    each = map if executor is None else executor.map
    forms = each(fit_form, kinds, [seen[kind] for kind in kinds], [seed] * len(kinds), [limits] * len(kinds))
    return dict(zip(kinds, forms, strict=True))


def fit_form(kind: Kind, rows: MeasuredLookups, seed: int, limits: DeviceLimits) -> LookupForm:
    """The form of one implementation and direction; choices were made on validation rows beforehand."""
    return _FITS[FORMS[kind][1]](rows, seed, limits)


# By the class of a form.
_FITS: Mapping[str, Callable[[MeasuredLookups, int, DeviceLimits], LookupForm]] = {
    "BatchedForward": batched_forward.fit,
    "BatchedBackward": batched_backward.fit,
    "BagForward": kernel_sum.fit_bag_forward,
    "BagBackward": partial(kernel_sum.fit_kernel_sum, BagBackward),
    "DenseBackward": partial(kernel_sum.fit_kernel_sum, DenseBackward),
    "RowsForward": partial(kernel_sum.fit_kernel_sum, RowsForward),
}


def skew_of(lookups: Lookups) -> Floats:
    """How skewed lookups are: ln of how much oftener two lookups of a table meet in a row than were all rows alike, [lookups].

    Of many tables the mean, each by its lookups. A uniform stream has 0, whatever its batch.
    """
    tables = lookups.pool.tables
    counts = tables.bin_lookups / np.maximum(tables.bin_rows, 1e-9)
    pairs = (tables.bin_rows * counts * np.maximum(counts - 1, 0.0)).sum(axis=1)
    number = tables.lookups
    meeting = pairs / np.maximum(number * (number - 1), 1.0) * tables.rows
    own = np.log(np.maximum(meeting, 1.0))
    return lookups.sums(own * number) / np.maximum(lookups.sums(number), 1.0)


def _many_tables(measured: MeasuredLookups) -> npt.NDArray[np.bool_]:
    result: npt.NDArray[np.bool_] = measured.lookups.counts > MOST_TABLES_FITTED
    return result


def _most_skewed(measured: MeasuredLookups) -> npt.NDArray[np.bool_]:
    skew = skew_of(measured.lookups)
    result: npt.NDArray[np.bool_] = skew > np.quantile(skew, _SKEWED)
    return result


def _in_series(measured: MeasuredLookups) -> npt.NDArray[np.bool_]:
    result: npt.NDArray[np.bool_] = measured.series != ""
    return result


HELD_OUT: dict[str, Callable[[MeasuredLookups], npt.NDArray[np.bool_]]] = {
    "table counts": _many_tables,
    "distributions": _most_skewed,
    "series": _in_series,
}
"""Tests on lookups unlike those a form was fitted to: which lookups it does not see."""


def _recipe(table: pa.Table, seen: Mapping[Kind, MeasuredLookups], seed: int) -> dict[str, Any]:
    text = {name: sorted({str(value) for value in table[name].unique().to_pylist()}) for name in _RECIPE}
    dates = sorted(str(date) for date in table["date"].unique().to_pylist())
    rows = Counter(str(split) for item in seen.values() for split in item.split)
    return {
        **text,
        "measured": [dates[0], dates[-1]],
        "rows": {name: rows[name] for name in sorted(rows) if name != TEST},
        "seed": seed,
        "steptime": __version__,
        "command": "steptime fit",
    }
