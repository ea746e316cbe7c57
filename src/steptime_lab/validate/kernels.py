"""Kernel models against measured rows they were never fitted to: per family, dtype and part of the GPU, baselines beside."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from steptime._models.engine.splits import TEST
from steptime._models.kernels.call import base_of, precision_of
from steptime._models.kernels.family import families
from steptime._models.kernels.fitted import Answered, KernelModels
from steptime._models.kernels.forms import KernelForm
from steptime._ops.catalogue import op_kind
from steptime._ops.families import WorkFamily, op_family
from steptime.errors import InputError
from steptime_lab.measurements.kernels import Row, rows_of
from steptime_lab.validate.engine import Case, Compared, Group, Summary, Validation, group, groups, repeat_errors

# Families of which only the innermost op of a step is recorded, by another name than that which is measured.
_BY_INNER_OPS = (WorkFamily.ATTENTION, WorkFamily.CONVOLUTION)
_LONG_NS = 10_000
_COMPANY = {"idle": "idle parts", "same": "parts that do the same", "streaming": "parts that stream memory"}


def validate_kernels(
    table: pa.Table, models: KernelModels, baselines: Mapping[str, KernelForm], step_kernels: pa.Table, *, split: str = TEST
) -> Validation:
    """Every row of the split on a whole GPU and on parts; `step_kernels` says how much of real steps each family takes."""
    rows = [row for row in rows_of(table) if row.split == split and row.family in families()]
    answered = models.ask([row.question for row in rows])
    cases = [_case(row, item, models) for row, item in zip(rows, answered, strict=True)]
    beside = {name: form.answers([row.question for row in rows]) for name, form in baselines.items()}
    missing = [f"{row.family}: {item.why}" for row, item in zip(rows, answered, strict=True) if item.answer is None]
    compared = [
        Compared(row, case, {name: case.by(answers[index].time_ns) for name, answers in beside.items()})
        for index, (row, case) in enumerate(zip(rows, cases, strict=True))
        if answered[index].answer is not None
    ]
    whole = [item for item in compared if _whole(item.item)]
    if not whole:
        raise InputError("these models answer no row of a whole GPU; fit them to kernels that were measured on one")
    result = groups(compared, _groups(rows))
    shares = family_shares(step_kernels)
    return Validation(
        name="kernels",
        title=f"device time of op calls, {split} rows",
        cases=[item.case for item in compared],
        whole=group(whole),
        groups=result,
        facts=_facts(result, shares),
        notes=("noise floor: one repeat against the mean of the others; a median of three repeats has about half of it",),
        warnings=tuple(sorted(set(missing))),
    )


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


def _whole(row: Row) -> bool:
    return row.question.share == 1


def _groups(rows: Sequence[Row]) -> Iterable[tuple[str, Callable[[Row], bool]]]:
    """Names and choices: families, families by precision, workloads' own calls, long kernels, parts of the GPU."""
    for family in sorted({row.family for row in rows}):
        yield family, lambda row, family=family: _whole(row) and row.family == family  # type: ignore[misc]
    for family, precision in sorted({(row.family, _precision(row)) for row in rows}):
        yield (
            f"{family}, {precision}",
            lambda row, family=family, precision=precision: (  # type: ignore[misc]
                _whole(row) and row.family == family and _precision(row) == precision
            ),
        )
    yield "calls of workloads", lambda row: _whole(row) and row.source != "sweep"
    yield f"longer than {_LONG_NS // 1000} us", lambda row: _whole(row) and row.time_ns > _LONG_NS
    for share in sorted({row.question.share for row in rows} - {1}):
        for others, company in _COMPANY.items():
            yield (
                f"1/{share} of the GPU beside {company}",
                lambda row, share=share, others=others: (  # type: ignore[misc]
                    row.question.share == share and row.question.others == others
                ),
            )


def _precision(row: Row) -> str:
    return precision_of(row.question.call, row.question.tf32)


def _facts(found: Mapping[str, Group], shares: Mapping[str, float]) -> dict[str, float]:
    own: dict[str, Summary] = {family: found[family].summary for family in families() if family in found}
    known = {family: share for family, share in shares.items() if family in own}
    weighted = sum(share * own[family].gmae for family, share in known.items()) / sum(known.values())
    return {
        "median_family_gmae": float(np.median([item.gmae for item in own.values()])),
        "worst_family_gmae": max(item.gmae for item in own.values()),
        "gmae_weighted_by_share_of_steps": weighted,
        **{f"share_of_steps/{family}": share for family, share in shares.items()},
    }


def _case(row: Row, answered: Answered, models: KernelModels) -> Case:
    measured = row.time_ns
    if answered.answer is None:
        return Case(_name(row), math.nan, measured)
    predicted = answered.answer.time_ns
    quantiles = models.residuals.of_answer(row.family, predicted, row.question.share)
    log = math.log(measured / predicted)
    covered = bool(quantiles[0] <= log <= quantiles[-1])
    return Case(_name(row), predicted, measured, row.spread, covered, repeat_errors(row.times_ns))


def _name(row: Row) -> str:
    """Op, shapes and dtype: enough to find the row again."""
    call = row.question.call
    shapes = " ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in list(call.tensors())[:4])
    state = "warm" if row.question.warm else "cold"
    return f"{op_kind(call.op).plain} {shapes} {_precision(row)} {state}"
