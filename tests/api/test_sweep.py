"""Sweeps: every combination is what `predict` says of it, whoever computes it, in whatever order, however often it is ended."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

import steptime
from steptime import _processes
from steptime._cli.app import run
from steptime._report.sweep import csv_of
from steptime._report.sweep_text import best_lines, order_words, table_cells
from steptime._sweep import workers

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = EXAMPLES / "configs" / "dlrm_small.toml"
GPT = EXAMPLES / "configs" / "gpt2-ddp.toml"
MACHINE = "2xh200-nvlink"


def small(**more: Any) -> steptime.Predictions:
    return steptime.sweep(SMALL, MACHINE, batch=[1024, 2048], **more)


def test_any_key_of_a_config_is_an_axis() -> None:
    found = small(settings={"optimizer": ["sgd", "rowwise_adagrad"], "tables.user.rows": 1000}, power_cap_w=[500.0, 700.0])
    assert len(found) == 8
    for each in found.variants[:3]:
        keys = {key: each.settings[key] for key in ("optimizer", "tables.user.rows")}
        cap = each.settings["power_cap_w"]
        alone = steptime.predict(SMALL, MACHINE, batch=each.settings["batch"], settings=keys, power_cap_w=cap)
        assert each.document == alone.to_dict() == each.prediction.to_dict()
    assert list(found.varied) == ["batch", "power_cap_w", "optimizer"]


def test_named_variants_go_together_and_what_cannot_be_is_left_out() -> None:
    parts = {"ddp": {}, "fsdp": {"parallel.fsdp": 8}, "tensor": {"parallel.tensor": 8}}
    found = steptime.sweep(GPT, "8xh200-nvlink", batch=[64, 100], ranks=8, settings={"layers": 2}, variants=parts)
    assert [(each.settings["variant"], each.settings["batch"]) for each in found.variants] == [("ddp", 64), ("fsdp", 64)]
    assert [each.prediction.workload.description.parallelism for each in found.variants] == [{"data": 8}, {"fsdp": 8}]
    reasons = {(each.settings["variant"], each.settings["batch"]): each.reason for each in found.left_out}
    assert "heads 12 does not divide by parallel.tensor 8" in reasons["tensor", 64]
    assert "batch" in reasons["ddp", 100]
    assert len(found.warnings) < len(found.left_out)


def test_sizes_that_do_not_make_the_ranks_are_left_out_with_the_reason() -> None:
    sizes = {"parallel.fsdp": [1, 8], "parallel.tensor": [1, 4], "layers": 2}
    found = steptime.sweep(GPT, "8xh200-nvlink", batch=64, ranks=8, settings=sizes)
    ways = [each.document["parallelism"] for each in found.variants]
    assert ways == [{"data": 8}, {"data": 2, "tensor": 4}, {"fsdp": 8}]
    assert "8 ranks with parallel.fsdp = 8 and parallel.tensor = 4" in found.left_out[0].reason


def test_the_best_fit_and_no_variant_of_a_front_is_beaten() -> None:
    found = steptime.sweep(
        GPT, ["8xh200-nvlink", "8xa100-nvlink"], batch=[64, 4096], price={"8xh200-nvlink": 4, "8xa100-nvlink": 1}
    )
    assert [each.fits for each in found.ranked] == sorted((bool(each.fits) for each in found.variants), reverse=True)
    best = found.ranked[0]
    assert best.fits
    assert best.speed == max(each.speed for each in found.variants if each.fits)
    for kind in ("memory", "cost"):
        front = found.front(kind)
        amounts = {id(each): (each.peak_bytes if kind == "memory" else each.cost) or 0 for each in found.variants}
        for one in front:
            assert not any(
                other.fits and other.speed > one.speed and amounts[id(other)] <= amounts[id(one)] for other in found.variants
            )
    assert found.cheapest is min((each for each in found.variants if each.fits), key=lambda each: each.cost or 0)
    hour = best.document["cost_per_million_samples"] * best.speed * 3600 / 1e6
    assert hour == pytest.approx(8 * {"8xh200-nvlink": 4, "8xa100-nvlink": 1}[best.settings["platform"]], rel=1e-3)


def test_variants_as_fast_and_as_large_as_each_other_are_both_on_the_front() -> None:
    """Two platforms on which the host binds the step: one had the mark, the other was said to be beaten."""
    found = steptime.sweep(EXAMPLES / "configs" / "gpt2.toml", ["1xh100", "1xh200"], settings={"layers": 2})
    one, other = found.variants
    assert (one.speed, one.peak_bytes) == (other.speed, other.peak_bytes)
    assert {id(each) for each in found.front()} == {id(one), id(other)}


def test_what_all_variants_say_stands_before_what_some_say() -> None:
    found = steptime.sweep(
        EXAMPLES / "configs" / "gpt2.toml", ["1xa100", "1xh100"], settings={"layers": 2, "precision": ["bf16", "tf32"]}
    )
    common = ["platform" not in text for text in found.notices.basis]
    assert any(common)
    assert not all(common)
    assert common == sorted(common, reverse=True)


def test_what_barely_fits_is_said_beside_the_best_that_has_room() -> None:
    """Peaks are predicted to within some percent: the fastest of all may not fit, and a table that drops this misleads."""
    found = small()
    fast, slow = found.ranked
    documents = {id(fast): {**fast.document, "verdict": {**fast.document["verdict"], "tight": True}}}
    variants = tuple(replace(each, document=documents.get(id(each), each.document)) for each in found.variants)
    tight = replace(found, variants=variants)
    assert found.with_room is None
    assert not any("barely" in words for _, words in best_lines(found))
    assert tight.ranked[0].tight
    assert tight.with_room == slow
    lines = dict(best_lines(tight))
    assert "barely fits" in lines["Best"]
    assert lines["Memory"] == "all fit, 1 of them barely"
    assert "barely" not in lines["With room"]
    _, rows = table_cells(tight, tight.ranked)
    assert ["~" in " ".join(row) for row in rows] == [True, False]
    assert "~ barely fits" in order_words(tight)
    assert [row["tight"] for row in tight.rows()].count(True) == 1


def test_who_computes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = small(ranks=[1, 2], workers=1).to_dict()
    with ThreadPoolExecutor(2) as threads:
        assert small(ranks=[1, 2], executor=threads).to_dict() == alone
    monkeypatch.setattr(workers, "_WORTH_PROCESSES_S", 0.0)
    assert small(ranks=[1, 2], workers=2).to_dict() == alone


def test_a_journal_goes_on_where_a_sweep_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = tmp_path / "journal", list[int]()
    whole = small(journal=file).to_dict()
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    file.write_bytes(b"".join(lines[:2]) + lines[2][: len(lines[2]) // 2])  # as if it was ended while it wrote

    real = workers.run

    def counted(job: Any, points: Any, groups: Any, *more: Any) -> None:
        asked.extend(at for group in groups for at in group)
        real(job, points, groups, *more)

    monkeypatch.setattr("steptime._api.sweep.run", counted)
    assert small(journal=file).to_dict() == whole
    assert asked == [1]  # the other was there
    assert file.read_bytes() == b"".join(lines)
    asked.clear()
    small(journal=file, price=2.0)
    assert asked == [0, 1]  # other inputs are other variants


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers = 2\n", "is no journal of a sweep"),
        ('{"journal": "steptime sweep", "schema_version": 1}\n{"key"\n', "line 2: is damaged"),
        (
            '{"journal": "steptime sweep", "schema_version": 1}\n{"key": "a", "check": "", "result": {}}\n',
            "line 2: was changed",
        ),
    ],
)
def test_a_damaged_journal_is_said_and_left_alone(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "journal"
    file.write_text(text)
    with pytest.raises(steptime.InputError, match=said):
        small(journal=file)
    assert file.read_text() == text


def test_a_journal_is_of_the_contents_of_files(tmp_path: Path) -> None:
    config, file = tmp_path / "mine.toml", tmp_path / "journal"
    config.write_text(SMALL.read_text())
    first = steptime.sweep(config, MACHINE, journal=file).variants[0]
    config.write_text(SMALL.read_text().replace("batch = 2048", "batch = 4096"))
    assert steptime.sweep(config, MACHINE, journal=file).variants[0].document["batch"] == 4096 != first.document["batch"]
    with pytest.raises(steptime.InputError, match="a journal goes with a config"):
        steptime.sweep(steptime.read(config), MACHINE, journal=file)


def test_files_have_a_row_for_every_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, parquet, page = (tmp_path / name for name in ("a.csv", "a.parquet", "a.html"))
    words = [
        "sweep",
        str(SMALL),
        "--platform",
        f"{MACHINE},8xh100-nvlink",
        "--batch",
        "1024:4096",
        "--set",
        "bottom=[256,64],[512,64]",
    ]
    assert run([*words, "--csv", str(table), "--parquet", str(parquet), "--html", str(page), "--price", "2"]) == 0
    text = capsys.readouterr().out
    assert "Best of every platform" in text
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == pq.read_table(parquet).num_rows == 12
    assert {row["batch"] for row in rows} == {"1024", "2048", "4096"}
    assert {row["bottom"] for row in rows} == {"[256, 64]", "[512, 64]"}
    shown = page.read_text()
    assert shown.count("<figure>") == 6  # four curves and two clouds
    assert "<script" not in shown
    before = (table.read_bytes(), parquet.read_bytes(), page.read_bytes())
    assert run([*words, "--csv", str(table), "--parquet", str(parquet), "--html", str(page), "--price", "2"]) == 0
    assert before == (table.read_bytes(), parquet.read_bytes(), page.read_bytes())
    assert run([*words, "--csv", str(SMALL)]) == 2


def test_a_platform_that_is_not_there_is_a_slip_and_no_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", str(SMALL), "--platform", f"{MACHINE},8xh2000"]) == 2
    assert "8xh2000" in capsys.readouterr().err


def test_ctrl_c_ends_workers_and_what_was_done_stays(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    words = ["-m", "steptime", "sweep", str(GPT), "--platform", "8xh200-nvlink", "--batch", "8:8192:8", "--resume", str(file)]
    started = subprocess.Popen(
        [sys.executable, *words, "--workers", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 (whoever runs the tests may ignore it)
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not file.exists() or file.read_bytes().count(b"\n") < 6):
        time.sleep(0.1)
    os.killpg(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    with pytest.raises(ProcessLookupError):  # nobody of the group is left
        for _ in range(100):
            os.killpg(started.pid, 0)
            time.sleep(0.1)
    for line in file.read_bytes().split(b"\n")[:-1]:
        json.loads(line)


def test_a_process_that_has_loaded_torch_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads are none that Python counts, and forked workers would wait for them without end."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert _processes.context().get_start_method() == "spawn"


def test_a_cell_of_a_table_is_no_formula_and_has_no_escapes() -> None:
    rows = list(csv.DictReader(csv_of([{"variant": "=1+1", "ms": -2.5}, {"variant": "\x1b[2J", "ms": 1}]).splitlines()))
    assert [row["variant"] for row in rows] == ["'=1+1", "\ufffd[2J"]
    assert [row["ms"] for row in rows] == ["-2.5", "1"]


def test_what_errors_do_not_tell_from_the_best_is_tied_in_text_json_and_tables() -> None:
    """The same comparison as that of `compare`: errors that variants of one machine share tell nothing apart."""
    found = steptime.sweep(GPT, ["8xh200-nvlink", "8xh100-nvlink", "8xa100-nvlink"], settings={"layers": [4, 12]})
    compared = steptime.compare(found)
    places = {id(each): place for place, each in enumerate(found.variants)}
    best = places[id(found.fitting[0])]
    again = steptime.compare(*(found.variants[at].document for at in (best, *range(len(found.variants)))))
    expected = {at for at, each in enumerate(again.differences[1:]) if not each.certain and at != best}
    assert 0 < len(expected) < len(found.variants) - 1
    assert {places[id(each)] for each in found.tied} == expected == set(found.to_dict()["tied"])
    assert {at for at, row in enumerate(found.rows()) if row["tied"]} == expected
    assert len(compared.items) == len(found.variants)
    heads, rows = table_cells(found, found.variants)
    steps = [row[heads.index("step\nms")] for row in rows]
    assert {at for at, cell in enumerate(steps) if cell.endswith("=")} == expected
    assert "Tied" in dict(best_lines(found))
