"""`Meter`: energy, power, clock, temperature and limits of one GPU, as the driver's management library (NVML) reads them.

Energy is a counter of the card: over seconds it gives the mean power without the aliasing of power readings, which are averages
over an unknown window. What a driver or a permission does not give is None.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_SM_CLOCK = 1  # NVML_CLOCK_SM
_GPU_TEMPERATURE = 0  # NVML_TEMPERATURE_GPU
_UUID_LENGTH = 96
# Bits of the clocks' event reasons (nvml.h): the driver's power cap, the card's own power brake, and heat.
POWER_CAP, POWER_BRAKE, HEAT = 0x4, 0x80, 0x20 | 0x40
_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class CardReading:
    """One look at the card."""

    at_s: float  # by `time.perf_counter`
    energy_j: float | None
    power_w: float | None
    clock_hz: float | None
    temperature_c: float | None
    reasons: int | None


@dataclass(frozen=True, slots=True)
class CardUse:
    """What a card drew between two moments, and how."""

    seconds: float
    power_w: float | None  # from the energy counter, or else from readings
    reading_w: float | None  # the mean of power readings
    clock_hz: float | None  # the mean of clock readings
    temperature_c: float | None
    capped: float | None  # share of readings in which the power cap held the clock
    heated: float | None  # share of readings in which heat did

    @classmethod
    def of(cls, readings: Sequence[CardReading]) -> CardUse:
        """Between the first and the last of some readings."""
        seconds = readings[-1].at_s - readings[0].at_s if readings else 0.0
        reading_w = _mean([item.power_w for item in readings])
        reasons = [item.reasons for item in readings if item.reasons is not None]
        return cls(
            seconds,
            _power_w(readings) or reading_w,
            reading_w,
            _mean([item.clock_hz for item in readings]),
            _mean([item.temperature_c for item in readings]),
            float(np.mean([bool(item & (POWER_CAP | POWER_BRAKE)) for item in reasons])) if reasons else None,
            float(np.mean([bool(item & HEAT) for item in reasons])) if reasons else None,
        )


class Meter:
    """One GPU, by the order of the driver or its UUID. `absent` says why nothing can be read."""

    def __init__(self, gpu: str = "0") -> None:
        self.absent = ""
        self._handle = ctypes.c_void_p()
        try:
            self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self.absent = "the driver's management library (libnvidia-ml.so.1) is not here"
            return
        self._library.nvmlInit_v2()
        by_uuid = not gpu.isdigit()
        find = self._library.nvmlDeviceGetHandleByUUID if by_uuid else self._library.nvmlDeviceGetHandleByIndex_v2
        if find(gpu.encode() if by_uuid else ctypes.c_uint(int(gpu)), ctypes.byref(self._handle)):
            self.absent = f"the driver's management library knows no GPU {gpu}"

    @property
    def uuid(self) -> str:
        """What identifies the card."""
        text = ctypes.create_string_buffer(_UUID_LENGTH)
        failed = self.absent or self._library.nvmlDeviceGetUUID(self._handle, text, ctypes.c_uint(_UUID_LENGTH))
        return "" if failed else text.value.decode(errors="replace")

    @property
    def limit_w(self) -> float | None:
        """The power cap in force."""
        return _scaled(self._uint("nvmlDeviceGetEnforcedPowerLimit"), 1e-3)

    @property
    def most_clock_hz(self) -> float | None:
        """The highest SM clock the card may run at."""
        return _scaled(self._uint("nvmlDeviceGetMaxClockInfo", ctypes.c_uint(_SM_CLOCK)), 1e6)

    def read(self) -> CardReading:
        """The card now."""
        return CardReading(
            time.perf_counter(),
            _scaled(self._value(ctypes.c_ulonglong, "nvmlDeviceGetTotalEnergyConsumption"), 1e-3),
            _scaled(self._uint("nvmlDeviceGetPowerUsage"), 1e-3),
            _scaled(self._uint("nvmlDeviceGetClockInfo", ctypes.c_uint(_SM_CLOCK)), 1e6),
            _scaled(self._uint("nvmlDeviceGetTemperature", ctypes.c_uint(_GPU_TEMPERATURE)), 1.0),
            self._value(ctypes.c_ulonglong, "nvmlDeviceGetCurrentClocksThrottleReasons"),
        )

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Reads the card from a thread of its own while the block runs."""
        watch = Watch(self)
        watch.start()
        try:
            yield watch
        finally:
            watch.stop()

    def _uint(self, function: str, *arguments: Any) -> int | None:
        return self._value(ctypes.c_uint, function, *arguments)

    def _value(self, kind: Any, function: str, *arguments: Any) -> int | None:
        if self.absent or not hasattr(self._library, function):
            return None
        result = kind()
        failed = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(result))
        return None if failed else int(result.value)


@dataclass
class Watch:
    """Readings of a card as they come."""

    meter: Meter
    readings: list[CardReading] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to read."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Reads no more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def between(self, first_s: float, last_s: float) -> CardUse:
        """What was drawn between two moments (`time.perf_counter`)."""
        return CardUse.of([item for item in list(self.readings) if first_s <= item.at_s <= last_s])

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.readings.append(self.meter.read())


def _power_w(readings: Sequence[CardReading]) -> float | None:
    """The slope of the energy counter over the moments at which it moved."""
    moved: list[tuple[float, float]] = []
    last: float | None = None
    for item in readings:
        if item.energy_j is not None and item.energy_j != last:
            if last is not None:
                moved.append((item.at_s, item.energy_j))
            last = item.energy_j
    if len(moved) < 2:
        return None
    (first_s, first_j), (last_s, last_j) = moved[0], moved[-1]
    return (last_j - first_j) / (last_s - first_s) if last_s > first_s else None


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
