"""`MachineCosts`: what host calls and collectives cost on one machine, as `steptime calibrate` writes them to a file.

schema_version   1
recipe           machine, device, versions, date, command of the run
ranks, share     of the group that was measured; share: how many ranks were on one GPU
host             per kind, op, call and phase: time_ns (median over ranks and bursts), spread, repeats
fabric           per collective, bytes, dtype, mode, fabric, ranks and share: the same
recorded         of a recorded run (`calibrate --from-run`) instead of host and fabric: how many times as long its host, its
                 device and each kind of collective took as the models of the named platform say, spread and number of values
card             a product from rest and for long, a pass over memory, power, clock and cap of the first GPU
factors          host: per kind the geometric mean of its costs here over those of the shipped host, `all` over kinds;
                 null where the host's model knows none of them; applied: what all of them show, how sure that is, and what
                 predictions on machines with the shipped host make of it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from steptime._hardware.description import read_declared
from steptime._measurements.recipe import spread_of
from steptime._models.kernels.call import Call, TensorArg

Row = Mapping[str, Any]

SCHEMA_VERSION = 1
# Nothing that a calibration times takes a quarter of an hour, and no message has a pebibyte: what is beyond is damaged.
_LONGEST_NS, _MOST_BYTES, _MOST_RANKS = 1e12, 1 << 50, 1 << 20
# No machine of a platform is so many times faster or slower than another, and no recording has so many ranks and steps.
_FAR_OFF, _MOST_VALUES = 50, 1 << 40


def _check(entry: HostBurst | WireCost | RecordedSpeed | CardCosts, **ranges: tuple[float, float]) -> None:
    for name, (least, most) in ranges.items():
        if not least <= getattr(entry, name) <= most:
            raise ValueError(f"{name} is {getattr(entry, name)}; expected {least:g} to {most:g}")


@dataclass(frozen=True, slots=True)
class HostBurst:
    """One host cost: calls of an op, or of a mechanism around ops, in a burst."""

    kind: str
    op: str
    time_ns: float
    spread: float = 0.0
    call: str | None = ""
    phase: str | None = ""
    repeats: int = 1

    def __post_init__(self) -> None:
        # Slopes of what costs next to nothing come out below zero, and their spread with them.
        _check(self, time_ns=(-_LONGEST_NS, _LONGEST_NS), spread=(-_LONGEST_NS, _LONGEST_NS))


@dataclass(frozen=True, slots=True)
class WireCost:
    """One collective of a size; `mode` says whether calls came behind one another."""

    collective: str
    bytes: int
    ranks: int
    time_ns: float
    mode: str | None = None
    spread: float = 0.0
    dtype: str | None = None
    fabric: str | None = None
    share: int = 1
    repeats: int = 1

    def __post_init__(self) -> None:
        _check(
            self, bytes=(0, _MOST_BYTES), ranks=(1, _MOST_RANKS), time_ns=(0, _LONGEST_NS), spread=(-_LONGEST_NS, _LONGEST_NS)
        )


@dataclass(frozen=True, slots=True)
class RecordedSpeed:
    """How many times as long a part of a recorded run took as the models say; `spread` of the logarithms behind it."""

    factor: float
    spread: float = 0.0
    repeats: int = 1
    share: float = 1.0  # by how much the value it was taken from gets longer with the part, both as logarithms

    def __post_init__(self) -> None:
        _check(self, factor=(1 / _FAR_OFF, _FAR_OFF), spread=(0, _FAR_OFF), repeats=(1, _MOST_VALUES), share=(0.01, 1.5))


@dataclass(frozen=True)
class RecordedRun:
    """What one run shows beside the models of a platform; None and absent kinds: it does not tell."""

    platform: str
    host: RecordedSpeed | None = None
    unprofiled: RecordedSpeed | None = None  # the host, by step times measured without a profiler
    device: RecordedSpeed | None = None
    wire: Mapping[str, RecordedSpeed] = field(default_factory=dict)


# What a card is timed on: a product of half precision, as a linear layer has it, and a pass over memory.
PRODUCT_CALL = Call("aten::mm.default", (TensorArg((8192, 8192), "bfloat16"), TensorArg((8192, 8192), "bfloat16")))
MEMORY_CALL = Call("aten::abs.default", (TensorArg((1 << 26,)),))


@dataclass(frozen=True, slots=True)
class CardCosts:
    """What the card does on `PRODUCT_CALL` and `MEMORY_CALL`; None: the driver did not say."""

    product_ns: float  # from rest on
    sustained_ns: float  # without a pause, for seconds
    memory_ns: float
    power_w: float | None = None  # mean, while the product ran without a pause
    clock_hz: float | None = None  # that the driver asked for meanwhile
    capped: float | None = None  # share of the time in which the power cap held the clock
    temperature_c: float | None = None
    limit_w: float | None = None  # the cap in force
    uuid: str | None = None

    def __post_init__(self) -> None:
        _check(self, product_ns=(1, _LONGEST_NS), sustained_ns=(1, _LONGEST_NS), memory_ns=(1, _LONGEST_NS))
        for name, most in (("power_w", 1e5), ("clock_hz", 1e11), ("limit_w", 1e5)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} is {value}; expected 1 to {most:g}")


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """Of how costs were measured, what predictions have to know."""

    device: str | None = None


_Cost = TypeVar("_Cost", HostBurst, WireCost)


@dataclass(frozen=True)
class MachineCosts:
    """Medians of what one group of processes measured."""

    host: tuple[HostBurst, ...]
    fabric: tuple[WireCost, ...]
    recorded: RecordedRun | None = None
    recipe: MeasuredOn | None = None
    card: CardCosts | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def device(self) -> str | None:
        """The GPU that was measured, as its driver names it; empty: none was there; None: not known."""
        return None if self.recipe is None else self.recipe.device

    @classmethod
    def of_rows(cls, host: Iterable[Row], fabric: Iterable[Row]) -> MachineCosts:
        """From rows of the measured sets `host` and `collectives`; of the latter, calls on idle hosts by all ranks at once."""
        return cls(_medians(host, HostBurst), _medians(filter(_plain, fabric), WireCost))

    @classmethod
    def read(cls, file: Path) -> MachineCosts:
        """From a file of `steptime calibrate`."""
        return read_declared(file, cls, SCHEMA_VERSION, "a calibration", "calibrate again, with `steptime calibrate`")


def _medians(rows: Iterable[Row], entry: type[_Cost]) -> tuple[_Cost, ...]:
    """Median, spread and number of all times of rows that agree in what was asked, sorted by it."""
    key = [each.name for each in fields(entry) if each.name not in ("time_ns", "spread", "repeats")]
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        times[tuple(row[name] for name in key)] += row["times_ns"]
    return tuple(
        entry(
            **dict(zip(key, question, strict=True)),
            time_ns=round(float(np.median(times[question])), 1),
            spread=round(spread_of(times[question]), 4),
            repeats=len(times[question]),
        )
        for question in sorted(times)
    )


def _plain(row: Row) -> bool:
    idle = row["beside"] == "none" and row["host_threads"] == "idle"
    return idle and row["arrival"] == "together" and not row["splits"]
