"""The limits of a GPU, or of a part of one, from its data sheet: a TOML file each, every number with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import steptime
from steptime.errors import InputError

SCHEMA_VERSION = 1
FOLDER = Path(steptime.__file__).parent / "data" / "devices"

# The precision a product of some dtype runs in.
PRECISIONS = ("float64", "float32", "tf32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """A GPU as its data sheet has it. `share` parts of it are equal, and this is one of them."""

    name: str
    title: str
    share: int
    models: str  # the fitted kernel models that answer for it, by the name of the whole device
    sms: Quantity
    memory_bytes: Quantity
    bandwidth_bytes_per_s: Quantity
    cache_bytes: Quantity  # of the last level
    clock_hz: Quantity
    peak_flop_per_s: Mapping[str, Quantity]  # by precision, dense

    def roofline_ns(self, flop: float, nbytes: float, precision: str) -> float:
        """The longer of computing and moving at the limits of this part."""
        peak = self.peak_flop_per_s.get(precision, self.peak_flop_per_s["float32"]).value
        return 1e9 * self.share * max(flop / peak, nbytes / self.bandwidth_bytes_per_s.value)


def device_names() -> list[str]:
    """The devices that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def read_device(name: str | Path) -> DeviceLimits:
    """A shipped device by its name, or one of the user's by the path of its TOML file."""
    name = str(name)
    file = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not file.is_file():
        raise InputError(f"no device {name!r}; there are {', '.join(device_names())}, or give the path of a .toml file")
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not readable as TOML ({error})") from error
    if content.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{file}: device of version {content.get('schema_version')}, this steptime reads {SCHEMA_VERSION}")
    whole = content.get("part_of")
    if whole is None:
        return _limits(file, content)
    return _part(file, content, read_device(str(file.with_name(f"{whole}.toml"))))


def _part(file: Path, content: Mapping[str, Any], whole: DeviceLimits) -> DeviceLimits:
    """So much of the whole; rates and sizes stay the whole's, for parts share them."""
    share = content.get("share")
    if not isinstance(share, int) or share < 1:
        raise InputError(f"{file}: share is {share!r}, expected how many equal parts the device is divided into")
    return DeviceLimits(
        name=str(content.get("name", file.stem)),
        title=str(content.get("title", "")),
        share=share,
        models=whole.models,
        sms=whole.sms,
        memory_bytes=whole.memory_bytes,
        bandwidth_bytes_per_s=whole.bandwidth_bytes_per_s,
        cache_bytes=whole.cache_bytes,
        clock_hz=whole.clock_hz,
        peak_flop_per_s=whole.peak_flop_per_s,
    )


def _limits(file: Path, content: Mapping[str, Any]) -> DeviceLimits:
    def quantity(place: Any, key: str) -> Quantity:
        found = place.get(key) if isinstance(place, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get("value"), int | float) or not found.get("source"):
            raise InputError(f"{file}: {key} needs a value and its source, as in {key} = {{ value = 1, source = '...' }}")
        if not found["value"] > 0:
            raise InputError(f"{file}: {key} is {found['value']}, expected more than nothing")
        return Quantity(float(found["value"]), str(found["source"]))

    limits = content.get("limits")
    peaks = limits.get("peak_flop_per_s", {}) if isinstance(limits, dict) else {}
    if "float32" not in peaks:
        raise InputError(f"{file}: limits.peak_flop_per_s.float32 is missing")
    return DeviceLimits(
        name=str(content.get("name", file.stem)),
        title=str(content.get("title", "")),
        share=1,
        models=str(content.get("models", file.stem)),
        sms=quantity(limits, "sms"),
        memory_bytes=quantity(limits, "memory_bytes"),
        bandwidth_bytes_per_s=quantity(limits, "bandwidth_bytes_per_s"),
        cache_bytes=quantity(limits, "cache_bytes"),
        clock_hz=quantity(limits, "clock_hz"),
        peak_flop_per_s={precision: quantity(peaks, precision) for precision in PRECISIONS if precision in peaks},
    )
