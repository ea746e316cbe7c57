"""What `steptime calibrate` found on a machine, as the `Calibration` of a platform: its host's speed and its wire's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from steptime._hardware.description import COUNT_OF_RANKS, Range, read_json
from steptime._models.collectives.message import KINDS, Message
from steptime._models.host.calibration import speed_of
from steptime._platforms.platform import Platform
from steptime._sim.modelled.step import UNCALIBRATED, Calibration
from steptime.errors import InputError

SCHEMA_VERSION = 1
# Smaller messages are latency, which calibrations of a few calls repeat badly.
_LEAST_BYTES = 64 << 10
_STREAMED = "stream"
_RANGES = {
    "time_ns": Range(0, 1e12, "nanoseconds"),
    "spread": Range(0, 1e6, "times the median"),
    "bytes": Range(0, 1 << 48, "bytes"),
    "ranks": COUNT_OF_RANKS,
}
# What is left unknown once a machine is calibrated: between processes that time the same step minutes apart, measured steps
# differ by 6 % on the average and by 11 % (standard deviation of the logarithm of their ratio; DLRM of 2 and 4 ranks on one
# machine, two visits each): host-bound ones by more than wire-bound ones.
HOST_ERROR, WIRE_ERROR = 0.11, 0.08


def read_calibration(file: Path, platform: Platform) -> Calibration:
    """The calibration in a file that `steptime calibrate` wrote, for predictions on this platform."""
    content = _content(file)
    host, fabric = _entries(content, "host", file), _entries(content, "fabric", file)
    # Slopes of what costs nothing can come out below zero.
    speed = speed_of(platform.host, [_times(entry, file) for entry in host if not _below_zero(entry)])
    if speed is None:
        raise InputError(f"{file}: none of its host costs is known to the host of platform {platform.name}; calibrate again")
    wire = _wire(fabric, platform, file)
    return Calibration(speed, wire, HOST_ERROR, WIRE_ERROR if wire else UNCALIBRATED.wire_error)


def _content(file: Path) -> Mapping[str, Any]:
    content = read_json(file, "what `steptime calibrate` wrote")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{file}: no calibration of version {SCHEMA_VERSION}; `steptime calibrate` writes one")
    return content


def _entries(content: Mapping[str, Any], key: str, file: Path) -> list[Mapping[str, Any]]:
    found = content.get(key)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise InputError(f"{file}: {key} is {type(found).__name__}; expected a list of what was measured")
    return found


def _number(entry: Mapping[str, Any], key: str, file: Path) -> float:
    return _RANGES[key].check(f"{file}: {key} of {entry.get('op') or entry.get('collective')}", entry.get(key))


def _below_zero(entry: Mapping[str, Any]) -> bool:
    value = entry.get("time_ns")
    return isinstance(value, int | float) and value < 0


def _times(entry: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """As rows of the set `host` have it: the median of the bursts, and their tenth and ninetieth percentile."""
    time_ns, spread = _number(entry, "time_ns", file), _number(entry, "spread", file)
    times = [time_ns * (1.0 + share * spread) for share in (-0.5, 0.0, 0.5)]
    return {"kind": entry.get("kind"), "op": entry.get("op"), "times_ns": times, "reference_cpu_ns": None}


def _wire(entries: Iterable[Mapping[str, Any]], platform: Platform, file: Path) -> dict[str, float]:
    """Per kind, how many times as long it takes as the platform's fabric says; of as many ranks as the platform has."""
    logs: dict[str, list[float]] = defaultdict(list)
    for entry in entries:
        kind, ranks, nbytes = str(entry.get("collective")), _number(entry, "ranks", file), _number(entry, "bytes", file)
        usual = kind in KINDS and entry.get("mode") == _STREAMED and nbytes >= _LEAST_BYTES and ranks == platform.ranks
        if usual and platform.fabric is not None and platform.fabric.knows(kind):
            (expected,) = platform.fabric.estimates([Message(kind, platform.ranks, int(nbytes))])
            logs[kind].append(float(np.log(max(_number(entry, "time_ns", file), 1.0) / expected.time_ns)))
    return {kind: float(np.exp(np.mean(found))) for kind, found in sorted(logs.items())}
