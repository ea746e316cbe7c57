"""The measured sets, one file each: which columns its rows have and which of them say what was asked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import pyarrow as pa

from steptime._measurements.recipe import RECIPE_COLUMNS
from steptime.errors import InputError

# A name that repeats from row to row.
NAME = pa.dictionary(pa.int32(), pa.string())

# What every row of every set has besides its recipe.
COMMON_COLUMNS: tuple[pa.Field, ...] = (
    pa.field("key", pa.string()),  # digest of the set's case columns: the same question has the same key on every machine
    pa.field("process", NAME),  # repeats of one key in different processes differ here; `run`-`process` is unique
    pa.field("rank", pa.int16()),  # which rank of `ranks` this row's times were taken on
    pa.field("sm_clock_mhz", pa.float32()),  # while it was measured; null where nobody looked
    pa.field("time_ns", pa.float64()),  # the median of `times_ns`
    pa.field("spread", pa.float32()),  # (90th - 10th percentile) / median of `times_ns`
    pa.field("times_ns", pa.list_(pa.float64())),  # one per repeat, in order
)


@dataclass(frozen=True)
class MeasuredSet:
    """One table of measurements. `case` names the columns that say what was asked; their digest is a row's key."""

    name: str
    about: str
    columns: tuple[pa.Field, ...]
    case: tuple[str, ...]
    repeats: tuple[str, ...] = ()  # columns of the case that only tell repeats of one question apart
    optional: tuple[str, ...] = ()  # columns of the case that are null where they do not apply
    added: tuple[str, ...] = ()  # columns that older parts lack and rows may leave out: there they are null
    timed: bool = True  # whether `times_ns` are what is asked

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that have a value in every row: what was asked, and the times."""
        return ("times_ns", *(name for name in self.case if name not in self.optional and name not in self.added))

    @property
    def schema(self) -> pa.Schema:
        """All columns, in the order they are stored."""
        return pa.schema([*COMMON_COLUMNS, *self.columns, *RECIPE_COLUMNS])


@cache
def measured_sets() -> dict[str, MeasuredSet]:
    """Every set, by name: a file in this folder with a `SET`."""
    result = {}
    for module in sorted(iter_modules(__path__), key=lambda entry: entry.name):
        held = import_module(f"{__name__}.{module.name}").SET
        result[held.name] = held
    return result


def measured_set(name: str) -> MeasuredSet:
    """The set of that name."""
    if name not in measured_sets():
        raise InputError(f"no measured set is called {name!r}; there are {', '.join(measured_sets())}")
    return measured_sets()[name]
