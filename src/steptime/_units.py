"""The only place that converts units: time is int64 nanoseconds, sizes are bytes, dtypes have one name each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from steptime.errors import InputError

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

# Earlier than anything recorded; durations can be added to it without wrapping around.
LONG_AGO = -(2**60)

MIB = 1024 * 1024
GIB = 1024 * MIB
_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB")

# Canonical dtype name -> bytes per element.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8": 1,
    "float4x2": 1,  # two elements of four bits
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}

# Spellings met in traces (Kineto "Input type" and "dtype", execution traces "Tensor(...)", NCCL) -> canonical name.
_DTYPE_ALIASES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "c10::half": "float16",
    "c10::bfloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "long long": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "unsigned char": "uint8",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::float8_e4m3fn": "float8",
    "c10::float8_e5m2": "float8",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
    "c10::float4_e2m1fn_x2": "float4x2",
    "float4_e2m1fn_x2": "float4x2",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
}


@lru_cache(maxsize=1 << 10)
def dtype_name(spelling: str) -> str:
    """The canonical dtype behind any spelling met in traces; unknown spellings come back unchanged."""
    text = spelling.strip()
    if text.startswith("Tensor(") and text.endswith(")"):
        text = text[len("Tensor(") : -1]
    lowered = text.lower()
    if lowered in DTYPE_BYTES:
        return lowered
    return _DTYPE_ALIASES.get(lowered, text)


@lru_cache(maxsize=1 << 10)
def dtype_bytes(name: str) -> int:
    """Bytes per element of a dtype in any spelling; 0 for one that is not known."""
    return DTYPE_BYTES.get(dtype_name(name), 0)


def ms(nanoseconds: float) -> float:
    """Nanoseconds as milliseconds, for people."""
    return float(nanoseconds) / NS_PER_MS


# --- quantities as people write them ---------------------------------------------------------------------------------------

_DECIMAL = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_WRITTEN = re.compile(r"(?P<number>[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+)\s*(?P<unit>.*)", re.DOTALL)
_SHOWN_AT_MOST = 40


@dataclass(frozen=True, slots=True)
class Dimension:
    """What a quantity is of, and the units it may be written in."""

    name: str
    units: Mapping[str, float]  # unit -> how many of the first one
    examples: str

    def parse(self, text: str, where: str, *, plain: str | None = None) -> float:
        """A quantity as people write it, in its first unit; a number alone is in the `plain` unit, or else in the first.

        `where` names the option, or the file and the key.
        """
        shown = text if len(text) <= _SHOWN_AT_MOST else f"{text[:_SHOWN_AT_MOST]}..."
        written = _WRITTEN.fullmatch(text.strip())
        value = float(written["number"].replace("_", "")) if written else math.inf
        if written is None or not math.isfinite(value):
            raise InputError(f"{where} {shown!r}: expected {self.name} such as {self.examples}")
        unit = written["unit"].strip() or plain
        if unit is None:
            return value
        factor = self.units.get(unit) or self.units.get(unit.replace("µ", "u").replace("μ", "u"))
        if factor is None:
            raise InputError(f"{where} {shown!r}: {self.name} has no unit {unit[:_SHOWN_AT_MOST]!r}; expected {self.examples}")
        return value * factor


def _prefixed(unit: str, prefixes: str = "kMGTP") -> dict[str, float]:
    return {unit: 1.0, **{f"{prefix}{unit}": _DECIMAL[prefix] for prefix in prefixes}}


_BYTES = {
    **_prefixed("B"), "KB": 1e3, **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGTP", 1)}
}  # fmt: skip
# Small letters throughout are meant as bytes; `Gb` are bits, which nobody measures memory in.
SIZE = Dimension(
    "a size",
    {"bytes": 1.0, **_BYTES, **{unit.lower(): factor for unit, factor in _BYTES.items()}},
    "30GB, 80GiB or 30e9 (bytes)",
)
_MINUTE_S, _HOUR_S = 60.0, 3600.0
_SECONDS = {
    "s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "m": _MINUTE_S, "min": _MINUTE_S, "h": _HOUR_S
}  # fmt: skip
DURATION = Dimension("a time", _SECONDS, "90s, 2m or 1.5h; a number alone is seconds")
NANOSECONDS = Dimension("a time", {unit: factor * NS_PER_S for unit, factor in _SECONDS.items()}, "5us, 700ns or 5e3 (ns)")
MICROSECONDS = Dimension("a time", {unit: factor * 1e6 for unit, factor in _SECONDS.items()}, "5us, 700ns or 5 (us)")
MINUTES = Dimension(
    "a time", {unit: factor / _MINUTE_S for unit, factor in _SECONDS.items()}, "90s, 2m or 1.5h; a number is minutes"
)
POWER = Dimension("a power", {**_prefixed("W", "kM"), "w": 1.0}, "500W, 0.7kW or 500 (watts)")
FREQUENCY = Dimension("a frequency", _prefixed("Hz"), "1.98GHz, 1980MHz or 1.98e9 (Hz)")
_BITS = {
    f"{bit}{per}": 0.125 * factor
    for bit, factor in (*_prefixed("b").items(), *_prefixed("bit").items())
    for per in ("/s", "ps")
}
BANDWIDTH = Dimension(
    "a bandwidth",
    {**{f"{unit}/s": factor for unit, factor in _BYTES.items()}, **_BITS},
    "450GB/s, 400Gbit/s or 450e9 (bytes/s)",
)
GB_PER_S = Dimension(
    "a bandwidth", {unit: factor / 1e9 for unit, factor in BANDWIDTH.units.items()}, "450GB/s, 400Gbit/s or 450 (GB/s)"
)
_RATES = {f"{prefix}{unit}": factor for unit in ("FLOPS", "FLOP/s", "OPS") for prefix, factor in (("", 1.0), *_DECIMAL.items())}
RATE = Dimension("a rate", _RATES, "989TFLOPS or 989e12 (per second)")
PRICE = Dimension("a price", {"$": 1.0, "USD": 1.0}, "2.5, a number of dollars per GPU-hour")


def size_words(size: int) -> str:
    """Return bytes with three digits and the unit that fits."""
    value, index = float(size), 0
    while value >= 1024 and index < len(_SIZES) - 1:
        value, index = value / 1024, index + 1
    digits = str(size) if not index else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"{digits} {_SIZES[index]}"
