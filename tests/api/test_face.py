"""The public face: what it reads, what it answers, and that answers say what was asked."""

from __future__ import annotations

import json
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.api.answer_schema import answers_schema, wrong_in

import steptime
from steptime._cli.app import run

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = EXAMPLES / "configs" / "dlrm_small.toml"
RECORDED = EXAMPLES / "h200_mps4_dlrm"
TASK = EXAMPLES / "sharding" / "task.toml"
MACHINE = "2xh200-nvlink"


@cache
def small() -> steptime.Prediction:
    return steptime.predict(SMALL, MACHINE)


@cache
def swept() -> steptime.Predictions:
    return steptime.sweep(SMALL, [MACHINE, "8xh100-nvlink"], batch=[1024, 2048], ranks=[2, 4])


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert run([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_and_paths_and_lists_of_them_name_the_same_recording() -> None:
    sources: list[Any] = [str(RECORDED), RECORDED, [RECORDED], [str(RECORDED)], sorted(RECORDED.glob("*.gz"))]
    found = [steptime.read(source) for source in sources]
    assert {workload.world_size for workload in found} == {4}
    assert {len(workload.programs[0].works) for workload in found} == {len(found[0].programs[0].works)}


def test_the_obvious_call_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert small().to_dict() == printed(capsys, "predict", SMALL, "--platform", MACHINE)
    assert steptime.predict(RECORDED).to_dict() == printed(capsys, "predict", RECORDED)
    assert steptime.replay(RECORDED).to_dict() == printed(capsys, "replay", RECORDED)


def test_a_platform_is_a_name_a_file_or_the_thing_itself(tmp_path: Path) -> None:
    parts = steptime.Platform.load(MACHINE).parts
    lines = [
        "schema_version = 1",
        *(f"{key} = {json.dumps(value)}" for key, value in asdict(parts).items() if value is not None),
    ]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    for platform in (file, str(file), steptime.Platform.load(MACHINE)):
        assert steptime.predict(steptime.read(SMALL), platform).to_dict() == small().to_dict()


def test_a_saved_workload_is_predicted_as_the_one_it_was_saved_from(tmp_path: Path) -> None:
    steptime.read(SMALL).save(tmp_path / "small.json.gz")
    assert steptime.predict(tmp_path / "small.json.gz", MACHINE).to_dict() == small().to_dict()


def test_a_batch_of_none_is_refused_and_not_taken_for_the_usual_one() -> None:
    with pytest.raises(steptime.InputError, match="batch is 0; expected 1 or more"):
        steptime.read(SMALL, batch=0)
    with pytest.raises(steptime.InputError, match="batch 8: a recording"):
        steptime.read(RECORDED, batch=8)


def test_answers_say_what_was_asked() -> None:
    found = small().to_dict()
    assert (found["workload"], found["batch"], found["sequence"]) == ("dlrm-small", 2048, None)
    assert (found["precision"], found["parallelism"]) == ("fp32", {"data": 2, "tables": 2})
    assert found["samples_per_s"] == pytest.approx(2048e3 / found["step_time_ms"], rel=1e-5)
    assert found["tokens_per_s"] is None
    recorded = steptime.predict(RECORDED).to_dict()
    assert [recorded[key] for key in ("batch", "sequence", "parallelism", "parameters", "samples_per_s")] == [None] * 5
    assert (recorded["workload"], recorded["precision"]) == ("h200_mps4_dlrm", "fp32")


def test_answers_are_short_to_look_at() -> None:
    for answer in (small(), swept(), steptime.replay(RECORDED)):
        assert "\n" not in repr(answer)
        assert len(repr(answer)) < 300
    assert "dlrm-small on 2xh200-nvlink" in repr(small())
    assert "90 % interval" in repr(small())


def test_answers_are_tables_pages_and_timelines(tmp_path: Path) -> None:
    table = small().to_table()
    assert table.num_rows == 2
    assert table.column("step_time_ms").to_pylist() == [small().to_dict()["step_time_ms"]] * 2
    assert steptime.replay(RECORDED).to_table().column_names == ["step", "predicted_ms", "measured_ms", "error"]
    small().html(tmp_path / "a.html")
    small().trace(str(tmp_path / "a.json"))
    assert "2xh200-nvlink" in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"]


def test_a_sweep_is_predictions_one_by_one() -> None:
    found = swept()
    assert [dict(each.settings) for each in found.variants] == [
        {"platform": platform, "batch": batch, "ranks": ranks}
        for platform, batch, ranks in [
            (MACHINE, 1024, 2), (MACHINE, 2048, 2), ("8xh100-nvlink", 1024, 2), ("8xh100-nvlink", 1024, 4),
            ("8xh100-nvlink", 2048, 2), ("8xh100-nvlink", 2048, 4),
        ]
    ]  # fmt: skip
    assert [dict(each.settings)["ranks"] for each in found.left_out] == [4, 4]
    assert len(found.warnings) == 1  # a line for a reason
    assert "platform 2xh200-nvlink and ranks 4: dlrm-small has 4 ranks, platform 2xh200-nvlink 2" in found.warnings[0]
    for each in found.variants:
        alone = steptime.predict(SMALL, each.settings["platform"], batch=each.settings["batch"], ranks=each.settings["ranks"])
        assert each.prediction.to_dict() == alone.to_dict()
    fastest = max(found, key=lambda one: one.samples_per_s or 0.0)
    assert found.ranked[0].prediction is fastest
    assert found.to_table().num_rows == len(found) == 6


def test_any_executor_plays_a_sweep() -> None:
    with ThreadPoolExecutor(2) as threads:
        found = steptime.sweep(SMALL, MACHINE, batch=[1024, 2048], executor=threads)
    alone = steptime.sweep(SMALL, MACHINE, batch=[1024, 2048])
    assert found.to_dict() == alone.to_dict()


def test_a_sweep_of_which_nothing_can_be_built_says_why() -> None:
    with pytest.raises(steptime.InputError, match="cannot be split evenly over 3 ranks"):
        steptime.sweep(SMALL, "8xh200-nvlink", ranks=[3])
    with pytest.raises(steptime.InputError, match="batch 8: a recording"):
        steptime.sweep(RECORDED, "4xh200-quarter-loopback", batch=[8])


def test_the_sweep_command_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", SMALL, "--platform", f"{MACHINE},8xh100-nvlink", "--batch", "1024,2048", "--ranks", "2,4"]
    assert printed(capsys, *words) == swept().to_dict()
    assert run(list(map(str, words))) == 0
    out = capsys.readouterr().out
    assert out.index("2,048") < out.index("1,024")  # most samples per second first
    assert " ".join(out.split()).count("h100 as h200 by data sheets") == 1  # once for a platform, however many variants it has
    assert run(["sweep", str(SMALL), "--platform", MACHINE, "--batch", "8,x"]) == 2
    assert "'x' is no whole number" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["predict", "recorded", "changed", "replay", "sweep", "whatif", "diff"])
def test_answers_keep_to_the_schema(name: str) -> None:
    made = {
        "predict": lambda: small().to_dict(),
        "recorded": lambda: steptime.predict(RECORDED).to_dict(),
        "changed": lambda: steptime.predict(RECORDED, what_if=["host * 0.5", "matmul * 0.5"]).to_dict(),
        "replay": lambda: steptime.replay(RECORDED).to_dict(),
        "diff": lambda: steptime.diff(RECORDED, RECORDED, after_platform="4xh200-quarter-loopback").to_dict(),
        "whatif": lambda: steptime.whatif(RECORDED).to_dict(),
        "sweep": lambda: swept().to_dict(),
    }[name]()
    rule = "predict" if name in ("recorded", "changed") else name
    assert wrong_in(made, rule) == []
    assert wrong_in({**made, "surprise": 1}, rule)


def test_the_schema_names_every_answer() -> None:
    named = {each["$ref"].rpartition("/")[2] for each in answers_schema()["anyOf"]}
    assert named == {"predict", "replay", "shard", "sweep", "compare", "whatif", "diff", "plan"}
    assert wrong_in({"schema_version": 1}, "predict")


def test_a_sharding_is_an_answer_too(tmp_path: Path) -> None:
    found = steptime.shard(TASK, "4xh200-quarter-loopback", evaluations=200)
    assert wrong_in(found.to_dict(), "shard") == []
    assert found.plan == found.to_dict()["best"]["plan"]
    assert found.interval_ms[0] < found.step_time_ms < found.interval_ms[1]
    assert "tables on 4 ranks" in repr(found)
    assert found.to_table().column("plan").to_pylist()[0] == "best"
    found.html(tmp_path / "shard.html")
    assert (tmp_path / "shard.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_strict_is_an_error_of_its_own_that_old_handlers_catch() -> None:
    workload = steptime.read(EXAMPLES / "configs" / "gpt2.toml", batch=1)
    program = workload.programs[0]
    names = tuple("made::up" if name == "aten::native_layer_norm" else name for name in program.names)
    odd = replace(workload, programs=(replace(program, names=names),))
    with pytest.raises(steptime.UnsupportedError, match="made::up"):
        steptime.predict(odd, "1xh200", strict=True)
    assert issubclass(steptime.UnsupportedError, steptime.InputError)


def test_old_names_work_and_say_what_to_use() -> None:
    old: Any = steptime
    with pytest.warns(DeprecationWarning, match=r"steptime\.configured_in is deprecated.*use steptime\.read"):
        configured = old.configured_in(SMALL)
    with pytest.warns(DeprecationWarning, match=r"use steptime\.predict"):
        predict_on = old.predict_on
    found = predict_on(
        configured.workload, steptime.Platform.load(MACHINE), lookups=configured.lookups, unnamed=configured.unnamed
    )
    assert found.step_time_ms == small().step_time_ms
    assert configured.with_batch(1024).batch == 1024
    with pytest.warns(DeprecationWarning, match=r"use steptime\.read"):
        assert old.load([RECORDED]).world_size == 4
    for name in ("simulate", "steady"):
        with pytest.warns(DeprecationWarning):
            assert callable(getattr(steptime, name))


def test_a_mapping_with_the_keys_of_a_config_is_that_config() -> None:
    values = tomllib.loads(Path(SMALL).read_text(encoding="utf-8"))
    by_mapping, by_file = steptime.predict(values, MACHINE).to_dict(), small().to_dict()
    assert by_mapping["step_time_ms"] == by_file["step_time_ms"]
    assert by_mapping["memory"] == by_file["memory"]
    assert steptime.read(values).varied(batch=512).description.batch == 512


@pytest.mark.parametrize("source", [None, [], 3, [None], {}])
def test_a_source_of_another_kind_is_refused_in_a_line(source: Any) -> None:
    with pytest.raises(steptime.InputError, match=r"nothing to read; expected a path|'kind' is missing"):
        steptime.predict(source, MACHINE)


def test_a_batch_in_words_and_memory_below_a_byte_are_refused() -> None:
    with pytest.raises(steptime.InputError, match="batch is '16'; expected a whole number"):
        steptime.predict(SMALL, MACHINE, batch="16")  # type: ignore[arg-type]
    with pytest.raises(steptime.InputError, match="-1: expected bytes, 1 or more"):
        steptime.predict(SMALL, MACHINE, memory_bytes=-1)
    with pytest.raises(steptime.InputError, match=r"train\.py: `plan` takes a Transformer config"):
        steptime.plan("train.py", MACHINE)


def test_what_a_step_costs_keeps_its_digits_however_cheap_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    cost = printed(capsys, "predict", SMALL, "--platform", MACHINE, "--price", "0.0001")["cost_per_step"]
    assert cost == pytest.approx(0.0001 * 2 * small().step_time_ms / 3.6e6, rel=1e-5)


def test_answers_about_a_recording_say_what_was_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    mean_ms = steptime.replay(RECORDED).measured_step_ms
    for answer in (steptime.predict(RECORDED), steptime.predict(RECORDED, "4xh200-nvlink")):
        assert answer.recorded_step_ms == pytest.approx(mean_ms)
        assert answer.to_dict()["recorded_step_ms"] == pytest.approx(mean_ms)
    assert small().recorded_step_ms is None
    both = steptime.diff(RECORDED, RECORDED).to_dict()
    assert [both[side]["recorded_step_ms"] for side in ("before", "after")] == [pytest.approx(mean_ms)] * 2
    assert run(["predict", str(RECORDED)]) == 0
    assert f"Recorded    {mean_ms:.3f} ms per step with its profiler" in capsys.readouterr().out


def test_another_batch_of_a_recording_names_the_change_that_predicts_it() -> None:
    with pytest.raises(steptime.InputError, match=r"--what-if 'batch \* 2' predicts twice the samples"):
        steptime.predict(RECORDED, batch=64)
