"""A step that is captured, and never run, is predicted as its execution trace is."""

from __future__ import annotations

import json
from statistics import median

import pytest

from steptime import capture
from steptime._sim.modelled.step import modelled
from steptime_lab.validate.held_out import DATA
from steptime_lab.validate.steps.cases import platform_of, shipped_steps
from steptime_lab.validate.steps.predict import predict_case
from steptime_lab.validate.steps.sources import CONFIG, builder, captured_step, captured_steps, from_config, from_trace
from steptime_lab.workloads.large_cases import AGAIN, LARGE, large_cases

torch = pytest.importorskip("torch", reason="capturing a step needs torch")
pytest.importorskip("transformers", reason="the step is one of transformers'")

NAME = "gpt2-b64-r4-bf16"


@pytest.mark.slow
def test_a_captured_step_of_several_ranks_is_predicted_as_its_trace_is() -> None:
    (case,) = shipped_steps([NAME])
    assert builder(case, CONFIG, {}) is None
    assert builder(case, CONFIG, captured_steps()) is captured_step
    traced, captured = (predict_case(case, build) for build in (from_trace, captured_step))
    assert captured.predicted_ns == pytest.approx(traced.predicted_ns, rel=0.02)


def test_a_dlrm_is_built_of_its_config_even_where_torch_is() -> None:
    (case,) = shipped_steps(["dlrm-t01-b1024-r2"])
    assert builder(case, CONFIG, captured_steps()) is from_config


# Those of the decoders divided by FSDP2 and DTensor that wait for their hosts most.
SHARDED = ((LARGE, "large-tp2-small-r2"), (AGAIN, "large-hsdp2x2-deep-r4"), (AGAIN, "large-tp2fsdp2-768-r4"))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), SHARDED)
def test_python_of_sharded_modules_takes_as_long_as_in_measured_steps(group: str, name: str) -> None:
    file = {LARGE: "decoders_measured.json", AGAIN: "decoders_again_measured.json"}[group]
    times_ms = json.loads((DATA / "committed" / file).read_text(encoding="utf-8"))[name]["step_ms"]
    (case,) = (case for case in large_cases(int(name[-1]), group) if case.name == name)
    from steptime_lab.workloads.networks.large import training_step  # with torch

    workload = capture(lambda rank: training_step(case, rank, torch.device("cuda")), ranks=case.ranks)
    predicted_ms = modelled(workload, platform_of(case.ranks)).play().step_ns / 1e6
    assert predicted_ms == pytest.approx(median(times_ms), rel=0.08)
