"""From a folder of measurements to files of fitted models, with the baselines they will be compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steptime._hardware.device import FOLDER, DeviceLimits, device_names, read_device, reference_device
from steptime._hardware.fabric import fabric_names, read_fabric
from steptime._measurements.sets import COLLECTIVES, HOST
from steptime._measurements.store import read
from steptime._models.collectives.overlap import FILE as OVERLAP
from steptime._models.engine.archive import write_archive
from steptime._models.engine.splits import FIT, TEST, split_of
from steptime._models.engine.stored import pack
from steptime._models.host.model import HostModel
from steptime._models.kernels.fitted import KernelModels
from steptime._models.lookups.contention import Contention
from steptime._models.power.model import power_file
from steptime._platforms.device import Device
from steptime._platforms.fabric import Fabric, read_models, write_models
from steptime._processes import workers
from steptime._program.load import load
from steptime._program.program import Program
from steptime.errors import InputError
from steptime_lab.baselines.kernels import BASELINES
from steptime_lab.fit import sharing
from steptime_lab.fit.compiled_host import with_compiled_costs
from steptime_lab.fit.fabrics import fit_measured
from steptime_lab.fit.host import fit as fit_host
from steptime_lab.fit.kernels.fitting import fit_generated, fit_kernels, with_forms
from steptime_lab.fit.lookups import fit_and_write_lookup_baselines, fit_and_write_lookups
from steptime_lab.fit.overlap import fit_overlaps, overlap_rows, write_overlaps
from steptime_lab.fit.power import fit_power, too_elastic
from steptime_lab.fit.waiting import STEP_FABRIC, kernels_beside, profiled_steps, slowed_beside, waits
from steptime_lab.measurements.generated import generated_rows
from steptime_lab.measurements.kernels import rows_of
from steptime_lab.measurements.sets import COMPILED, GENERATED, KERNELS, LOOKUPS, POWER


@dataclass(frozen=True, slots=True)
class FitRun:
    """From which folder of measurements, into which folder, for which device and host; what is drawn begins with the seed."""

    folder: Path
    out: Path
    device: str
    host: str
    seed: int
    report: Callable[[str], None]

    def limits(self) -> DeviceLimits:
        """Of the device: a file beside the models, else the shipped one of that name, else those of the reference device."""
        name, beside = self.device, self.out / f"{self.device}.toml"
        if beside.is_file() or name in device_names():
            return read_device(beside if beside.is_file() else name)
        self.report(f"{name}: no {beside}, so features go by the limits of {reference_device().name}")
        return reference_device()


def fit_and_write(run: FitRun, what: Sequence[str]) -> list[Path]:
    """Fits what is asked and gives the files written."""
    run.out.mkdir(parents=True, exist_ok=True)
    written = []
    for item, fit in _FITS.items():
        if item in what:
            begun = time.monotonic()
            run.report(f"fitting {item}")
            written += fit(run)
            run.report(f"{item}: {time.monotonic() - begun:.0f} s")
    return written


def _kernels(run: FitRun) -> list[Path]:
    table = read(run.folder, KERNELS)
    # The two forms with most rows take nearly all the time, about as long as each other.
    with workers(2) as executor:
        models = fit_kernels(table, run.limits(), run.seed, report=run.report, executor=executor)
    if (generated := read(run.folder, GENERATED)).num_rows:
        models = with_forms(models, fit_generated(generated_rows(generated), run.limits(), run.seed))
    file = run.out / f"{run.device}.npz"
    models.save(file)
    return [file]


def _generated(run: FitRun) -> list[Path]:
    """Kernels that PyTorch's compiler generates, beside the kernel models that are there."""
    table = read(run.folder, GENERATED)
    if not table.num_rows:
        raise InputError(f"{run.folder}: no rows of generated kernels to fit")
    file = run.out / f"{run.device}.npz"
    models = KernelModels.load(file if file.is_file() else FOLDER / f"{run.device}.npz")
    run.report(f"generated: {table.num_rows:,} rows")
    with_forms(models, fit_generated(generated_rows(table), run.limits(), run.seed)).save(file)
    return [file]


def _lookups(run: FitRun) -> list[Path]:
    return [fit_and_write_lookups(run.folder, run.out, run.limits(), run.device, run.seed, run.report)]


def _power(run: FitRun) -> list[Path]:
    """What the card draws."""
    if not len(read(run.folder, POWER)):
        raise InputError(f"{run.folder}: no rows of power to fit; `steptime measure power` makes some")
    shipped = run.device in device_names() and (run.out / f"{run.device}.npz").is_file() is False
    timed_by = Device.load(run.device if shipped else run.out / f"{run.device}.toml")
    model, mixes = fit_power(run.folder, run.limits(), timed_by)
    target = run.out / power_file(run.device)
    model.write(target)
    worst = max(mixes.values(), key=abs, default=0.0)
    run.report(f"power: gamma {model.gamma:.2f}; mixes that had no part in it {100 * worst:+.1f} % off at most")
    for call in too_elastic(run.folder):
        run.report(f"power: slowed by more than the clock, which is an error of another kind: {call}")
    return [target]


def _baselines(run: FitRun) -> list[Path]:
    """What the fitted models are compared with: other forms, and the lookups' own forms shown some of the rows only."""
    results = []
    if (table := read(run.folder, KERNELS)).num_rows:
        rows = [row for row in rows_of(table) if row.split != TEST]
        parts = {}
        for form, baseline in BASELINES.items():
            run.report(f"{form}: {len(rows):,} rows")
            parts[form] = pack(baseline.fit(rows, run.seed))
        results.append(baselines_file(run.out, run.device))
        write_archive(results[-1], {"seed": run.seed}, parts)
    if read(run.folder, LOOKUPS).num_rows:
        results.append(fit_and_write_lookup_baselines(run.folder, run.out, run.limits(), run.device, run.seed, run.report))
    if not results:
        raise InputError(f"{run.folder}: no kernel or lookup rows to fit; `steptime measure kernels` makes some")
    return results


def baselines_file(folder: Path, name: str) -> Path:
    """Where the baselines of a device are kept."""
    return folder / f"{name}-baselines.npz"


def _host(run: FitRun) -> list[Path]:
    """Of the rows of one rank alone and of what full traces beside them tell; nothing is drawn."""
    from steptime_lab.fit.reference_steps import reference_bursts  # which captures, with torch

    table = read(run.folder, HOST)
    if not table.num_rows:
        raise InputError(f"{run.folder}: no host rows to fit; `steptime measure host` makes some")
    traces = sorted((run.folder / "traces").glob("*.kineto.json.gz"))
    run.report(f"host: {table.num_rows:,} rows, {len(traces)} traces")
    programs = [program for trace in traces for program in load([trace]).programs]
    file = run.out / f"{run.host}.json"
    model = _with_compiled(run, fit_host(table.to_pylist(), programs))
    replace(model, bursts={**model.bursts, **reference_bursts(model)}).save(file)
    return [file]


def _with_compiled(run: FitRun, model: HostModel) -> HostModel:
    """The model with what tiny steps cost compiled, where some were measured; they are captured here, which takes minutes."""
    from steptime import capture  # with torch
    from steptime_lab.workloads.compiled import host_cases

    cases = host_cases()
    rows = [row for row in read(run.folder, COMPILED).to_pylist() if row["name"] in cases]
    if not rows:
        return model
    run.report(f"host: {len(rows)} rows of tiny steps eager and compiled, each captured")

    def captured(name: str, form: str) -> Program:
        return capture(cases[name].eager if form == "eager" else cases[name].compiled).programs[0]

    return with_compiled_costs(model, rows, captured)


def _fabrics(run: FitRun) -> list[Path]:
    """Of every fabric that has a description; nothing is drawn."""
    rows = read(run.folder, COLLECTIVES).to_pylist()
    if not rows:
        raise InputError(f"{run.folder}: no rows of collectives to fit; `steptime measure collectives` makes some")
    written = []
    for fabric in sorted({row["fabric"] for row in rows} & set(fabric_names())):
        tiers, fitted = fit_measured(read_fabric(fabric), rows)
        run.report(f"{fabric}: {len(fitted.points):,} messages, each by {fitted.reduction}")
        written.append(run.out / f"{fabric}.json")
        write_models(written[-1], tiers)
    if not written:
        raise InputError(
            f"{run.folder}: no described fabric among its collectives; `steptime fabric {run.folder}` describes one"
        )
    return written


def _overlap(run: FitRun) -> list[Path]:
    """What collectives and kernels beside them do to each other, on every described fabric; nothing is drawn."""
    limits = run.limits()
    rows = [row for row in overlap_rows(run.folder) if row["fabric"] in fabric_names()]
    steps = list(profiled_steps(run.folder))
    waited = [wait for wait in waits(steps, _fitted_fabric(run.out)) if split_of(wait.collective.case) == FIT] if steps else []
    run.report(f"overlap: {len(rows):,} rows of collectives, {len(steps)} profiled steps")
    overlaps = fit_overlaps(
        rows, kernels_beside(steps), moving=round(slowed_beside(waited)[0], 3), sms=limits.sms.value,
        source=f"measured set collectives and profiled steps on parts of {limits.title.split(',')[0]}",
    )  # fmt: skip
    file = run.out / OVERLAP.name
    write_overlaps(file, overlaps, "steptime fit --only overlap")
    return [file]


def _sharing(run: FitRun) -> list[Path]:
    """What ranks on shares of one GPU do to each other; nothing is drawn."""
    fabric, law = _fitted_fabric(run.out), Contention.of(replace(run.limits(), share=sharing.RANKS))
    if law is None:
        raise InputError(f"{run.device} says nothing of [contention]; begin with that of another device")
    exchanges, lookups = (
        sharing.measured_exchanges(run.folder, sharing.RANKS, fabric),
        sharing.measured_lookups_together(run.folder, sharing.RANKS),
    )
    run.report(f"sharing: {exchanges.begun_ns.shape[1]} exchanges, {len(lookups.begun_ns)} times lookups together")
    fitted = sharing.fit_contention(lookups, law)
    file = run.out / "sharing.toml"
    source = f"exchanges and lookups of {sharing.RANKS} ranks (steptime fit --only sharing)"
    sharing.write_sharing(file, sharing.fit_buffered_bytes(exchanges, fabric), fitted, source)
    return [file]


def _fitted_fabric(out: Path) -> Fabric:
    """The fabric of the profiled steps, with the models just fitted where there are any."""
    limits, file = read_fabric(STEP_FABRIC), out / f"{STEP_FABRIC}.json"
    return Fabric(limits, read_models(file)) if file.is_file() else Fabric.load(STEP_FABRIC)


_FITS: dict[str, Callable[[FitRun], list[Path]]] = {
    "kernels": _kernels,
    "generated": _generated,
    "lookups": _lookups,
    "host": _host,
    "fabrics": _fabrics,
    "overlap": _overlap,
    "sharing": _sharing,
    "power": _power,
    "baselines": _baselines,
}
WHAT = tuple(_FITS)
