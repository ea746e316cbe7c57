"""How far an adopted platform is off on its own rows: those of its kernels and lookups that no fit saw, and of its collectives
each message by curves that did not see its fifth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import read
from steptime._models.lookups.fitted import LookupModels, lookups_file
from steptime._platforms.device import Device
from steptime._platforms.own_fabric import from_measured
from steptime._platforms.platform import PlatformParts, platform_parts
from steptime.errors import InputError
from steptime_lab.adopt.fitting import MEASURED_FABRIC
from steptime_lab.adopt.job import MEASUREMENTS
from steptime_lab.fit.lookups import read_lookups
from steptime_lab.measurements.sets import KERNELS, LOOKUPS
from steptime_lab.validate.engine import Compared, MeasuredCase, Summary, Validation, group, grouped
from steptime_lab.validate.kernels import compared_kernels
from steptime_lab.validate.lookups import compared_lookups

WHAT = ("kernels", "lookups", "collectives")


def scored(folder: Path, what: Sequence[str] = WHAT) -> Validation:
    """An adopted platform against its own rows; of every set a group, and of every family, implementation and collective."""
    parts = platform_parts(str(folder))
    measurements = folder / MEASUREMENTS
    if not measurements.is_dir():
        raise InputError(f"{folder}: no {MEASUREMENTS} in it; `steptime adopt` writes a folder with both models and rows")
    found = {item: _COMPARED[item](parts, measurements) for item in what}
    found = {item: compared for item, compared in found.items() if compared}
    if not found:
        raise InputError(f"{measurements}: no rows of {' or '.join(what)} that no fit saw; adopt for longer (--minutes)")
    every = [each for compared in found.values() for each in compared]
    result = {name: group(compared) for name, compared in found.items()}
    return Validation.of(
        f"platform {parts.name}", f"{parts.name} on its own rows, held out", every, groups={**result, **grouped(every)}
    )


def errors(validation: Validation) -> dict[str, dict[str, Any]]:
    """What a report says of each set and family."""
    return {"all": _said(validation.whole.summary), **{name: _said(each.summary) for name, each in validation.groups.items()}}


def _said(summary: Summary) -> dict[str, Any]:
    return {
        "rows": summary.rows,
        "gmae": round(summary.gmae, 4),
        "mape": round(summary.mape, 4),
        "p90": round(summary.p90, 4),
        "interval_coverage": None if summary.interval_coverage is None else round(summary.interval_coverage, 3),
        "sharpness": None if summary.sharpness is None else round(summary.sharpness, 4),
    }


def _kernels(parts: PlatformParts, measurements: Path) -> list[Compared]:
    return compared_kernels(read(measurements, KERNELS), Device.load(parts.device))


def _lookups(parts: PlatformParts, measurements: Path) -> list[Compared]:
    file = lookups_file(Path(parts.device).parent, Path(parts.device).stem)
    if not file.is_file() or not read(measurements, LOOKUPS).num_rows:
        return []
    return compared_lookups(read_lookups(measurements)[1], LookupModels.load(file))


def _collectives(parts: PlatformParts, measurements: Path) -> list[Compared]:
    if parts.fabric is None or not read(measurements, COLLECTIVES).num_rows:
        return []
    fabric = from_measured(Path(parts.fabric).stem, measurements, of=MEASURED_FABRIC)
    return [
        Compared(MeasuredCase(f"{left.kind} of {'/'.join(map(str, left.ranks))} ranks", 1.0 + error, 1.0), (left.kind,))
        for left in fabric.left_out
        for error in left.errors.tolist()
    ]


_COMPARED = {"kernels": _kernels, "lookups": _lookups, "collectives": _collectives}
