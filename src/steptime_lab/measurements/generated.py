"""Measured rows of generated kernels as questions with their answers; whole graphs are of one split."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from steptime._models.engine.splits import split_of
from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.forms.generated.numbers import generated_call
from steptime._models.kernels.question import Question
from steptime._ops.generated import GeneratedKernel
from steptime._units import dtype_bytes
from steptime_lab.measurements.kernels import Row

FAMILY = "generated"
_COLUMNS = ("graph", "kernel", "sizes", "ages", "time_ns", "times_ns", "spread")


def generated_rows(table: pa.Table) -> list[Row]:
    """The rows of the measured set `generated`."""
    return [_row(row) for row in table.select(_COLUMNS).to_pylist()]


def _row(row: dict[str, Any]) -> Row:
    kernel = GeneratedKernel.read(row["kernel"])
    tensors = [
        TensorArg((size // dtype_bytes(dtype),), dtype) for (_, dtype), size in zip(kernel.arguments, row["sizes"], strict=True)
    ]
    return Row(
        question=Question(generated_call(kernel.name, row["kernel"], tensors, row["ages"])),
        family=FAMILY,
        source=row["graph"],
        split=split_of(f"graph {row['graph']}"),
        time_ns=row["time_ns"],
        times_ns=tuple(row["times_ns"]),
        spread=row["spread"],
        kernel_names=(kernel.name,),
        kernel_ns=(row["time_ns"],),
    )
