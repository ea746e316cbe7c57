"""Which expert each token goes to, where a model decides by values that are not there: every expert gets as many.

What picks one or several of few classes (`topk`, `argmax`, ...) gives numbers that are then known: masks, counts, splits and
loops over experts have the shapes of a balanced mixture. `--expert-skew` makes the fullest expert larger.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from steptime.errors import InputError

SKEW = "STEPTIME_EXPERT_SKEW"
"""The environment variable that says how many times as many tokens as the mean the fullest expert gets."""

MOST_CLASSES = 1024
_aten: Any = torch.ops.aten
# By op, the place of its result that has the classes.
ROUTES = {_aten.topk.default: 1, _aten.argmax.default: 0, _aten.max.dim: 1, _aten.multinomial.default: 0}


def skew() -> float:
    """How many times as many tokens as the mean the fullest expert gets."""
    text = os.environ.get(SKEW, "1")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1.0 <= value <= MOST_CLASSES:
        raise InputError(f"--expert-skew {text}: expected how many times the mean the fullest expert gets, 1 to {MOST_CLASSES}")
    return value


def classes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> tuple[int, int]:
    """Of how many classes an op picks, and along which dimension of its result the picked ones lie; 0: of no few."""
    source = args[0]
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    dim = named.get("dim", -1)
    if dim is None or not source.dim() or not result.numel():
        return 0, 0
    count = source.shape[dim]
    along = dim % source.dim() if result.dim() == source.dim() else -1
    return (count if 2 <= count <= MOST_CLASSES else 0), along


def balanced(result: torch.Tensor, count: int, along: int) -> torch.Tensor:
    """Classes for a result of this shape: the first gets its share of rows, the others take turns in what is left."""
    each = result.shape[along] if along >= 0 else 1
    rows = result.numel() // each
    if each >= count:
        chosen = torch.arange(count).expand(rows, count)[:, :each]
    else:
        share = min(1.0, skew() * each / count)
        fullest = torch.floor(torch.arange(1, rows + 1) * share).diff(prepend=torch.zeros(1)) > 0
        others = 1 + torch.arange(rows * each) % (count - 1)
        chosen = others.view(rows, each)
        # Rows that the fullest gets give up one of theirs, and what follows moves up: all others stay even.
        free = torch.ones(rows, each, dtype=torch.bool)
        free[:, 0] = ~fullest
        turns = (free.flatten().cumsum(0) - 1).view(rows, each)
        chosen = torch.where(free, 1 + turns % (count - 1), 0)
    if along < 0:
        return chosen.reshape(result.shape)
    moved = list(result.shape)
    moved.append(moved.pop(along))
    return chosen.reshape(moved).movedim(-1, along)
