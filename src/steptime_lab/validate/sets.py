"""Validations of the shipped sets, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steptime._hardware.device import FOLDER, read_device
from steptime._hardware.fabric import read_fabric
from steptime._models.collectives.fitting import swept
from steptime._models.collectives.overlap import FILE as OVERLAP
from steptime._models.collectives.overlap import Overlap, read_overlaps
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms import KernelForm
from steptime._models.lookups.fitted import LookupModels, lookups_file
from steptime._platforms.fabric import Fabric, read_models
from steptime.errors import InputError
from steptime_lab.baselines.kernels import read_baselines
from steptime_lab.fit.fabrics import fit_measured
from steptime_lab.fit.lookups import lookup_baselines_file, read_lookup_baselines, read_lookups
from steptime_lab.fit.models import baselines_file
from steptime_lab.fit.overlap import overlap_rows
from steptime_lab.fit.waiting import kernels_beside, profiled_steps, waits
from steptime_lab.measurements.shipped import BASELINES, shipped
from steptime_lab.measurements.shipped import FOLDER as MEASUREMENTS
from steptime_lab.validate.collectives import validate_collectives
from steptime_lab.validate.collectives_in_steps import validate_overlap, validate_waiting
from steptime_lab.validate.compiled.compiled import validate_compiled
from steptime_lab.validate.device_time import device_times, validation_of
from steptime_lab.validate.engine import Validation
from steptime_lab.validate.generated import validate_generated
from steptime_lab.validate.held_out import validate_committed, validate_visit
from steptime_lab.validate.intervals.home import validate_home
from steptime_lab.validate.kernels import validate_kernels
from steptime_lab.validate.lookups import validate_lookups
from steptime_lab.validate.memory import validate_memory
from steptime_lab.validate.power import validate_power
from steptime_lab.validate.recordings import validate_recordings
from steptime_lab.validate.sharding.sharding import validate_sharding
from steptime_lab.validate.steps.steps import validate_steps
from steptime_lab.validate.zoo.zoo import validate_zoo

# Files of a device beside its kernel models.
_BESIDE = ("-lookups", "-baselines")


@dataclass(frozen=True, slots=True)
class Models:
    """Which models are validated: a device's and a fabric's, in a folder of `steptime fit` or the shipped ones."""

    device: str = "h200"
    folder: Path | None = None
    fabric: str = "loopback"

    def kernels(self) -> KernelModels:
        """The kernel models of the device, of which a part has none of its own."""
        return KernelModels.load((self.folder or FOLDER) / f"{self.name()}.npz")

    def name(self) -> str:
        """What the files are called: as the device's models, or as the only device that a folder of `steptime fit` has."""
        if self.folder is None:
            return self.measured()
        there = sorted(file.stem for file in self.folder.glob("*.npz") if not file.stem.endswith(_BESIDE))
        if len(there) == 1:
            return there[0]
        return self.measured()

    def measured(self) -> str:
        """Whose models the device has: one on paper alone has none that its measurements could be held against."""
        limits = read_device(self.device)
        if limits.analytic:
            raise InputError(
                f"device {self.device} is on paper alone, scaled from {limits.models}: no rows of it are shipped; "
                "docs/devices.md has its error on public measurements"
            )
        return limits.models

    def baselines(self) -> dict[str, KernelForm]:
        """The baselines beside them, where they were fitted."""
        file = baselines_file(self.folder or BASELINES, self.name())
        return read_baselines(file) if file.exists() else {}


def validated(what: str, models: Models) -> Validation:
    """One of the sets against models."""
    return SETS[what](models)


def _kernels(models: Models) -> Validation:
    return validate_kernels(shipped("kernels"), models.kernels(), models.baselines(), shipped("step_kernels"))


def _generated(models: Models) -> Validation:
    return validate_generated(shipped("generated"), models.kernels())


def _lookups(models: Models) -> Validation:
    folder, name = models.folder or FOLDER, models.name()
    file = lookup_baselines_file(models.folder or BASELINES, name)
    baselines, held_out = read_lookup_baselines(file) if file.exists() else ({}, {})
    _, measured = read_lookups(MEASUREMENTS)
    return validate_lookups(measured, LookupModels.load(lookups_file(folder, name)), baselines, held_out)


def _collectives(models: Models) -> Validation:
    """Fitted anew, since most of what is asked is asked of models that did not see some of the rows."""
    if models.folder is not None:
        raise InputError("validate collectives fits the shipped rows itself, to leave some of them out; drop --models")
    rows = shipped("collectives").to_pylist()
    measured = sorted({row["fabric"] for row in rows})
    if models.fabric not in measured:
        raise InputError(f"no rows of the fabric {models.fabric!r} are shipped; there are {', '.join(measured)}")
    _, fitted = fit_measured(read_fabric(models.fabric), rows)
    return validate_collectives(models.fabric, fitted, elsewhere=swept(rows, models.fabric))


def _waiting(models: Models) -> Validation:
    limits = read_fabric(models.fabric)
    fabric = (
        Fabric.load(models.fabric)
        if models.folder is None
        else Fabric(limits, read_models(models.folder / f"{limits.name}.json"))
    )
    return validate_waiting(waits(profiled_steps(MEASUREMENTS), fabric))


def _overlap(models: Models) -> Validation:
    overlaps = read_overlaps(OVERLAP if models.folder is None else models.folder / OVERLAP.name)
    in_steps = kernels_beside(profiled_steps(MEASUREMENTS))
    return validate_overlap(overlaps.get(models.fabric, Overlap()), models.fabric, overlap_rows(MEASUREMENTS), in_steps)


def _device_time(models: Models) -> Validation:
    return validation_of(device_times(models.kernels().ask))


def _shipped_alone(what: str, validate: Callable[[], Validation]) -> Callable[[Models], Validation]:
    """A set that asks shipped models, or none."""

    def checked(models: Models) -> Validation:
        if models.folder is not None:
            raise InputError(f"validate {what} asks no models of a folder; drop --models")
        return validate()

    return checked


SETS: dict[str, Callable[[Models], Validation]] = {
    "kernels": _kernels,
    "generated": _generated,
    "lookups": _lookups,
    "collectives": _collectives,
    "waiting": _waiting,
    "overlap": _overlap,
    "device-time": _device_time,
    "memory": _shipped_alone("memory", validate_memory),
    "steps": _shipped_alone("steps", lambda: validate_steps().validation),
    "sharding": _shipped_alone("sharding", lambda: validate_sharding().steps),
    "committed": _shipped_alone("committed", validate_committed),
    "intervals": _shipped_alone("intervals", validate_home),
    "visit": _shipped_alone("visit", validate_visit),
    "power": _shipped_alone("power", validate_power),
    "recordings": _shipped_alone("recordings", validate_recordings),
    "zoo": _shipped_alone("zoo", validate_zoo),
    "compiled": _shipped_alone("compiled", validate_compiled),
}
