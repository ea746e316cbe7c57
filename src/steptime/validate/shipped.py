"""Validations of the shipped sets, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from steptime.hardware.device import FOLDER, read_device
from steptime.measurements.shipped import shipped
from steptime.models.kernels.fitted import KernelModels
from steptime.validate.fitting import baselines_file, read_baselines
from steptime.validate.kernels import validate_kernels
from steptime.validate.summary import Validation


def validated(what: str, device: str, folder: Path | None = None) -> Validation:
    """One of the sets against the models of a device, in a folder or the shipped ones."""
    return SETS[what](read_device(device).models, folder or FOLDER)


def _kernels(name: str, folder: Path) -> Validation:
    models = KernelModels.load(folder / f"{name}.npz")
    file = baselines_file(folder, name)
    baselines = read_baselines(file) if file.exists() else {}
    return validate_kernels(shipped("kernels"), models, baselines, shipped("step_kernels"))


SETS: dict[str, Callable[[str, Path], Validation]] = {"kernels": _kernels}
