"""Validations of the shipped sets, by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steptime.hardware.device import FOLDER, read_device
from steptime.measurements.programs import FILE_NAME, read_programs
from steptime.measurements.shipped import FOLDER as MEASURED
from steptime.measurements.shipped import shipped
from steptime.models.host.model import HostModel, shipped_host
from steptime.models.kernels.fitted import KernelModels
from steptime.validate.device_time import case_time, validation_of
from steptime.validate.fitting import baselines_file, host_of, read_baselines
from steptime.validate.host import shipped_cases, validate_host
from steptime.validate.kernels import validate_kernels
from steptime.validate.summary import Validation


def validated(what: str, device: str, folder: Path | None = None) -> Validation:
    """One of the sets against the models of a device, in a folder or the shipped ones."""
    return SETS[what](read_device(device).models, folder)


def _kernels(name: str, folder: Path | None) -> Validation:
    models = _models(name, folder)
    file = baselines_file(folder or FOLDER, name)
    baselines = read_baselines(file) if file.exists() else {}
    return validate_kernels(shipped("kernels"), models, baselines, shipped("step_kernels"))


def _models(name: str, folder: Path | None) -> KernelModels:
    return KernelModels.load((folder or FOLDER) / f"{name}.npz")


def _device_time(name: str, folder: Path | None) -> Validation:
    """Every measured step, a rank for each distinct program, from its execution traces alone."""
    models = _models(name, folder)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in shipped("step_kernels").to_pylist():
        rows[row["name"]].append(row)
    programs = read_programs(MEASURED / FILE_NAME)
    return validation_of([case_time(case, rows[case.name], models.ask) for case in programs if rows[case.name]])


def _host(name: str, folder: Path | None) -> Validation:
    host = host_of(name)
    model = shipped_host(host) if folder is None else HostModel.load(folder / f"{host}.json")
    return validate_host(model, shipped_cases(model))


SETS: dict[str, Callable[[str, Path | None], Validation]] = {
    "kernels": _kernels,
    "device-time": _device_time,
    "host": _host,
}
