"""`Platform`: ranks on devices, a host and a fabric under one name, `<ranks>x<device>-<fabric>`; any part can be swapped.

The names that come with the package follow from its devices and fabrics: a fabric named after a device joins such devices
(`8xh200-nvlink` has the fabric `h200-nvlink`), and loopback joins the parts of one (`4xh200-quarter-loopback`). A user's
platform is a TOML file with `ranks`, `device`, `host` and `fabric`, each a shipped name or the path of a file, or the folder
of `steptime adopt`, in which such a file lies.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from steptime._files import read_whole
from steptime._hardware.description import Catalogue, count, is_file, read_toml
from steptime._hardware.device import DEVICES, device_names, read_device
from steptime._hardware.fabric import FABRICS, fabric_names, read_fabric
from steptime._models.collectives.overlap import Overlap
from steptime._models.host.model import HOSTS, HostModel, read_host
from steptime._platforms.device import Device
from steptime._platforms.fabric import Fabric
from steptime._platforms.names import chip, joining, joins, named, shipped
from steptime.errors import InputError

SCHEMA_VERSION = 1
# What describes the platform in a folder of `steptime adopt`.
ADOPTED = "platform.toml"

_NAME = re.compile(r"([0-9]{1,6})x([a-z0-9]\S*)")
_TURNED = re.compile(r"([a-z][a-z0-9]*?)x([0-9]{1,6})(|-\S*)")  # h100x8
_NVLINK = ("nvlink", "nvswitch")
_NEAREST = 8  # platforms that an unknown one is answered with
_LONGEST_NAME = 100  # in a message


@dataclass(frozen=True, slots=True)
class PlatformParts:
    """What a platform is made of: names of shipped parts, or paths of a user's. One rank needs no fabric."""

    name: str
    ranks: int
    device: str
    host: str
    fabric: str | None = None
    calibration: str | None = None  # of the very machine, where its file names one; it goes with the host

    def swapped(
        self, *, ranks: int | None = None, device: str | None = None, host: str | None = None, fabric: str | None = None
    ) -> PlatformParts:
        """The same with other parts; its name follows what it is made of."""
        if fabric:
            read_fabric(fabric)  # a mistyped name is an error, also for one rank, which uses none
        chosen = (self.ranks if ranks is None else ranks, device or self.device, fabric or self.fabric)
        if chosen == (self.ranks, self.device, self.fabric):
            return replace(self, host=host or self.host, calibration=None if host else self.calibration)
        kept = None if host or device else self.calibration
        return PlatformParts(
            named(*chosen), chosen[0], chosen[1], host or self.host, chosen[2] if chosen[0] > 1 else None, kept
        )

    def check(self) -> None:
        """An error where so many ranks cannot be on its device and fabric."""
        device = read_device(self.device)
        fabric = None if self.fabric is None else read_fabric(self.fabric)
        ranks = f"platform {self.name}: {self.ranks} ranks"
        if self.ranks < 1:
            raise InputError(f"{ranks}, expected 1 or more")
        if self.ranks > 1 and fabric is None:
            raise InputError(f"{ranks} and no fabric between them; there are {', '.join(fabric_names())}")
        if fabric is not None and self.ranks > fabric.ranks:
            other = joining(self.ranks, self.device)
            raise InputError(f"{ranks}, fabric {fabric.name} joins {fabric.ranks}{f'; did you mean {other}?' if other else ''}")
        if 1 < device.share < self.ranks:
            raise InputError(f"{ranks}, {device.name} is one of {device.share} shares of a GPU")


@dataclass(frozen=True)
class Platform:
    """Ranks, each on a device like this with a host like this, joined by a fabric; None where there is one rank."""

    parts: PlatformParts
    device: Device
    host: HostModel
    fabric: Fabric | None
    part_of: PlatformParts | None = field(default=None, compare=False)  # the one with more ranks, where these are some of its

    @property
    def overlap(self) -> Overlap:
        """How much collectives and what runs beside them slow each other here; not at all where nothing is known of it."""
        if self.fabric is None:
            return Overlap()
        result, device = Overlap.load(self.fabric.limits.name), self.device.limits
        if not result.known and device.share == 1 and self.fabric.limits.tiers[0].kind in _NVLINK:
            return Overlap.on_paper(device.sms.value)
        return result

    @property
    def name(self) -> str:
        """`<ranks>x<device>-<fabric>`, or what its file says."""
        return self.parts.name

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.parts.ranks

    @classmethod
    def load(
        cls,
        name: str,
        *,
        ranks: int | None = None,
        device: str | None = None,
        host: str | None = None,
        fabric: str | None = None,
    ) -> Platform:
        """A platform by its name, its TOML file or its folder; parts that are given replace its own."""
        return cls.of(platform_parts(name).swapped(ranks=ranks, device=device, host=host, fabric=fabric))

    @classmethod
    def of(cls, parts: PlatformParts) -> Platform:
        """From the names of its parts."""
        parts.check()
        fabric = None if parts.fabric is None else Fabric.load(parts.fabric)
        return cls(parts, Device.load(parts.device), read_host(parts.host), fabric)


def shipped_platforms() -> list[PlatformParts]:
    """Those whose device, host and fabric come with the package: usual rank counts, measured devices and whole ones first."""
    return [_parts(*each) for each in shipped()]


def fabrics_without_device() -> list[str]:
    """Shipped fabrics between devices of which no models come with the package."""
    devices = [read_device(name) for name in device_names()]
    return [name for name in fabric_names() if not any(joins(read_fabric(name), device) for device in devices)]


def platform_parts(name: str) -> PlatformParts:
    """What a platform of this name, in this TOML file or in this folder of `steptime adopt`, is made of."""
    if name.endswith(".toml"):
        return _read(Path(name))
    if is_file(Path(name) / ADOPTED):
        return _read(Path(name) / ADOPTED)
    result = _NAME.fullmatch(name)
    if result is None:
        raise _unknown(name, "names read <ranks>x<device>-<fabric>")
    ranks, rest = int(result[1]), result[2]
    if ranks < 1:
        raise _unknown(name, f"{ranks} ranks, expected 1 or more")
    devices = [device for device in device_names() if f"{rest}-".startswith(f"{device}-")]
    if not devices:
        raise _unknown(name, _without_models(rest))
    device = max(devices, key=len)
    word = rest.removeprefix(device).removeprefix("-")
    if not word:
        if ranks != 1:
            raise _unknown(name, f"{ranks} ranks need a fabric, as in {ranks}x{device}-FABRIC")
        return _parts(1, device, None)
    limits = read_device(device)
    fabric = next((item for item in (f"{limits.whole}-{word}", f"{chip(limits)}-{word}", word) if item in fabric_names()), None)
    if fabric is None:
        raise _unknown(name, f"no fabric is called {limits.whole}-{word} or {word}")
    parts = _parts(ranks, device, fabric)
    parts.check()
    return parts


def is_fabric(name: str) -> bool:
    """Whether a name or a TOML file is a fabric's, and no platform's."""
    if not name.endswith(".toml"):
        return name in fabric_names()
    try:
        return "tiers" in tomllib.loads(read_whole(Path(name)).decode())
    except (OSError, ValueError, RecursionError):
        return False


def _read(file: Path) -> PlatformParts:
    content = read_toml(file, "platform", SCHEMA_VERSION)
    ranks = count(file, content, "ranks")
    device = _part(file, content, "device", DEVICES)
    fabric = _part(file, content, "fabric", FABRICS) if "fabric" in content else None
    host = _part(file, content, "host", HOSTS) if "host" in content else usual_host(device)
    calibration = content.get("calibration")
    if calibration is not None and (not isinstance(calibration, str) or not is_file(file.parent / calibration)):
        raise InputError(f"{file}: calibration is {calibration!r}, expected the path of a file of `steptime calibrate`")
    own = None if calibration is None else str(file.parent / calibration)
    return PlatformParts(str(content.get("name", file.stem)), ranks, device, host, fabric, own)


def _part(file: Path, content: Mapping[str, Any], key: str, catalogue: Catalogue) -> str:
    """A shipped name as it is, a path from where the platform's file lies."""
    result = content.get(key)
    if not isinstance(result, str) or not result:
        raise InputError(f"{file}: {key} is {result!r}, expected a shipped name or the path of a file")
    name = str(file.parent / result) if result.endswith((".toml", ".json")) else result
    try:
        catalogue.file(name)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return name


def _parts(ranks: int, device: str, fabric: str | None) -> PlatformParts:
    return PlatformParts(named(ranks, device, fabric), ranks, device, usual_host(device), fabric if ranks > 1 else None)


def usual_host(device: str) -> str:
    """The host such devices were measured in, or else any; its speed is what `calibrate` is for."""
    names = HOSTS.names()
    if not names:
        raise InputError("no host comes with this package; `steptime fit` writes one")
    return next((name for name in names if name.endswith(f"-{read_device(device).models}")), names[0])


def _without_models(rest: str) -> str:
    """Why there is no device at the start of what follows the ranks."""
    word = rest.split("-", 1)[0]
    fabrics = [name for name in fabrics_without_device() if name.startswith(f"{word}-")]
    if fabrics:
        return f"no models of device {word} come with the package yet, only its fabrics {', '.join(fabrics)}"
    return f"no device is called {word}"


def _unknown(name: str, why: str) -> InputError:
    there = [parts.name for parts in shipped_platforms()]
    alike = [item for item in there if item.split("x")[0] == name.split("x", maxsplit=1)[0]]
    meant = _turned(name.lower(), there) or _close(name, alike) or _close(name, there)
    hint = f"; did you mean {meant[0]}?" if meant else "."
    near = list(dict.fromkeys((*get_close_matches(name.lower(), there, _NEAREST), *there)))[:_NEAREST]
    others = f"{', '.join(near)} and {len(there) - len(near)} more (steptime platforms)"
    more = f"There are {others}, or give a .toml file or a folder of `steptime adopt`"
    return InputError(f"no platform {name[:_LONGEST_NAME]!r}: {why}{hint} {more}")


def _close(name: str, names: list[str]) -> list[str]:
    return get_close_matches(name.lower(), names, 1, cutoff=0.4)


def _turned(name: str, there: list[str]) -> list[str]:
    """The platform that is written so but for its case, or that has its ranks behind the device."""
    turned = _TURNED.fullmatch(name)
    wanted = name if turned is None else f"{turned[2]}x{turned[1]}{turned[3]}"
    return [each for each in there if each == wanted or each.startswith(f"{wanted}-")][:1]
