"""What the device did in profiled steps, as measured: compute, collectives and launches by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Profiled:
    """The device's part of a step; nanoseconds."""

    compute_ns: float  # of the rank that computes longest
    exposed_ns: float  # of it, what no collective covers
    wire_ns: float  # collectives, each by the rank that waited least, in the quietest of the profiled steps
    launches: tuple[Mapping[str, float], ...]  # per rank, by op


def profiled(ranks: Sequence[Row]) -> Profiled:
    """From the rows of `step_kernels` of all ranks of a case."""
    ordered = sorted(ranks, key=lambda row: int(row["rank"]))
    times = [_times(row["kernel_ns"]) for row in ordered]
    wires = [np.array(["nccl" in name.lower() for name in row["kernel"]], dtype=bool) for row in ordered]
    computed = [_computed(row, np.median(taken, axis=1), wire) for row, taken, wire in zip(ordered, times, wires, strict=True)]
    collectives = [taken[wire] for taken, wire in zip(times, wires, strict=True)]
    return Profiled(
        compute_ns=max(compute for compute, _ in computed),
        exposed_ns=max(exposed for _, exposed in computed),
        wire_ns=_wire(collectives),
        launches=tuple(_launches(row["op"]) for row in ordered),
    )


def _launches(ops: Sequence[str]) -> dict[str, float]:
    return {op: float(count) for op, count in Counter(ops).items()}


def _times(kernel_ns: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """[kernels, steps]: as many steps as every kernel has."""
    steps = min((len(each) for each in kernel_ns), default=0)
    return np.array([each[:steps] for each in kernel_ns], dtype=np.float64).reshape(len(kernel_ns), max(steps, 1))


def _wire(collectives: Sequence[npt.NDArray[np.float64]]) -> float:
    """Ranks wait for each other inside a collective: the last to come shows how long it really takes."""
    steps = min(each.shape[1] for each in collectives)
    if len({len(each) for each in collectives}) > 1:
        return float(min(each.sum(axis=0).min() for each in collectives))
    return float(np.min([each[:, :steps] for each in collectives], axis=0).sum(axis=0).min())


def _computed(row: Row, took: npt.NDArray[np.float64], wire: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Compute of one rank, and what of it lies outside its collectives in the last profiled step."""
    start = np.asarray(row["start_ns"], dtype=np.float64)
    covered = np.zeros(len(start))
    for begin, length in zip(start[wire], took[wire], strict=True):
        covered += np.maximum(0.0, np.minimum(start + took, begin + length) - np.maximum(start, begin))
    return float(took[~wire].sum()), float(np.maximum(0.0, took - covered)[~wire].sum())
