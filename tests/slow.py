"""Which cases of a long list `make test` plays; `make test-slow` plays the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def slow_beyond(count: int, values: Sequence[Any]) -> list[Any]:
    """The values as parameters of a test, those after the first `count` marked slow."""
    return [value if at < count else pytest.param(value, marks=pytest.mark.slow) for at, value in enumerate(values)]


def slow_unless(quick: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The values as parameters of a test, those that are not quick marked slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
