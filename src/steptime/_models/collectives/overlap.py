"""`Overlap`: how much a collective and what runs beside it slow each other, measured, or over NVLink from what is published.

A collective holds SMs from its own start, waiting included. What runs beside it has the others; short kernels lose more, and a
kernel whose blocks are dealt out once, one to each SM (`persistent`), begins some of them only when others end. A collective
that finds the device full starts when the running kernel ends. Where the wire is CPU time, busy cores slow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._hardware.description import read_json
from steptime._hardware.fabric import FOLDER
from steptime._hardware.nccl import read_nccl
from steptime._models.collectives.message import Floats
from steptime.errors import InputError

Flags = npt.NDArray[np.bool_]
Row = Mapping[str, Any]  # of the set collectives

SCHEMA_VERSION = 1
FILE = FOLDER / "overlap.json"
NOT_MEASURED, ANALYTIC = "not measured", "analytic: SMs that NCCL holds, from what is published (nccl.toml)"

# Products of cuBLAS for Hopper; of the kernels of the measured steps only these go far beyond the others' law.
PERSISTENT_KERNELS = ("nvjet",)
# However small the part, a collective leaves this much of it.
_LEAST_LEFT = 0.25
_EVERY = 1e18  # of nanoseconds: a collective that outlasts any kernel


def is_persistent(kernel: str) -> bool:
    """Whether a kernel of this name deals its blocks out once."""
    return kernel.startswith(PERSISTENT_KERNELS)


@dataclass(frozen=True)
class Overlap:
    """Factors of time. The fields are fitted constants; without any, everything takes what it takes alone."""

    source: str = NOT_MEASURED
    sms: float = 1.0  # of the whole device on which it was measured
    held_sms: float = 0.0  # by a collective, as far as long kernels notice
    tail_ns: float = 0.0  # what a kernel of some length loses besides, on half a GPU
    tail_power: float = 0.0  # and how that goes with the parts of the GPU
    short_ns: float = 1.0  # kernels of this length lose half of it
    persistent: Mapping[int, float] | None = None  # parts of the GPU -> factor of persistent kernels
    start_wait: float = 0.0  # of the running kernel's time, before the collective has started on all ranks
    persistent_start_wait: float = 0.0  # where that is a persistent one, per part of the GPU
    moving: float = 0.0  # ln of what moving takes more where kernels run beside it all the while
    busy: Mapping[int, float] | None = None  # ranks -> factor where a thread keeps one of the rank's cores busy

    @classmethod
    def load(cls, fabric: str) -> Overlap:
        """Of a shipped fabric; nothing slows anything where no pairs were measured."""
        return _shipped().get(fabric, cls())

    @classmethod
    def on_paper(cls, sms: float) -> Overlap:
        """Of whole GPUs with so many SMs and NVLink between them."""
        paper = read_nccl().overlap
        return cls(ANALYTIC, sms, paper.held_sms, persistent={1: paper.persistent}, moving=paper.moving)

    @property
    def known(self) -> bool:
        """Whether factors other than 1 may come."""
        return self.source != NOT_MEASURED

    def compute_factor(
        self,
        kernel_ns: npt.ArrayLike,
        share: npt.ArrayLike,
        *,
        collective_ns: npt.ArrayLike = _EVERY,
        persistent: npt.ArrayLike = False,
    ) -> Floats:
        """How many times as long a kernel takes of which a collective runs beside, waiting included.

        `kernel_ns` is what it takes by itself on its part of the GPU, of which there are `share`; `collective_ns` is how long
        the collective holds its SMs. A kernel that begins or ends without it wants a factor for the time in common only.
        """
        alone, parts, held = _columns(kernel_ns, _checked("share", share), collective_ns)
        if not self.known:
            return np.ones(alone.shape)
        sms = self.sms / parts
        long = sms / np.maximum(sms - self.held_sms, _LEAST_LEFT * sms)
        usual = long + self.tail_ns * (parts / 2.0) ** self.tail_power / (np.maximum(alone, 0.0) + self.short_ns)
        dealt = _between(self.persistent, parts)
        factor = np.where(np.asarray(persistent, dtype=np.bool_), dealt, usual)
        met = np.maximum(held, 0.0) / np.maximum(np.maximum(held, 0.0) + np.maximum(alone, 0.0), 1.0)
        result: Floats = 1.0 + (factor - 1.0) * met
        return result

    def collective_factor(
        self,
        alone_ns: npt.ArrayLike,
        ranks: npt.ArrayLike,
        share: npt.ArrayLike = 1,
        *,
        kernel_ns: npt.ArrayLike = 0.0,
        persistent: npt.ArrayLike = False,
        busy: npt.ArrayLike = False,
    ) -> Floats:
        """How many times as long a collective takes, from when all ranks have called it.

        `kernel_ns` is the usual length of the kernels that fill the device meanwhile, 0 where nothing runs beside. A simulator
        that itself holds a collective back until the running kernel ends asks for `moving_factor` instead.
        """
        alone, kernel, counts, parts = _columns(alone_ns, kernel_ns, _checked("ranks", ranks), _checked("share", share))
        if not self.known:
            return np.ones(alone.shape)
        wait = np.where(
            np.asarray(persistent, dtype=np.bool_), np.minimum(self.persistent_start_wait * parts, 1.0), self.start_wait
        )
        # Of a collective of no time the factor says nothing.
        waited = wait * np.maximum(kernel, 0.0) / np.maximum(alone, 1.0)
        return self.moving_factor(counts, beside=kernel > 0, busy=busy) + np.where(alone > 0, waited, 0.0)

    def moving_factor(self, ranks: npt.ArrayLike, *, beside: npt.ArrayLike = 0.0, busy: npt.ArrayLike = False) -> Floats:
        """The same without the wait for a running kernel to end; `beside` is the share of its time with kernels beside it."""
        counts, covered, crowded = _columns(_checked("ranks", ranks), beside, busy)
        if not self.known:
            return np.ones(counts.shape)
        slowed: Floats = np.exp(self.moving * np.clip(covered, 0.0, 1.0))
        return slowed * np.where(crowded > 0, _between(self.busy, counts), 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            name: {str(key): round(each, 4) for key, each in value.items()} if isinstance(value, Mapping) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> Overlap:
        """What `to_dict` gave; `where` is said in errors."""
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            odd = ", ".join(sorted(set(values) ^ names))
            raise InputError(f"{where}: constants of an overlap that are missing or not known: {odd}")
        known = {name: values[name] for name in ("persistent", "busy") if values[name] is not None}
        tables = {name: {int(key): float(each) for key, each in table.items()} for name, table in known.items()}
        return cls(**{**values, **tables})


def _columns(*values: npt.ArrayLike) -> tuple[Floats, ...]:
    return tuple(np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in values)))


def _checked(name: str, values: npt.ArrayLike) -> Floats:
    result = np.asarray(values, dtype=np.float64)
    if result.size and not result.min() >= 1:
        raise InputError(f"overlap: {name} is {result.min():g}; expected 1 or more")
    return result


def _between(table: Mapping[int, float] | None, places: Floats) -> Floats:
    """Interpolated over doublings; beyond what was measured, as at its end."""
    if not table:
        return np.ones(places.shape)
    known = sorted(table)
    result: Floats = np.interp(np.log2(places), np.log2(known), [table[item] for item in known])
    return result


@cache
def _shipped() -> Mapping[str, Overlap]:
    return read_overlaps(FILE)


def read_overlaps(file: Path) -> Mapping[str, Overlap]:
    """What `write_overlaps` wrote, by fabric."""
    content = read_json(file, "overlaps")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{file}: no overlaps of version {SCHEMA_VERSION}")
    return {name: Overlap.from_dict(values, f"{file}, {name}") for name, values in content["fabrics"].items()}
