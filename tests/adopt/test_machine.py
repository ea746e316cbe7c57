from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steptime.errors import InputError
from steptime_lab.adopt.machine import FILE, GpuFacts, facts

H200 = {
    "name": "NVIDIA H200",
    "memory_bytes": 150e9,
    "clock_khz": 1_980_000.0,
    "sms": 132.0,
    "memory_clock_khz": 3_201_000.0,
    "memory_bus_bits": 6_144.0,
    "cache_bytes": 62_914_560.0,
    "threads_per_sm": 2_048.0,
    "capability_major": 9.0,
    "capability_minor": 0.0,
}
ALONE = "0, NVIDIA H200, 580.1, 700.00, GPU-aa"


def smi(gpus: str = ALONE, asked: str = "700.00, 1980, 5, 16, 0", apps: str = "") -> Callable[[Sequence[str]], str]:
    """An nvidia-smi that says so."""

    def say(arguments: Sequence[str]) -> str:
        if "compute-apps" in arguments[0]:
            return apps
        return gpus if arguments[0].startswith("--query-gpu=index") else asked

    return say


def driver(**changed: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: {**H200, **changed}


@pytest.fixture(autouse=True)
def every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_limits_come_from_the_driver_and_from_nvidia_smi() -> None:
    found = facts(driver(), smi())
    assert (found.sms, found.gpus, found.power_limit_w, found.driver) == (132, 1, 700, "580.1")
    assert found.clock_hz == pytest.approx(1.98e9)
    assert found.bandwidth_bytes_per_s == pytest.approx(4.92e12, rel=0.01)
    assert not found.slice


def test_what_the_driver_or_nvidia_smi_does_not_say_is_nothing_rather_than_an_error() -> None:
    found = facts(driver(memory_clock_khz=0.0), smi(asked="[N/A], [N/A], 5"))
    assert (found.bandwidth_bytes_per_s, found.power_limit_w, found.pcie_generation, found.pcie_lanes) == (0, 0, 5, 0)
    assert found.clock_hz == pytest.approx(1.98e9)


def test_several_gpus_of_one_kind_are_counted_and_of_several_kinds_refused() -> None:
    second = "1, NVIDIA H200, 580.1, 700.00, GPU-bb"
    assert facts(driver(), smi(f"{ALONE}\n{second}")).gpus == 2
    with pytest.raises(InputError, match=r"GPUs of 2 kinds here .*CUDA_VISIBLE_DEVICES"):
        facts(driver(), smi(f"{ALONE}\n{second.replace('H200', 'L4')}"))


def test_a_slice_of_a_gpu_is_one_rank_with_limits_of_its_own() -> None:
    found = facts(driver(name="NVIDIA H200 MIG 1g.18gb", sms=16.0, memory_bytes=18e9), smi(f"{ALONE}\n{ALONE}"))
    assert found.slice
    assert (found.gpus, found.sms) == (1, 16)


def test_a_gpu_that_others_use_is_refused_and_an_idle_process_on_it_is_not() -> None:
    stranger = "4711, python, 900 MiB"
    with pytest.raises(InputError, match="GPU 0 is 37 % busy with another process"):
        facts(driver(), smi(asked="700, 1980, 5, 16, 37", apps=stranger))
    assert facts(driver(), smi(asked="700, 1980, 5, 16, 1", apps=stranger)).sms == 132


@pytest.mark.parametrize(("told", "listed"), [({}, ALONE), (H200, "")])
def test_a_machine_without_a_gpu_or_a_driver_has_nothing_to_adopt(told: Mapping[str, Any], listed: str) -> None:
    with pytest.raises(InputError, match="no NVIDIA GPU here"):
        facts(lambda: told, smi(listed))


def test_a_card_of_16_gb_is_adopted_and_one_of_2_is_not() -> None:
    assert facts(driver(memory_bytes=15.8e9), smi()).memory_bytes == 15.8e9
    with pytest.raises(InputError, match=r"has 2\.0 GB; adopting needs 3"):
        facts(driver(memory_bytes=2e9), smi())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = facts(driver(), smi())
    found.write(tmp_path / FILE)
    assert GpuFacts.read(tmp_path / FILE) == found


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / FILE
    facts(driver(), smi()).write(file)
    text, dice = file.read_text(encoding="utf-8"), random.Random(0)
    refused = 0
    for _ in range(500):
        place = dice.randrange(len(text))
        file.write_text(
            text[:place] + dice.choice(["", "x", '"', "}", "-", "null", "1e999"]) + text[place + 1 :], encoding="utf-8"
        )
        try:
            GpuFacts.read(file)
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 100
    file.write_text(json.dumps({"schema_version": 7}), encoding="utf-8")
    with pytest.raises(InputError, match="of version 7, this steptime reads 1"):
        GpuFacts.read(file)


def test_the_name_says_whether_it_is_a_slice() -> None:
    found = facts(driver(), smi())
    assert replace(found, name="NVIDIA A100-SXM4-80GB MIG 3g.40gb").slice
