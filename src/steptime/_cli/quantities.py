"""Options that take a quantity as people write it: `--memory 30GB`, `--limit 2m`, `--power-cap 500W`."""

from __future__ import annotations

import math
from collections.abc import Callable

from steptime._units import MIB, PRICE, SIZE, Dimension
from steptime.errors import InputError


def quantity(option: str, dimension: Dimension, least: float = 0.0) -> Callable[[str], float]:
    """What reads an option: a number with or without a unit; a number alone means what it always did."""

    def parsed(text: str) -> float:
        value = dimension.parse(text.removeprefix("$") if dimension is PRICE else text, option)
        result = math.floor(value) if dimension is SIZE else value
        if dimension is SIZE and least <= result < MIB and text.strip().isdecimal():
            raise InputError(f"{option} {text}: {text.strip()} is in bytes; did you mean {text.strip()}GB?")
        if result < least:
            raise InputError(f"{option} {text}: expected {least:g} or more, such as {dimension.examples}")
        return result

    return parsed
