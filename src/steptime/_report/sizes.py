"""Bytes as people say them."""

from __future__ import annotations

_STEP = 1024
_NAMES = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size_words(size: int) -> str:
    """Bytes with three digits and the unit that fits."""
    value, index = float(size), 0
    while value >= _STEP and index < len(_NAMES) - 1:
        value, index = value / _STEP, index + 1
    return (
        f"{size} {_NAMES[0]}"
        if not index
        else f"{value:.3g} {_NAMES[index]}"
        if value < 1000
        else f"{value:.0f} {_NAMES[index]}"
    )
