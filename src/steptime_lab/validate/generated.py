"""The model of kernels that PyTorch's compiler generates, against measured ones of graphs that it was not fitted to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from steptime._models.engine.splits import TEST
from steptime._models.error import gmae
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms.generated.numbers import asked_of
from steptime.errors import InputError
from steptime_lab.measurements.generated import FAMILY, generated_rows
from steptime_lab.measurements.kernels import Row
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, grouped, repeat_errors

# Graphs that were drawn have numbers, those of an architecture do not.
_DRAWN = re.compile(r" \d+$")
# Where groups by measured time end.
_SIZES_US = (3, 10, 50)


def validate_generated(table: pa.Table, models: KernelModels, *, split: str = TEST) -> Validation:
    """Every row of the split, by kind of kernel and by how long it took."""
    every = generated_rows(table)
    rows = [row for row in every if row.split == split]
    answers = models.ask([row.question for row in rows])
    compared = [
        Compared(_case(row, item.answer.time_ns, models), (_kind(row), _size(row.time_ns)))
        for row, item in zip(rows, answers, strict=True)
        if item.answer is not None
    ]
    if not compared:
        raise InputError("these models know no generated kernels; fit them with `steptime fit --only generated`")
    return Validation.of(
        "generated",
        f"device time of generated kernels, {split} graphs",
        compared,
        groups=grouped(compared),
        facts={**_facts(every), **_architectures_off(table, every, models, split)},
        notes=("noise floor: one repeat against the mean of the others of its process",),
    )


def _facts(rows: Sequence[Row]) -> dict[str, float]:
    """How far apart equal kernels of different graphs are: what the same description leaves open."""
    errors = _twin_errors(rows)
    return {"noise_floor_between_graphs": gmae(np.abs(errors).tolist())} if errors else {}


def _architectures_off(table: pa.Table, every: Sequence[Row], models: KernelModels, split: str) -> dict[str, float]:
    """By how much all generated kernels of an architecture are off together: root mean square of logarithms."""
    measured: dict[str, float] = defaultdict(float)
    predicted: dict[str, float] = defaultdict(float)
    kept = [(row, count) for row, count in zip(every, table["launches"].to_pylist(), strict=True)
            if row.split == split and not _DRAWN.search(row.source)]  # fmt: skip
    for (row, count), item in zip(kept, models.ask([row.question for row, _ in kept]), strict=True):
        if item.answer is not None:
            measured[row.source] += count * row.time_ns
            predicted[row.source] += count * item.answer.time_ns
    if not measured:
        return {}
    off = np.log([measured[source] / predicted[source] for source in measured])
    return {"architectures_off_by": float(np.sqrt(np.mean(off**2)))}


def _twin_errors(rows: Sequence[Row]) -> list[float]:
    """Of each row against the median of the same kernel in other graphs; names aside, which say nothing."""
    twins: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        call = row.question.call
        twins[str(call.args[0]).partition('"k":')[2], call.args[1:]].append(row)
    errors = []
    for same in twins.values():
        for row in same:
            others = [other.time_ns for other in same if other.source != row.source]
            errors += [row.time_ns / float(np.median(others)) - 1.0] if others else []
    return errors


def _case(row: Row, predicted_ns: float, models: KernelModels) -> MeasuredCase:
    interval = models.residuals.interval_ns(FAMILY, predicted_ns)
    return MeasuredCase(
        f"{row.source}: {row.question.call.op}", predicted_ns, row.time_ns, row.spread, interval, repeat_errors(row.times_ns)
    )


def _kind(row: Row) -> str:
    return asked_of(row.question.call)[0].kind.replace("_", " ")


def _size(time_ns: float) -> str:
    for low, high in pairwise((0, *_SIZES_US)):
        if time_ns < high * 1000:
            return f"{low} to {high} us" if low else f"under {high} us"
    return f"over {_SIZES_US[-1]} us"
