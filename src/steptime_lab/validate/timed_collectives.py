"""A fabric against a table of collectives that others timed: as it is, or each row by a fit without its kind and rank count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steptime._hardware.fabric import first_ranks
from steptime._measurements.nccl_tests import Point, TimedPoints
from steptime._models.collectives.fitting import fit_curves
from steptime._models.collectives.message import KINDS, Messages
from steptime._models.collectives.spanning import Tier
from steptime._models.collectives.tier import CollectiveTimes, TierModel
from steptime._platforms.fabric import Fabric
from steptime._platforms.own_fabric import tier_points
from steptime.errors import InputError
from steptime_lab.validate.collectives import LARGE_BYTES
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation

_Group = tuple[str, int, int]  # kind, ranks, nodes


def validate_timed(fabric: Fabric, table: TimedPoints, *, leave_out: bool = False) -> Validation:
    """The rows of GPUs that the fabric is named after; `leave_out`: by curves that saw no row of the same kind and ranks."""
    rows = _of_fabric(fabric, table.points)
    compared: list[Compared] = []
    for group in sorted({_group(row) for row in rows}, key=lambda one: (KINDS.index(one[0]), *one[1:])):
        asked = fabric if not leave_out else _without(fabric, rows, group)
        alike = [row for row in rows if _group(row) == group]
        compared += _compared(alike, _times(asked, group, [row.bytes for row in alike]))
    how = "each by a fit without its kind and rank count" if leave_out else "asked of the fabric as it is"
    skipped = [f"{table.skipped} rows are damaged or of no kind that is modelled, and left out"] * (table.skipped > 0)
    return Validation.of(
        f"collectives {fabric.limits.name}",
        f"timed collectives, {how}",
        compared,
        warnings=skipped,
        notes=("kinds and rank counts without rows in the table keep the fabric's own curves",) * leave_out,
    )


def _of_fabric(fabric: Fabric, points: Sequence[Point]) -> list[Point]:
    limits = fabric.limits
    gpu = limits.name.split("-", 1)[0]
    fitting = [
        row
        for row in points
        if row.device.lower().split("_")[0] == gpu
        and row.nodes <= limits.nodes
        and row.ranks <= row.nodes * limits.gpus_per_node
    ]
    chosen = [row for row in fitting if row.ranks > 1]
    if not chosen:
        there = ", ".join(sorted({f"{row.device} on {row.nodes} node{'s' * (row.nodes > 1)}" for row in points}))
        raise InputError(f"the table has no collective of {gpu} that fits on fabric {limits.name}; it has {there}")
    return chosen


def _group(row: Point) -> _Group:
    return row.kind, row.ranks, row.nodes


def _without(fabric: Fabric, rows: Sequence[Point], group: _Group) -> Fabric:
    """The fabric with its curves fitted to the other rows of the table, and those of kinds and ranks that are not in it."""
    others = [row for row in rows if _group(row) != group]
    points = tier_points(fabric.limits, others) if others else {}
    of_table = tier_points(fabric.limits, rows)
    tiers: dict[str, Tier] = dict(fabric.tiers)
    for name in of_table:
        model = fabric.tier(name)
        if isinstance(model, TierModel):
            timed = {(row.kind, row.ranks) for row in of_table[name].rows}
            kept = {pair: curve for pair, curve in model.curves.items() if pair not in timed}
            if name in points:
                fitted = fit_curves(points[name], idle_power=model.idle_power, ragged=model.ragged, like=model.like)
                kept |= fitted.curves
            tiers[name] = replace(model, curves=kept)
    return Fabric(fabric.limits, tiers)


def _times(fabric: Fabric, group: _Group, sizes: Sequence[int]) -> CollectiveTimes:
    kind, ranks, nodes = group
    placed = first_ranks(fabric.limits, ranks, ranks // nodes if nodes > 1 else None)
    return fabric.times(Messages.even(kind, ranks, [float(size) for size in sizes]), placed)


def _compared(rows: Sequence[Point], times: CollectiveTimes) -> list[Compared]:
    results = []
    intervals = zip(times.low_ns.tolist(), times.high_ns.tolist(), strict=True)
    for row, ns, interval in zip(rows, times.ns.tolist(), intervals, strict=True):
        size = "from 1 MiB" if row.bytes >= LARGE_BYTES else "below 1 MiB"
        name = f"{row.kind} of {row.ranks} ranks, {row.bytes:,} bytes, NCCL {row.nccl or 'unknown'}"
        groups = (size, f"{row.ranks} ranks", f"{row.kind}, {row.ranks} ranks", f"{row.kind}, {row.ranks} ranks, {size}")
        results.append(Compared(MeasuredCase(name, ns, row.ns, interval=interval), groups))
    return results
