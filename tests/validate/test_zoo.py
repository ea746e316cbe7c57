"""Laws of validating the zoo, on a made-up set of three architectures."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from tests.measurements.test_store import a_store
from tests.program.mutations import BYTES, drop_key, retype

from steptime._models.engine.splits import Residuals
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms import KernelForm
from steptime._platforms.situation import Situation, read_unseen
from steptime.errors import InputError
from steptime_lab.fit.kernels.fitting import with_forms
from steptime_lab.measurements.sets import ZOO, ZOO_KERNELS
from steptime_lab.report.zoo import zoo_document
from steptime_lab.validate.zoo.answers import PREDICTED, SECOND_PREDICTED, ZooAnswer, ZooAnswers
from steptime_lab.validate.zoo.left_out import groups_of, without
from steptime_lab.validate.zoo.measured import family_of
from steptime_lab.validate.zoo.widths import unseen_situation
from steptime_lab.validate.zoo.zoo import DEVICE_TIME, HOST_BOUND, ZooCase, explained, validate_zoo, zoo_cases

ANSWER = ZooAnswer(
    "decoders", step_ms=10.0, low_ms=9.5, high_ms=10.5, device_ms=9.0, launches=100, allocated_bytes=1000, fallback=0.0,
    outside=0.0, families={"matmul": 6.0, "elementwise": 3.0},
)  # fmt: skip
ANSWERS = ZooAnswers({
    "one": ANSWER,
    "two": replace(ANSWER, group="encoders", step_ms=12.0, low_ms=11.8, high_ms=12.2),
    "lost": ANSWER,
}, {"never": "not captured"})  # fmt: skip


def timed_row(name: str, group: str, step_ms: float, **changed: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(column.name for column in ZOO.columns)
    times_ns = [step_ms * 1e6 * factor for factor in (0.99, 1.0, 1.01)]
    row |= {
        "architecture": name,
        "group": group,
        "finite": True,
        "capped": 0.0,
        "allocated_bytes": 1000,
        "left_bytes": 0,
        "times_ns": times_ns,
    }
    return row | changed


def kernels_row(name: str, group: str, times_ms: dict[str, float]) -> dict[str, Any]:
    return {
        "architecture": name, "group": group, "launches": 100, "op": list(times_ms), "around": list(times_ms),
        "shapes": ["[]"] * len(times_ms), "kernel": ["k"] * len(times_ms), "count": [1] * len(times_ms),
        "kernel_ns": [1e6 * value for value in times_ms.values()], "times_ns": [1e6 * sum(times_ms.values())],
    }  # fmt: skip


@pytest.fixture
def cases(tmp_path: Path) -> list[ZooCase]:
    store = a_store(tmp_path)
    store.add(ZOO, timed_row("one", "decoders", 10.2))
    store.add(ZOO, timed_row("two", "encoders", 15.0, allocated_bytes=1250, left_bytes=50))
    store.add(ZOO, timed_row("lost", "decoders", 1.0, finite=False))
    store.add(ZOO, timed_row("unanswered", "decoders", 1.0))
    store.add(ZOO_KERNELS, kernels_row("one", "decoders", {"aten::mm": 6.5, "aten::add": 3.0}))
    store.add(ZOO_KERNELS, kernels_row("two", "encoders", {"aten::mm": 6.0, "aten::sum": 1.0}))
    store.flush()
    return zoo_cases(ANSWERS, tmp_path)


def test_without_measurements_one_line_says_how_to_measure(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no architecture of the zoo has been measured; on an H200: `steptime measure zoo"):
        zoo_cases(ANSWERS, tmp_path)


def test_groups_have_their_own_errors_and_what_is_not_finite_counts_nowhere(cases: list[ZooCase]) -> None:
    result = validate_zoo(cases, by_left_out=True)
    assert [case.name for case in result.cases] == ["one", "two"]
    assert {name: group.summary.rows for name, group in result.groups.items() if "," not in name} == {
        "decoders": 1, "encoders": 1, "GPU-bound": 1, HOST_BOUND: 1, DEVICE_TIME: 2,
    }  # fmt: skip
    assert result.whole.summary.interval_coverage == 0.5
    assert result.groups["encoders"].summary.max == pytest.approx(0.2)
    assert result.groups[DEVICE_TIME].summary.max == pytest.approx(2 / 7)
    assert (result.facts["memory_within_5_%"], result.facts["launches_within_2_%"]) == (0.5, 1.0)
    assert "lost" in result.warnings[0]


def test_parts_of_an_error_sum_to_it(cases: list[ZooCase]) -> None:
    by_name = {case.name: case for case in cases}
    parts = explained(cases)
    assert list(parts) == ["two", "one"]  # the largest error first
    for name, split in parts.items():
        assert sum(split.values()) == pytest.approx(by_name[name].step.error)
    assert parts["one"]["matmul"] == pytest.approx(-0.5 / 10.2)
    assert parts["two"]["reduction"] == pytest.approx(-1.0 / 15.0)
    assert next(iter(parts["two"])) == "host"
    assert zoo_document(cases)["two"]["memory_error"] == pytest.approx(1000 / 1200 - 1)


def test_answers_come_back_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    ANSWERS.write(file)
    assert ZooAnswers.read(file) == ANSWERS


def test_damaged_answers_are_one_line(tmp_path: Path) -> None:
    file, rng = tmp_path / "answers.json", random.Random(7)
    ANSWERS.write(file)
    whole = file.read_bytes()
    document = json.loads(whole)
    refused = 0
    for _ in range(500):
        damaged = copy.deepcopy(document)
        rng.choice((retype, drop_key))(rng, damaged, "cases")
        text = json.dumps(damaged).encode()
        file.write_bytes(text if rng.random() < 0.6 else rng.choice(BYTES)(rng, whole))
        try:
            ZooAnswers.read(file)
        except InputError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1
    assert refused > 100


def test_rows_of_kin_are_left_out_and_sweeps_stay() -> None:
    sources = ["sweep", "gpt2-bf16", "bert-fp32", "xlnet-fp32", "zoo:decoders", "zoo:encoders", "resnet50-bf16", None]
    table = pa.table({"source": pa.array(sources, pa.string())})
    kept = without(table, "decoders")["source"].to_pylist()
    assert kept == ["sweep", "zoo:encoders", "resnet50-bf16", None]
    assert without(table, "recurrent").num_rows == len(sources)
    assert groups_of("dlrm-embedding_bag-fp32") == ("recommenders",)


@pytest.mark.parametrize(
    ("op", "around", "kernel", "family"),
    [
        ("aten::mm", "AddmmBackward0", "gemm", "matmul"),
        ("aten::_foreach_add_", "Optimizer.step#SGD.step", "multi_tensor", "optimizer"),
        ("aten::copy_", "aten::_to_copy", "elementwise_kernel", "copy"),
        ("aten::sum", "aten::layer_norm", "reduce", "normalization"),
        ("", "", "Memset (Device)", "memset"),
    ],
)
def test_a_kernel_is_of_the_family_that_a_prediction_has_it_in(op: str, around: str, kernel: str, family: str) -> None:
    assert family_of(op, around, kernel).label == family


def test_a_group_is_predicted_by_models_that_saw_none_of_its_kin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from steptime_lab.validate.zoo import refit
    from steptime_lab.workloads.zoo import architectures

    chosen = {name: (architectures()[name], None) for name in ("resnet20", "policy_gradient", "matrix_factors")}
    fitted: list[pa.Table] = []
    refitted_forms: list[set[str]] = []
    asked: dict[str, object] = {}
    widths: dict[str, Situation | None] = {}

    def fit_kernels(rows: pa.Table, *_: object, forms: list[str], **__: object) -> str:
        fitted.append(rows)
        refitted_forms.append(set(forms))
        return f"models {len(fitted)}"

    def answered(kin: dict[str, Any], platform: Any, *_: object, situation: Situation | None = None) -> dict[str, ZooAnswer]:
        asked.update(dict.fromkeys(kin, platform.device.models))
        widths.update(dict.fromkeys(kin, situation))
        return {name: replace(ANSWER, group=each.group) for name, (each, _) in kin.items()}

    later = {"conv_mixer": (architectures()["conv_mixer"], None)}  # of the second visit
    monkeypatch.setattr(refit, "captured_zoo", lambda names, *_: (chosen if "resnet20" in names else later, {"never": "why"}))
    monkeypatch.setattr(refit, "fit_kernels", fit_kernels)
    monkeypatch.setattr(refit, "with_forms", lambda _, fitted: fitted)
    monkeypatch.setattr(refit, "answered", answered)
    result, together = refit.refitted(lambda _: None)
    assert (set(result.cases), dict(result.refused)) == (set(chosen), {"never": "why"})
    assert asked["resnet20"] == "models 1"
    assert asked["matrix_factors"] == "models 2"
    assert not isinstance(asked["policy_gradient"], str)  # nothing in any fit is of its kin
    assert "convolution" in refitted_forms[0] and "attention" not in refitted_forms[0] | refitted_forms[1]
    assert len(together.sources) == 4
    refit.keep(result, together, tmp_path / "answers.json", tmp_path / "widths.toml")
    assert ZooAnswers.read(tmp_path / "answers.json") == result
    assert set(read_unseen(tmp_path / "widths.toml").errors) == {*together.errors, "generated"}
    for name, (each, _) in chosen.items():
        fitted_to = widths[name]
        assert fitted_to is not None and each.group not in fitted_to.sources and len(fitted_to.sources) == 3
    for rows, gone in zip(fitted, (("resnet50", "inception"), ("dlrm",)), strict=True):
        assert not [source for source in set(rows["source"].to_pylist()) if source.startswith(gone)]


def test_a_family_that_is_off_in_what_has_much_of_it_is_wider(cases: list[ZooCase]) -> None:
    (one,) = [case for case in cases if case.name == "one"]
    assert one.measured.kernels is not None
    off = replace(one, measured=replace(one.measured, step_ms=13.0, kernels=replace(
        one.measured.kernels, families={"matmul": 9.0, "elementwise": 3.0})))  # fmt: skip
    errors = unseen_situation([one, off]).errors
    assert errors["matmul"].above > errors["elementwise"].above
    assert errors["matmul"].above == errors["matmul"].below
    assert errors["matmul"].above > unseen_situation([one, one]).errors["matmul"].above


@pytest.mark.parametrize(("visit", "file", "least"), [("first visit", PREDICTED, 60), ("second visit", SECOND_PREDICTED, 16)])
def test_committed_predictions_are_of_architectures_there_are(visit: str, file: Path, least: int) -> None:
    from steptime_lab.workloads.zoo import architectures, of_visit

    answers = ZooAnswers.read(file)
    assert {*answers.cases, *answers.refused} == set(of_visit(visit))
    assert len(answers.cases) >= least
    assert all(case.group == architectures()[name].group for name, case in answers.cases.items())
    assert not [why for why in answers.refused.values() if "/" in why]


def test_a_form_replaces_that_of_the_same_name_with_what_it_is_off_by() -> None:
    quantiles = np.arange(6.0).reshape(3, 2)
    a, b, new = (cast(KernelForm, name) for name in ("a", "b", "new"))
    ours = KernelModels({"a": a, "b": b}, Residuals(("one", "one", "two"), (0, 1, 0), quantiles, quantiles[0]), {"seed": 0})
    theirs = KernelModels({"b": new}, Residuals(("two",), (1,), -quantiles[:1], quantiles[1]), {})
    both = with_forms(ours, theirs)
    assert (both.forms, both.recipe) == ({"a": a, "b": new}, {"seed": 0})
    assert list(zip(both.residuals.families, both.residuals.sizes, strict=True)) == [("one", 0), ("one", 1), ("two", 1)]
    assert both.residuals.quantiles.tolist() == [[0.0, 1.0], [2.0, 3.0], [0.0, -1.0]]
