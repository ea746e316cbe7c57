"""From measured lookups to the lookup models of a device, to files of them, and of what they are compared with.

The same forms are fitted to some of the rows only, too. These answer what a fit to all of them cannot: whether a form knows
tables, counts of tables and distributions that it has never seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from steptime import __version__
from steptime._hardware.device import DeviceLimits
from steptime._lookups.table import Floats
from steptime._measurements.store import read
from steptime._models.engine.archive import Archive, write_archive
from steptime._models.engine.splits import FIT, TEST, VALIDATION, Residuals
from steptime._models.engine.splits import group_of as residual_group
from steptime._models.engine.stored import Arrays, pack, unpack
from steptime._models.lookups.fitted import Kind, LookupModels, group_of, lookups_file
from steptime._models.lookups.forms import FORMS, LookupForm, load_form
from steptime._models.lookups.forms.bag_backward import BagBackward
from steptime._models.lookups.forms.dense_backward import DenseBackward
from steptime._models.lookups.forms.kernel_sum import RowsForward
from steptime._models.lookups.question import Lookups
from steptime._processes import workers
from steptime.errors import InputError
from steptime_lab.baselines.lookups import BASELINES
from steptime_lab.fit.lookups import batched_backward, batched_forward, kernel_sum
from steptime_lab.measurements.lookups import FILE_NAME as STREAMS
from steptime_lab.measurements.lookups import MeasuredLookups, Streams, measured_lookups, streams_of, summarised
from steptime_lab.measurements.sets import LOOKUPS

# What a recipe takes over from the rows.
_RECIPE = ("device", "driver", "torch", "cuda", "triton")
# Held-out tests are of these: the others have too few rows.
_MANY = ("table_batched", "embedding_bag")

MOST_TABLES_FITTED = 20
"""Of the test on unseen table counts: a lookup with more is not fitted to."""

_SKEWED = 0.75
"""Of the test on unseen distributions: lookups beyond this quantile of skew are not fitted to."""

Said = Callable[[str], None]
Forms = dict[Kind, LookupForm]


def fit_lookups(
    table: pa.Table,
    measured: Mapping[Kind, MeasuredLookups],
    limits: DeviceLimits,
    seed: int = 0,
    *,
    said: Said = lambda _: None,
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
    kinds = sorted(seen, key=lambda kind: -len(seen[kind]))
    forms = dict(zip(kinds, _fit_each([(kind, seen[kind]) for kind in kinds], limits, seed, executor), strict=True))
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
) -> dict[str, Forms]:
    """For every test of `HELD_OUT` the forms that saw none of the lookups it is on."""
    tests = [
        (test, kind, item.take(~unseen))
        for test, chosen in HELD_OUT.items()
        for kind, item in measured.items()
        if kind[0] in _MANY and (unseen := chosen(item)).any()
    ]
    forms = _fit_each([(kind, item.of(FIT)) for _, kind, item in tests], limits, seed, executor)
    result: dict[str, Forms] = {test: {} for test in HELD_OUT}
    for (test, kind, _), form in zip(tests, forms, strict=True):
        result[test][kind] = form
    return result


def _fit_each(
    rows: Sequence[tuple[Kind, MeasuredLookups]], limits: DeviceLimits, seed: int, executor: Executor | None
) -> Iterable[LookupForm]:
    kinds, items = zip(*rows, strict=True) if rows else ((), ())
    each = map if executor is None else executor.map
    return each(fit_form, kinds, items, [seed] * len(rows), [limits] * len(rows))


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


def _most_skewed(measured: MeasuredLookups) -> npt.NDArray[np.bool_]:
    skew = skew_of(measured.lookups)
    result: npt.NDArray[np.bool_] = skew > np.quantile(skew, _SKEWED)
    return result


HELD_OUT: dict[str, Callable[[MeasuredLookups], npt.NDArray[np.bool_]]] = {
    "table counts": lambda measured: measured.lookups.counts > MOST_TABLES_FITTED,
    "distributions": _most_skewed,
    "series": lambda measured: measured.series != "",
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


def fit_and_write_lookups(folder: Path, out: Path, limits: DeviceLimits, name: str, seed: int, said: Said) -> Path:
    """The lookup models of a device; gives the file."""
    with workers(2) as executor:
        table, measured = read_lookups(folder, said=said, executor=executor)
        models = fit_lookups(table, measured, limits, seed, said=said, executor=executor)
    file = lookups_file(out, name)
    models.save(file)
    return file


def read_lookups(
    folder: Path, *, said: Said = lambda _: None, executor: Executor | None = None
) -> tuple[pa.Table, dict[Kind, MeasuredLookups]]:
    """Measured lookups with the statistics of their index streams; new ones are drawn, and kept beside the rows."""
    table = read(folder, LOOKUPS)
    if not table.num_rows:
        raise InputError(f"{folder}: no lookup rows; `steptime measure lookups` makes some")
    streams = Streams.load(folder / STREAMS)
    missing = streams.missing(streams_of(table))
    if missing:
        said(f"drawing {len(missing):,} index streams again, for their statistics")
        streams = streams.with_more(summarised(missing, executor))
        streams.save(folder / STREAMS)
    return table, measured_lookups(table, streams)


def fit_and_write_lookup_baselines(folder: Path, out: Path, limits: DeviceLimits, name: str, seed: int, said: Said) -> Path:
    """Other forms on the same rows, and the models' own shown some of the rows only; gives the file."""
    with workers(2) as executor:
        _, measured = read_lookups(folder, said=said, executor=executor)
        said("lookups: forms that are shown some of the rows only")
        parts = {
            f"{test}: {group_of(kind)}": pack(form)
            for test, forms in fit_held_out(measured, limits, seed, executor=executor).items()
            for kind, form in forms.items()
        }
    for baseline, form_maker in BASELINES.items():
        said(f"lookups: {baseline}")
        for kind, item in measured.items():
            parts[f"{baseline}: {group_of(kind)}"] = pack(form_maker.fit(item.of(FIT, VALIDATION), seed))
    file = lookup_baselines_file(out, name)
    write_archive(file, {"seed": seed}, parts)
    return file


def lookup_baselines_file(folder: Path, name: str) -> Path:
    """Where the baselines of a device's lookup models are kept."""
    return folder / f"{name}-lookups-baselines.npz"


def read_lookup_baselines(file: Path) -> tuple[dict[str, Forms], dict[str, Forms]]:
    """Baselines by name, and by held-out test the forms that did not see what it asks."""
    archive = Archive.open(file)

    def read_forms(name: str, load: Callable[[Kind, Arrays], LookupForm]) -> Forms:
        parts = {kind: f"{name}: {group_of(kind)}" for kind in FORMS}
        return {kind: load(kind, archive.part(part)) for kind, part in parts.items() if part in archive.parts}

    baselines = {name: read_forms(name, lambda _, arrays, rule=rule: unpack(rule, arrays)) for name, rule in BASELINES.items()}  # type: ignore[misc]
    held_out = {test: read_forms(test, load_form) for test in HELD_OUT}
    return baselines, held_out
