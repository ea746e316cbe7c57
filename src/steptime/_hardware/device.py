"""The limits of a GPU, or of a part of one, from its data sheet: a TOML file each, every number with its source.

A device that was measured names its fitted models (`models`). One that nobody ran names the device whose models stand in for
its own (`transferred_from`), and what is known of going from one to the other (`[transfer]`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import steptime
from steptime.errors import InputError

SCHEMA_VERSION = 1
FOLDER = Path(steptime.__file__).parent / "data" / "devices"

# The precision a product of some dtype runs in.
PRECISIONS = ("float64", "float32", "tf32", "float16", "bfloat16")
# Of attention.
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class TransferBasis:
    """What is known of a device that answers with another one's models."""

    basis: str  # what the two have in common and what not
    interval_factor: Quantity  # how far off, either way, nine of ten transferred times are, the other's own errors apart
    attention_flop_per_s: Mapping[str, Quantity]  # by direction, what fused attention reaches; none where it is the other's
    whole_waves: bool = False  # whether products run in whole rounds of tiles over the SMs


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """A GPU as its data sheet has it. `share` parts of it are equal, and this is one of them."""

    name: str
    title: str
    whole: str  # the device that it is, or is a part of
    share: int
    models: str  # the fitted kernel models that answer for it, by the name of the whole device
    sms: Quantity
    memory_bytes: Quantity
    bandwidth_bytes_per_s: Quantity
    cache_bytes: Quantity  # of the last level
    clock_hz: Quantity
    peak_flop_per_s: Mapping[str, Quantity]  # by precision, dense
    host_bandwidth_bytes_per_s: Quantity | None = None  # to or from the host, one way
    transfer: TransferBasis | None = None  # where `models` are another device's

    @property
    def analytic(self) -> bool:
        """Whether its times are another device's, scaled by what is on paper of both."""
        return self.transfer is not None

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
    if whole.analytic:
        raise InputError(f"{file}: part of {whole.name}, of which nothing was measured; parts are of measured devices only")
    return DeviceLimits(
        name=str(content.get("name", file.stem)),
        title=str(content.get("title", "")),
        whole=whole.whole,
        share=share,
        models=whole.models,
        sms=whole.sms,
        memory_bytes=whole.memory_bytes,
        bandwidth_bytes_per_s=whole.bandwidth_bytes_per_s,
        cache_bytes=whole.cache_bytes,
        clock_hz=whole.clock_hz,
        peak_flop_per_s=whole.peak_flop_per_s,
        host_bandwidth_bytes_per_s=whole.host_bandwidth_bytes_per_s,
    )


def _quantity(file: Path, place: Any, key: str) -> Quantity:
    found = place.get(key) if isinstance(place, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("value"), int | float) or not found.get("source"):
        raise InputError(f"{file}: {key} needs a value and its source, as in {key} = {{ value = 1, source = '...' }}")
    if not found["value"] > 0:
        raise InputError(f"{file}: {key} is {found['value']}, expected more than nothing")
    return Quantity(float(found["value"]), str(found["source"]))


def _transfer(file: Path, content: Mapping[str, Any]) -> TransferBasis | None:
    if "transferred_from" not in content:
        return None
    if not isinstance(content["transferred_from"], str):
        raise InputError(
            f"{file}: transferred_from is {content['transferred_from']!r}, expected the name of a device with models"
        )
    if "models" in content:
        raise InputError(f"{file}: models and transferred_from; a device has models of its own or another one's, not both")
    given = content.get("transfer")
    if not isinstance(given, dict) or not given.get("basis"):
        raise InputError(
            f"{file}: transfer.basis is missing: what {content['transferred_from']} and this device have in common"
        )
    factor = _quantity(file, given, "interval_factor")
    if factor.value < 1:
        raise InputError(f"{file}: interval_factor is {factor.value}, expected 1 or more: times lie that factor either way")
    attention = given.get("attention_flop_per_s", {})
    return TransferBasis(
        basis=str(given["basis"]),
        whole_waves=bool(given.get("whole_waves", False)),
        interval_factor=factor,
        attention_flop_per_s={
            direction: _quantity(file, attention, direction) for direction in DIRECTIONS if direction in attention
        },
    )


def _limits(file: Path, content: Mapping[str, Any]) -> DeviceLimits:
    quantity = partial(_quantity, file)
    limits = content.get("limits")
    peaks = limits.get("peak_flop_per_s", {}) if isinstance(limits, dict) else {}
    if "float32" not in peaks:
        raise InputError(f"{file}: limits.peak_flop_per_s.float32 is missing")
    name = str(content.get("name", file.stem))
    host = "host_bandwidth_bytes_per_s"
    return DeviceLimits(
        name=name,
        title=str(content.get("title", "")),
        whole=name,
        share=1,
        models=str(content.get("transferred_from", content.get("models", file.stem))),
        sms=quantity(limits, "sms"),
        memory_bytes=quantity(limits, "memory_bytes"),
        bandwidth_bytes_per_s=quantity(limits, "bandwidth_bytes_per_s"),
        cache_bytes=quantity(limits, "cache_bytes"),
        clock_hz=quantity(limits, "clock_hz"),
        peak_flop_per_s={precision: quantity(peaks, precision) for precision in PRECISIONS if precision in peaks},
        host_bandwidth_bytes_per_s=quantity(limits, host) if isinstance(limits, dict) and host in limits else None,
        transfer=_transfer(file, content),
    )
