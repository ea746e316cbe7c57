"""What a sweep varies: axes from texts such as `32:512` or `1,8`, and every combination of their values as a point."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from steptime._build.config_values import shortened
from steptime._build.settings import parsed, value_of
from steptime._units import Dimension
from steptime.errors import InputError

MOST_POINTS = 100_000
"""Of one sweep: they would take hours, and are a slip of the keyboard."""

_RANGE = re.compile(r"(\d{1,12}):(\d{1,12})(?::(\d{1,12}))?", re.ASCII)
_WHOLE = re.compile(r"\d{1,12}", re.ASCII)
_NAMED = re.compile(r"\s*([^:=,\[\]{}]{1,60}?)\s*:(.*)", re.DOTALL)
_OPEN, _CLOSE, _QUOTES = "[{", "]}", "\"'"

Axes = Mapping[str, Sequence[Any]]
Variants = Mapping[str, Mapping[str, Any]]
VARIANT = "variant"
"""The axis of named variants."""


@dataclass(frozen=True)
class SweepPoint:
    """One combination: the values of all axes, and of the keys of its named variant."""

    settings: Mapping[str, Any]


def listed(text: str, option: str) -> list[str]:
    """What stands between commas, each once; commas inside brackets, braces or quotes separate nothing."""
    parts, depth, quote, begin = [], 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    if quote or depth:
        raise InputError(f"{option} {shortened(text)}: a bracket or a quote has no partner")
    values = list(dict.fromkeys(each.strip() for each in (*parts, text[begin:])))
    if not all(values):
        raise InputError(f"{option} {shortened(text)}: expected one value, or several with commas between")
    return values


def whole_numbers(option: str, text: str) -> list[int]:
    """Whole numbers between commas, and ranges: `32:512` doubles from 32 to 512, `32:512:64` goes in steps of 64."""
    values: list[int] = []
    for each in listed(text, option):
        span = _ranged(each, option)
        if span is None and (_WHOLE.fullmatch(each) is None or int(each) < 1):
            raise InputError(
                f"{option} {shortened(text)}: {shortened(each)} is no whole number of 1 or more, nor a range as 32:512"
            )
        values += [int(each)] if span is None else span
    return list(dict.fromkeys(values))


def quantities(option: str, text: str, dimension: Dimension) -> list[float]:
    """Quantities between commas, with or without units, and ranges of whole ones."""
    values: list[float] = []
    for each in listed(text, option):
        span = _ranged(each, option)
        values += [dimension.parse(each, option)] if span is None else span
    return list(dict.fromkeys(values))


def setting_axis(text: str) -> tuple[str, list[Any]]:
    """The key and the values of `KEY=V1,V2`: TOML values or bare words, and ranges."""
    key, given, rest = text.partition("=")
    key, where = key.strip(), f"--set {key.strip()}"
    if not given or not key:
        raise InputError(f"--set {shortened(text)}: expected KEY=VALUE,..., as in --set parallel.fsdp=1,8")
    if not rest.strip():
        return key, [None]
    values: list[Any] = []
    for each in listed(rest, where):
        span = _ranged(each, where)
        values += [value_of(each, where)] if span is None else span
    return key, _once(values)


def named_variant(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of `NAME: KEY=VALUE, KEY=VALUE`; nothing behind the colon is the config as it is."""
    found = _NAMED.fullmatch(text)
    if found is None or not found[1]:
        raise InputError(
            f"--variant {shortened(text)}: expected 'NAME: KEY=VALUE, ...', as in --variant 'tp: parallel.tensor=8'"
        )
    settings: dict[str, Any] = {}
    for each in listed(found[2], f"--variant {found[1]}") if found[2].strip() else ():
        key, value = parsed(each, f"--variant {found[1]}:")
        if key in settings:
            raise InputError(f"--variant {found[1]}: {key} is there twice; give it once")
        settings[key] = value
    return found[1], settings


def points_of(axes: Axes, variants: Variants | None = None) -> list[SweepPoint]:
    """Every combination of the values of all axes, in order, the last axis fastest; with each named variant's settings."""
    named = variants or {}
    for name, values in axes.items():
        if not values:
            raise InputError(f"a sweep needs at least one value of {name}")
        inside = next((variant for variant, settings in named.items() if name in settings), None)
        if inside is not None:
            raise InputError(f"{name} is given for all variants and again in variant {inside!r}; give it in one of the places")
    count = math.prod(len(values) for values in axes.values()) * max(len(named), 1)
    if count > MOST_POINTS:
        raise InputError(f"{count:,} combinations; expected {MOST_POINTS:,} at most: give fewer values")
    return list(_points(axes, named))


def _points(axes: Axes, named: Variants) -> Iterator[SweepPoint]:
    whole: dict[str, Sequence[Any]] = dict(axes)
    if named:
        whole[VARIANT] = list(named)
    for values in product(*whole.values()):
        settings = dict(zip(whole, values, strict=True))
        yield SweepPoint({**settings, **named.get(settings.get(VARIANT, ""), {})})


def _ranged(text: str, where: str) -> list[int] | None:
    """The whole numbers of a range; None where the text is none."""
    found = _RANGE.fullmatch(text)
    if found is None:
        return None
    first, last, step = int(found[1]), int(found[2]), None if found[3] is None else int(found[3])
    if first > last or first < 1 or step == 0:
        raise InputError(f"{where}: {text} is no range; expected FIRST:LAST, which doubles, or FIRST:LAST:STEP, from 1 up")
    if step is None:
        return [first << twice for twice in range((last // first).bit_length())]
    if (last - first) // step >= MOST_POINTS:
        raise InputError(f"{where}: {text} has {(last - first) // step + 1:,} values; expected {MOST_POINTS:,} at most")
    return list(range(first, last + 1, step))


def _once(values: Sequence[Any]) -> list[Any]:
    """Each value once; 1 and true are two."""
    return list({f"{type(each).__name__} {each!r}": each for each in values}.values())
