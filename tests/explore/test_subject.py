"""What is explored: controls have values that they accept, and the command and the config of a variant give its answer."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.explore.asked import CONFIGS, subject_of

from steptime import predict
from steptime._api.read import read
from steptime._capture.launch import RunAgain, Script
from steptime._cli.app import run
from steptime._explore.answer import answered
from steptime._explore.controls import SET
from steptime._explore.files import config_text, without_config
from steptime._explore.subject import Subject
from steptime.errors import InputError

EXAMPLES = CONFIGS.parent
GPT, DLRM = ("gpt2-ddp.toml", "8xh200-nvlink"), ("dlrm_small.toml", "2xh200-nvlink")

VARIANTS: tuple[tuple[tuple[str, str], dict[str, Any]], ...] = (
    (GPT, {}),
    (GPT, {"batch": 64, "ranks": 4}),
    (GPT, {"set.parallel.tensor": 2}),
    (GPT, {"set.parallel.data": 2, "set.parallel.fsdp": 2}),
    (GPT, {"set.layers": 6, "set.precision": "fp32", "set.fused": False, "set.dropout": 0.2}),
    (GPT, {"platform": "8xa100-nvlink", "power_cap_w": 300, "price": 2.5}),
    (GPT, {"host_factor": 1.5, "what_if": ["matmul * 0.5"]}),
    (DLRM, {"batch": 4096, "set.rule": "naive", "set.table_precision": "fp16"}),
    (DLRM, {"ranks": 1, "set.cuda_graph": True}),
    (DLRM, {"fabric": "a100-nvlink", "wire_factor": 2}),
)


@pytest.mark.parametrize(("where", "values"), VARIANTS)
def test_the_command_of_a_variant_gives_its_answer(
    where: tuple[str, str], values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    subject = subject_of(*where)
    expected = subject.predicted(values).to_dict()
    program, *arguments = shlex.split(subject.command(values))
    assert program == "steptime" and run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.parametrize(("where", "values"), VARIANTS)
def test_the_config_of_a_variant_gives_its_step(where: tuple[str, str], values: dict[str, Any], tmp_path: Path) -> None:
    own = {name: value for name, value in values.items() if name.startswith(SET) or name in ("batch", "ranks")}
    subject = subject_of(*where)
    file = tmp_path / "variant.toml"
    file.write_text(config_text(subject, own), encoding="utf-8")
    assert predict(str(file), where[1]).step_time_ms == subject.predicted(own).step_time_ms


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.toml")))
def test_controls_accept_what_they_show(name: str) -> None:
    subject = subject_of(name)
    assert subject.checked({}) == {each: control.value for each, control in subject.controls.items()}
    for control in subject.controls.values():
        for value in (*control.steps, *(value for value, _ in control.choices if control.kind == "choice")):
            if not control.disabled:
                assert control.checked(value) == value
        assert control.label and control.group
        assert control.to_dict()["name"] == control.name
    assert {"batch", "ranks", "platform", "fabric", "host", "power_cap_w", "host_factor", "what_if"} <= set(subject.controls)


def test_a_rule_may_replace_a_plan_and_a_list_of_tables_has_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    config = str(CONFIGS / "dlrm_small.toml")
    tables = [each.name for each in subject_of(*DLRM).config.model.tables]  # type: ignore[union-attr]
    file.write_text(json.dumps({name: [0] for name in tables}), encoding="utf-8")
    subject = Subject(read([config], plan=file), (config,), "2xh200-nvlink", str(file))
    assert "--plan" in subject.command({}) and subject.controls["set.rule"].empty.endswith("plan.json")
    assert "--plan" not in subject.command({"set.rule": "naive"})
    by_rule = subject_of(*DLRM).predicted({"set.rule": "naive"}).step_time_ms
    assert subject.predicted({"set.rule": "naive"}).step_time_ms == by_rule
    listed = str(EXAMPLES / "sharding" / "tables.csv")
    lists = Subject(read([listed], platform_ranks=2), (listed,), "2xh200-nvlink")
    assert lists.controls["set.rule"].disabled and "--ranks 2" in lists.command({"platform": "8xa100-nvlink"})
    with pytest.raises(InputError, match="list of tables"):
        lists.checked({"set.rule": "naive"})
    with pytest.raises(InputError, match="list of tables"):
        config_text(lists, {})


def test_what_does_not_fit_is_answered_at_once_and_helped_afterwards() -> None:
    values = {"batch": 1 << 14}
    at_once, helped = (json.loads(answered(subject_of(*GPT), form, values)) for form in ("predict", "helps"))
    assert at_once["answer"]["memory"]["fits"] is False and "gradient_accumulation" not in at_once["sections"]["summary"]
    assert "gradient_accumulation" in helped["summary"]
    made = [each for each in helped["remedies"] if each is not None]
    assert {"set.gradient_accumulation"} <= {name for each in made for name in each}
    for each in made[:2]:
        assert json.loads(answered(subject_of(*GPT), "predict", each))["answer"]["memory"]["fits"] is True
    subject = subject_of(*GPT)
    assert subject.predicted(values, helps=False).step_time_ms == subject.predicted(values).step_time_ms


def test_a_recording_can_be_moved_to_a_platform_and_not_changed() -> None:
    recording = str(EXAMPLES / "dlrm_overlap4")
    subject = Subject(read([recording]), (recording,))
    assert subject.controls["platform"].value == "as recorded"
    assert subject.controls["batch"].disabled and subject.controls["ranks"].disabled
    assert not [name for name in subject.controls if name.startswith(SET)]
    assert subject.command({}) == f"steptime predict {recording}"
    assert subject.predicted({"platform": "8xh200-nvlink"}).platform == "4xh200-nvlink"
    with pytest.raises(InputError, match="platform"):
        subject.predicted({"power_cap_w": 300})
    with pytest.raises(InputError, match="no config"):
        config_text(subject, {})


def test_what_a_script_or_a_recording_cannot_have_is_disabled_with_the_reason(tmp_path: Path) -> None:
    recording = str(EXAMPLES / "dlrm_overlap4")
    recorded = Subject(read([recording]), (recording,))
    assert "recording" in without_config(recorded)
    assert without_config(subject_of(*GPT)) == without_config(subject_of(*DLRM)) == ""
    (tmp_path / "train.py").touch()
    script = replace(recorded.workload, rebuild=RunAgain(Script(tmp_path / "train.py", ()), None))
    batch, ranks = (Subject(script, ("train.py",), "4xh200-nvlink").controls[name] for name in ("batch", "ranks"))
    assert "after --" in batch.disabled
    assert ranks.disabled == ""
    with pytest.raises(InputError, match="script"):
        batch.checked(64)
