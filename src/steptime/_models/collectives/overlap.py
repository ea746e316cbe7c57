"""`Overlap`: how much a collective and what runs beside it slow each other, on the fabrics on which that was measured.

A collective holds SMs from its own start, waiting included. What runs beside it has the others; short kernels lose more, and a
kernel whose blocks are dealt out once, one to each SM (`persistent`), begins some of them only when others end. A collective
that finds the device full starts when the running kernel ends. Where the wire is CPU time, busy cores slow it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._hardware.fabric import FOLDER
from steptime._models.kernels.rows import split_of
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Row = Mapping[str, Any]  # of the set collectives

SCHEMA_VERSION = 1
FILE = FOLDER / "overlap.json"
NOT_MEASURED = "not measured"

# Products of cuBLAS for Hopper; of the kernels of the measured steps only these go far beyond the others' law.
PERSISTENT_KERNELS = ("nvjet",)
_SMS = 132.0  # of an H200, on which all of it was measured
# However small the part, a collective leaves this much of it.
_LEAST_LEFT = 0.25
_UNSTEADY_RANKS = 8  # at which repeats have a heavy upper tail on any setting
_STEADY_FABRIC = "loopback"
_LONG_NS = 250e3  # kernels from which on what they lose besides held SMs is lost in noise
_EVERY = 1e18  # of nanoseconds: a collective that outlasts any kernel


def is_persistent(kernel: str) -> bool:
    """Whether a kernel of this name deals its blocks out once."""
    return kernel.startswith(PERSISTENT_KERNELS)


@dataclass(frozen=True)
class Overlap:
    """Factors of time. The fields are fitted constants; without any, everything takes what it takes alone."""

    source: str = NOT_MEASURED
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

    @property
    def measured(self) -> bool:
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
        if not self.measured:
            return np.ones(alone.shape)
        sms = _SMS / parts
        long = sms / np.maximum(sms - self.held_sms, _LEAST_LEFT * sms)
        usual = long + self.tail_ns * (parts / 2.0) ** self.tail_power / (np.maximum(alone, 0.0) + self.short_ns)
        dealt = _between(self.persistent, parts)
        factor = np.where(np.asarray(persistent, dtype=np.bool_), dealt, usual)
        met = np.maximum(held, 0.0) / np.maximum(np.maximum(held, 0.0) + np.maximum(alone, 0.0), 1.0)
        found: Floats = 1.0 + (factor - 1.0) * met
        return found

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
        if not self.measured:
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
        if not self.measured:
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
        names = {one.name for one in fields(cls)}
        if set(values) != names:
            odd = ", ".join(sorted(set(values) ^ names))
            raise InputError(f"{where}: constants of an overlap that are missing or not known: {odd}")
        known = {name: values[name] for name in ("persistent", "busy") if values[name] is not None}
        tables = {name: {int(key): float(each) for key, each in table.items()} for name, table in known.items()}
        return cls(**{**values, **tables})


def _columns(*values: npt.ArrayLike) -> tuple[Floats, ...]:
    return tuple(np.broadcast_arrays(*(np.asarray(one, dtype=np.float64) for one in values)))


def _checked(name: str, values: npt.ArrayLike) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if found.size and not found.min() >= 1:
        raise InputError(f"overlap: {name} is {found.min():g}; expected 1 or more")
    return found


def _between(table: Mapping[int, float] | None, places: Floats) -> Floats:
    """Interpolated over doublings; beyond what was measured, as at its end."""
    if not table:
        return np.ones(places.shape)
    known = sorted(table)
    found: Floats = np.interp(np.log2(places), np.log2(known), [table[one] for one in known])
    return found


@cache
def _shipped() -> Mapping[str, Overlap]:
    return read_overlaps(FILE)


def read_overlaps(file: Path) -> Mapping[str, Overlap]:
    """What `write_overlaps` wrote, by fabric."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{file}: no overlaps of version {SCHEMA_VERSION}")
    return {name: Overlap.from_dict(values, f"{file}, {name}") for name, values in content["fabrics"].items()}


def write_overlaps(file: Path, overlaps: Mapping[str, Overlap], recipe: str) -> None:
    """Constants by fabric, and the command that makes them again."""
    found = {name: overlap.to_dict() for name, overlap in sorted(overlaps.items())}
    content = {"schema_version": SCHEMA_VERSION, "recipe": recipe, "fabrics": found}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class KernelPairs:
    """Kernels beside a collective and without one."""

    alone_ns: Floats
    beside_ns: Floats
    share: Floats
    persistent: Flags
    collective_ns: Floats
    kernel: npt.NDArray[np.str_]  # which one it is
    text: Sequence[str]  # what decides on which side of the split a pair lies

    def of(self, *splits: str) -> KernelPairs:
        """Those of some splits."""
        return self.take(np.array([split_of(one) in splits for one in self.text], dtype=np.bool_))

    def take(self, chosen: Flags) -> KernelPairs:
        """Some of them."""
        return replace(self, **_taken(self, chosen))

    def joined(self, other: KernelPairs) -> KernelPairs:
        """Both, one after the other."""
        columns = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _column_names(self)}
        return replace(self, text=[*self.text, *other.text], **columns)

    def predicted_ns(self, overlap: Overlap) -> Floats:
        """What the kernels take beside the collective."""
        factor = overlap.compute_factor(self.alone_ns, self.share, collective_ns=self.collective_ns, persistent=self.persistent)
        return self.alone_ns * factor


@dataclass(frozen=True)
class CollectivePairs:
    """Collectives beside something and by themselves."""

    alone_ns: Floats
    beside_ns: Floats
    ranks: Floats
    share: Floats
    kernel_ns: Floats  # 0 where only the host was busy
    persistent: Flags
    busy: Flags
    text: Sequence[str]

    def of(self, *splits: str) -> CollectivePairs:
        """Those of some splits."""
        return self.take(np.array([split_of(one) in splits for one in self.text], dtype=np.bool_))

    def take(self, chosen: Flags) -> CollectivePairs:
        """Some of them."""
        return replace(self, **_taken(self, chosen))

    def predicted_ns(self, overlap: Overlap) -> Floats:
        """What the collectives take in company."""
        factor = overlap.collective_factor(
            self.alone_ns, self.ranks, self.share, kernel_ns=self.kernel_ns, persistent=self.persistent, busy=self.busy
        )
        return self.alone_ns * factor


def _column_names(pairs: KernelPairs | CollectivePairs) -> list[str]:
    return [one.name for one in fields(pairs) if one.name != "text"]


def _taken(pairs: KernelPairs | CollectivePairs, chosen: Flags) -> dict[str, Any]:
    columns: dict[str, Any] = {name: getattr(pairs, name)[chosen] for name in _column_names(pairs)}
    return {**columns, "text": [one for one, kept in zip(pairs.text, chosen, strict=True) if kept]}


def measured_pairs(rows: Iterable[Row], fabric: str) -> tuple[KernelPairs, CollectivePairs]:
    """Rows of one fabric with something beside them, each with the same message alone, of the same run where it has one."""
    own = [row for row in rows if row["fabric"] == fabric and row["mode"] == "stream" and row["arrival"] == "together"]
    alone: dict[tuple[str, int, int], list[Row]] = {}
    for row in own:
        if _alone(row) and not row["splits"]:
            alone.setdefault(_message(row), []).append(row)
    pairs = [
        (row, _level(row), _alone_ns(row, alone[_message(row)])) for row in own if not _alone(row) and _message(row) in alone
    ]
    beside = [(row, alone_ns) for row, _, alone_ns in pairs if row["beside_ns"] and row["beside_alone_ns"]]
    kernels = KernelPairs(
        np.array([row["beside_alone_ns"] for row, _ in beside]),
        np.array([row["beside_ns"] for row, _ in beside]),
        np.array([float(row["share"]) for row, _ in beside]),
        np.array([row["beside"] == "gemm" for row, _ in beside], dtype=np.bool_),
        np.array([alone_ns for _, alone_ns in beside]),
        np.array([row["beside"] for row, _ in beside], dtype=np.str_),
        [_text(row) for row, _ in beside],
    )
    collectives = CollectivePairs(
        np.array([alone_ns for _, _, alone_ns in pairs]),
        np.array([level for _, level, _ in pairs]),
        np.array([float(row["ranks"]) for row, _, _ in pairs]),
        np.array([float(row["share"]) for row, _, _ in pairs]),
        np.array([float(row["beside_alone_ns"] or 0.0) for row, _, _ in pairs]),
        np.array([row["beside"] == "gemm" for row, _, _ in pairs], dtype=np.bool_),
        np.array([row["host_threads"] == "busy" for row, _, _ in pairs], dtype=np.bool_),
        [_text(row) for row, _, _ in pairs],
    )
    return kernels, collectives


def _alone(row: Row) -> bool:
    return bool(row["beside"] == "none" and row["host_threads"] == "idle")


def _message(row: Row) -> tuple[str, int, int]:
    return row["collective"], row["ranks"], row["bytes"]


def _text(row: Row) -> str:
    return json.dumps(_message(row), separators=(",", ":"))


def _level(row: Row) -> float:
    """Of the repeats; a low quantile where many are disturbed."""
    unsteady = row["ranks"] >= _UNSTEADY_RANKS or row["fabric"] != _STEADY_FABRIC
    return float(np.quantile(row["times_ns"], 0.25 if unsteady else 0.5))


def _alone_ns(row: Row, alone: Sequence[Row]) -> float:
    together = [one for one in alone if one["run"] == row["run"]]
    return float(np.median([_level(one) for one in together or alone]))


def fit_overlap(kernels: KernelPairs, collectives: CollectivePairs, *, moving: float, source: str) -> Overlap:
    """The constants from pairs that a fit may see. Errors count as they are, so that single disturbed pairs count little.

    `moving` comes from steps: what ran without a pause beside the measured pairs slows moving more than any step does.
    """
    found = Overlap(source, moving=moving, busy=busy_table(collectives), **_fit_compute(kernels))
    return replace(found, **_fit_waits(collectives.take(~collectives.busy), found))


def busy_table(pairs: CollectivePairs) -> dict[int, float]:
    """Per rank count, the middle of what a busy thread on each rank does to collectives with nothing else beside them."""
    return _middles(pairs.ranks, pairs.beside_ns / pairs.alone_ns, pairs.busy & (pairs.kernel_ns == 0))


def _middles(places: Floats, factors: Floats, chosen: Flags) -> dict[int, float]:
    """Per place the median factor, at least 1."""
    known: list[float] = sorted(set(places[chosen].tolist()))
    return {int(one): max(1.0, round(float(np.median(factors[chosen & (places == one)])), 4)) for one in known}


def _fit_compute(pairs: KernelPairs) -> dict[str, Any]:
    """Long kernels say how many SMs are held, then all what shorter ones lose besides; persistent ones go by themselves."""
    factors = pairs.beside_ns / pairs.alone_ns
    long = ~pairs.persistent & (pairs.alone_ns >= _LONG_NS)
    lost = _SMS / pairs.share * (1.0 - 1.0 / factors)
    held = max(0.0, round(float(np.median(lost[long])), 2)) if long.any() else 0.0
    met = pairs.collective_ns / (pairs.collective_ns + pairs.alone_ns)
    usual = pairs.take(~pairs.persistent)

    def off(values: Mapping[str, Any]) -> float:
        return _off(usual.predicted_ns(Overlap("fit", held_sms=held, **values)), usual.beside_ns)

    grids = {
        "tail_ns": np.arange(0.0, 8001.0, 100.0),
        "tail_power": np.arange(0.0, 1.51, 0.1),
        "short_ns": np.arange(500.0, 10001.0, 250.0),
    }
    tail = _descend(off, grids, {"tail_ns": 2000.0, "tail_power": 0.5, "short_ns": 1500.0})
    return {"held_sms": held, **tail, "persistent": _persistent_table(pairs, 1.0 + (factors - 1.0) / met)}


def _persistent_table(pairs: KernelPairs, factors: Floats) -> dict[int, float]:
    """The middle over kernels, so that one beside many collectives counts as one."""
    kernels = sorted(set(zip(pairs.share[pairs.persistent].tolist(), pairs.kernel[pairs.persistent].tolist(), strict=True)))
    middles = [float(np.median(factors[(pairs.share == share) & (pairs.kernel == kernel)])) for share, kernel in kernels]
    return _middles(np.array([share for share, _ in kernels]), np.array(middles), np.ones(len(kernels), dtype=np.bool_))


def _fit_waits(pairs: CollectivePairs, known: Overlap) -> dict[str, Any]:
    def off(values: Mapping[str, Any]) -> float:
        return _off(pairs.predicted_ns(replace(known, **values)), pairs.beside_ns)

    grids = {"start_wait": np.arange(0.0, 1.01, 0.02), "persistent_start_wait": np.arange(0.0, 0.31, 0.01)}
    return _descend(off, grids, {"start_wait": 0.7, "persistent_start_wait": 0.1})


def _off(predicted_ns: Floats, measured_ns: Floats) -> float:
    return float(np.abs(np.log(predicted_ns / measured_ns)).mean()) if len(measured_ns) else 0.0


def _descend(
    off: Callable[[Mapping[str, float]], float], grids: Mapping[str, Floats], start: Mapping[str, float]
) -> dict[str, float]:
    """The least error on grids, one constant after another until none moves."""
    found = dict(start)
    for _ in range(20):
        before = dict(found)
        for name, grid in grids.items():
            errors = [off({**found, name: float(value)}) for value in grid]
            found[name] = round(float(grid[int(np.argmin(errors))]), 4)
        if found == before:
            break
    return found
