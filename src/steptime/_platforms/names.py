"""Names of the platforms that come with the package, without loading their models: completion asks for them at every key."""

from __future__ import annotations

import re
from pathlib import Path

from steptime._hardware.device import DeviceLimits, device_names, read_device
from steptime._hardware.fabric import FabricLimits, fabric_names, read_fabric

_LOOPBACK = "loopback"
_MEMORY = re.compile(r"-[0-9]+gb$")


def shipped() -> list[tuple[int, str, str | None]]:
    """Ranks, device and fabric of every platform: usual rank counts, measured devices and whole ones first."""
    devices = sorted((read_device(name) for name in device_names()), key=lambda device: (device.analytic, device.share))
    fabrics = [read_fabric(name) for name in fabric_names()]
    results: list[tuple[int, str, str | None]] = [(1, device.name, None) for device in devices if device.share == 1]
    for device in devices:
        for fabric in fabrics:
            if joins(fabric, device):
                counts = (device.share,) if device.share > 1 else _usual_counts(fabric)
                results += [(ranks, device.name, fabric.name) for ranks in counts]
    return results


def named(ranks: int, device: str, fabric: str | None) -> str:
    """Without what the fabric's name says of the device already; of paths, the file's name."""
    device, whole = Path(device).name.removesuffix(".toml"), read_device(device).whole
    if fabric is None or ranks == 1:
        return f"{ranks}x{device}"
    word = Path(fabric).name.removesuffix(".toml").removeprefix(f"{whole}-").removeprefix(f"{_MEMORY.sub('', whole)}-")
    return f"{ranks}x{device}-{word}"


def joins(fabric: FabricLimits, device: DeviceLimits) -> bool:
    """Whether devices like this are on such a fabric: parts of one on loopback, whole ones on those named after them."""
    if fabric.tiers[0].kind == _LOOPBACK:
        return device.share > 1
    return device.share == 1 and fabric.name.startswith((f"{device.name}-", f"{chip(device)}-"))


def chip(device: DeviceLimits) -> str:
    """What devices are called that differ in nothing but memory: they are on the same fabrics."""
    return _MEMORY.sub("", device.whole)


def joining(ranks: int, device: str) -> str | None:
    """A platform of so many ranks on such devices, of the smallest shipped fabric that joins them; None where none does."""
    fabrics = [read_fabric(name) for name in fabric_names()]
    large = [each for each in fabrics if each.ranks >= ranks and joins(each, read_device(device))]
    return named(ranks, device, min(large, key=lambda each: each.ranks).name) if large else None


def _usual_counts(fabric: FabricLimits) -> list[int]:
    """Powers of two and all ranks; of several nodes, those that one node does not have."""
    least = 2 if fabric.nodes == 1 else fabric.gpus_per_node + 1
    powers = {1 << power for power in range(1, fabric.ranks.bit_length())}
    return sorted(count for count in powers | {fabric.ranks} if least <= count <= fabric.ranks)
