"""`steptime validate layouts`: rows of others become configs or one line, few layers tell of many, and choices are scored."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.mutated import damaged_tables

from steptime._cli.app import run
from steptime.errors import InputError
from steptime_lab.validate.layouts.choice import Job, chosen, jobs_of
from steptime_lab.validate.layouts.layouts import validate_layouts
from steptime_lab.validate.layouts.predict import Question, answered, played
from steptime_lab.validate.layouts.rows import COLUMNS, MEASURED, LayoutRow, read_layouts

HEAD = ",".join((*COLUMNS, MEASURED))
# GPUs, batch, micro-batch, width, heads, layers, sequence, tensor, data, pipeline, milliseconds
ROWS = (
    "2,8,1,512,8,12,256,1,2,1,120.0",
    "2,8,2,512,8,12,256,1,2,1,90.0",
    "2,8,4,512,8,12,256,2,1,1,150.0",
    "2,8,4,256,8,12,256,2,1,1,140.0",
)


def written(tmp_path: Path, *rows: str) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text("\n".join((HEAD, *rows)))
    return file


def test_a_row_is_the_config_that_a_user_would_write(tmp_path: Path) -> None:
    (row, *_), refused = read_layouts(written(tmp_path, *ROWS))
    config = row.config
    assert (config.ranks, config.parallel.data, config.gradient_accumulation, config.local_batch) == (2, 2, 4, 1)
    assert (config.precision, config.attention, config.checkpointing) == ("fp16", "unfused", False)
    assert row.job == (2, 8, 512, 8, 12, 256)
    assert refused == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("2,8,1,512,8,12,256,1,2,1,", "iteration time (ms) is ''; expected a number above 0"),
        ("2,8,1,512,8,12,256,1,2,1,nan", "iteration time (ms) is 'nan'; expected a number above 0"),
        ("2,8,x,512,8,12,256,1,2,1,5.0", "line 2: micro batch is 'x'; expected a whole number from 1"),
        ("4,8,1,512,8,12,256,1,2,1,5.0", "tensor x data x pipeline is not the 4 GPUs"),
        ("2,8,3,512,8,12,256,1,2,1,5.0", "does not divide into micro-batches of 3 on 2 replicas; expected a multiple of 6"),
        ("2,8,1,500,8,12,256,1,2,1,5.0", "width 500 does not divide by heads 8"),
    ],
)
def test_a_row_that_cannot_be_built_costs_a_line(tmp_path: Path, row: str, said: str) -> None:
    rows, (refused,) = read_layouts(written(tmp_path, row, ROWS[0]))
    assert len(rows) == 1
    assert said in refused


def test_few_layers_and_micro_batches_tell_of_a_whole_step(tmp_path: Path) -> None:
    (row, *_), _ = read_layouts(written(tmp_path, *ROWS))
    (told,) = answered(Question((row,)))
    whole = played(row.config, row.platform)
    assert not isinstance(told, str)
    assert told.step_ms == pytest.approx(whole.step_ms, rel=0.01)
    assert np.quantile(told.draws_ms, 0.95) == pytest.approx(np.quantile(whole.draws_ms, 0.95), rel=0.03)


def test_rows_are_scored_by_parallelism_and_choices_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "layouts", "--rows", str(written(tmp_path, *ROWS)), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"tensor 1", "tensor 2", "width 256", "width 512", "micro-batch of 4"} <= set(document["parts"])
    assert document["facts"]["jobs"] == 1
    assert 0 <= document["facts"]["mean_regret"] <= 150 / 90 - 1


def test_a_host_is_found_on_rows_of_other_widths(tmp_path: Path) -> None:
    slower = [f"{row.rpartition(',')[0]},200.0".replace(",12,256,", ",2,256,") for row in ROWS]
    with ThreadPoolExecutor(1) as executor:
        plain = validate_layouts(written(tmp_path, *slower), executor=executor)
        known = validate_layouts(written(tmp_path, *slower), per_box=True, executor=executor)
    assert known.facts["host_of_width_256"] > 1.2
    assert known.whole.summary.gmae < plain.whole.summary.gmae
    with pytest.raises(InputError, match="finds a host on rows of other widths"):
        validate_layouts(written(tmp_path, *ROWS[:2]), per_box=True)


def _rows(tmp_path: Path, *times: float) -> list[LayoutRow]:
    (row, *_), _ = read_layouts(written(tmp_path, ROWS[0]))
    return [replace(row, measured_ms=time) for time in times]


def test_regret_is_what_the_layout_predicted_fastest_takes_longer(tmp_path: Path) -> None:
    rows = _rows(tmp_path, 10.0, 11.0, 20.0)
    predicted = np.array([2.0, 1.0, 3.0])
    (job,) = jobs_of(rows, predicted, np.tile(predicted[:, None], 4))
    facts = chosen([job])
    assert facts["mean_regret"] == pytest.approx(0.1)
    assert facts["best_found"] == 0.0
    assert facts["random_pick_regret"] == pytest.approx(41 / 30 - 1)
    assert job.chances.tolist() == [0.0, 1.0, 0.0]
    assert facts["brier"] == pytest.approx(2.0)
    assert not jobs_of(rows[:2], predicted[:2], predicted[:2, None])


def test_layouts_called_likely_are_compared_with_how_often_they_are_fastest(tmp_path: Path) -> None:
    rows = _rows(tmp_path, 10.0, 11.0, 20.0)
    jobs = [Job(rows, np.ones(3), np.array(each)) for each in ([0.75, 0.25, 0.0], [0.25, 0.75, 0.0])]
    facts = chosen(jobs)
    assert (facts["called_likely"], facts["likely_were_given"], facts["likely_were_fastest"]) == (2, 0.75, 0.5)


def test_bad_tables_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "plain.csv"
    file.write_text("a,b\n1,2")
    with pytest.raises(InputError, match="no column '# GPUs'"):
        read_layouts(file)
    with pytest.raises(InputError, match="no row can be predicted; the first"):
        validate_layouts(written(tmp_path, "x,8,1,512,8,12,256,1,2,1,5.0"))
    assert run(["validate", "layouts"]) == 2


def test_five_hundred_damaged_tables_are_read_or_refused(tmp_path: Path) -> None:
    for rows in damaged_tables(tmp_path, (HEAD, *ROWS), read_layouts):
        assert all(row.measured_ms > 0 for row in rows)
