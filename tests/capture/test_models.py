"""A sample of the list of library models: each is captured as it comes from its library, with its own count of parameters.

The whole list runs with `make capture-models`.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import steptime


def benchmark() -> Any:
    """The module that makes the steps, beside the benchmark that runs the whole list."""
    spec = spec_from_file_location("steps", Path(__file__).parents[2] / "benchmarks" / "capture" / "steps.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["steps"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


steps = benchmark()

SAMPLE = (
    "torchvision/mobilenet_v3_small", "torchvision/squeezenet1_1", "torchvision/vit_b_16", "timm/lcnet_100", "timm/levit_256",
    "timm/pit_s_224", "transformers/DistilBertForMaskedLM/mask", "transformers/GPT2LMHeadModel/checkpointing",
    "transformers/ResNetForImageClassification", "transformers/MarianMTModel",
)  # fmt: skip
CASES = {case.name: case for case in steps.cases()}


def test_the_list_is_long_and_names_each_once() -> None:
    models = {(case.library, case.model) for case in CASES.values()}
    assert len(models) >= 150
    assert len(CASES) == sum(1 for _ in steps.cases())


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_of_a_library_is_captured_with_all_its_parameters(name: str) -> None:
    case = CASES[name]
    pytest.importorskip(case.library, reason=f"{case.library} is not installed", exc_type=ImportError)
    counted = []

    def make() -> Any:
        step, own = steps.step_of(case)
        counted.append(own)
        return step

    workload = steptime.capture(make)
    assert workload.description.parameters == counted[0]
