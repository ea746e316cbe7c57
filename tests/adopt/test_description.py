from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.adopt.test_machine import driver, smi

from steptime._hardware.description import Quantity
from steptime._hardware.device import read_device
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.question import Question
from steptime_lab.adopt.description import Nearest, device_limits, device_toml, features, nearest, peaks
from steptime_lab.adopt.machine import GpuFacts, facts
from steptime_lab.measurements.kernels import Row

SMALL: dict[str, Any] = {
    "name": "NVIDIA Thing 16",
    "sms": 40.0,
    "memory_bytes": 16e9,
    "memory_bus_bits": 256.0,
    "cache_bytes": 4e6,
}


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> GpuFacts:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return facts(driver(), smi())


def product(side: int, dtype: str, tflop_per_s: float, *, tf32: bool = False) -> Row:
    call = Call("aten::mm.default", (TensorArg((side, side), dtype), TensorArg((side, side), dtype)))
    time_ns = 2 * side**3 / tflop_per_s / 1e3
    return Row(Question(call, tf32=tf32), "matmul", "sweep", "fit", time_ns, (time_ns,), 0.0, ("gemm",), (time_ns,))


def test_a_known_name_has_its_data_sheet_and_what_the_driver_says(h200: GpuFacts) -> None:
    like = nearest(h200)
    assert (like.limits.name, like.named) == ("h200", True)
    assert peaks(h200, like, ())["bfloat16"] == like.limits.peak_flop_per_s["bfloat16"]
    limits = device_limits(h200, like, ())
    assert limits["memory_bytes"].value == h200.memory_bytes
    assert limits["host_bandwidth_bytes_per_s"].value == pytest.approx(63e9, rel=0.01)
    assert features(like, limits, peaks(h200, like, ())) == like.limits.features


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 42.3e9, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100"),
        ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
        ("NVIDIA H100 PCIe", 85e9, "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", 25.4e9, "rtx-4090"),
    ],
)
def test_cards_of_one_name_are_told_apart_by_the_rest_of_it(h200: GpuFacts, name: str, memory: float, expected: str) -> None:
    like = nearest(replace(h200, name=name, memory_bytes=memory))
    assert (like.limits.name, like.named) == (expected, True)


def test_a_slice_has_no_data_sheet_of_its_own(h200: GpuFacts) -> None:
    assert not nearest(replace(h200, name="NVIDIA H200 MIG 1g.18gb", sms=16, memory_bytes=18e9)).named


def test_an_unknown_card_has_the_peaks_that_its_products_show_and_else_those_of_the_nearest_by_sms_and_clock(
    h200: GpuFacts,
) -> None:
    card = replace(h200, **SMALL)
    like = nearest(card)
    assert not like.named
    found = peaks(card, like, [product(4096, "bfloat16", 64.0), product(64, "bfloat16", 900.0)])
    assert found["bfloat16"].value == pytest.approx(64e12 / like.limits.reach.peak.value)
    assert "measured products" in found["bfloat16"].source
    slower = 40 * card.clock_hz / (like.limits.sms.value * like.limits.clock_hz.value)
    assert found["float32"].value == pytest.approx(slower * like.limits.peak_flop_per_s["float32"].value)


def test_assumptions_go_by_the_limits_they_belong_to(h200: GpuFacts) -> None:
    card = replace(h200, **SMALL)
    like = Nearest(read_device("h200"), named=False)
    limits = device_limits(card, like, ())
    peak = {name: Quantity(value.value / 10, "") for name, value in like.limits.peak_flop_per_s.items()}
    found = features(like, limits, peak)
    before = like.limits.features
    bandwidth = limits["bandwidth_bytes_per_s"].value / like.limits.bandwidth_bytes_per_s.value
    assert found["launched"]["read_bytes_per_ns"].value == pytest.approx(
        before["launched"]["read_bytes_per_ns"].value * bandwidth
    )
    assert found["launched"]["l1_bytes"].value == before["launched"]["l1_bytes"].value
    cache = 4e6 / like.limits.cache_bytes.value
    assert found["lookups"]["l2_kept_bytes"].value == pytest.approx(before["lookups"]["l2_kept_bytes"].value * cache, rel=1e-4)
    assert found["matmul"]["nvjet_flop_per_s"].value == pytest.approx(before["matmul"]["nvjet_flop_per_s"].value / 10)
    of_sm = 0.1 * 132 / 40
    assert found["attention"]["flash_forward"].value == pytest.approx(
        before["attention"]["flash_forward"].value * of_sm, rel=1e-4
    )


def test_the_file_is_read_as_a_device_whose_gaps_another_one_fills(h200: GpuFacts, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(device_toml(replace(h200, **{**SMALL, "name": 'A "card"'}), "mine", ()), encoding="utf-8")
    found = read_device(file)
    assert (found.name, found.models, found.sms.value, found.title) == ("mine", "mine", 40, 'A "card", 16 GB, adopted')
    assert found.memory_bytes.source.startswith("what the driver says")
    assert found.power_w is not None
    assert found.power_w.value == 700
    assert not found.analytic
    assert found.carried_from == "h200"
    assert found.carried is not None
    assert all(factor.value > 1 for factor in found.carried.interval_factor.values())


def test_a_driver_that_does_not_say_its_memory_clock_is_measured(h200: GpuFacts) -> None:
    card = replace(h200, name="NVIDIA Thing", memory_clock_khz=0.0)
    like = nearest(card)
    call = Call("aten::relu.default", (TensorArg((1 << 26,)),))
    row = Row(Question(call), "activation", "sweep", "fit", 1e6, (1e6,), 0.0, ("relu",), (1e6,))
    found = device_limits(card, like, [row])["bandwidth_bytes_per_s"]
    assert found.value == pytest.approx(2 * 4 * 2**26 / 1e-3 / like.limits.reach.bandwidth.value)
    assert "measured activations" in found.source
    assert "as" in device_limits(card, like, ())["bandwidth_bytes_per_s"].source
