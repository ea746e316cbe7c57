"""The only place that converts units: time is int64 nanoseconds, sizes are bytes, dtypes have one name each."""

from __future__ import annotations

from functools import lru_cache

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

# Earlier than anything recorded; durations can be added to it without wrapping around.
LONG_AGO = -(2**60)

MIB = 1024 * 1024
GIB = 1024 * MIB

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
