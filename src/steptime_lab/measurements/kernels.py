"""Measured kernel rows as questions with their answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from steptime._models.engine.splits import split_of
from steptime._models.kernels.call import Call
from steptime._models.kernels.question import Question

_COLUMNS = (
    "family", "call", "cache", "tf32", "benchmark", "source", "share", "others", "time_ns", "times_ns", "spread",
    "kernel_names", "kernel_ns", "span_ns", "busy_ns",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One measured question. Times are what a step sees: kernels that ran side by side (cuDNN takes the groups of a convolution
    and the layers of a recurrent network so) have their shares of the time that any of them ran.
    """

    question: Question
    family: str
    source: str  # sweep | the workload whose step makes this call
    split: str  # fit | validation | test
    time_ns: float
    times_ns: tuple[float, ...]
    spread: float
    kernel_names: tuple[str, ...]
    kernel_ns: tuple[float, ...]


def rows_of(table: pa.Table, *, families: Iterable[str] | None = None, shares: Sequence[int] | None = None) -> list[Row]:
    """The rows of the measured set `kernels`, or those of some families and shares of a GPU."""
    wanted = None if families is None else set(families)
    return [
        _row(row)
        for row in table.select(_COLUMNS).to_pylist()
        if (wanted is None or row["family"] in wanted) and (shares is None or row["share"] in shares)
    ]


_call = cache(Call.from_json)


def _row(row: dict[str, Any]) -> Row:
    question = Question(
        call=_call(row["call"]),
        tf32=bool(row["tf32"]),
        benchmark=bool(row["benchmark"]),
        warm=row["cache"] == "warm",
        share=int(row["share"]),
        others=str(row["others"]),
    )
    values: dict[str, Any] = {name: row[name] for name in ("family", "source", "time_ns", "spread")}
    ran_ns = next(row[name] for name in ("busy_ns", "span_ns", "time_ns") if row[name] is not None)
    beside = min(1.0, ran_ns / row["time_ns"])
    values["time_ns"] *= beside
    values |= {name: tuple(beside * each for each in row[name]) for name in ("times_ns", "kernel_ns")}
    return Row(question=question, split=split_of(row["call"]), kernel_names=tuple(row["kernel_names"]), **values)


def of(rows: Sequence[Row], split: str) -> list[Row]:
    """The rows of one split."""
    return [row for row in rows if row.split == split]
