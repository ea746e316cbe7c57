"""From the rows of an adoption to its platform: a device, a host and a fabric in one folder, and how far off they are.

DIR/platform.toml                      ranks, device, host, calibration and fabric: what `predict --platform DIR` reads
    NAME.toml, NAME.npz, NAME-lookups.npz, NAME-power.json   the device: limits with sources, models of kernels, lookups, power
    NAME-host.json                     the host
    NAME-fabric.toml, .json            the fabric, of a machine with several GPUs
    calibration.json                   how fast the host ran training steps
    driver.json                        what the driver said
    measurements/                      rows, as Parquet; how much of its time each sweep has had
    report.json                        rows, errors on rows held out, what was carried over
"""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from steptime._calibrate.calibrate import FILE as CALIBRATION
from steptime._files import write_whole
from steptime._hardware.device import read_device
from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import devices_of_rows, read
from steptime._models.engine.splits import VALIDATION
from steptime._models.kernels.family import families
from steptime._models.kernels.fitted import LEFT_OUT, KernelModels
from steptime._models.kernels.forms.matmul import MatmulForm
from steptime._models.kernels.forms.matmul.products import GROUPS
from steptime._platforms.calibration import Calibration
from steptime._platforms.device import Device
from steptime._platforms.own_fabric import OwnFabric, from_measured
from steptime._platforms.platform import ADOPTED, Platform
from steptime._platforms.platform import SCHEMA_VERSION as PLATFORM_VERSION
from steptime.errors import InputError
from steptime_lab.adopt import description
from steptime_lab.adopt.job import MEASUREMENTS
from steptime_lab.adopt.machine import FILE as DRIVER
from steptime_lab.adopt.machine import GpuFacts
from steptime_lab.fit.models import FitRun, fit_and_write
from steptime_lab.measurements.kernels import of, rows_of
from steptime_lab.measurements.sets import KERNELS

# The fabric of GPUs of their own, as `steptime measure collectives` calls it.
MEASURED_FABRIC = "default"


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was fitted: rows by set, what another machine answers for, and how long it took."""

    rows: dict[str, int]
    warnings: list[str]
    seconds: float


def fit(folder: Path, name: str, said: Callable[[str], None], seed: int = 0, *, alone: bool = False) -> Adopted:
    """Fits what was measured and writes the platform.

    What is missing, or known less well than by scaling, is left to the nearest known device and host; nothing is if `alone`.
    """
    begun, measurements = time.monotonic(), folder / MEASUREMENTS
    if not (folder / DRIVER).is_file():
        raise InputError(f"{folder}: no {DRIVER} in it; `steptime adopt {name} -o DIR` on the machine itself writes it")
    facts = GpuFacts.read(folder / DRIVER)
    # The fit reads the device's limits from its file.
    products = rows_of(read(measurements, KERNELS), families=(description.PRODUCTS, description.MAPS))
    write_whole(folder / f"{name}.toml", description.device_toml(facts, name, products, alone=alone))
    run = FitRun(measurements, folder, name, f"{name}-host", seed, said)
    fit_and_write(run, ["kernels"])
    if not alone:
        _leave_to_others(folder / f"{name}.toml", measurements)
    missing = [item for item in ("lookups", "host", "power") if not _fitted(run, item)]
    fabric = _fabric(folder, name, facts.gpus)
    ranks, host = facts.gpus if fabric is not None else 1, "host" not in missing
    write_whole(folder / ADOPTED, platform_toml(name, ranks, host=host))
    if _calibrated(folder, said):
        write_whole(folder / ADOPTED, platform_toml(name, ranks, host=host, calibrated=True))
    rows = {item: len(devices) for item, devices in sorted(devices_of_rows(measurements).items())}
    return Adopted(rows, _without(folder / f"{name}.npz", missing, alone=alone), time.monotonic() - begun)


def _fitted(run: FitRun, item: str) -> bool:
    """Fits one of the parts that a platform can do without; says why not where it cannot be."""
    try:
        return bool(fit_and_write(run, [item]))
    except InputError as error:
        run.report(f"{item}: not fitted, {error}")
        return False


def _calibrated(folder: Path, said: Callable[[str], None]) -> bool:
    """Whether there is a calibration that the platform can use."""
    file = folder / MEASUREMENTS / CALIBRATION
    try:
        Calibration.read(file, Platform.load(str(folder)))
    except InputError as error:
        said(f"not calibrated: {error}")
        return False
    # Beside the rest: a platform is whole without its rows.
    shutil.copyfile(file, folder / CALIBRATION)
    return True


def _leave_to_others(file: Path, measurements: Path) -> None:
    """Leaves out families that the nearest known device, scaled, answers better on rows that both have not seen."""
    # Not those of a loaded device, which are kept: they are about to change.
    own, other = KernelModels.load(file.with_suffix(".npz")), Device.carried(read_device(file))
    assert other is not None
    asked = of(rows_of(read(measurements, KERNELS), families=families(), shares=(1,)), VALIDATION)
    logs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, item in zip(asked, other.estimates([row.question for row in asked]), strict=True):
        # Of its own, what the residuals say: some forms have learned from these rows since.
        residuals = own.residuals.of_answer(row.family, row.time_ns)
        logs[row.family].append((float(np.abs(residuals).mean()), abs(math.log(item.estimate.time_ns / row.time_ns))))
    worse = {name for name, pairs in logs.items() if np.diff(np.mean(pairs, axis=0))[0] < 0}
    left = sorted({*own.recipe[LEFT_OUT], *worse})
    replace(own, recipe={**own.recipe, LEFT_OUT: left}).save(file.with_suffix(".npz"))


def _without(models: Path, missing: list[str], *, alone: bool) -> list[str]:
    """What is not of this machine, in words: it has the interval of a device that nobody measured, or is guessed."""
    fitted = KernelModels.load(models)
    few = [name for name, family in families().items() if name in fitted.recipe[LEFT_OUT] or family.form not in fitted.forms]
    if isinstance(products := fitted.forms.get("matmul"), MatmulForm) and "matmul" not in few:
        few += [f"matmul ({group})" for group in GROUPS if group not in products.groups]
    nobody, known = "nothing stands in (--alone)", "that of the nearest known machine stands in"
    lines = [f"{item}: too little was measured; {nobody if alone and item != 'host' else known}" for item in missing]
    instead = "they are guessed by the limits" if alone else "times of the nearest known device, scaled, stand in for them"
    text = f"too few calls of {', '.join(few)} were measured; {instead}"
    return [*lines, text] if few else lines


def _fabric(folder: Path, name: str, gpus: int) -> OwnFabric | None:
    """Of a machine with several GPUs whose collectives were measured, on some of them at least."""
    fabrics = set(read(folder / MEASUREMENTS, COLLECTIVES)["fabric"].to_pylist())
    if MEASURED_FABRIC not in fabrics:
        return None
    result = from_measured(f"{name}-fabric", folder / MEASUREMENTS, of=MEASURED_FABRIC, gpus_per_node=gpus)
    result.write(folder)
    return result


def platform_toml(name: str, ranks: int, *, host: bool, calibrated: bool = False) -> str:
    """The text of the platform's file: its parts lie beside it."""
    lines = [f"schema_version = {PLATFORM_VERSION}", f'name = "{name}"', f"ranks = {ranks}", f'device = "{name}.toml"']
    lines += [f'host = "{name}-host.json"'] if host else []
    lines += [f'calibration = "{CALIBRATION}"'] if calibrated else []
    lines += [f'fabric = "{name}-fabric.toml"'] if ranks > 1 else []
    return "\n".join(lines) + "\n"
