"""Nothing that launches is left out without a word: what cannot be used is guessed, counted and refused by `strict`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steptime._ops.operations import operations_of
from steptime._platforms.device import FACTOR, guess
from steptime._platforms.platform import Platform
from steptime._program.load import load
from steptime._program.program import Tensor
from steptime._program.workload import Workload
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"
QUARTERS = "4xh200-quarter-loopback"
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_sync", "gpu_user_annotation")


def changed(tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Workload:
    """One rank of the example, its file changed."""
    content = json.loads(gzip.decompress((EXAMPLE / name).read_bytes()))
    change(content)
    file = tmp_path / name.removesuffix(".gz")
    file.write_text(json.dumps(content))
    return load([file])


def busy_ms(workload: Workload) -> tuple[float, str]:
    """Computation of the first rank, and all that is said."""
    found = predict_on(workload, Platform.load(QUARTERS))
    return found.ranks[0].compute_ms, " ".join(text for texts in found.notices for text in texts)


def on_cpu(content: dict[str, Any]) -> None:
    text = json.dumps(content["nodes"]).replace('"cuda:0"', '"cpu"')
    content["nodes"] = json.loads(text)


def emptied(key: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for node in content["nodes"]:
            for side in ("inputs", "outputs"):
                if side in node:
                    node[side][key] = []

    return change


def without_device_events(content: dict[str, Any]) -> None:
    content["traceEvents"] = [event for event in content["traceEvents"] if event.get("cat") not in DEVICE_EVENTS]


def test_a_step_recorded_on_a_cpu_takes_as_long_as_on_a_device_and_that_is_said(tmp_path: Path) -> None:
    workload = changed(tmp_path, "rank0.et.json.gz", on_cpu)
    busy, said = busy_ms(workload)
    expected, silent = busy_ms(load([EXAMPLE / "rank0.et.json.gz"]))
    assert busy == pytest.approx(expected, rel=0.02)
    assert "recorded on a CPU" in said and "recorded on a CPU" not in silent
    with pytest.raises(InputError, match="recorded on a CPU"):
        predict_on(workload, Platform.load(QUARTERS), strict=True)


@pytest.mark.parametrize("key", ["types", "values"])
def test_ops_without_usable_arguments_are_counted(tmp_path: Path, key: str) -> None:
    workload = changed(tmp_path, "rank0.et.json.gz", emptied(key))
    busy, said = busy_ms(workload)
    assert busy > 0.0
    assert "no usable arguments are recorded of ops of " in said and "% of the kernels' time (aten::copy_ (26)" in said
    with pytest.raises(InputError, match=r"has no model on h200-quarter \(rank 0, 105 such calls\)"):
        predict_on(workload, Platform.load(QUARTERS), strict=True)


def test_a_kineto_trace_without_device_events_is_guessed_from_its_ops_and_refused_by_strict(tmp_path: Path) -> None:
    workload = changed(tmp_path, "rank0.kineto.json.gz", without_device_events)
    busy, said = busy_ms(workload)
    expected, _ = busy_ms(load([EXAMPLE / "rank0.kineto.json.gz"]))
    assert busy == pytest.approx(expected, rel=0.3)  # a recording also has copies and kernels that its ops do not tell of
    assert "have no device event" in said
    with pytest.raises(InputError, match="no device event"):
        predict_on(workload, Platform.load(QUARTERS), strict=True)


def test_products_without_a_model_count_operations() -> None:
    left, right = Tensor((4096, 4096), "float8_e4m3fn"), Tensor((4096, 4096), "float8_e4m3fn", (1, 4096))
    scales = (Tensor((4096, 1), "float32"), Tensor((1, 4096), "float32"))
    scaled = operations_of("aten::_scaled_mm", (), (left, right, *scales))
    assert scaled == 2.0 * 4096**3
    rows, experts = Tensor((8192, 1024), "bfloat16"), Tensor((8, 1024, 512), "bfloat16")
    assert operations_of("aten::_grouped_mm", (), (rows, experts, Tensor((8,), "int32"))) == 2.0 * 8192 * 1024 * 512
    heads = Tensor((2, 8, 128, 64), "bfloat16")
    assert operations_of("flash_attn::_flash_attn_forward", (), (heads,) * 3) == 4.0 * heads.numel * 128
    assert operations_of("aten::frobnicate", (), (rows,)) == rows.numel
    limits = Platform.load("1xh200").device.limits
    estimate = guess(limits, scaled, 3 * 4096.0**2, "float8_e4m3fn")
    # Near the data sheet's rate of FP8, never above it.
    assert 1.0 <= estimate.time_ns / (1e9 * scaled / 1979e12) <= 1.3
    assert (estimate.low_ns, estimate.high_ns) == (estimate.time_ns / FACTOR, estimate.time_ns * FACTOR)
