"""Whose error it is: each part of a predicted step in turn put as it was profiled, and what that changes.

What the step is longer with the modelled part than with the measured one is that part's error; what no part explains is put
down to synchronisation: who waits for whom, and what parts do to each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from steptime._sim.core.steady import Steady, steady
from steptime._sim.modelled.step import ModelledStep
from steptime_lab.validate.steps.cases import StepCase, Visit
from steptime_lab.validate.steps.measured import with_host_of, with_measured_device, with_measured_wire


@dataclass(frozen=True, slots=True)
class Split:
    """The signed relative error of a prediction and its parts; `error` is the sum of the four parts."""

    error: float
    device: float
    host: float
    communication: float
    synchronisation: float
    measured_parts: float  # the error that is left where all three parts are as measured


def split(step: ModelledStep, recorded: ModelledStep, found: Steady, case: StepCase, visit: Visit) -> Split:
    """The error of one visit; `found` is its prediction, `recorded` the step with the profile's host."""
    base = [played.cohort for played in found.timeline.cohorts]
    host = recorded.cohorts(visit.calibration)
    device = with_measured_device(step, base, case)
    wire = with_measured_wire(step, base, case, visit.calibration)
    measured = with_measured_wire(step, with_host_of(device, host), case, visit.calibration)
    predicted, with_device, with_host, with_wire, with_all = (
        float(steady(cohorts).period_ns[0]) / visit.measured_ns
        for cohorts in (base, device, with_host_of(base, host), wire, measured)
    )
    of_device, of_host, of_wire = predicted - with_device, predicted - with_host, predicted - with_wire
    return Split(
        error=predicted - 1.0,
        device=of_device,
        host=of_host,
        communication=of_wire,
        synchronisation=predicted - 1.0 - of_device - of_host - of_wire,
        measured_parts=with_all - 1.0,
    )


def mean_splits(splits: Mapping[str, Sequence[Split]]) -> dict[str, dict[str, float]]:
    """Per group: of the error and each of its parts, the mean and the mean of absolute values."""
    result: dict[str, dict[str, float]] = {}
    for name, entry in splits.items():
        columns = {each.name: np.array([getattr(item, each.name) for item in entry]) for each in fields(Split)}
        result[name] = {
            "rows": float(len(entry)),
            **{part: float(values.mean()) for part, values in columns.items()},
            **{f"absolute_{part}": float(np.abs(values).mean()) for part, values in columns.items()},
        }
    return result


def grouped(pairs: Iterable[tuple[str, Split]]) -> dict[str, list[Split]]:
    """Splits by the name of their group."""
    result: dict[str, list[Split]] = defaultdict(list)
    for name, item in pairs:
        result[name].append(item)
    return dict(sorted(result.items()))
