"""How far equal cards and hosts differ, and what the slowest of many costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import erf, exp, pi, sqrt
from pathlib import Path

import numpy as np

import steptime
from steptime._hardware.description import Quantity, quantity, read_toml

SCHEMA_VERSION = 1
FILE = Path(steptime.__file__).parent / "data" / "spread.toml"
# Standard deviations around the mean, and steps of the sum over them.
_WIDEST, _POINTS = 9.0, 3601


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations of ln of the time that equal work takes."""

    card: Quantity
    host: Quantity


@cache
def read_spread(file: Path = FILE) -> Spread:
    """The shipped file."""
    content = read_toml(file, "spread", SCHEMA_VERSION)
    return Spread(quantity(file, content, "card", "spread"), quantity(file, content, "host", "spread"))


@cache
def expected_maximum(count: int) -> float:
    """Of so many independent draws of a standard normal; 0 of one."""
    if count <= 1:
        return 0.0
    places = np.linspace(-_WIDEST, _WIDEST, _POINTS)
    below = np.array([0.5 * (1.0 + erf(place / sqrt(2.0))) for place in places])
    density = np.array([exp(-place * place / 2.0) / sqrt(2.0 * pi) for place in places])
    width = 2.0 * _WIDEST / (_POINTS - 1)
    return float(np.sum(places * count * density * below ** (count - 1)) * width)


def slowest(spread: float, count: int) -> float:
    """How many times as long the slowest of so many takes as the usual one, as is expected."""
    return exp(spread * expected_maximum(count))
