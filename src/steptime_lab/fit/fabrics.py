"""A fabric's models from what was measured on it: the rows of the set `collectives`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steptime._hardware.fabric import FabricLimits
from steptime._models.collectives.fitting import (
    Points,
    Reduction,
    Swept,
    best_points,
    by_kind,
    fit_curves,
    interval_ends,
    left_out,
    steadiest,
    swept,
)
from steptime._models.collectives.tier import TierModel
from steptime._models.engine.splits import FIT, VALIDATION
from steptime.errors import InputError


@dataclass(frozen=True)
class FittedFabric:
    """A fabric's model, the rows it comes from, and how repeats were reduced."""

    model: TierModel
    points: Points  # of all splits
    reduction: Reduction
    runs: frozenset[str] = frozenset()


def fit_fabric(rows: Sequence[Swept]) -> FittedFabric:
    """From the steadiest sweeps of each rank count, with repeats reduced as does best on validation rows."""
    points, reduction = best_points(rows)
    return FittedFabric(fit_points(points), points, reduction, frozenset(row.run for row in steadiest(rows)))


def fit_points(points: Points) -> TierModel:
    """Curves through all rows but those for tests; the residuals are of curves that did not see a row's fifth."""
    seen = points.of(FIT, VALIDATION)
    result = fit_curves(seen)
    errors: dict[str, list[float]] = defaultdict(list)
    for tested, times in left_out(seen, result):
        for kind, logs in by_kind(tested, np.log(tested.ns / times.ns)).items():
            errors[kind] += logs.tolist()
    return replace(result, residuals=interval_ends(errors))


def fit_measured(limits: FabricLimits, rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, TierModel], FittedFabric]:
    """From rows of the measured set on the fabric of this name: one node, one tier. The second says how it was chosen."""
    if len(limits.tiers) > 1:
        raise InputError(f"fabric {limits.name} has {len(limits.tiers)} tiers; measured rows do not say which one they used")
    result = fit_fabric(swept(rows, limits.name))
    return {limits.tiers[0].name: result.model}, result
