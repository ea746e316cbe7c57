"""Fabrics: NCCL settings under a name, and where a group of ranks stands on one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# The first of several is swept densely.
LOOPBACK: dict[str, dict[str, str]] = {
    "loopback": {},
    "loopback-2x2": {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"},
}
SETTINGS: dict[str, dict[str, str]] = {**LOOPBACK, "default": {}, "gloo": {}}

# Names the fabric of a group whose wires are not the usual ones.
FABRIC = "STEPTIME_FABRIC"


def fabric_of(ranks: int, share: int, device: str) -> str:
    """What connects the ranks of a group, as the collectives' set names it; the environment may say otherwise."""
    if ranks == 1:
        return "none"
    if not device.startswith("cuda"):
        return "gloo"
    return os.environ.get(FABRIC, "loopback" if share > 1 else "default")


@dataclass(frozen=True, slots=True)
class Place:
    """A number of ranks on a fabric: what one group of processes measures."""

    ranks: int
    fabric: str
    share: int  # how many ranks share one GPU; 1: a GPU each

    @property
    def settings(self) -> dict[str, str]:
        """The environment that makes the fabric."""
        return SETTINGS.get(self.fabric, {})

    @property
    def dense(self) -> bool:
        """Whether every case is wanted here; a second fabric gets a coarser grid."""
        return self.fabric != "loopback-2x2"

    @property
    def unsteady(self) -> bool:
        """Whether a quarter of all repeats and more are outliers: ranks with two cores each, threads that share sockets."""
        return self.ranks >= 8 or self.fabric == "loopback-2x2"

    def columns(self) -> dict[str, Any]:
        """What a row says about it."""
        settings = json.dumps(self.settings, sort_keys=True)
        return {"ranks": self.ranks, "fabric": self.fabric, "settings": settings, "share": self.share}

    def to_dict(self) -> dict[str, Any]:
        """For a plan."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Place:
        """The place that `to_dict` gave."""
        return cls(int(values["ranks"]), str(values["fabric"]), int(values["share"]))
