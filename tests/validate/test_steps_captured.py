"""A step that is captured, and never run, is predicted as its execution trace is."""

from __future__ import annotations

import pytest

from steptime_lab.validate.steps.cases import shipped_steps
from steptime_lab.validate.steps.predict import predict_case
from steptime_lab.validate.steps.sources import CONFIG, builder, captured_step, captured_steps, from_config, from_trace

pytest.importorskip("torch", reason="capturing a step needs torch")
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
