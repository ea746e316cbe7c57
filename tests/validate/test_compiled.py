"""Laws of compiled steps predicted and measured: kinds of kernels, files of answers, and what errors are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.errors import InputError
from steptime_lab.validate.compiled.answers import SEALED, CaseAnswer, CompiledAnswers, StepAnswer
from steptime_lab.validate.compiled.compiled import StepPair, compiled_pairs, validate_compiled
from steptime_lab.validate.compiled.kinds import kind_of, kinds_of, matched
from steptime_lab.validate.compiled.measured import MeasuredForm, MeasuredPair

_KINDS = st.dictionaries(st.sampled_from(["generated pointwise", "matmul", "copy"]), st.integers(1, 50), min_size=1)


def _answer(step_ms: float, kinds: Mapping[str, int] | None = None) -> StepAnswer:
    return StepAnswer(step_ms, 0.9 * step_ms, 1.1 * step_ms, step_ms / 2, 1000, 0.0, kinds or {"matmul": 3})


def _form(step_ms: float, device_ms: float | None = None, kinds: Mapping[str, int] | None = None) -> MeasuredForm:
    return MeasuredForm(step_ms, 0.01, (step_ms, step_ms), 1000, device_ms, kinds or {"matmul": 3}, ())


def _pair(
    said: tuple[float, float], took: tuple[float, float], mode: str = "default", device_ms: float | None = None, name: str = "a"
) -> StepPair:
    measured = MeasuredPair(
        name, "net", mode, "bf16", "model", 1, "2.11.0", _form(took[0], device_ms), _form(took[1], device_ms)
    )
    return StepPair(measured, _answer(said[0]), _answer(said[1]))


@pytest.mark.parametrize(
    ("kernel", "op", "kind"),
    [
        ("triton_poi_fused_add_gelu_3", "", "generated pointwise"),
        ("triton_red_fused_sum_1", "aten::mm", "generated reduction"),
        ("triton_per_fused_native_layer_norm_0", "", "generated persistent reduction"),
        ("triton_for_fused_0", "", "generated foreach"),
        ("some_kernel", "triton_poi_fused_add_0", "generated pointwise"),
        ("Memset (Device)", "aten::mm", "memset"),
        ("Memcpy DtoD (Device -> Device)", "aten::copy_", "copy"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "", "communication"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "", "matmul"),
        ("void whatever", "aten::addmm", "matmul"),
    ],
)
def test_a_kernel_is_known_by_its_name_or_by_the_op_that_launched_it(kernel: str, op: str, kind: str) -> None:
    assert kind_of(kernel, op) == kind


def test_kinds_are_counted() -> None:
    assert kinds_of(["triton_poi_fused_0", "triton_poi_fused_1", "Memset (Device)"], ["", "", ""]) == {
        "generated pointwise": 2,
        "memset": 1,
    }


@given(_KINDS, _KINDS)
def test_lists_match_as_far_as_both_have_it(first: dict[str, int], second: dict[str, int]) -> None:
    assert matched(first, first) == 1.0
    assert matched(first, second) == matched(second, first)
    assert 0.0 <= matched(first, second) <= 1.0
    assert (matched(first, second) == 1.0) == (first == second)


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = CompiledAnswers(
        {"a": CaseAnswer(_answer(2.0), _answer(1.0)), "b": CaseAnswer(_answer(2.0), None)}, {"torch": "2.13.0"}, {"b": "why"}
    )
    written.write(tmp_path / "answers.json")
    assert CompiledAnswers.read(tmp_path / "answers.json") == written


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema_version": 1}', '{"schema_version": 1, "cases": {"a": 1}, "made_with": {}, "refused": {}}']
)
def test_what_is_no_file_of_answers_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "answers.json").write_text(text)
    with pytest.raises(InputError, match=r"answers\.json"):
        CompiledAnswers.read(tmp_path / "answers.json")


def test_the_error_of_a_speedup_is_that_of_a_ratio() -> None:
    pair = _pair((22.0, 11.0), (20.0, 10.0))
    assert pair.speedup.error == pytest.approx(0.0)
    result = validate_compiled([pair])
    assert result.whole.summary.gmae == pytest.approx(0.1, rel=0.01)
    assert result.groups["speed-up"].summary.max == pytest.approx(0.0)
    assert result.groups["eager"].summary.max == pytest.approx(0.1)


def test_modes_and_small_steps_have_groups_of_their_own() -> None:
    pairs = [
        _pair((20.0, 10.0), (20.0, 10.0)),
        _pair((20.0, 5.0), (20.0, 10.0), "reduce-overhead", 4.0, "b"),
        _pair((20.0, 10.0), (20.0, 10.0), "reduce-overhead", 19.0, "c"),
    ]
    groups = validate_compiled(pairs).groups
    assert groups["compiled, mode default"].summary.rows == 1
    assert groups["compiled, CUDA graphs"].summary.rows == 2
    assert groups["compiled, CUDA graphs, small steps"].summary.rows == 1
    assert groups["compiled, CUDA graphs, small steps"].summary.max == pytest.approx(0.5)


def test_without_rows_one_line_says_how_to_measure(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="steptime measure compiled"):
        compiled_pairs(tmp_path)


def test_what_is_predicted_again_stands_beside_and_unseen_architectures_by_themselves() -> None:
    seen, unseen = (_pair((10.0, 5.0), (10.0, 5.0), name=name) for name in ("seen", "unseen"))
    unseen = replace(unseen, measured=replace(unseen.measured, architecture=SEALED[0]))
    both = [replace(each, again=CaseAnswer(_answer(10.0), _answer(wrong))) for each, wrong in ((seen, 6.0), (unseen, 5.5))]
    groups = validate_compiled(both).groups
    assert groups["again: compiled"].summary.rows == 2
    assert groups["again, unseen: compiled"].summary.rows == 1
    assert groups["again, unseen: compiled"].summary.max == pytest.approx(0.1)
    assert groups["again, unseen: speed-up"].summary.max == pytest.approx(1 - 5.0 / 5.5)
