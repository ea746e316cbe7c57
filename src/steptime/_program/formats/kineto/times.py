"""Timestamps of Kineto traces -> nanoseconds: whole or broken microseconds, as numbers or as text, or whole nanoseconds."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from steptime._program.program import IntColumn

# A float64 holds whole nanoseconds up to here.
_FLOAT_NS_EXACT = 2**53
_FLOAT_US_EXACT = _FLOAT_NS_EXACT / 1000
# Integer timestamps above this are nanoseconds since the epoch, not microseconds (1e17 us is the year 5138).
_INT_NS_FROM = 10**17
# Times beyond this (about 146 years) would not fit int64 arithmetic.
_NS_AT_MOST = 2**62
_FIRST_TIME = re.compile(rb'"ts"\s*:\s*"?(\d+)\.\d')


def beyond_floats(text: bytes) -> bool:
    """Whether the first broken timestamp holds more digits than a float64."""
    first = _FIRST_TIME.search(text)
    return first is not None and int(first.group(1)) >= _FLOAT_US_EXACT


def times_ns(starts: list[Any], durations: list[Any]) -> tuple[IntColumn, IntColumn]:
    """Starts and durations of one category of events in nanoseconds; raises where one of them is no time."""
    column = np.array(starts) if starts and type(starts[0]) in (int, float) else np.zeros(0, dtype=object)
    if column.dtype == np.float64:
        begin = np.rint(column * 1000)
        usable = bool(np.all(np.abs(begin) < _FLOAT_NS_EXACT))
    elif column.dtype == np.int64:
        begin = column * 1000
        usable = _within(column, _NS_AT_MOST // 1000)
    else:
        begin, usable = _exact_times(starts)
    if not usable:
        spans = [span_ns(*each) for each in zip(starts, durations, strict=True)]
        return np.array([s for s, _ in spans], dtype=np.int64), np.array([d for _, d in spans], dtype=np.int64)
    duration = np.array([0 if d is None else d for d in durations], dtype=None if durations else np.int64)
    if duration.dtype not in (np.int64, np.float64) or duration.ndim != 1 or not _within(duration, _NS_AT_MOST // 1000):
        raise TypeError(duration.dtype)
    return begin.astype(np.int64), np.rint(duration * 1000.0).astype(np.int64)


def _within(values: npt.NDArray[Any], limit: int) -> bool:
    """Whether all values lie between -limit and limit; not by `abs`, which the least int64 has none of."""
    return bool(np.all((values > -limit) & (values < limit)))


def _exact_times(starts: list[Any]) -> tuple[npt.NDArray[Any], bool]:
    """Times kept as text with exactly three decimals, read as whole nanoseconds at once; False where they are not all so."""
    none = np.zeros(0, dtype=np.int64)
    if not starts or any(type(s) is not msgspec.Raw for s in starts):
        return none, False
    text = b"[" + b",".join(map(bytes, starts)) + b"]"
    try:
        approximate = np.array(msgspec.json.decode(text, type=list[float]))
        exact = np.array(msgspec.json.decode(text.replace(b".", b""), type=list[int]))
    except msgspec.DecodeError:
        return none, False
    agree = exact.dtype == np.int64 and _within(exact, _NS_AT_MOST) and bool(np.all(np.abs(exact / 1000 - approximate) < 1))
    return exact, agree


def span_ns(start: Any, duration: Any) -> tuple[int, int]:
    """Start and duration in nanoseconds, from integer, float, string or nanosecond timestamps."""
    if type(start) is float:
        begin, scale = round(start * 1000), 1000
    elif type(start) is int:
        begin, scale = _whole_ns(start)
    else:
        begin, scale = _text_ns(start)
    if not -_NS_AT_MOST < begin < _NS_AT_MOST:
        raise ValueError(begin)
    if type(duration) is float or type(duration) is int:
        length = round(duration * scale)
    else:
        length = 0 if duration is None else round(float(duration) * scale)
    if not -_NS_AT_MOST < length < _NS_AT_MOST:
        raise ValueError(length)
    return begin, length


def _whole_ns(start: int) -> tuple[int, int]:
    return (start, 1) if abs(start) >= _INT_NS_FROM else (start * 1000, 1000)


def _text_ns(start: Any) -> tuple[int, int]:
    """From text, without going through a float: it may hold more digits than one."""
    if type(start) not in (str, msgspec.Raw):
        raise TypeError(type(start))
    text = start if type(start) is str else bytes(start).strip(b'"').decode()
    whole, _, fraction = text.partition(".")
    if not fraction:
        return _whole_ns(int(whole))
    if not (fraction.isdigit() and whole.lstrip("-").isdigit()):
        return round(float(text) * 1000), 1000
    below = int((fraction + "00")[:3])
    return int(whole) * 1000 + (-below if whole.startswith("-") else below), 1000
