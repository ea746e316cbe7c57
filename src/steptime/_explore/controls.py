"""`Control`: one thing a person can change, described once for the page, for checks and for the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from steptime._build.config_values import shortened
from steptime.errors import InputError

WHOLE, NUMBER, CHOICE, SWITCH, CHANGES = "whole", "number", "choice", "switch", "changes"
SET = "set."
"""What the names of controls begin with that are keys of a config."""

_MOST_CHANGES, _LONGEST_CHANGE = 16, 200


class WrongValueError(InputError):
    """A value that a control cannot have; `control` names it."""

    def __init__(self, control: str, message: str) -> None:
        super().__init__(message)
        self.control = control


@dataclass(frozen=True, slots=True)
class Control:
    """What can be changed: what it is called, which values it may have, and which one it has to begin with.

    `steps` are the places of its slider. `disabled` says why it cannot be changed, where it cannot. An `optional` one may be
    left empty, which leaves the choice to what `empty` says.
    """

    name: str
    group: str
    label: str
    kind: str
    value: Any = None
    unit: str = ""
    least: float | None = None
    most: float | None = None
    steps: tuple[float, ...] = ()
    choices: tuple[tuple[str, str], ...] = ()  # value, and how a person reads it
    help: str = ""
    disabled: str = ""
    optional: bool = False
    empty: str = ""
    more: bool = False  # seldom changed: shown on demand

    def to_dict(self) -> dict[str, Any]:
        """As the page gets it."""
        return asdict(self)

    def checked(self, value: object) -> Any:
        """The value, if the control can have it."""
        if value == self.value and type(value) is type(self.value):
            return value
        if self.disabled:
            raise self._wrong(value, self.disabled)
        if value is None or (value == "" and not any(name == "" for name, _ in self.choices)):
            if not self.optional:
                raise self._wrong(value, f"expected {self._expected()}")
            return None
        if self.kind == CHANGES:
            return self._changes(value)
        good = {
            WHOLE: type(value) is int and self._inside(value),
            NUMBER: type(value) in (int, float) and self._inside(value),
            CHOICE: isinstance(value, str) and value in {name for name, _ in self.choices},
            SWITCH: isinstance(value, bool),
        }
        if not good[self.kind]:
            raise self._wrong(value, f"expected {self._expected()}")
        return value

    def _inside(self, value: Any) -> bool:
        least, most = (-math.inf if self.least is None else self.least), (math.inf if self.most is None else self.most)
        return bool(math.isfinite(value) and least <= value <= most)

    def _changes(self, value: object) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(value, "expected a list of changes")
        if len(value) > _MOST_CHANGES or any(len(each) > _LONGEST_CHANGE for each in value):
            raise self._wrong(value, f"expected at most {_MOST_CHANGES} changes of at most {_LONGEST_CHANGE} letters each")
        return [" ".join(each.split()) for each in value if each.strip()]

    def _expected(self) -> str:
        if self.kind == CHOICE:
            return listed([name for name, _ in self.choices])
        if self.kind == SWITCH:
            return "true or false"
        what = "a whole number" if self.kind == WHOLE else "a number"
        least = "" if self.least is None else f" from {self.least:g}"
        most = "" if self.most is None else f" to {self.most:,.0f}" if self.most >= 1e6 else f" to {self.most:g}"
        return what + least + most + (f" {self.unit}" if self.unit else "")

    def _wrong(self, value: object, why: str) -> WrongValueError:
        shown = "nothing" if value is None else shortened(value)
        return WrongValueError(self.name, f"{self.label} is {shown}: {why}")


def listed(names: Sequence[str], most: int = 12) -> str:
    """Some names as a choice, the first ones where there are many."""
    if len(names) > most:
        return f"{', '.join(names[:most])} or one of {len(names) - most} more"
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else list(names))


def doubling(around: int, least: int = 1, most: int = 1 << 24, *, times: int = 7) -> tuple[int, ...]:
    """Places of a slider: a number halved and doubled as long as it is whole."""
    down = [around >> power for power in range(1, times + 1) if around % (1 << power) == 0 and around >> power >= least]
    up = [around << power for power in range(times + 1) if around << power <= most]
    return tuple(sorted({*down, *up}))
