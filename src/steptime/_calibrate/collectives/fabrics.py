"""Fabrics: NCCL settings under a name, and where a group of ranks stands on one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from steptime._calibrate.harness.options import Options
from steptime._calibrate.harness.ranks import Layout
from steptime.errors import InputError

# The first of several is swept densely.
LOOPBACK: dict[str, dict[str, str]] = {
    "loopback": {},
    "loopback-2x2": {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"},
}
SETTINGS: dict[str, dict[str, str]] = {**LOOPBACK, "default": {}, "gloo": {}}

# Sharded training on four ranks is measured first, so its wires are as well.
_ORDER_OF_WORTH = (4, 2, 8)


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


def places(options: Options, gpus: int) -> list[Place]:
    """What there is to measure, most wanted first: every rank count on the first fabric, then on the next."""
    ranks = rank_counts(options, gpus)
    if options.device != "cuda":
        return [Place(count, "gloo", 1) for count in ranks]
    if not options.share_gpu:
        return [Place(count, "default", 1) for count in ranks]
    return [Place(count, fabric, count) for fabric in LOOPBACK for count in ranks]


def rank_counts(options: Options, gpus: int) -> list[int]:
    """The rank counts asked for that can exchange something, most wanted first."""
    asked = [count for count in options.ranks if count > 1]
    if options.device == "cuda" and not options.share_gpu:
        fitting = [count for count in asked or (2, 4, 8) if count <= gpus]
        if not fitting:
            raise InputError(
                f"collectives need two ranks or more and this machine has {gpus} GPU(s); "
                "let the ranks share one (--share-gpu) or use a machine with more"
            )
        asked = fitting
    elif not asked:
        asked = [2, 4, 8] if options.device == "cuda" else [2]
    return sorted(set(asked), key=lambda count: (_ORDER_OF_WORTH.index(count) if count in _ORDER_OF_WORTH else 9, count))


def layout_of(place: Place, device: str) -> Layout:
    """Where its ranks live."""
    return Layout(place.ranks, share_gpu=device == "cuda" and place.share > 1, device=device)
