"""Which cases of a long list `make test` plays, and which `make test-slow`; `make test-long` plays the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def slow_beyond(count: int, values: Sequence[Any], *, one_in: int = 1) -> list[Any]:
    """The values as parameters of a test, those after the first `count` marked slow, and all but one in some of them long."""
    return _marked(values, lambda at, _: at < count, one_in)


def slow_unless(quick: Sequence[Any], values: Sequence[Any], *, one_in: int = 1) -> list[Any]:
    """The values as parameters of a test, those that are not quick marked slow, and all but one in some of them long."""
    return _marked(values, lambda _, value: value in quick, one_in)


def _marked(values: Sequence[Any], quick: Callable[[int, Any], bool], one_in: int) -> list[Any]:
    marked: list[Any] = []
    for at, value in enumerate(values):
        marks = [pytest.mark.slow] if at % one_in == 0 else [pytest.mark.long]
        marked.append(value if quick(at, value) else pytest.param(value, marks=marks))
    return marked
