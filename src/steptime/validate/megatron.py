"""Published iterations of Megatron-DeepSpeed on A100 GPUs against predictions: vTrain's table of single-node runs.

The table (VIA-Research/vTrain, `data/ground_truth_single.csv`, MIT) is not in the package; the path of a copy is given. Its
rows are GPT models in half precision with tensor, data and pipeline parallelism; those without pipelines can be asked.

A caution goes with it. Rows that differ in the number of micro-batches alone lie on straight lines to the nanosecond, which no
clock shows: times were put together from parts that are said to be measured. `straight_lines` finds that in any table.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from steptime.build.transformer_config import Transformer
from steptime.build.transformer_megatron import megatron_gpt
from steptime.errors import InputError
from steptime.validate.summary import Case, Part, Validation, summary

# Words of the table's header, in the order of the fields of `Iteration`.
_COLUMNS = (
    "# GPUs",
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    "iteration time (ms)",
)
# Measured times repeat to a per mille at best; a line that holds a thousand times better was calculated.
_STRAIGHT = 1e-6
_LEAST_SERIES = 3


@dataclass(frozen=True, slots=True)
class Iteration:
    """One row: a model, how ranks share it, and what an iteration is said to take."""

    ranks: int
    batch: int
    micro_batch: int
    width: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    time_ms: float

    @property
    def micro_batches(self) -> int:
        """Of every rank, one after another."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def name(self) -> str:
        """All that tells it from the others."""
        return (
            f"{self.layers}x{self.width} batch {self.batch} in parts of {self.micro_batch}, "
            f"tensor {self.tensor} data {self.data}"
        )


@dataclass(frozen=True, slots=True)
class PredictedIteration:
    """What a model says of a row."""

    time_ms: float
    low_ms: float
    high_ms: float
    regime: str = ""  # what it is bound by, where that is said


Predict = Callable[[Iteration], PredictedIteration]


def read_iterations(file: Path) -> list[Iteration]:
    """All rows of the table."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({error}); expected vTrain's table of single-node iterations") from error
    if not rows or tuple(rows[0]) != _COLUMNS:
        raise InputError(f"{file}: not vTrain's table of iterations; expected a first line of {', '.join(_COLUMNS)}")
    return [_iteration(file, line, row) for line, row in enumerate(rows[1:], 2) if row]


def _iteration(file: Path, line: int, row: Sequence[str]) -> Iteration:
    try:
        sizes = dict(zip((one.name for one in fields(Iteration)), map(int, row[:-1]), strict=False))
        found = Iteration(**sizes, time_ms=float(row[-1]))
    except (TypeError, ValueError) as error:
        raise InputError(f"{file}, line {line}: {','.join(row)!r} is no row of {len(_COLUMNS)} numbers") from error
    whole = [getattr(found, one.name) for one in fields(found)]
    if min(whole) <= 0 or not np.isfinite(found.time_ms):
        raise InputError(f"{file}, line {line}: {min(whole)} where more than nothing was expected")
    if found.ranks != found.tensor * found.data * found.pipeline or found.batch % (found.data * found.micro_batch):
        raise InputError(f"{file}, line {line}: {found.ranks} ranks and a batch of {found.batch} do not divide as it says")
    return found


def transformer_of(row: Iteration) -> Transformer:
    """The training step of a row without pipeline parallelism."""
    values = (str(getattr(row, one.name)) for one in fields(row))
    return megatron_gpt(dict(zip(_COLUMNS, values, strict=True)))


def straight_lines(rows: Iterable[Iteration]) -> tuple[int, int]:
    """Of series that differ in the batch alone, three rows at least: how many lie on a line to 1e-6, and how many there are."""
    series: dict[Iteration, list[Iteration]] = defaultdict(list)
    for row in rows:
        series[replace(row, batch=0, time_ms=0.0)].append(row)
    long = [some for some in series.values() if len({row.batch for row in some}) >= _LEAST_SERIES]
    return sum(map(_is_straight, long)), len(long)


def _is_straight(rows: Sequence[Iteration]) -> bool:
    times = np.array([row.time_ms for row in rows])
    counts = np.array([float(row.micro_batches) for row in rows])
    slope, start = np.polyfit(counts, times, 1)
    return bool(np.abs((start + slope * counts) / times - 1).max() < _STRAIGHT)


def chosen(rows: Sequence[Iteration], most: int | None = None) -> list[Iteration]:
    """Rows that can be asked; of more than `most`, as many evenly from the whole table in the order of its sizes."""
    asked = sorted((row for row in rows if row.pipeline == 1), key=lambda row: [getattr(row, one.name) for one in fields(row)])
    if most is None or len(asked) <= most:
        return asked
    return [asked[round(place)] for place in np.linspace(0, len(asked) - 1, most)]


def compare(rows: Sequence[Iteration], predict: Predict, *, table: Sequence[Iteration] = ()) -> Validation:
    """Every row against what `predict` says, by parallelism, size and regime; `table` is where the rows are from."""
    every: list[Case] = []
    parts: dict[str, list[Case]] = defaultdict(list)
    for row in rows:
        found = predict(row)
        covered = found.low_ms <= row.time_ms <= found.high_ms
        every.append(Case(row.name, found.time_ms, row.time_ms, covered=covered))
        for name in (
            f"tensor {row.tensor}, data {row.data}",
            f"width {row.width}, micro-batch {row.micro_batch}",
            f"tensor {row.tensor}",
            f"width {row.width}",
            *([found.regime] if found.regime else []),
        ):
            parts[name].append(every[-1])
    if not every:
        raise InputError("no row without pipeline parallelism to compare")
    straight, series = straight_lines(table or rows)
    return Validation(
        name="megatron",
        title="iterations of Megatron-DeepSpeed on A100, published by vTrain",
        cases=every,
        whole=Part(summary(every)),
        parts={name: Part(summary(some)) for name, some in sorted(parts.items())},
        facts={"series": float(series), "series_on_a_line": float(straight)},
        warnings=_warnings(straight, series),
    )


def _warnings(straight: int, series: int) -> tuple[str, ...]:
    if not straight:
        return ()
    return (
        f"{straight} of {series} series of rows that differ in the batch alone are straight lines to {_STRAIGHT:g}: "
        "these times were put together from parts, not measured one by one",
    )
