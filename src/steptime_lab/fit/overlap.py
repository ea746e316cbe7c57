"""`Overlap` from measurements: collectives and kernels beside each other in the measured set and in profiled steps.

Pairs are the same kernel, or the same message, beside the other kind of work and without it. The set `collectives` has pairs
that ran without a pause; profiled steps (`waiting`) have those that training meets.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from steptime._files import write_whole
from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import read
from steptime._models.collectives.overlap import SCHEMA_VERSION, Overlap
from steptime._models.engine.splits import FIT, split_of
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Texts = npt.NDArray[np.str_]
Row = Mapping[str, Any]  # of the set collectives

_COLUMNS = (
    "collective", "ranks", "bytes", "splits", "fabric", "share", "mode", "arrival", "beside", "host_threads", "beside_ns",
    "beside_alone_ns", "times_ns", "run",
)  # fmt: skip
_UNSTEADY_RANKS = 8  # at which repeats have a heavy upper tail on any setting
_STEADY_FABRIC = "loopback"
_LONG_NS = 250e3  # kernels from which on what they lose besides held SMs is lost in noise
# Copies reach what memory gives without all SMs and say nothing about those that are held.
_MEMORY_BOUND = "copy"


def overlap_rows(folder: Path) -> list[Row]:
    """The rows of a folder's set `collectives`, with the columns that pairs need."""
    result: list[Row] = read(folder, COLLECTIVES).select(_COLUMNS).to_pylist()
    return result


def fit_overlaps(rows: Sequence[Row], in_steps: KernelPairs, *, moving: float, sms: float, source: str) -> dict[str, Overlap]:
    """Per fabric with pairs. The steady fabric, or else the one with most pairs, has the constants; the device is the same on
    the others, whose rows are less steady, so that only what busy cores do is their own.
    """
    names = sorted({str(row["fabric"]) for row in rows if not _alone(row)})
    pairs = {name: measured_pairs(rows, name) for name in names}
    pairs = {name: item for name, item in pairs.items() if len(item[1].text)}
    if not pairs:
        raise InputError("no collective was measured beside kernels or busy cores; `steptime measure collectives` does so")
    main = _STEADY_FABRIC if _STEADY_FABRIC in pairs else max(pairs, key=lambda name: len(pairs[name][1].text))
    kernels = in_steps
    for name in (main, *(name for name in pairs if name != main)):
        timed = pairs[name][0]
        kernels = kernels.joined(timed.take(timed.kernel != _MEMORY_BOUND))
    overlap = fit_overlap(kernels.of(FIT), pairs[main][1].of(FIT), moving=moving, sms=sms, source=source)
    return {name: overlap if name == main else replace(overlap, busy=busy_table(pairs[name][1].of(FIT))) for name in pairs}


def write_overlaps(file: Path, overlaps: Mapping[str, Overlap], recipe: str) -> None:
    """Constants by fabric, and the command that makes them again."""
    constants = {name: overlap.to_dict() for name, overlap in sorted(overlaps.items())}
    content = {"schema_version": SCHEMA_VERSION, "recipe": recipe, "fabrics": constants}
    write_whole(file, json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class Pairs:
    """The same work beside other work and by itself, a column each."""

    alone_ns: Floats
    beside_ns: Floats
    share: Floats
    persistent: Flags
    text: Texts  # what decides on which side of the split a pair lies

    def take(self, chosen: Flags) -> Self:
        """Those that are chosen."""
        return replace(self, **{name: column[chosen] for name, column in vars(self).items()})

    def of(self, *splits: str) -> Self:
        """Those of some splits."""
        return self.take(np.array([split_of(item) in splits for item in self.text.tolist()], dtype=np.bool_))


@dataclass(frozen=True)
class KernelPairs(Pairs):
    """Kernels beside a collective and without one."""

    collective_ns: Floats
    kernel: Texts  # which one it is

    def joined(self, other: KernelPairs) -> KernelPairs:
        """Both, one after the other."""
        return KernelPairs(**{name: np.concatenate([column, getattr(other, name)]) for name, column in vars(self).items()})

    def predicted_ns(self, overlap: Overlap) -> Floats:
        """What the kernels take beside the collective."""
        factor = overlap.compute_factor(self.alone_ns, self.share, collective_ns=self.collective_ns, persistent=self.persistent)
        return self.alone_ns * factor


@dataclass(frozen=True)
class CollectivePairs(Pairs):
    """Collectives beside something and by themselves."""

    ranks: Floats
    kernel_ns: Floats  # 0 where only the host was busy
    busy: Flags

    def predicted_ns(self, overlap: Overlap) -> Floats:
        """What the collectives take in company."""
        factor = overlap.collective_factor(
            self.alone_ns, self.ranks, self.share, kernel_ns=self.kernel_ns, persistent=self.persistent, busy=self.busy
        )
        return self.alone_ns * factor


def measured_pairs(rows: Iterable[Row], fabric: str) -> tuple[KernelPairs, CollectivePairs]:
    """Rows of one fabric with something beside them, each with the same message alone, of the same run where it has one."""
    swept = [row for row in rows if row["fabric"] == fabric and row["mode"] == "stream" and row["arrival"] == "together"]
    alone: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in swept:
        if _alone(row) and not row["splits"]:
            alone[_message(row)].append(row)
    pairs = [row for row in swept if not _alone(row) and _message(row) in alone]
    beside = [row for row in pairs if row["beside_ns"] and row["beside_alone_ns"]]
    kernels = KernelPairs(
        alone_ns=np.array([row["beside_alone_ns"] for row in beside]),
        beside_ns=np.array([row["beside_ns"] for row in beside]),
        collective_ns=np.array([_alone_ns(row, alone[_message(row)]) for row in beside]),
        kernel=np.array([row["beside"] for row in beside], dtype=np.str_),
        **_settings(beside),
    )
    collectives = CollectivePairs(
        alone_ns=np.array([_alone_ns(row, alone[_message(row)]) for row in pairs]),
        beside_ns=np.array([_level(row) for row in pairs]),
        ranks=np.array([float(row["ranks"]) for row in pairs]),
        kernel_ns=np.array([float(row["beside_alone_ns"] or 0.0) for row in pairs]),
        busy=np.array([row["host_threads"] == "busy" for row in pairs], dtype=np.bool_),
        **_settings(pairs),
    )
    return kernels, collectives


def _settings(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "share": np.array([float(row["share"]) for row in rows]),
        "persistent": np.array([row["beside"] == "gemm" for row in rows], dtype=np.bool_),
        "text": np.array([json.dumps(_message(row), separators=(",", ":")) for row in rows], dtype=np.str_),
    }


def _alone(row: Row) -> bool:
    return bool(row["beside"] == "none" and row["host_threads"] == "idle")


def _message(row: Row) -> tuple[str, int, int]:
    return row["collective"], row["ranks"], row["bytes"]


def _level(row: Row) -> float:
    """Of the repeats; a low quantile where many are disturbed."""
    unsteady = row["ranks"] >= _UNSTEADY_RANKS or row["fabric"] != _STEADY_FABRIC
    return float(np.quantile(row["times_ns"], 0.25 if unsteady else 0.5))


def _alone_ns(row: Row, alone: Sequence[Row]) -> float:
    together = [item for item in alone if item["run"] == row["run"]]
    return float(np.median([_level(item) for item in together or alone]))


def fit_overlap(kernels: KernelPairs, collectives: CollectivePairs, *, moving: float, sms: float, source: str) -> Overlap:
    """The constants from pairs that a fit may see. Errors count as they are, so that single disturbed pairs count little.

    `moving` comes from steps: what ran without a pause beside the measured pairs slows moving more than any step does.
    """
    compute = Overlap(source, sms=sms, moving=moving, busy=busy_table(collectives), **_fit_compute(kernels, sms))
    return replace(compute, **_fit_waits(collectives.take(~collectives.busy), compute))


def busy_table(pairs: CollectivePairs) -> dict[int, float]:
    """Per rank count, the middle of what a busy thread on each rank does to collectives with nothing else beside them."""
    return _middles(pairs.ranks, pairs.beside_ns / pairs.alone_ns, pairs.busy & (pairs.kernel_ns == 0))


def _middles(places: Floats, factors: Floats, chosen: Flags) -> dict[int, float]:
    """Per place the median factor, at least 1."""
    known: list[float] = sorted(set(places[chosen].tolist()))
    return {int(item): max(1.0, round(float(np.median(factors[chosen & (places == item)])), 4)) for item in known}


def _fit_compute(pairs: KernelPairs, sms: float) -> dict[str, Any]:
    """Long kernels say how many SMs are held, then all what shorter ones lose besides; persistent ones go by themselves."""
    factors = pairs.beside_ns / pairs.alone_ns
    long = ~pairs.persistent & (pairs.alone_ns >= _LONG_NS)
    lost = sms / pairs.share * (1.0 - 1.0 / factors)
    held = max(0.0, round(float(np.median(lost[long])), 2)) if long.any() else 0.0
    met = pairs.collective_ns / (pairs.collective_ns + pairs.alone_ns)
    usual = pairs.take(~pairs.persistent)

    def off(values: Mapping[str, Any]) -> float:
        return _off(usual.predicted_ns(Overlap("fit", sms=sms, held_sms=held, **values)), usual.beside_ns)

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
    result = dict(start)
    for _ in range(20):
        before = dict(result)
        for name, grid in grids.items():
            errors = [off({**result, name: float(value)}) for value in grid]
            result[name] = round(float(grid[int(np.argmin(errors))]), 4)
        if result == before:
            break
    return result
