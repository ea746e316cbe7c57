"""Reading descriptions of hardware: TOML and JSON files, and numbers that lie where such hardware can have them."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from steptime._files import read_whole
from steptime._units import BANDWIDTH, FREQUENCY, NANOSECONDS, POWER, RATE, SIZE, Dimension
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class ValueRange:
    """What a number can be: generous beyond anything built or planned, so that only slips of unit fall outside."""

    least: float
    most: float
    unit: str
    dimension: Dimension | None = None  # whose units it may be written with, as text

    def check(self, where: str, value: object) -> float:
        """The value as a float; `where` names the file and the key, or the option."""
        if self.dimension is not None and isinstance(value, str):
            value = self.dimension.parse(value, where)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{where} is {_shown(value)}, expected a number of {self.unit}")
        if not self.least <= value <= self.most:
            raise InputError(f"{where} is {_shown(value)}, expected {self.least:g} to {self.most:g} {self.unit}")
        return float(value)


_NEAREST = 6  # known names that an unknown one is answered with
MOST_RANKS = 1 << 17  # more than any machine has; what is counted rank by rank stays small
_BANDWIDTH = ValueRange(1e6, 1e15, "bytes per second (3.35 TB/s is 3.35e12)", BANDWIDTH)
_PEAK = ValueRange(1e9, 1e18, "operations per second (989 TFLOPS are 989e12)", RATE)
_TIME = ValueRange(0, 1e9, "nanoseconds (5 us are 5e3)", NANOSECONDS)
_FRACTION = ValueRange(1e-3, 1.0, "of what the data sheet has")
RANGES: Mapping[str, ValueRange] = {
    "sms": ValueRange(1, 1e4, "SMs"),
    "threads_per_sm": ValueRange(32, 1e5, "threads"),
    "compute_capability": ValueRange(1, 100, "major.minor, as NVIDIA numbers it"),
    "memory_bytes": ValueRange(1e8, 1e14, "bytes (80 GB are 80e9)", SIZE),
    "cache_bytes": ValueRange(1e4, 1e11, "bytes (50 MB are 50e6)", SIZE),
    "clock_hz": ValueRange(1e7, 1e11, "hertz (1.98 GHz are 1.98e9)", FREQUENCY),
    "power_w": ValueRange(1, 1e5, "watts", POWER),
    "bandwidth_bytes_per_s": _BANDWIDTH,
    "host_bandwidth_bytes_per_s": _BANDWIDTH,
    "cache_bandwidth_bytes_per_s": _BANDWIDTH,
    "buffered_bytes": ValueRange(1, 1e12, "bytes (1.5 MB are 1.5e6)", SIZE),
    "host_slowdown": ValueRange(1, 1e2, "times (1: none)"),
    "cores": ValueRange(1, 1e4, "cores of the box"),
    "latency_ns": ValueRange(0.1, 1e9, "nanoseconds (5 us are 5e3)", NANOSECONDS),
    "spread": ValueRange(0, 1, "ln of a time"),
    "interval_factor": ValueRange(1, 1e3, "times either way"),
    "energy": ValueRange(0.01, 100, "of what the other device needs"),
    "start_ns": _TIME,
    "release_ns": _TIME,
    "return_ns": _TIME,
    "spacing_ns": _TIME,
    "peak": _FRACTION,
    "bandwidth": _FRACTION,
    "host_bandwidth": _FRACTION,
    "fraction": _FRACTION,
    "feature": ValueRange(1e-6, 1e18, "the unit that its name says"),
}
"""By key, or by what several keys are; every other key of a device is a peak rate."""


def quantity(file: Path, table: object, key: str, like: str | None = None) -> Quantity:
    """A number of a table with its source, within the range of its key, or of the one that it is like."""
    entry = table.get(key) if isinstance(table, Mapping) else None
    if not isinstance(entry, Mapping) or "value" not in entry or not entry.get("source"):
        raise InputError(f"{file}: {key} needs a value and its source, as in {key} = {{ value = 1, source = '...' }}")
    value = RANGES.get(like or key, _PEAK).check(f"{file}: {key}", entry["value"])
    return Quantity(value, str(entry["source"]))


def quantities(file: Path, table: object, keys: Iterable[str], like: str | None = None) -> dict[str, Any]:
    """Several of them by key, as the fields of what they describe."""
    return {key: quantity(file, table, key, like) for key in keys}


def subtable(file: Path, table: Mapping[str, Any], key: str, expected: str, *, within: str = "") -> Mapping[str, Any]:
    """A table of a table; `expected` says in errors of what, `within` names the outer one."""
    value = table.get(key)
    if not isinstance(value, Mapping):
        raise InputError(f"{file}: {within}{key} is {value!r}, expected {expected}")
    return value


def count(file: Path, table: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of a table, no larger than any machine."""
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_RANKS:
        raise InputError(f"{file}: {key} is {_shown(value)}, expected a whole number, {least} to {MOST_RANKS:,}")
    return value


def read_toml(file: Path, what: str, version: int) -> Mapping[str, Any]:
    """The content of a description of this version; `what` names it in errors."""
    content: Mapping[str, Any] = _read(file, "TOML", _parsed)
    if content.get("schema_version") != version:
        raise InputError(f"{file}: {what} of version {content.get('schema_version')}, this steptime reads {version}")
    return content


def read_json(file: Path, expected: str) -> Mapping[str, Any]:
    """A JSON object; `expected` says in errors what the file should be."""
    content = _read(file, "JSON", json.loads)
    if not isinstance(content, dict):
        raise InputError(f"{file}: holds no JSON object; expected {expected}")
    return content


_Decoded = TypeVar("_Decoded")


def read_declared(file: Path, kind: type[_Decoded], version: int, what: str, remedy: str) -> _Decoded:
    """A JSON file of this version as a declared type; `what` it is and the `remedy` are said in errors."""
    import msgspec  # noqa: PLC0415 - measuring goes without it where it is absent

    try:
        content = read_whole(file)
        there = msgspec.json.decode(content, type=_SchemaVersion).schema_version
        if there == version:
            return msgspec.json.decode(content, type=kind)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); expected {what}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: not {what} ({error}); {remedy}") from error
    raise InputError(f"{file}: {what} of version {there}, this steptime reads {version}; {remedy}")


@dataclass(frozen=True, slots=True)
class _SchemaVersion:
    schema_version: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Descriptions of one kind: those that come with the package by name, a user's by the path of a file."""

    kind: str
    folder: Path
    suffix: str = ".toml"

    def names(self) -> list[str]:
        """Those that come with the package."""
        return sorted(file.stem for file in self.folder.glob(f"*{self.suffix}"))

    def file(self, name: str | Path) -> Path:
        """Of a shipped name, or the path itself."""
        name = str(name)
        file = Path(name) if name.endswith(self.suffix) else self.folder / f"{name}{self.suffix}"
        if not is_file(file):
            near = get_close_matches(name.lower(), self.names(), _NEAREST, cutoff=0.0)
            known = f"the nearest known are {', '.join(near)}" if near else f"no {self.kind} is known by name"
            raise InputError(f"no {self.kind} {_shown(name)}; {known}; or give the path of a {self.suffix} file")
        return file


def is_file(file: Path) -> bool:
    """Whether there is such a file; names that no file can have are of none."""
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=64)
def _parsed(text: str) -> Mapping[str, Any]:
    """A file is read whenever it is asked for, and understood once."""
    return MappingProxyType(tomllib.loads(text))


def _read(file: Path, kind: str, loads: Callable[[str], Any]) -> Any:
    try:
        return loads(read_whole(file).decode())
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # damaged, not UTF-8, nested too deep, or numbers of thousands of digits
        raise InputError(f"{file}: not readable as {kind} ({str(error).splitlines()[0]})") from error


def _shown(value: object) -> str:
    """A value in a message, however long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else str(value)
    return repr(value)[:60]
