"""Values of a sweep's options: lists, ranges and named variants; whatever else is written is one clear line."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from steptime._build.settings import parsed
from steptime._sweep.axes import (
    MOST_POINTS,
    SweepPoint,
    listed,
    named_variant,
    points_of,
    quantities,
    setting_axis,
    whole_numbers,
)
from steptime._units import POWER
from steptime.errors import InputError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8", [8]),
        ("1,2,4", [1, 2, 4]),
        ("32:512", [32, 64, 128, 256, 512]),
        ("32:500", [32, 64, 128, 256]),
        ("32:128:32", [32, 64, 96, 128]),
        ("1:4,3,4", [1, 2, 4, 3]),
        ("7:7", [7]),
    ],
)
def test_ranges_double_or_go_in_steps(text: str, values: list[int]) -> None:
    assert whole_numbers("--batch", text) == values


@pytest.mark.parametrize(
    "text", ["", ",", "0", "-1", "x", "1,,2", "8:4", "0:8", "1:8:0", "1:2:3:4", "1e3", "9" * 20, "1:999999999999:1", "\u0663"]
)
def test_what_is_no_number_is_said(text: str) -> None:
    with pytest.raises(InputError, match="--batch"):
        whole_numbers("--batch", text)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("parallel.fsdp=1,8", "parallel.fsdp", [1, 8]),
        ("bottom=[256,64],[512,64]", "bottom", [[256, 64], [512, 64]]),
        ("precision=bf16,fp32", "precision", ["bf16", "fp32"]),
        ('name="a,b",c', "name", ["a,b", "c"]),
        ("layers=12:48:12", "layers", [12, 24, 36, 48]),
        ("causal=true,false", "causal", [True, False]),
        ("plan=", "plan", [None]),
        ("x=1,true,1.0", "x", [1, True, 1.0]),
    ],
)
def test_values_of_a_key(text: str, key: str, values: list[Any]) -> None:
    found = setting_axis(text)
    assert found == (key, values)
    assert [type(each) for each in found[1]] == [type(each) for each in values]


def test_watts_have_units_and_ranges() -> None:
    assert quantities("--power-cap", "300:700:200,0.35kW,400W", POWER) == [300, 500, 700, 350, 400]


def test_variants_have_a_name_and_settings() -> None:
    assert named_variant("ddp:") == ("ddp", {})
    assert named_variant("tp 8: parallel.tensor=8, parallel.sequence=true") == (
        "tp 8",
        {"parallel.tensor": 8, "parallel.sequence": True},
    )
    assert named_variant("w: bottom=[1, 2], top=[1]") == ("w", {"bottom": [1, 2], "top": [1]})


def test_points_are_all_combinations_in_order() -> None:
    found = points_of({"a": [1, 2], "b": ["x", "y"]}, {"one": {}, "two": {"c": 3}})
    assert len(found) == 8
    assert found[0] == SweepPoint({"a": 1, "b": "x", "variant": "one"})
    assert found[-1] == SweepPoint({"a": 2, "b": "y", "variant": "two", "c": 3})
    with pytest.raises(InputError, match="a is given for all variants and again in variant 'two'"):
        points_of({"a": [1]}, {"two": {"a": 2}})
    with pytest.raises(InputError, match="combinations; expected"):
        points_of({"a": range(MOST_POINTS), "b": [1, 2]})


_PIECES = (
    "1", "8", "32:512", "1:64:8", ",", ",,", "[1,2]", "[", "]", "{a=1}", "{", "}", '"', "'", "a", "parallel.fsdp", "=", "==",
    ":", "bf16", "true", "1e400", "nan", "inf", "-1", "0", " ", "\n", "\t", "\x00", "\u00e9", "\u0663", "9" * 25, "#", ";",
    "\\", "*", "tables[*].rows", "0x10", "1_000", "2020-01-01", "12:30:00", "'a,b'", '"""', "[[", "x=1",
)  # fmt: skip


def test_any_text_is_values_or_one_line() -> None:
    draws = random.Random(21)
    readers: tuple[Callable[[str], Any], ...] = (
        lambda text: whole_numbers("--batch", text), lambda text: quantities("--power-cap", text, POWER), setting_axis,
        named_variant, parsed, lambda text: listed(text, "--platform"),
    )  # fmt: skip
    refused = 0
    for _ in range(3000):
        text = "".join(draws.choice(_PIECES) for _ in range(draws.randint(0, 7)))
        for read in readers:
            try:
                found = read(text)
            except InputError as error:
                refused += 1
                assert "\n" not in str(error)
                assert len(str(error)) < 400
                continue
            flat = found if isinstance(found, list) else [found]
            assert len(flat) <= MOST_POINTS
            if read in readers[:2]:
                assert all(isinstance(each, int | float) and math.isfinite(each) for each in flat)
    assert 3000 < refused < 18_000
