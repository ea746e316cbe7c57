"""Products of few bits and their casts on devices that nobody measured: what newer architectures need not do."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.family import families
from steptime._models.kernels.question import Question
from steptime._platforms.device import Device

ROWS, WIDTH = 8192, 8192


@cache
def device(name: str) -> Device:
    families()
    return Device.load(name)


def time_ns(name: str, op: str, *args: Any) -> float:
    (result,) = device(name).estimates([Question(Call(f"{op}.default", args))])
    assert result.family in ("grouped_products", "matmul", "fused_layers")
    return result.estimate.time_ns


def product_ns(name: str, dtype: str, *, fast: bool) -> float:
    width = WIDTH // 2 if dtype == "float4x2" else WIDTH
    x, weight = TensorArg((ROWS, width), dtype), TensorArg((ROWS, width), dtype).transposed()
    scale = TensorArg(())
    return time_ns(name, "aten::_scaled_mm", x, weight, scale, scale, None, None, None, fast)


def test_exact_sums_cost_hopper_alone() -> None:
    assert product_ns("h200", "float8", fast=False) > product_ns("h200", "float8", fast=True)
    assert product_ns("h100", "float8", fast=False) > product_ns("h100", "float8", fast=True)
    assert product_ns("b200", "float8", fast=False) == product_ns("b200", "float8", fast=True)


def test_what_has_one_scale_is_cast_one_way_after_hopper() -> None:
    x = TensorArg((ROWS, WIDTH), "bfloat16")
    for name, alike in (("h200", False), ("gb300", True)):
        both, one = (time_ns(name, "transformer_engine::quantize", x, ways, 0) for ways in (2, 1))
        assert (both == one) is alike
        blocks, rows = (time_ns(name, "transformer_engine::quantize", x, ways, 32) for ways in (2, 1))
        assert blocks > rows


@pytest.mark.parametrize("name", ["b200", "gb200", "b300", "gb300"])
def test_fewer_bits_are_faster_by_no_more_than_the_peaks_say(name: str) -> None:
    """What a product loses to other things than its rate is carried over as it is."""
    sixteen = time_ns(name, "aten::mm", TensorArg((ROWS, WIDTH), "bfloat16"), TensorArg((WIDTH, ROWS), "bfloat16"))
    eight, four = (product_ns(name, dtype, fast=True) for dtype in ("float8", "float4x2"))
    peaks = device(name).limits.peak_flop_per_s
    assert 1.3 < sixteen / eight < 1.1 * peaks["float8"].value / peaks["bfloat16"].value
    assert 1.3 < eight / four < 1.1 * peaks["float4"].value / peaks["float8"].value
