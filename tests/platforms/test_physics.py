"""No answer beyond physics: no device beats its peaks or its memory, or multiplies formats that its tensor cores lack."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import steptime
from steptime._hardware.device import device_names
from steptime._models.kernels.call import Call, TensorArg, flop_of
from steptime._models.kernels.family import families
from steptime._models.kernels.question import Question
from steptime._platforms.device import Device
from steptime.errors import UnsupportedError

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
# Sizes of products: square, a layer's, few rows, and no multiple of a tile.
PRODUCTS = ((8192, 8192, 8192), (16384, 4096, 16384), (4096, 14336, 4096), (8208, 8208, 8208))
FORMATS = ("float32", "bfloat16", "float16", "float64")
EIGHT_BITS = ("float8", "float8_e4m3fn", "float8_e5m2", "c10::Float8_e4m3fn")
# Far beyond every cache, so that memory has to move nearly all of it.
LARGE = (1 << 14, 1 << 16)


@cache
def device(name: str) -> Device:
    families()
    return Device.load(name)


def time_ns(name: str, op: str, *args: Any, tf32: bool = False) -> float:
    (result,) = device(name).estimates([Question(Call(op, args), tf32=tf32)])
    return result.estimate.time_ns


def flop_per_s(name: str, op: str, *args: Any, tf32: bool = False) -> float:
    return 1e9 * flop_of(Call(op, args)) / time_ns(name, op, *args, tf32=tf32)


def scaled(rows: int, columns: int, inner: int, dtype: str, *, by_row: bool) -> tuple[Any, ...]:
    scales = (TensorArg((rows, 1)), TensorArg((1, columns))) if by_row else (TensorArg(()), TensorArg(()))
    left, right = TensorArg((rows, inner), dtype), TensorArg((columns, inner), dtype).transposed()
    return left, right, *scales, None, None, None, True


@pytest.mark.parametrize("name", device_names())
def test_no_product_beats_the_peak_of_its_format(name: str) -> None:
    limits = device(name).limits
    for rows, columns, inner in PRODUCTS:
        for dtype in FORMATS:
            for tf32 in (False, True) if dtype == "float32" else (False,):
                peak = limits.peak_flop_per_s[limits.rated("tf32" if tf32 else dtype)].value / limits.share
                args = TensorArg((rows, inner), dtype), TensorArg((inner, columns), dtype)
                assert flop_per_s(name, "aten::mm.default", *args, tf32=tf32) <= peak, (rows, columns, inner, dtype, tf32)


@pytest.mark.parametrize("name", device_names())
def test_no_product_of_eight_bits_beats_the_peak_however_they_are_spelled(name: str) -> None:
    limits = device(name).limits
    if "float8" not in limits.peak_flop_per_s:
        pytest.skip("has none")
    for rows, columns, inner in PRODUCTS:
        for by_row in (False, True):
            calls = [scaled(rows, columns, inner, each, by_row=by_row) for each in EIGHT_BITS]
            times = {time_ns(name, "aten::_scaled_mm.default", *args) for args in calls}
            assert len(times) == 1
            peak = limits.peak_flop_per_s["float8"].value / limits.share
            assert 2e9 * rows * columns * inner / times.pop() <= peak, (rows, columns, inner, by_row)


@pytest.mark.parametrize("name", device_names())
def test_no_kernel_moves_more_than_its_memory_does(name: str) -> None:
    """Parts of a device share its memory, and were measured while the others did not always use it."""
    limits = device(name).limits
    x, row = TensorArg(LARGE), TensorArg((LARGE[1],))
    calls = (  # tensors of this size that each has to read or write
        (3, "aten::add.Tensor", x, x),
        (2, "aten::copy_.default", x, x),
        (2, "aten::gelu.default", x),
        (2, "aten::_softmax.default", x, -1, False),
        (2, "aten::native_layer_norm.default", x, (LARGE[1],), row, row, 1e-5),
        (1, "aten::sum.dim_IntList", x, (-1,)),
    )
    for count, op, *args in calls:
        moved = count * x.nbytes - 2 * limits.cache_bytes.value
        assert moved / time_ns(name, op, *args) <= limits.bandwidth_bytes_per_s.value / 1e9, op


@pytest.mark.parametrize("name", device_names())
def test_attention_beats_no_peak(name: str) -> None:
    limits = device(name).limits
    each = TensorArg((8, 16, 4096, 128), "bfloat16")
    op = "aten::_scaled_dot_product_flash_attention.default"
    peak = limits.peak_flop_per_s[limits.rated("bfloat16")].value / limits.share
    assert flop_per_s(name, op, each, each, each, 0.0, False) <= peak


@pytest.mark.parametrize(("name", "dtype"), [("a100", "float8"), ("v100", "float8"), ("a10", "fp8"), ("h100", "float4x2")])
def test_a_format_that_a_device_lacks_is_refused(name: str, dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} has no tensor cores for products in {dtype}"):
        device(name).limits.check_format(dtype, "a step")
    for wider in ("float32", "bfloat16", "float16", "bf16"):
        device(name).limits.check_format(wider, "a step")


@pytest.mark.parametrize(
    ("platform", "precision"),
    [("8xa100-nvlink", "fp8"), ("8xa100-nvlink", "nvfp4"), ("8xh200-nvlink", "nvfp4"), ("8xh100-nvlink", "mxfp8")],
)
def test_precisions_that_a_device_lacks_are_refused_by_every_command(platform: str, precision: str) -> None:
    small = {"layers": 2, "precision": precision}
    with pytest.raises(UnsupportedError, match=f"has no tensor cores for products in {precision}"):
        steptime.predict(CONFIGS / "llama-8b.toml", platform, settings=small)
    with pytest.raises(UnsupportedError, match=f"has no tensor cores for products in {precision}"):
        steptime.plan(CONFIGS / "llama-8b.toml", platform, settings=small)
    swept = steptime.sweep(CONFIGS / "llama-8b.toml", platform, settings={"layers": 2, "precision": ["bf16", precision]})
    assert [each.settings["precision"] for each in swept.variants] == ["bf16"]
    assert [f"has no tensor cores for products in {precision}" in each.reason for each in swept.left_out] == [True]


def test_precisions_that_a_device_has_are_answered() -> None:
    for platform, precision in (("8xh200-nvlink", "fp8"), ("8xb200-nvlink", "mxfp8"), ("8xb200-nvlink", "nvfp4")):
        assert (
            steptime.predict(CONFIGS / "llama-8b.toml", platform, settings={"layers": 2, "precision": precision}).step_time_ms
            > 0
        )
