"""Quantities as people write them: units mean what they say, numbers alone what they always did, slips are one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._cli.app import run
from steptime._hardware.description import RANGES
from steptime._units import BANDWIDTH, DURATION, FREQUENCY, GB_PER_S, MINUTES, NANOSECONDS, POWER, RATE, SIZE, Dimension
from steptime.errors import InputError

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
EVERY = (BANDWIDTH, DURATION, FREQUENCY, GB_PER_S, MINUTES, NANOSECONDS, POWER, RATE, SIZE)


@pytest.mark.parametrize(
    ("dimension", "text", "value"),
    [
        (SIZE, "30GB", 30e9), (SIZE, "80 GiB", 80 * 2**30), (SIZE, "80gib", 80 * 2**30), (SIZE, "30e9", 30e9),
        (SIZE, "1.5TB", 1.5e12), (SIZE, "512 kB", 512e3), (SIZE, "7 bytes", 7), (DURATION, "90", 90), (DURATION, "2m", 120),
        (DURATION, "1.5h", 5400), (DURATION, "250ms", 0.25), (MINUTES, "2", 2), (MINUTES, "90s", 1.5), (POWER, "0.7kW", 700),
        (POWER, "500W", 500), (NANOSECONDS, "5us", 5e3), (NANOSECONDS, "5 µs", 5e3), (FREQUENCY, "1.98GHz", 1.98e9),
        (BANDWIDTH, "3.35TB/s", 3.35e12), (BANDWIDTH, "400Gbit/s", 50e9), (BANDWIDTH, "400Gb/s", 50e9), (GB_PER_S, "50", 50),
        (GB_PER_S, "400Gbps", 50), (RATE, "989TFLOPS", 989e12),
    ],
)  # fmt: skip
def test_units_mean_what_they_say(dimension: Dimension, text: str, value: float) -> None:
    assert dimension.parse(text, "--x") == pytest.approx(value)


@given(st.floats(0, 1e15, allow_nan=False), st.sampled_from(EVERY))
def test_a_number_alone_keeps_its_meaning(value: float, dimension: Dimension) -> None:
    assert dimension.parse(repr(value), "--x") == value


@given(st.text(max_size=30), st.sampled_from(EVERY))
def test_whatever_is_written_is_a_quantity_or_one_line(text: str, dimension: Dimension) -> None:
    try:
        value = dimension.parse(text, "--x")
    except InputError as error:
        assert str(error).startswith("--x ")
        assert dimension.examples in str(error)
    else:
        assert 0 <= value < float("inf")


@pytest.mark.parametrize("text", ["30Gb", "30G", "GB", "-30GB", "30 GB GB", "nan", "inf", "1e999", "9" * 5000, "", "0x10"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^--memory .*30GB, 80GiB"):
        SIZE.parse(text, "--memory")


def test_numbers_of_descriptions_may_have_units() -> None:
    assert RANGES["memory_bytes"].check("x: memory_bytes", "80GB") == 80e9
    assert RANGES["bandwidth_bytes_per_s"].check("x", "3.35TB/s") == 3.35e12
    with pytest.raises(InputError, match="no unit 'XB'"):
        RANGES["memory_bytes"].check("x: memory_bytes", "80XB")
    with pytest.raises(InputError, match="expected a number of SMs"):
        RANGES["sms"].check("x: sms", "132")


@pytest.mark.parametrize("option", ["--memory", "--price"])
def test_an_option_with_another_unit_is_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(CONFIGS / "llama-8b.toml"), "--platform", "8xh200-nvlink", option, "3 parsecs"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"steptime: error: {option} '3 parsecs': ")
    assert said.count("\n") == 1
