"""What-ifs: what texts mean, what a change does to a step, and what is said of texts that mean nothing."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import steptime
from steptime._program.program import Tensor
from steptime._report.whatif import ChangedPrediction
from steptime._whatif import batch
from steptime._whatif.batch import SampleDimensions, batch_size
from steptime._whatif.grammar import Change, Target, parse, parse_all, pattern
from steptime._whatif.named import Changer
from steptime._whatif.savings import Scene

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def scene(name: str, platform: str | None = None) -> Scene:
    return Scene(steptime.predict(EXAMPLES / name, platform))


def saves_ms(name: str, *texts: str, platform: str | None = None) -> float:
    return scene(name, platform).gains_ms(parse_all(texts))


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("matmul * 0.5", Change("matmul * 0.5", "*", Target("matmul"), 0.5)),
        (
            "kernel:void foo<a, b> = 20us",
            Change("kernel:void foo<a, b> = 20us", "=", Target("kernel", "void foo<a, b>"), 20_000),
        ),
        ("all-reduce  no-overlap", Change("all-reduce no-overlap", "no-overlap", Target("all_reduce"))),
        ("rank:03 level", Change("rank:03 level", "level", Target("rank", "3"))),
        ("TF32 on", Change("TF32 on", "tf32")),
        ("optimizer fused", Change("optimizer fused", "optimizer", choice="fused")),
        ("optimizer * .25", Change("optimizer * .25", "*", Target("optimizer"), 0.25)),
        ("batch = 64", Change("batch = 64", "batch", amount=64, choice="=")),
    ],
)
def test_a_text_means_a_change(text: str, change: Change) -> None:
    assert parse(text) == change


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a known change"),
        ("matmul", "is not a known change"),
        ("matmul * fast", "is not a known change"),
        ("matmul * 1e300", "at most"),
        ("matmul = 3", "says no unit"),
        ("host = 3us", "give a factor or remove"),
        ("batch = 2.5", "whole number"),
        ("batch = 3us", "batch = N"),
        ("stream:7 remove", "kernel:NAME"),
        ("rank:x level", "no number of a rank"),
        ("matmul level", "rank:0 level"),
        ("rank:1 remove", "rank:0 level"),
    ],
)
def test_what_means_nothing_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(steptime.InputError, match=r"^--what-if '") as raised:
        parse(text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("attention * 2", "matmul"),
        ("kernel:nothing = 1us", "ncclDevKernel"),
        ("op:nothing remove", "aten::"),
        ("rank:9 * 2", "ranks: 0, 1"),
    ],
)
def test_a_change_of_nothing_says_what_there_is(text: str, there: str) -> None:
    with pytest.raises(steptime.InputError, match="there is") as raised:
        saves_ms("h200_mps4_dlrm", text)
    assert there in str(raised.value)


@pytest.mark.parametrize(("name", "platform"), [("h200_mps4_dlrm", None), ("prefetch_sync", None), ("prefetch_sync", "1xh200")])
def test_no_change_is_the_prediction_itself(name: str, platform: str | None) -> None:
    assert saves_ms(name, "matmul * 1", platform=platform) == 0
    base = scene(name, platform)
    assert base.before.period_ns[0] / 1e6 == pytest.approx(base.prediction.step_time_ms, rel=1e-9)


def test_a_faster_piece_never_costs_time_and_a_slower_one_never_saves() -> None:
    for target in ("matmul", "host", "device", "communication", "op:aten::mm", "rank:1"):
        assert saves_ms("h200_mps4_dlrm", f"{target} * 0.5") >= 0
        assert saves_ms("h200_mps4_dlrm", f"{target} * 2") <= 0


def test_everything_scaled_is_the_step_scaled() -> None:
    base = scene("prefetch_sync")
    saved = base.gains_ms(parse_all(["device * 0", "host * 0"]))
    assert saved > 0.95 * base.prediction.step_time_ms  # what is left is latency and the distance of kernels
    assert base.gains_ms(parse_all(["device remove", "host remove"])) >= saved


def test_a_host_that_does_not_wait_runs_ahead() -> None:
    base = scene("prefetch_sync")
    alone, together = saves_ms("prefetch_sync", "sync remove"), saves_ms("prefetch_sync", "sync remove", "host remove")
    assert 0 < alone <= together < base.prediction.step_time_ms


def test_a_prediction_with_changes_is_the_changed_step_and_says_what_each_saves() -> None:
    answer = steptime.predict(EXAMPLES / "h200_mps4_dlrm", what_if=["host * 0.8", "rank:0 level"])
    assert isinstance(answer, ChangedPrediction)
    found = answer.to_dict()
    assert [each["change"] for each in found["changes"]] == ["host * 0.8", "rank:0 level"]
    saved = found["before"]["step_time_ms"] - found["step_time_ms"]
    assert saved == pytest.approx(found["together"]["saves_ms"], abs=2e-6)
    for each in [*found["changes"], found["together"]]:
        low, high = each["interval_ms"]
        assert low <= each["saves_ms"] <= high


def test_the_page_of_a_changed_step_says_what_was_changed(tmp_path: Path) -> None:
    steptime.predict(EXAMPLES / "prefetch_sync", what_if=["matmul * 0.5"]).html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "What if matmul * 0.5" in page
    assert "Without the changes" in page


def test_random_texts_are_changes_or_one_line() -> None:
    pieces = [
        "matmul", "host", "sync", "kernel:", "op:", "rank:", "all_reduce", "batch", "tf32", "on", "*", "=", "0.5", "1e9", "-1",
        "us", "ms", "remove", "overlap", "no-overlap", "level", "cuda graph", "optimizer", "fused", ";", ":", "\x00", "é", "[",
        "(?:", "aten::*", "?", "nan", "inf", "99999999999999999999", " ", "\n",
    ]  # fmt: skip
    rng, cohorts = random.Random(7), scene("prefetch_sync")
    for _ in range(500):
        text = " ".join(rng.choice(pieces) for _ in range(rng.randrange(1, 6)))
        try:
            cohorts.changed(parse_all([text]))
        except steptime.InputError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 2000


def named_saves_ms(name: str, text: str, platform: str | None = None) -> float:
    found = steptime.predict(EXAMPLES / name, platform, what_if=[text]).to_dict()
    return float(found["changes"][0]["saves_ms"])


def test_named_changes_of_a_recording_take_ratios_of_models() -> None:
    step_ms = steptime.predict(EXAMPLES / "prefetch_sync").step_time_ms
    tf32, bf16 = named_saves_ms("prefetch_sync", "tf32 on"), named_saves_ms("prefetch_sync", "bf16 on")
    assert 0 < tf32 < step_ms
    assert 0 < bf16 < step_ms
    assert 0 < named_saves_ms("prefetch_sync", "optimizer fused") < step_ms
    twice = named_saves_ms("prefetch_sync", "batch * 2")
    assert -2 * step_ms < twice < 0 < named_saves_ms("prefetch_sync", "batch * 0.5")


@pytest.mark.parametrize(
    ("change", "key", "value", "within"),
    [
        ("optimizer fused", 'optimizer = "adamw"', 'optimizer = "adamw_fused"', 0.1),
        ("bf16 on", 'precision = "fp32"', 'precision = "bf16-autocast"', 0.1),
        ("tf32 on", 'precision = "fp32"', 'precision = "tf32"', 0.05),
        ("batch = 64", "batch = 32", "batch = 64", 0.05),
    ],
)
def test_a_named_change_is_about_what_the_config_with_it_says(
    change: str, key: str, value: str, within: float, tmp_path: Path
) -> None:
    written = (EXAMPLES / "configs" / "gpt2.toml").read_text(encoding="utf-8").replace("bf16-autocast", "fp32")
    written = written.replace("batch = 16", "batch = 32")  # for the GPU to be what a step waits for
    assert key in written
    files = [tmp_path / "before.toml", tmp_path / "after.toml"]
    for file, text in zip(files, (written, written.replace(key, value)), strict=True):
        file.write_text(text, encoding="utf-8")
    before, after = (steptime.predict(file, "1xh200").step_time_ms for file in files)
    foretold = steptime.predict(files[0], "1xh200", what_if=[change]).step_time_ms
    assert before - foretold == pytest.approx(before - after, rel=within)


def test_a_job_that_can_be_built_again_is_with_another_batch() -> None:
    config, platform = EXAMPLES / "configs" / "dlrm_small.toml", "2xh200-nvlink"
    before = steptime.predict(config, platform)
    batch = before.workload.description.batch
    assert batch is not None
    answer = steptime.predict(config, platform, what_if=["host * 1", "batch * 2"])
    assert answer.workload.description.batch == 2 * batch
    assert answer.step_time_ms == pytest.approx(steptime.predict(config, platform, batch=2 * batch).step_time_ms, rel=1e-6)
    low, high = answer.interval_ms
    assert low <= answer.step_time_ms <= high


def test_copies_and_exchanges_of_samples_grow_with_the_batch() -> None:
    base = scene("h200_mps4_dlrm")
    changed = Changer()(parse("batch * 4"), base.cohorts)
    for before, after in zip(base.cohorts, changed, strict=True):
        program = before.program
        kinds = [program.collectives[at].kind if at >= 0 else "" for at in program.works.collective.tolist()]
        ratio = after.timing.duration_ns[:, 0, 0] / before.timing.duration_ns[:, 0, 0].clip(1)
        exchanges = ratio[[kind == "all_to_all" for kind in kinds]]
        assert (exchanges > 1).any()
        assert (exchanges <= 4.01).all()
        assert (ratio[[kind == "all_reduce" for kind in kinds]] == 1).all()


def test_named_changes_that_change_nothing_say_so() -> None:
    with pytest.raises(steptime.InputError, match="no step of an optimiser"):
        named_saves_ms("gpt_graph", "optimizer fused")
    with pytest.raises(steptime.InputError, match="only collectives overlap"):
        named_saves_ms("prefetch_sync", "matmul overlap")


def test_collectives_waited_for_at_once_cost_time_and_overlapped_ones_save_none_of_it_twice() -> None:
    for name in ("dlrm_overlap4", "gpt_fsdp2_small"):
        waited, beside = saves_ms(name, "communication no-overlap"), saves_ms(name, "communication overlap")
        gone = saves_ms(name, "communication remove")
        assert waited <= 0 <= beside <= gone


def test_the_batch_is_told_from_layers_and_steps_of_time() -> None:
    # As a bidirectional LSTM of two layers over 128 texts of 100 words is recorded: states of 4, and steps first within cuDNN.
    recurrent = Counter({(4, 128, 512): 24, (128, 20): 21, (128, 100, 512): 15, (100, 128, 512): 15, (12800, 512): 12})
    assert batch_size(recurrent) == 128
    assert batch_size(Counter({(16, 512, 768): 687, (3, 16, 12, 512, 64): 168, (8192, 768): 135})) == 16
    assert batch_size(Counter({(7, 3): 1, (5, 2): 1, (3, 9): 1, (2, 4): 1})) is None


@pytest.mark.parametrize(("name", "size"), [("prefetch_sync", 4096), ("gpt_fsdp2_small", 128), ("dlrm_overlap4", 2048)])
def test_every_product_follows_the_batch_that_its_recording_had(name: str, size: int) -> None:
    """Also where a weight has the shape of what it is multiplied by, and where parameters are gathered from as many ranks."""
    for cohort in scene(name).cohorts:
        samples = SampleDimensions.of(parse("batch * 2"), cohort.program)
        assert samples.size == size
        program, rewrite = cohort.program, samples.rewrite(2.0)
        for row, at in enumerate(program.ops.signature.tolist()):
            if at >= 0 and program.names[int(program.ops.name[row])] in ("aten::mm", "aten::addmm"):
                before, after = (
                    each.inputs for each in (program.signatures[at], rewrite(program, row, program.signatures[at]))
                )
                left, right = (
                    tensors[-2:]
                    for tensors in ([each for each in some if isinstance(each, Tensor)] for some in (before, after))
                )
                grown = [b.shape[d] * 2 == a.shape[d] for b, a in zip(left, right, strict=True) for d in (0, 1)]
                assert grown in ([True, False, False, False], [False, True, True, False])


def test_what_was_taken_for_the_batch_is_said() -> None:
    said = steptime.predict(EXAMPLES / "gpt_fsdp2_small", what_if=["batch = 64"]).warnings[0]
    assert "a rank has 128 samples, 64 after it" in said
    assert "one rank, not of all 2" in said


def test_a_batch_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(steptime.InputError, match="batch is not known"):
        named_saves_ms("gpt_graph", "batch * 2")
    monkeypatch.setattr(batch, "batch_size", lambda _: 1000)  # as many classes as there are, taken for the batch
    with pytest.raises(steptime.InputError, match="do not follow it; predict a config"):
        named_saves_ms("prefetch_sync", "batch * 2")


def test_a_changed_precision_is_measured_by_its_own_peak() -> None:
    before = steptime.predict(EXAMPLES / "prefetch_sync")
    assert before.mfu is not None
    for text, precision in (("tf32 on", "tf32"), ("bf16 on", "bf16")):
        after = steptime.predict(EXAMPLES / "prefetch_sync", what_if=[text])
        assert after.precision == precision
        assert after.mfu is not None
        assert after.mfu < before.mfu
    # Operations of another batch were not counted.
    assert steptime.predict(EXAMPLES / "prefetch_sync", what_if=["batch * 2"]).mfu is None


def test_times_that_a_change_made_are_not_called_measured() -> None:
    halved = steptime.predict(EXAMPLES / "prefetch_sync", what_if=["matmul * 0.5"])
    assert 0 < halved.coverage["changed"] < 1
    assert sum(halved.coverage.values()) == pytest.approx(1.0)
    assert "changed" not in steptime.predict(EXAMPLES / "prefetch_sync", what_if=["host * 0.9"]).coverage


@pytest.mark.parametrize(
    ("name", "text", "matches"),
    [
        ("gemm", "ampere_GEMM_nt", True), ("gemm*", "ampere_gemm_nt", False), ("*gemm*", "ampere_gemm_nt", True),
        ("a*a", "a", False), ("a*a", "aa", True), ("*ab*ab", "abab", True), ("*ab*ab", "xabyabzab", True),
        ("a?c*", "abcd", True), ("*a*b", "ab_ba", False), ("*", "", True), ("a.c*", "abc", False),
    ],
)  # fmt: skip
def test_a_star_stands_for_anything_and_a_name_with_one_is_matched_whole(name: str, text: str, matches: bool) -> None:
    assert bool(pattern(name).search(text)) is matches


def test_a_name_of_many_stars_is_matched_in_time_that_grows_with_its_length() -> None:
    assert not pattern("*a" * 30 + "z").search("a" * 2000)
