from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from steptime._calibrate.harness import conditions
from steptime._calibrate.harness.conditions import ClockReader, Clocks, disturbances, gpus, recipe, strangers
from steptime.errors import InputError

TWO_GPUS = "0, NVIDIA H200, 580.1, 700.00, GPU-aaaa\n1, NVIDIA H200, 580.1, 700.00, GPU-bbbb\n"


def smi_saying(text: str) -> conditions.Smi:
    def smi(_: Sequence[str]) -> str:
        return text

    return smi


def test_the_recipe_names_machine_versions_date_and_command() -> None:
    made = recipe(["steptime", "measure", "host"], smi=smi_saying(TWO_GPUS))
    assert (made.device, made.gpus, made.driver, made.power_limit_w) == ("NVIDIA H200", 2, "580.1", 700.0)
    assert made.command == "steptime measure host"
    assert made.torch
    assert made.python
    assert made.cpu
    assert len(made.date) == 10


def test_two_runs_of_one_command_on_one_machine_differ_in_the_run_alone() -> None:
    one, other = (recipe(["x"], smi=smi_saying(TWO_GPUS)).to_dict() for _ in range(2))
    assert {name for name in one if one[name] != other[name]} == {"run"}


def test_without_a_gpu_one_line_says_so() -> None:
    with pytest.raises(InputError, match="no NVIDIA GPU"):
        recipe(["x"], smi=smi_saying(""))
    assert recipe(["x"], smi=smi_saying(""), need_gpu=False).device == ""


def test_what_is_measured_on_the_cpu_does_not_pass_for_the_gpus() -> None:
    made = recipe(["x"], smi=smi_saying(TWO_GPUS), need_gpu=False)
    assert (made.device, made.gpus) == ("", 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("1, 0", ["1", "0"]),
        ("GPU-bb", ["1"]),
        ("1,7,0", ["1"]),
        ("", []),
        ("MIG-cccc", ["0", "1"]),
    ],
)
def test_only_gpus_that_cuda_may_use_are_counted(
    given: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert [gpu["number"] for gpu in gpus(smi_saying(TWO_GPUS))] == expected


def test_a_gpu_that_will_not_say_its_power_limit_is_still_a_gpu() -> None:
    made = recipe(["x"], smi=smi_saying("0, NVIDIA GeForce, 550.0, [N/A], GPU-cc\n"))
    assert made.power_limit_w == 0.0
    assert len(gpus(smi_saying(TWO_GPUS))) == 2


def test_other_processes_on_the_gpu_are_strangers_and_our_own_are_not() -> None:
    answer = f"{os.getpid()}, python3, 10 MiB\n4242, python3, 900 MiB\n77, ours, 1 MiB\n"
    assert strangers([77], smi_saying(answer)) == ["4242, python3, 900 MiB"]


def test_settings_that_change_times_are_said_and_what_a_container_says_of_itself_is_not() -> None:
    around = {"NCCL_PROTO": "LL", "NCCL_VERSION": "2.28.9-1", "CUDA_LAUNCH_BLOCKING": "1", "HOME": "/root"}
    assert disturbances(around) == ["CUDA_LAUNCH_BLOCKING=1", "NCCL_PROTO=LL"]


def test_the_clock_reader_gives_the_median_of_what_came_since_it_last_looked(tmp_path: Path) -> None:
    file = tmp_path / "clocks.csv"
    times = [0.0]
    reader = ClockReader(file, lambda: times[-1])
    assert reader() is None
    file.write_text("1980, 300.1, 0x0000000000000000\n1965, 300.1, 0x0000000000000004\n345, 80, 0x0000000000000001\n19")
    assert reader() == 1980.0
    with file.open("a") as more:
        more.write("50, 310, 0x0000000000000000\n")
    assert reader() == 1950.0


def test_a_clock_is_known_for_a_minute_after_the_card_was_last_seen_working(tmp_path: Path) -> None:
    file = tmp_path / "clocks.csv"
    times = [0.0]
    reader = ClockReader(file, lambda: times[-1])
    file.write_text("1980, 300.1, 0x0000000000000000\n")
    assert reader() == 1980.0
    times.append(59.0)
    assert reader() == 1980.0
    times.append(61.0)
    assert reader() is None


def test_clocks_that_move_while_the_card_works_are_said(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks.csv")
    lines = ["1980, 600, 0x0000000000000000"] * 10
    clocks.file.write_text("\n".join(lines) + "\n345, 80, 0x0000000000000001\n")
    assert clocks.moved() == ""
    clocks.file.write_text("\n".join(lines + ["1700, 700, 0x0000000000000004"] * 5) + "\n")
    assert "1700 and 1980" in clocks.moved()
