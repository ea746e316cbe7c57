"""Kernels that others measured on devices which nobody ran here: published numbers and traces against what is carried over."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.traced_kernels import traced_calls, validation_of

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.question import Question
from steptime._platforms.device import Device
from steptime._program.load import load

TRACES = Path(os.environ.get("STEPTIME_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "traces"

# Medians in ms, half precision, from microsoft/vidur (MIT), data/profiling/compute/DEVICE/meta-llama/Llama-2-70b-hf/mlp.csv:
# tokens, ranks that share a layer -> products attn_pre_proj, attn_post_proj, mlp_up_proj, mlp_down_proj, and the sum `add`.
PUBLISHED = {
    "a100": {
        (4096, 1): (2.872, 2.377, 15.9405, 8.0635, 0.112),
        (3584, 1): (2.679, 2.192, 14.2005, 7.0805, 0.100),
        (1696, 4): (0.377, 0.283, 1.796, 0.982, 0.047),
        (1536, 4): (0.331, 0.255, 1.602, 0.807, 0.041),
        (1376, 4): (0.309, 0.239, 1.4015, 0.722, 0.036),
        (64, 4): (0.037, 0.029, 0.161, 0.0805, 0.003),
        (1, 4): (0.032, 0.026, 0.15, 0.076, 0.002),
    },
    "h100": {
        (4096, 1): (0.9825, 0.7885, 5.6685, 2.647, 0.062),
        (3584, 1): (0.873, 0.706, 5.019, 2.355, 0.055),
        (1696, 4): (0.131, 0.088, 0.585, 0.257, 0.024),
        (1536, 4): (0.09, 0.08, 0.5, 0.212, 0.0225),
        (1376, 4): (0.089, 0.068, 0.492, 0.2055, 0.019),
        (64, 4): (0.021, 0.017, 0.087, 0.045, 0.002),
        (1, 4): (0.019, 0.016, 0.081, 0.043, 0.002),
    },
}
WIDTH, INNER, HEAD, HEADS, KV_HEADS = 8192, 28672, 128, 64, 8
# Times are whole microseconds, mostly.
LEAST_MS = 0.015


def half(*shape: int, strides: tuple[int, ...] | None = None) -> TensorArg:
    return TensorArg(shape, "float16", strides)


def questions(tokens: int, ranks: int) -> list[Question]:
    """The layer's calls: linear layers have their weight by rows of outputs."""
    heads = (HEADS + 2 * KV_HEADS) * HEAD
    sizes = [(WIDTH, heads // ranks), (WIDTH // ranks, WIDTH), (WIDTH, 2 * INNER // ranks), (INNER // ranks, WIDTH)]
    products = [Call("aten::mm.default", (half(tokens, k), half(k, n, strides=(1, k)))) for k, n in sizes]
    return [Question(call) for call in (*products, Call("aten::add.Tensor", (half(tokens, WIDTH), half(tokens, WIDTH))))]


@pytest.mark.parametrize(("name", "most_off", "most_biased"), [("a100", 0.07, 0.03), ("h100", 0.14, 0.06)])
def test_published_layers_are_met_and_nine_of_ten_lie_inside(name: str, most_off: float, most_biased: float) -> None:
    device, off, inside = Device.load(name), [], []
    for (tokens, ranks), measured_ms in PUBLISHED[name].items():
        for found, time_ms in zip(device.estimates(questions(tokens, ranks)), measured_ms, strict=True):
            if time_ms >= LEAST_MS:
                off.append(found.estimate.time_ns / 1e6 / time_ms - 1)
                inside.append(found.estimate.low_ns <= 1e6 * time_ms <= found.estimate.high_ns)
    assert np.mean(np.abs(off)) < most_off
    assert abs(np.mean(off)) < most_biased
    assert np.mean(inside) >= 0.9


@pytest.mark.skipif(not TRACES.is_dir(), reason="public traces are not here")
@pytest.mark.parametrize(
    ("name", "files", "most_off", "products_off"),
    [
        ("a100", "megatron_tp8_8xA100/megatron_kineto_*.json.gz", 0.08, 0.08),
        ("h100", "variety/h100_Qwen*.json.gz", 0.05, 0.13),
    ],
)
def test_the_kernels_of_a_trace_take_about_as_long_as_carried_over(
    name: str, files: str, most_off: float, products_off: float
) -> None:
    device = Device.load(name)
    found = validation_of(traced_calls(load(sorted(TRACES.glob(files))), device), device)
    assert found.facts["of_the_time_answered"] > 0.9
    assert abs(found.facts["all_of_it_predicted_over_measured"] - 1) < most_off
    assert found.groups["matmul"].summary.mape < products_off
    assert found.groups["matmul"].summary.interval_coverage == 1.0
