"""Kernel models against measured rows they were never fitted to: per family, dtype and part of the GPU, baselines beside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np
import pyarrow as pa

from steptime._models.engine.splits import TEST
from steptime._models.estimate import Source
from steptime._models.kernels.call import base_of, precision_of
from steptime._models.kernels.family import families
from steptime._models.kernels.fitted import Answered, KernelModels
from steptime._models.kernels.forms import KernelForm
from steptime._models.kernels.question import Answer
from steptime._ops.catalogue import op_kind
from steptime._ops.families import WorkFamily, op_family
from steptime._platforms.device import Device
from steptime.errors import InputError
from steptime_lab.measurements.kernels import Row, rows_of
from steptime_lab.validate.engine import Compared, Group, MeasuredCase, Validation, grouped, repeat_errors

# Families of which only the innermost op of a step is recorded, by another name than that which is measured.
_BY_INNER_OPS = (WorkFamily.ATTENTION, WorkFamily.CONVOLUTION)
_LONG_NS = 10_000
_COMPANY = {"idle": "idle parts", "same": "parts that do the same", "streaming": "parts that stream memory"}


def validate_kernels(
    table: pa.Table, models: KernelModels, baselines: Mapping[str, KernelForm], step_kernels: pa.Table, *, split: str = TEST
) -> Validation:
    """Every row of the split on a whole GPU and on parts; `step_kernels` says how much of real steps each family takes."""
    rows = [row for row in rows_of(table) if row.split == split and row.family in families()]
    questions = [row.question for row in rows]
    answered = models.ask(questions)
    beside = {name: form.answers(questions) for name, form in baselines.items()}
    compared = [
        Compared(case, _groups(row), {name: case.by(time_ns) for name, time_ns in _known(beside, index).items()})
        for index, (row, item) in enumerate(zip(rows, answered, strict=True))
        if (case := _case(row, item, models)) is not None
    ]
    whole = [each for each in compared if each.groups[0] is not None]
    if not whole:
        raise InputError("these models answer no row of a whole GPU; fit them to kernels that were measured on one")
    missing = {f"{row.family}: {item.why}" for row, item in zip(rows, answered, strict=True) if item.answer is None}
    result = grouped(compared)
    return Validation.of(
        "kernels",
        f"device time of op calls, {split} rows",
        compared,
        whole=whole,
        groups=result,
        facts=_facts(result, family_shares(step_kernels)),
        notes=("noise floor: one repeat against the mean of the others; a median of three repeats has about half of it",),
        warnings=tuple(sorted(missing)),
    )


def _known(beside: Mapping[str, Sequence[Answer]], index: int) -> dict[str, float]:
    """What baselines say of a row; one that was fitted to nothing of its family says nothing."""
    times_ns = {name: answers[index].time_ns for name, answers in beside.items()}
    return {name: time_ns for name, time_ns in times_ns.items() if isfinite(time_ns)}


def compared_kernels(table: pa.Table, device: Device, *, split: str = TEST) -> list[Compared]:
    """Rows of the split on a whole GPU as a device answers them, each in its family's group alone; no guesses."""
    rows = [row for row in rows_of(table, families=families(), shares=(1,)) if row.split == split]
    answers = zip(rows, (item.estimate for item in device.estimates([row.question for row in rows])), strict=True)
    return [
        Compared(
            MeasuredCase(
                _name(row), item.time_ns, row.time_ns, row.spread, (item.low_ns, item.high_ns),
                repeat_errors(row.times_ns),
            ),
            (row.family,),
        )
        for row, item in answers
        if item.source is not Source.FALLBACK
    ]  # fmt: skip


def family_shares(step_kernels: pa.Table) -> dict[str, float]:
    """Of the compute time of all measured steps, what each family takes."""
    of_base = {base_of(op): family.name for family in families().values() for op in family.ops}
    total_ns: dict[str, float] = defaultdict(float)
    for ops, times_ns in zip(step_kernels["op"].to_pylist(), step_kernels["kernel_ns"].to_pylist(), strict=True):
        for op, repeats_ns in zip(ops, times_ns, strict=True):
            family = of_base.get(op) or (op_family(op).label if op_family(op) in _BY_INNER_OPS else None)
            if family is not None and repeats_ns:
                total_ns[family] += float(np.median(repeats_ns))
    every_ns = sum(total_ns.values())
    return {family: time_ns / every_ns for family, time_ns in sorted(total_ns.items())}


def _groups(row: Row) -> tuple[str | None, ...]:
    """Of a whole GPU: families, families by precision, workloads' own calls, long kernels; else parts of the GPU."""
    share = row.question.share
    if share > 1:
        company = _COMPANY.get(row.question.others)
        return (None,) * 4 + (company and f"1/{share} of the GPU beside {company}",)
    return (
        row.family,
        f"{row.family}, {_precision(row)}",
        "calls of workloads" if row.source != "sweep" else None,
        f"longer than {_LONG_NS // 1000} us" if row.time_ns > _LONG_NS else None,
    )


def _precision(row: Row) -> str:
    return precision_of(row.question.call, row.question.tf32)


def _facts(groups: Mapping[str, Group], shares: Mapping[str, float]) -> dict[str, float]:
    errors = {family: groups[family].summary.gmae for family in families() if family in groups}
    known = {family: share for family, share in shares.items() if family in errors}
    weighted = sum(share * errors[family] for family, share in known.items()) / sum(known.values())
    return {
        "median_family_gmae": float(np.median(list(errors.values()))),
        "worst_family_gmae": max(errors.values()),
        "gmae_weighted_by_share_of_steps": weighted,
        **{f"share_of_steps/{family}": share for family, share in shares.items()},
    }


def _case(row: Row, answered: Answered, models: KernelModels) -> MeasuredCase | None:
    if answered.answer is None:
        return None
    predicted = answered.answer.time_ns
    interval = models.residuals.interval_ns(row.family, predicted, row.question.share, inside=answered.answer.inside)
    return MeasuredCase(_name(row), predicted, row.time_ns, row.spread, interval, repeat_errors(row.times_ns))


def _name(row: Row) -> str:
    """Op, shapes and dtype: enough to find the row again."""
    call = row.question.call
    shapes = " ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in list(call.tensors())[:4])
    state = "warm" if row.question.warm else "cold"
    return f"{op_kind(call.op).plain} {shapes} {_precision(row)} {state}"
