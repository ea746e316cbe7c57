"""What NCCL does over links of a kind: protocols with their steps, connections of a pair, peers of an exchange."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import steptime
from steptime._hardware.description import Quantity, ValueRange, read_toml
from steptime.errors import InputError

SCHEMA_VERSION = 1
FILE = Path(steptime.__file__).parent / "data" / "nccl.toml"
_LINKS = {"nvlink": "nvlink", "nvswitch": "nvlink", "pcie": "pcie", "loopback": "pcie", "network": "network"}
_NUMBER = ValueRange(1e-3, 1e15, "the unit that its name says")


@dataclass(frozen=True, slots=True)
class Protocol:
    """Of messages through rings or trees."""

    name: str
    reached: float  # of the links' bandwidth
    nvlink_step_ns: float
    pcie_step_ns: float
    network_step_ns: float

    def step_ns(self, link: str) -> float:
        """Of one step over a tier of this kind."""
        return float(getattr(self, f"{_LINKS[link]}_step_ns"))


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """What messages through cards reach, and what peers cost."""

    ring_fraction: float  # of a card's bandwidth
    exchange_fraction: float
    peer_ns: float  # a further peer of an exchange
    connection_bytes_per_s: float
    connections: float  # of a pair among few nodes; one among many
    few_nodes: float

    def pair_bytes_per_s(self, nodes: int) -> float:
        """What the connections of a pair carry, in a group over so many nodes."""
        return self.connection_bytes_per_s * (self.connections if nodes <= self.few_nodes else 1.0)


@dataclass(frozen=True, slots=True)
class OverlapOnPaper:
    """How collectives over NVLink and the kernels of a whole GPU slow each other, from what others published."""

    held_sms: float  # by a collective, from its start
    persistent: float  # times as long a kernel takes whose blocks are dealt out once
    moving: float  # ln of how many times as long moving takes beside kernels


@dataclass(frozen=True, slots=True)
class Nccl:
    """Everything, with where it comes from by its place in the file."""

    rings: tuple[Protocol, ...]
    trees: tuple[Protocol, ...]
    network: NetworkUse
    node_peer_ns: float
    overlap: OverlapOnPaper
    sources: tuple[Quantity, ...]


@cache
def read_nccl(file: Path = FILE) -> Nccl:
    """The shipped file; numbers without a source are an error."""
    content = read_toml(file, "NCCL", SCHEMA_VERSION)
    found: list[Quantity] = []
    rings, trees = (
        tuple(Protocol(name, **_numbers(file, table, found)) for name, table in content[way].items())
        for way in ("rings", "trees")
    )
    network = NetworkUse(**_numbers(file, content["network"], found))
    node = _numbers(file, content["node"], found)
    overlap = OverlapOnPaper(**_numbers(file, content["overlap"], found))
    return Nccl(rings, trees, network, node["peer_ns"], overlap, tuple(found))


def _numbers(file: Path, table: dict[str, Any], found: list[Quantity]) -> dict[str, float]:
    for name, entry in table.items():
        if not isinstance(entry, dict) or not entry.get("source"):
            raise InputError(f"{file}: {name} needs a value and its source")
        found.append(Quantity(_NUMBER.check(f"{file}: {name}", entry["value"]), str(entry["source"])))
    return {name: float(entry["value"]) for name, entry in table.items()}
