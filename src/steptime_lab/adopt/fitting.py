"""From the rows of an adoption to its platform: a device, a host and a fabric in one folder, and how far off they are.

DIR/platform.toml                      ranks, device, host and fabric: what `predict --platform DIR` reads
    NAME.toml, NAME.npz, NAME-lookups.npz   the device: limits with their sources, models of kernels and of lookups
    NAME-host.json                     the host
    NAME-fabric.toml, .json            the fabric, of a machine with several GPUs
    driver.json                        what the driver said
    measurements/                      rows, as Parquet; how much of its time each sweep has had
    report.json                        rows, errors on rows held out, what was carried over
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steptime._files import write_whole
from steptime._measurements.sets import COLLECTIVES, HOST
from steptime._measurements.store import devices_of_rows, read
from steptime._models.kernels.family import families
from steptime._models.kernels.fitted import TOO_FEW, KernelModels
from steptime._models.kernels.forms.matmul import MatmulForm
from steptime._models.kernels.forms.matmul.products import GROUPS
from steptime._platforms.own_fabric import OwnFabric, from_measured
from steptime._platforms.platform import ADOPTED
from steptime._platforms.platform import SCHEMA_VERSION as PLATFORM_VERSION
from steptime.errors import InputError
from steptime_lab.adopt import description
from steptime_lab.adopt.job import MEASUREMENTS
from steptime_lab.adopt.machine import FILE as DRIVER
from steptime_lab.adopt.machine import GpuFacts
from steptime_lab.fit.models import FitRun, fit_and_write
from steptime_lab.measurements.kernels import rows_of
from steptime_lab.measurements.sets import KERNELS, LOOKUPS

# The fabric of GPUs of their own, as `steptime measure collectives` calls it.
MEASURED_FABRIC = "default"


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was fitted: rows by set, what could not be, and how long it took."""

    rows: dict[str, int]
    fabric: OwnFabric | None
    warnings: list[str]
    seconds: float


def fit(folder: Path, name: str, said: Callable[[str], None], seed: int = 0) -> Adopted:
    """Fits what was measured and writes the platform; what is missing is left to the nearest known device and host."""
    begun, measurements = time.monotonic(), folder / MEASUREMENTS
    if not (folder / DRIVER).is_file():
        raise InputError(f"{folder}: no {DRIVER} in it; `steptime adopt {name} -o DIR` on the machine itself writes it")
    facts = GpuFacts.read(folder / DRIVER)
    # The fit reads the device's limits from its file.
    products = rows_of(read(measurements, KERNELS), families=(description.PRODUCTS, description.MAPS))
    write_whole(folder / f"{name}.toml", description.device_toml(facts, name, products))
    what = {"kernels": KERNELS, "lookups": LOOKUPS, "host": HOST}
    there = {item: read(measurements, of).num_rows for item, of in what.items()}
    if not there["kernels"]:
        raise InputError(f"{measurements}: no kernels were measured; adopt for longer (--minutes)")
    missing = [item for item, count in there.items() if not count]
    fit_and_write(
        FitRun(measurements, folder, name, f"{name}-host", seed, said), [item for item in what if item not in missing]
    )
    fabric = _fabric(folder, name)
    write_whole(folder / ADOPTED, platform_toml(name, facts.gpus if fabric is not None else 1, host=bool(there["host"])))
    rows = {item: len(devices) for item, devices in sorted(devices_of_rows(measurements).items())}
    return Adopted(rows, fabric, _carried(folder / f"{name}.npz", missing), time.monotonic() - begun)


def _carried(models: Path, missing: list[str]) -> list[str]:
    """What is not of this machine, in words: it has the interval of a device that nobody measured."""
    fitted = KernelModels.load(models)
    few = [name for name, family in families().items() if name in fitted.recipe[TOO_FEW] or family.form not in fitted.forms]
    if isinstance(products := fitted.forms.get("matmul"), MatmulForm):
        few += [f"matmul ({group})" for group in GROUPS if group not in products.groups]
    lines = [f"no {item} were measured; those of the nearest known machine stand in" for item in missing]
    text = f"too few calls of {', '.join(few)} were measured; times of the nearest known device, scaled, stand in for them"
    return [*lines, text] if few else lines


def _fabric(folder: Path, name: str) -> OwnFabric | None:
    """Of a machine with several GPUs whose collectives were measured."""
    fabrics = set(read(folder / MEASUREMENTS, COLLECTIVES)["fabric"].to_pylist())
    if MEASURED_FABRIC not in fabrics:
        return None
    result = from_measured(f"{name}-fabric", folder / MEASUREMENTS, of=MEASURED_FABRIC)
    result.write(folder)
    return result


def platform_toml(name: str, ranks: int, *, host: bool) -> str:
    """The text of the platform's file: its parts lie beside it."""
    lines = [f"schema_version = {PLATFORM_VERSION}", f'name = "{name}"', f"ranks = {ranks}", f'device = "{name}.toml"']
    lines += [f'host = "{name}-host.json"'] if host else []
    lines += [f'fabric = "{name}-fabric.toml"'] if ranks > 1 else []
    return "\n".join(lines) + "\n"
