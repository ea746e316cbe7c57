"""Published Megatron iterations: rows are read or refused, become training steps, and times that were calculated are found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steptime.errors import InputError
from steptime.validate.megatron import (
    Iteration,
    PredictedIteration,
    chosen,
    compare,
    read_iterations,
    straight_lines,
    transformer_of,
)

SHARED = Path(os.environ.get("STEPTIME_SHARED", Path(__file__).parents[3] / "shared"))
PUBLISHED = SHARED / "data" / "steps" / "megatron_a100_single_node.csv"
HEADER = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)"
)


def iteration(batch: int, time_ms: float, *, micro: int = 1, tensor: int = 2, data: int = 2, pipeline: int = 1) -> Iteration:
    return Iteration(tensor * data * pipeline, batch, micro, 1024, 16, 12, 1024, tensor, data, pipeline, time_ms)


def table(folder: Path, *lines: str) -> Path:
    file = folder / "iterations.csv"
    file.write_text("\n".join((HEADER, *lines)))
    return file


def test_a_row_becomes_its_training_step(tmp_path: Path) -> None:
    (row,) = read_iterations(table(tmp_path, "8,32,2,2048,16,24,1024,4,2,1,457.7"))
    assert (row.ranks, row.micro_batches, row.time_ms) == (8, 8, 457.7)
    step = transformer_of(row)
    assert (step.ranks, step.layers, step.width, step.local_batch, step.gradient_accumulation) == (8, 24, 2048, 2, 8)
    assert step.parallel.tensor == 4
    assert step.dtype == "float16"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("8,32,2,2048,16,24,1024,4,2,1", "is no row of 11 numbers"),
        ("8,32,2,2048,16,24,1024,4,2,1,soon", "is no row of 11 numbers"),
        ("8,32,2,2048,16,24,1024,4,2,1,nan", "where more than nothing was expected"),
        ("8,32,0,2048,16,24,1024,4,2,1,9", "where more than nothing was expected"),
        ("8,32,2,2048,16,24,1024,4,1,1,9", "8 ranks and a batch of 32 do not divide"),
    ],
)
def test_a_damaged_row_is_named_in_one_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        read_iterations(table(tmp_path, "2,4,1,1024,16,12,1024,1,2,1,92.4", line))
    assert said in str(error.value)
    assert "line 3" in str(error.value)
    assert "\n" not in str(error.value)


def test_another_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2")
    with pytest.raises(InputError, match="expected a first line of # GPUs"):
        read_iterations(tmp_path / "other.csv")
    with pytest.raises(InputError, match="cannot be read"):
        read_iterations(tmp_path / "none.csv")


def test_pipelines_are_not_asked() -> None:
    rows = [iteration(4, 9.0), iteration(4, 9.0, pipeline=2)]
    assert chosen(rows) == rows[:1]
    with pytest.raises(InputError, match="pipeline parallelism is 2; only 1 can be built"):
        transformer_of(rows[1])


def test_some_rows_are_taken_from_the_whole_table() -> None:
    rows = [iteration(2 * count, 1.0 * count) for count in range(1, 101)]
    some = chosen(rows, 5)
    assert [row.batch for row in some] == [2, 52, 102, 150, 200]
    assert chosen(rows, 1000) == rows


def test_times_that_were_calculated_are_found_out() -> None:
    line = [iteration(2 * count, 5.0 + 43.1 * count) for count in (1, 2, 4, 8)]
    # Measured ones are a per mille beside it.
    beside = [iteration(row.batch, row.time_ms * (1 + 1e-3 * (-1) ** place), tensor=4) for place, row in enumerate(line)]
    assert straight_lines(line) == (1, 1)
    assert straight_lines([*line, *beside]) == (1, 2)
    # Two rows are always on a line.
    assert straight_lines(line[:2]) == (0, 0)


def test_a_comparison_is_by_row_and_part_and_warns_of_calculated_times() -> None:
    rows = [iteration(2 * count, 10.0 * count) for count in (1, 2, 4)] + [iteration(8, 20.0, tensor=1)]
    found = compare(rows, lambda row: PredictedIteration(1.1 * row.time_ms, 0.9 * row.time_ms, 1.05 * row.time_ms))
    assert found.whole.summary.rows == 4
    assert found.whole.summary.mape == pytest.approx(0.1)
    assert found.whole.summary.interval_coverage == 1.0
    assert found.parts["tensor 2"].summary.rows == 3
    assert found.parts["tensor 1, data 2"].summary.rows == 1
    assert "1 of 1 series" in found.warnings[0]
    # Of a few rows no series is left; the whole table has them.
    few = compare(rows[:1], lambda _: PredictedIteration(10, 9, 11, "host-bound"), table=rows)
    assert "1 of 1 series" in few.warnings[0]
    assert few.parts["host-bound"].summary.rows == 1
    with pytest.raises(InputError, match="no row without pipeline parallelism"):
        compare([], lambda _: PredictedIteration(1, 1, 1))


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="vTrain's table of iterations is not here")
def test_the_published_table_was_put_together_from_parts() -> None:
    rows = read_iterations(PUBLISHED)
    asked = chosen(rows)
    assert (len(rows), len(asked)) == (1008, 499)
    assert straight_lines(asked) == (69, 69)
    assert {transformer_of(row).ranks for row in asked} == {2, 4, 8}
