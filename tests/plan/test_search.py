"""The fastest layout, by the one evaluator."""

from __future__ import annotations

import json
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.api.answer_schema import wrong_in

import steptime
from steptime._build.config import read_config
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._cli import main
from steptime._plan.search import front_of
from steptime._plan.space import layouts_of
from steptime._report.plan import Planned
from steptime._report.plan_text import sure_words
from steptime._report.words import numerics_words
from steptime.errors import InputError

MODEL = Transformer(
    layers=2, width=512, heads=8, sequence=256, vocabulary=2048, batch=8, precision="bf16", positions="rotary", norm="rms_norm",
    activation="swiglu", tied_head=False, name="small",
)  # fmt: skip
PLATFORM = "4xh200-nvlink"


@pytest.fixture(scope="module")
def planned() -> Planned:
    with ThreadPoolExecutor(1) as here:
        return steptime.plan(MODEL, PLATFORM, recompute=["none"], pipeline=[1], zero=[0], price=2.0, executor=here)


def test_the_winner_is_what_predict_says(planned: Planned, tmp_path: Path) -> None:
    file = tmp_path / "winner.toml"
    file.write_text(planned.config())
    predicted = steptime.predict(file, PLATFORM)
    assert predicted.step_time_ms == pytest.approx(planned.step_time_ms, rel=1e-9)
    assert predicted.interval_ms == pytest.approx(planned.interval_ms, rel=1e-9)
    assert predicted.memory["peak_bytes"] == planned.found.best.peak_bytes
    assert predicted.mfu == pytest.approx(planned.found.best.mfu)
    assert predicted.verdict == planned.verdict
    assert set(predicted.warnings) <= set(planned.notices.warnings)


def test_a_plan_keeps_to_the_schema_and_begins_with_its_verdict(planned: Planned, tmp_path: Path) -> None:
    document = planned.to_dict()
    assert wrong_in(document, "plan") == []
    assert list(document)[1] == "verdict"
    assert document["verdict"]["fits"] is True
    assert document["verdict"]["bound"] == steptime.predict(planned_file(planned, tmp_path), PLATFORM).verdict.bound
    best = document["best"]
    hours = 2.0 * document["gpus"] / 3600
    assert best["cost_per_trillion_tokens"] == pytest.approx(1e12 * hours / best["tokens_per_s"], rel=1e-6)
    page = tmp_path / "plan.html"
    planned.html(page)
    text = page.read_text(encoding="utf-8")
    assert text.index(">Fits<") < text.index(f"Best layout: {planned.found.best.layout}") < text.index("ms per step")


def planned_file(planned: Planned, folder: Path) -> Path:
    file = folder / "winner.toml"
    file.write_text(planned.config())
    return file


def test_no_layout_that_was_played_is_faster_than_the_winner(planned: Planned) -> None:
    steps = [each.step_ns for each in planned.found.played]
    assert steps == sorted(steps)
    assert all(each.peak_bytes <= planned.limit_bytes for each in planned.found.played)
    assert sum(planned.found.p_fastest) == pytest.approx(1.0)


def test_parts_of_a_step_add_up_to_it(planned: Planned) -> None:
    for each in planned.found.played:
        assert sum(each.parts_ns.values()) == pytest.approx(each.step_ns, rel=0.01)


def test_the_front_has_no_layout_that_another_one_beats_in_both(planned: Planned) -> None:
    front = planned.found.front
    for one in front:
        assert not any(other.step_ns < one.step_ns and other.peak_bytes < one.peak_bytes for other in planned.found.played)
        assert one.step_ns <= 2 * front[0].step_ns
    best = planned.found.best
    smaller = [replace(best, step_ns=times * best.step_ns, peak_bytes=best.peak_bytes // 4) for times in (1.9, 2.1)]
    assert front_of([best, smaller[0]]) == (best, smaller[0])
    assert front_of([best, smaller[1]]) == (best,)


def test_a_winner_that_barely_fits_names_the_fastest_that_has_room(planned: Planned) -> None:
    assert planned.with_room is None
    assert "barely" not in sure_words(planned)
    best = planned.found.best
    tight = replace(planned, limit_bytes=best.peak_bytes + 1)
    roomy = tight.with_room
    assert roomy is not None
    assert not tight.fit(roomy).tight
    assert all(tight.fit(each).tight for each in planned.found.played if each.step_ns < roomy.step_ns if tight.fit(each).fits)
    assert "it barely fits" in sure_words(tight)
    assert str(roomy.layout) in sure_words(tight)


def test_layouts_are_compared_in_equal_precisions_and_the_answer_says_them(planned: Planned, tmp_path: Path) -> None:
    layouts = [each.layout for each in planned.found.played]
    assert {each.parallel.fsdp > 1 for each in layouts} == {True, False}  # shards, and whole replicas
    mixed = {
        "products": "bf16", "parameters": "bf16", "sums_of_gradients": "fp32", "master_weights": "fp32",
        "optimizer_states": "fp32",
    }  # fmt: skip
    assert all(each.of(MODEL).numerics == mixed for each in layouts)
    assert planned.to_dict()["numerics"] == mixed
    assert steptime.predict(planned_file(planned, tmp_path), PLATFORM).to_dict()["numerics"] == mixed
    assert tomllib.loads(planned.config())["states"] == "fp32"
    page = tmp_path / "numerics.html"
    planned.html(page)
    assert numerics_words(mixed) in page.read_text(encoding="utf-8")


def test_precisions_that_a_config_says_are_those_of_every_layout() -> None:
    pure = replace(MODEL, states="bf16")
    narrow = replace(MODEL, parallel=Parallelism(grad_reduce_in_fp32=False))
    for model in (pure, narrow):
        assert {tuple(each.of(model).numerics.values()) for each in layouts_of(model, 4).layouts} == {
            tuple(model.numerics.values())
        }


def test_vocabularies_are_padded_alike_in_every_layout() -> None:
    odd = replace(MODEL, vocabulary=2001)
    rows = {each.parallel.tensor: each.of(odd).vocabulary_rows for each in layouts_of(odd, 4).layouts}
    assert rows == {1: 2048, 2: 2048, 4: 2048}
    own = replace(odd, pad_vocab=64)
    assert {each.of(own).vocabulary_rows for each in layouts_of(own, 4).layouts if each.parallel.tensor == 1} == {2048}


def test_json_has_the_keys_that_are_promised(planned: Planned) -> None:
    document = planned.to_dict()
    assert {"best", "layouts", "searched", "seconds", "warnings", "schema_version", "front", "second"} <= set(document)
    keys = {"layout", "step_time_ms", "interval_ms", "tokens_per_s", "peak_bytes", "p_fastest"}
    assert all(keys <= set(each) for each in document["layouts"])
    assert len(document["layouts"]) <= 10
    assert document["best"]["cost_per_trillion_tokens"] == pytest.approx(
        2.0 * 4 * 1e12 / document["best"]["tokens_per_s"] / 3600
    )
    json.dumps(document, allow_nan=False)


def test_a_config_with_odd_text_is_written_so_that_it_reads_the_same(planned: Planned, tmp_path: Path) -> None:
    odd = replace(planned, found=replace(planned.found, model=replace(MODEL, name='a "b" \\ c\n#')))
    file = tmp_path / "odd.toml"
    file.write_text(odd.config())
    config = read_config(file)
    assert isinstance(config, Transformer)
    assert config.name == 'a "b" \\ c\n#'
    assert config.parallel == planned.found.best.layout.parallel


def test_a_page_is_one_file(planned: Planned, tmp_path: Path) -> None:
    planned.html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert str(planned.found.best.layout) in text
    assert "<script" not in text


def test_what_does_not_fit_says_by_how_much_and_what_would_help() -> None:
    with pytest.raises(InputError, match=r"does not fit on 4 GPUs: .* are short. What would help: \(1\)"):
        steptime.plan(MODEL, PLATFORM, memory_bytes=1 << 28, pipeline=[1], recompute=["full"], micro_batch=[1])


def run(*arguments: str) -> int:
    try:
        main(list(arguments))
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_the_command_answers_with_the_verdict_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.toml"
    file.write_text('layers = 2\nwidth = 256\nheads = 4\nsequence = 128\nvocabulary = 512\nbatch = 4\nprecision = "bf16"\n')
    fixed = ("--pipeline", "1", "--recompute", "none", "--tensor", "1", "--micro-batch", "1", "--fsdp", "2")
    assert run("plan", str(file), "--platform", "2xh200-nvlink", *fixed) == 0
    said = capsys.readouterr().out
    assert said.index("Best layout") < said.index("Where its step goes") < said.index("Searched")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "3"), "batch"),
        (("--gpus", "0"), "--gpus 0"),
        (("--gpus", "16"), "joins 4"),
        (("--tensor", "x"), "whole numbers between commas"),
        (("--tensor", "3"), "give one of 1, 2, 4"),
        (("--recompute", "perhaps"), "recompute"),
        (("--headroom", "1"), "headroom"),
    ],
)
def test_bad_options_end_in_one_line(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.toml"
    file.write_text("layers = 2\nwidth = 256\nheads = 4\nsequence = 128\nvocabulary = 512\nbatch = 4\n")
    assert run("plan", str(file), "--platform", PLATFORM, *options) == 2
    assert said in capsys.readouterr().err
