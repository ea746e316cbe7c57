"""Values of a config file, each checked as it is taken: what is wrong is one line with the place, the value and the way out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from steptime._files import read_whole
from steptime._program.program import MOST_RANKS
from steptime._units import SIZE
from steptime.errors import InputError

MOST_WIDTH = 1 << 20
"""Of a layer: what claims to be wider comes from a slip of the keyboard."""

MOST_WHOLE = 2**63 - 1
"""Of whole numbers where no key says less: they end in arrays of 64 bits."""


def nearest_multiples(size: int, parts: int) -> str:
    """The sizes next to one that so many parts do share evenly, in words for behind "a multiple of"."""
    if parts < 1:
        return ""
    below = size // parts * parts
    return f" ({below} or {below + parts})" if below else f" ({parts})"


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file that may be anything."""
    return dict(_read(path, "a config, see docs/configs.md", tomllib.loads, "TOML", "utf-8"))


def read_json(path: Path, expected: str) -> Any:
    """The values of a JSON file that may be anything; `expected` is what an error says should be in it."""
    return _read(path, expected, lambda text: json.loads(text, object_pairs_hook=_once), "JSON")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The values by key; a key that is there twice would lose one of them."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"key {shortened(twice)} is there twice in one object")
    return values


def read_text(path: Path, expected: str) -> str:
    """The text of a file; `expected` is what an error says should be in it."""
    return str(_read(path, expected, str))


def _read(path: Path, expected: str, parse: Callable[[str], Any], language: str = "", encoding: str = "utf-8-sig") -> Any:
    try:
        return parse(read_whole(path).decode(encoding))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected {expected}") from None
    # A ValueError is what either parser raises, of broken text, and of numbers of more than 4,300 digits.
    except (OSError, ValueError, RecursionError) as error:
        how = f" as {language}" if language else ""
        raise InputError(f"{path}: cannot be read{how} ({error}); expected {expected}") from None


@dataclass(frozen=True, slots=True)
class Overrides:
    """What stands beside the file: another batch, other ranks, how many its platform has, and settings (`_build.settings`)."""

    batch: int | None = None
    ranks: int | None = None
    platform_ranks: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        where: Path | str,
        batch: int | None = None,
        ranks: int | None = None,
        platform_ranks: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Overrides:
        """Checked; `batch` and `ranks` may stand among the settings."""
        rest = dict(settings or {})
        found: dict[str, int | None] = {}
        for name, option, most in (("batch", batch, MOST_WHOLE), ("ranks", ranks, MOST_RANKS)):
            also = rest.pop(name, None)
            if option is not None and also not in (None, option):
                raise InputError(f"{where}: {name} is {option} and is set to {shortened(also)}; give one of the two")
            value = also if option is None else option
            if value is not None and (type(value) is not int or value < 1):
                expected = "1 or more" if isinstance(value, int | float) else "a whole number of 1 or more"
                raise InputError(f"{where}: {name} is {shortened(value)}; expected {expected}")
            if value is not None and value > most:
                raise InputError(f"{where}: {name} is {shortened(value)}; expected at most {most}")
            found[name] = value
        return cls(found["batch"], found["ranks"], platform_ranks or 1, rest)


@dataclass(frozen=True, slots=True)
class Values:
    """One table of a config and where it stands, for messages."""

    values: Mapping[str, Any]
    where: str

    def wrong(self, key: str, expected: str) -> InputError:
        """That the value of a key is not what was expected."""
        return InputError(f"{self.where}: {key} is {shortened(self.values.get(key))}; expected {expected}")

    def expect(self, known: Collection[str], required: Sequence[str] = ()) -> None:
        """Refuses keys that nobody knows, and a table without one of those it needs."""
        unknown = next((key for key in self.values if key not in known), None)
        if unknown is not None:
            near = get_close_matches(unknown, known, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(known)}"
            raise InputError(f"{self.where}: unknown key {unknown!r}; {meant}")
        missing = next((key for key in required if key not in self.values), None)
        if missing is not None:
            raise InputError(f"{self.where}: {missing!r} is missing; expected {', '.join(required)}")

    def whole(self, key: str, least: int, most: int = MOST_WHOLE) -> int:
        """A whole number in a range."""
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            if isinstance(value, float) and value.is_integer() and least <= value <= most:
                raise self.wrong(key, f"a whole number, as {int(value)}")
            upper = "" if most == MOST_WHOLE else f", at most {most}"
            raise self.wrong(key, f"a whole number of {least} or more{upper}")
        return value

    def size(self, key: str) -> int:
        """Bytes, as a number or with a unit ("30GB"), 1 or more."""
        value = self.values[key]
        if isinstance(value, str):
            nbytes = SIZE.parse(value, f"{self.where}: {key}")
            if not 1 <= nbytes <= MOST_WHOLE:
                raise self.wrong(key, "1 byte or more")
            return int(nbytes)
        return self.whole(key, 1)

    def number(self, key: str, least: float, most: float = MOST_WHOLE) -> float:
        """A number in a range; neither NaN nor infinite."""
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            upper = "" if most == MOST_WHOLE else f", at most {most:g}"
            raise self.wrong(key, f"a number of {least:g} or more{upper}")
        return float(value)

    def text(self, key: str) -> str:
        """A name that is not empty."""
        value = self.values[key]
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        """One of some names."""
        value = self.values.get(key, default)
        if value not in choices:
            raise self.wrong(key, " or ".join(f'"{choice}"' for choice in choices))
        return str(value)

    def switch(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def widths(self, key: str) -> tuple[int, ...]:
        """Widths of layers."""
        value = self.values[key]
        good = isinstance(value, list) and value and all(type(width) is int and 1 <= width <= MOST_WIDTH for width in value)
        if not good:
            raise self.wrong(key, f"a list of one or more whole numbers from 1 to {MOST_WIDTH}")
        return tuple(value)

    def table(self, key: str) -> Values:
        """A table inside this one; an empty one where it is not there."""
        value = self.values.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a table of keys and values")
        return Values(value, f"{self.where}, {key}")


def shortened(value: object) -> str:
    """What a message shows of a value."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
