"""`sweep`: the same job with other batches, on other ranks and platforms, a prediction each.

Variants differ in what their ops launch, so that none can share a simulation with another: the scenario axis holds other times
of the same programs. What a variant costs is building it and asking models. So they are predicted one after the other while
that is quick, and by processes from where the first ones show that the rest would take longer than processes take to start.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime._api.predict import calibration_for, platform_for, platform_ranks
from steptime._api.read import read
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform
from steptime._program.workload import Rebuild, Workload
from steptime._report.answers import Prediction, Predictions, SweepVariant
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import InputError

if TYPE_CHECKING:
    from steptime._api.read import Source

# Seconds of work left from which processes are worth it: each loads the package and its models anew, about a second.
_WORTH_PROCESSES_S = 3.0


def sweep(
    source: Source,
    platform: str | Path | Platform | Sequence[str | Path | Platform],
    *,
    batch: Iterable[int] | None = None,
    ranks: Iterable[int] | None = None,
    calibration: str | Path | Calibration | None = None,
    strict: bool = False,
    executor: Executor | None = None,
) -> Predictions:
    """Predict every combination of platforms, batches and ranks.

    `executor` runs the variants: processes, threads, or a cluster's `concurrent.futures.Executor`; without one, this process
    does, with others' help where that is faster. Combinations that cannot be built (a batch that ranks do not divide, a
    platform with fewer ranks) are left out and named in `warnings`; where all are, the first one's error is raised.
    """
    platforms = [platform] if isinstance(platform, str | Path | Platform) else list(platform)
    workload = read(source, platform_ranks=platform_ranks(platforms[0]) if platforms else None)
    batches, counts = ([None] if axis is None else list(axis) for axis in (batch, ranks))
    if not (platforms and batches and counts):
        raise InputError("a sweep needs at least one platform, and one value of every option that is given")
    job = _Job(workload.rebuild, workload if workload.rebuild is None else None, calibration, strict)
    return _collected(_results(job, [_Point(*point) for point in product(platforms, batches, counts)], executor))


@dataclass(frozen=True)
class _Point:
    platform: str | Path | Platform
    batch: int | None
    ranks: int | None

    @property
    def settings(self) -> Mapping[str, Any]:
        name = self.platform.name if isinstance(self.platform, Platform) else str(self.platform)
        varied = {"batch": self.batch, "ranks": self.ranks}
        return {"platform": name, **{key: value for key, value in varied.items() if value is not None}}


@dataclass(frozen=True)
class _Job:
    """What all variants have in common: how to build them, or the one workload there is."""

    rebuild: Rebuild | None
    workload: Workload | None
    calibration: str | Path | Calibration | None
    strict: bool
    _machines: dict[tuple[str | Path, int], Platform] = field(default_factory=dict)  # as long as the sweep takes

    def __call__(self, point: _Point) -> SweepVariant | str:
        """The variant, or why there is none."""
        try:
            if self.workload is None:
                assert self.rebuild is not None
                workload = self.rebuild(batch=point.batch, ranks=point.ranks)
            else:
                workload = self.workload.varied(batch=point.batch, ranks=point.ranks)
            machine = self._machine(point.platform, workload.world_size)
            speed = calibration_for(self.calibration, machine)
            result = predict_on(workload, machine, calibration=speed, strict=self.strict)
        except InputError as error:
            return str(error)
        # A workload that can be built again says how; a copy of that in every answer would only be sent between processes.
        return SweepVariant(point.settings, Prediction.of(replace(result, workload=replace(workload, rebuild=None))))

    def _machine(self, platform: str | Path | Platform, ranks: int) -> Platform:
        if isinstance(platform, Platform):
            return platform_for(platform, ranks)
        if (platform, ranks) not in self._machines:
            self._machines[platform, ranks] = platform_for(platform, ranks)
        return self._machines[platform, ranks]


def _results(job: _Job, points: Sequence[_Point], executor: Executor | None) -> list[tuple[_Point, SweepVariant | str]]:
    if executor is not None:
        return list(zip(points, executor.map(job, points), strict=True))
    done: list[tuple[_Point, SweepVariant | str]] = []
    began = time.process_time()
    for index, point in enumerate(points):
        left = len(points) - index
        each_s = (time.process_time() - began) / max(index, 1)  # whatever else runs on the machine
        if index and left > 1 and left * each_s > _WORTH_PROCESSES_S and _workers() > 1 and _sendable(job):
            with ProcessPoolExecutor(min(_workers(), left)) as pool:
                return done + list(zip(points[index:], pool.map(job, points[index:]), strict=True))
        done.append((point, job(point)))
    return done


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sendable(job: _Job) -> bool:
    """Whether other processes can do the job: a function made on the spot cannot be sent to them."""
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _collected(results: Sequence[tuple[_Point, SweepVariant | str]]) -> Predictions:
    variants = tuple(result for _, result in results if isinstance(result, SweepVariant))
    left_out = [(point, result) for point, result in results if isinstance(result, str)]
    if not variants:
        raise InputError(left_out[0][1])
    text = tuple(f"left out: {', '.join(f'{k} {v}' for k, v in point.settings.items())}: {why}" for point, why in left_out)
    return Predictions(variants, text)
