"""Where a fabric's answers come from: of each collective and rank count whether it was fitted, lies between or beyond what was,
is put together from tiers or other kinds, or only on paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from steptime._hardware.topology import first_ranks, place
from steptime._models.collectives.message import KINDS, Messages
from steptime._models.collectives.tier import TierModel
from steptime._platforms.fabric import Fabric
from steptime.errors import InputError

_ASKED_BYTES = 1 << 20


class Origin(Enum):
    """Of what a fabric says about one kind and rank count, best first."""

    FITTED = "fitted"
    INTERPOLATED = "interpolated"  # between rank counts that were fitted
    EXTRAPOLATED = "extrapolated"  # beyond them
    TIERS = "from its tiers"  # a group over several nodes
    STAND_IN = "from another kind"
    ANALYTIC = "analytic"
    NONE = "not known"


@dataclass(frozen=True, slots=True)
class Fitted:
    """What was measured of one kind on one tier."""

    tier: str
    kind: str
    ranks: tuple[int, ...]
    bytes: tuple[float, float]  # the smallest and the largest that all of these counts have
    off: tuple[float, float] | None  # 5th and 95th percentile of measured over fitted - 1


def fitted(fabric: Fabric) -> list[Fitted]:
    """Every kind of every tier with a curve."""
    return [
        _fitted(tier.name, kind, model)
        for tier in fabric.limits.tiers
        if isinstance(model := fabric.tiers.get(tier.name), TierModel)
        for kind in KINDS
        if model.measured_ranks(kind)
    ]


def _fitted(tier: str, kind: str, model: TierModel) -> Fitted:
    ranks = model.measured_ranks(kind)
    curves = [model.curves[kind, count] for count in ranks]
    ends = model.residuals.get(kind)
    return Fitted(
        tier,
        kind,
        ranks,
        (max(curve.smallest_bytes for curve in curves), min(curve.largest_bytes for curve in curves)),
        None if ends is None else (float(np.expm1(ends[0])), float(np.expm1(ends[1]))),
    )


def origin(fabric: Fabric, kind: str, ranks: int) -> Origin:
    """Of one kind among the first so many ranks."""
    try:
        fabric.times(Messages.even(kind, [ranks], [_ASKED_BYTES]))
    except InputError:
        return Origin.NONE
    placed = place(fabric.limits, first_ranks(fabric.limits, ranks))
    model = fabric.tiers.get(placed.tier.name)
    if not isinstance(model, TierModel):
        return Origin.ANALYTIC
    if placed.spans_nodes and placed.per_node > 1:
        return Origin.TIERS
    counts = model.measured_ranks(kind)
    if not counts:
        return Origin.STAND_IN
    if ranks in counts:
        return Origin.FITTED
    return Origin.INTERPOLATED if counts[0] < ranks < counts[-1] else Origin.EXTRAPOLATED


def origins(fabric: Fabric, ranks: int) -> dict[str, Origin]:
    """Of every kind; a group of one rank asks nothing of a fabric."""
    return {kind: origin(fabric, kind, ranks) for kind in KINDS}
