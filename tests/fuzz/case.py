"""A case: a command, the files it reads, and what it may write. A kind makes one from a stream of random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.program.mutations import BYTES
from tests.support.mutated import mutated_number, mutated_text, mutated_tree, written_json

Content = str | bytes | Path  # a path: the file as it is


@dataclass(frozen=True)
class Case:
    """A command whose words that are names of files are given as their paths."""

    arguments: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()  # files that it writes where it succeeds
    may: tuple[str, ...] = ()  # files that it may write where it succeeds
    command: Callable[[list[str]], int] | None = None  # what takes the words, if not the command line
    before: Case | None = None  # the same without a small change: the step may then differ by little


Kind = Callable[[random.Random], Case]


def draw_of(kind: str, number: int) -> random.Random:
    """The random numbers of a case: the same on every machine, whatever other kinds there are."""
    return random.Random(f"{kind} {number}")


def damaged_text(draw: random.Random, text: str) -> str | bytes:
    """Damaged now and then as bytes are, mostly as values are, sometimes twice."""
    if draw.random() < 0.15:
        return draw.choice(BYTES)(draw, text.encode())
    for _ in range(draw.choice((1, 1, 1, 2))):
        text = mutated_text(text, draw)
    return text


def damaged_json(draw: random.Random, tree: object) -> str | bytes:
    """The same of a JSON document."""
    if draw.random() < 0.15:
        return draw.choice(BYTES)(draw, written_json(tree).encode())
    for _ in range(draw.choice((1, 1, 1, 2))):
        tree = draw.choice((mutated_tree, mutated_number))(tree, draw)
    return written_json(tree)
