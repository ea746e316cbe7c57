"""Files with one thing in them changed to something that nobody expects, the same way for the same draws."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from steptime.errors import InputError

Row = TypeVar("Row")
WORDS = (
    "0", "-1", "1e-9", "1e18", "1e400", "inf", "nan", "true", "'text'", '"h200"', "[]", "[1]", "{}", "3.35", "9" * 5000,
    "99999999999999999999", "[" * 3000, "\0", "", "7", "2147483648", "1e300", "-0.0", '"' + "x" * 140_000 + '"',
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    0, -1, 1e-9, 1e18, float("inf"), float("nan"), True, None, "text", "\0", [], [1], {}, {"value": 1}, 10**30, 10**400, 3,
    1 << 31, 1e300, "1", [[]], "\x1b[2J", [0, 0], [None], {"kind": "row_wise"}, {"kind": [], "ranks": [0]},
)  # fmt: skip
FACTORS = (-1, 1e-9, 1e-6, 1e-3, 0.1, 2, 10, 1e3, 1e6, 1e9, 1e12, 1e200)
_TOKEN = re.compile(r"\d[\d_.e]*|\"[^\"\n]*\"|true|\[|\]|\{|\}")


def mutated_text(text: str, draw: random.Random) -> str:
    """One number, word or bracket replaced by another, or a line lost."""
    if draw.random() < 0.15:
        lines = text.splitlines()
        del lines[draw.randrange(len(lines))]
        return "\n".join(lines)
    tokens = list(_TOKEN.finditer(text))
    numbers = [token for token in tokens if token[0][0].isdigit()]
    token = draw.choice(numbers if numbers and draw.random() < 0.6 else tokens)
    word = _scaled(token[0], draw) if token[0][0].isdigit() and draw.random() < 0.6 else draw.choice(WORDS)
    return text[: token.start()] + word + text[token.end() :]


def damaged_tables(
    folder: Path, lines: Sequence[str], read: Callable[[Path], tuple[list[Row], list[str]]]
) -> Iterator[list[Row]]:
    """What is read of 500 tables with a few bytes changed; what is refused is one line each, and says which of the file."""
    draw, whole, file = random.Random(20), "\n".join(lines).encode(), folder / "damaged.csv"
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            damaged[draw.randrange(len(damaged))] = draw.choice(b',\n"0129-.e\xff\x00ax')
        file.write_bytes(bytes(damaged))
        try:
            rows, refused = read(file)
        except InputError as error:
            assert "\n" not in str(error)
            continue
        assert all("damaged.csv, line " in line and "\n" not in line for line in refused)
        yield rows


def _scaled(number: str, draw: random.Random) -> str:
    """A number as a slip of unit or of the keyboard leaves it."""
    try:
        value = float(number) * draw.choice(FACTORS)
    except ValueError:
        return number
    return str(int(value)) if number.replace("_", "").isdecimal() and math.isfinite(value) else repr(value)


def mutated_tree(tree: Any, draw: random.Random) -> Any:
    """One value somewhere in a JSON document replaced by another, or lost."""
    if isinstance(tree, dict) and tree and draw.random() < 0.9:
        key = draw.choice(sorted(tree))
        if draw.random() < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        return {**tree, key: mutated_tree(tree[key], draw)}
    if isinstance(tree, list) and tree and draw.random() < 0.9:
        index = draw.randrange(len(tree))
        return [*tree[:index], mutated_tree(tree[index], draw), *tree[index + 1 :]]
    if type(tree) in (int, float) and abs(tree) < 1e300 and draw.random() < 0.6:
        return type(tree)(tree * draw.choice(FACTORS[:-1]))
    return draw.choice(VALUES)


def mutated_number(tree: Any, draw: random.Random) -> Any:
    """One number anywhere in a JSON document a few times as large or small, or that of another place: still plausible."""
    places = list(_numbers(tree, ()))
    if not places:
        return mutated_tree(tree, draw)
    path, value = draw.choice(places)
    if draw.random() < 0.3:
        return _replaced(tree, path, draw.choice(places)[1])
    scaled = value * draw.choice((0, 0.01, 0.3, 0.5, 0.9, 1.1, 2, 3, 7, 100, 1e4, 1e7, 1e10))
    return _replaced(tree, path, int(scaled) if isinstance(value, int) else scaled)


def with_number(tree: Any, draw: random.Random, numbers: Sequence[int | float]) -> Any:
    """One number anywhere in a JSON document replaced by one of these."""
    places = list(_numbers(tree, ()))
    return _replaced(tree, draw.choice(places)[0], draw.choice(numbers)) if places else tree


def _numbers(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int | float]]:
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _numbers(value, (*path, key))
    elif type(tree) in (int, float) and abs(tree) < 1e100:
        yield path, tree


def _replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(tree, dict):
        return {**tree, path[0]: _replaced(tree[path[0]], path[1:], value)}
    return [*tree[: path[0]], _replaced(tree[path[0]], path[1:], value), *tree[path[0] + 1 :]]


def written_json(tree: Any) -> str:
    """With integers of any length, which `json` refuses to write by itself."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(tree)
    finally:
        sys.set_int_max_str_digits(limit)
