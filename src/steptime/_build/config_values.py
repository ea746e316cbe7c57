"""Values of a config file, each checked as it is taken: what is wrong is one line with the place, the value and the way out."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from steptime.errors import InputError


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a file that may be anything."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a config, see docs/configs.md") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as TOML ({error}); expected a config, see docs/configs.md") from None


@dataclass(frozen=True, slots=True)
class Values:
    """One table of a config and where it stands, for messages."""

    values: Mapping[str, Any]
    where: str

    def wrong(self, key: str, expected: str) -> InputError:
        """That the value of a key is not what was expected."""
        return InputError(f"{self.where}: {key} is {_short(self.values.get(key))}; expected {expected}")

    def only(self, known: Collection[str]) -> None:
        """Refuses keys that nobody knows."""
        unknown = next((key for key in self.values if key not in known), None)
        if unknown is not None:
            near = get_close_matches(unknown, known, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(known)}"
            raise InputError(f"{self.where}: unknown key {unknown!r}; {meant}")

    def required(self, keys: Sequence[str]) -> None:
        """Refuses a table without one of these."""
        missing = next((key for key in keys if key not in self.values), None)
        if missing is not None:
            raise InputError(f"{self.where}: {missing!r} is missing; expected {', '.join(keys)}")

    def whole(self, key: str, least: int, most: int = 2**63 - 1) -> int:
        """A whole number."""
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            upper = "" if most == 2**63 - 1 else f", at most {most}"
            raise self.wrong(key, f"a whole number of {least} or more{upper}")
        return value

    def number(self, key: str, least: float) -> float:
        """A number."""
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            raise self.wrong(key, f"a number of {least:g} or more")
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

    def widths(self, key: str) -> tuple[int, ...]:
        """Widths of layers."""
        value = self.values[key]
        if not isinstance(value, list) or not value or any(type(width) is not int or width < 1 for width in value):
            raise self.wrong(key, "a list of one or more whole numbers above 0")
        return tuple(value)

    def table(self, key: str) -> Values:
        """A table inside this one."""
        value = self.values[key]
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a table of keys and values")
        return Values(value, f"{self.where}, {key}")


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."
