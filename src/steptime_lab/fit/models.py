"""From a folder of measurements to files of fitted models, with the baselines they will be compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from steptime._hardware.device import DeviceLimits, device_names, read_device, reference_device
from steptime._hardware.fabric import fabric_names, read_fabric
from steptime._measurements.store import read
from steptime._models.collectives.overlap import FILE as OVERLAP
from steptime._models.engine.archive import write_archive
from steptime._models.engine.splits import FIT, TEST, split_of
from steptime._models.engine.stored import pack
from steptime._models.lookups.contention import Contention
from steptime._platforms.fabric import Fabric, read_models, write_models
from steptime._program.load import load
from steptime.errors import InputError
from steptime_lab.baselines.kernels import BASELINES
from steptime_lab.fit import sharing
from steptime_lab.fit.fabrics import fit_measured
from steptime_lab.fit.host import fit as fit_host
from steptime_lab.fit.kernels.fitting import fit_kernels
from steptime_lab.fit.lookups import fit_and_write_lookup_baselines, fit_and_write_lookups
from steptime_lab.fit.overlap import fit_overlaps, overlap_rows, write_overlaps
from steptime_lab.fit.waiting import STEP_FABRIC, kernels_beside, profiled_steps, slowed_beside, waits
from steptime_lab.measurements.kernels import rows_of

WHAT = ("kernels", "lookups", "host", "fabrics", "overlap", "sharing", "baselines")

Said = Callable[[str], None]

# The box whose rows are shipped.
HOST = "xeon-h200"


@dataclass(frozen=True, slots=True)
class Names:
    """What the fitted device and the fitted host are called."""

    device: str = "h200"
    host: str = HOST


def fit_and_write(folder: Path, out: Path, names: Names, what: Sequence[str], seed: int, *, said: Said) -> list[Path]:
    """Fits what is asked and gives the files written."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for item in WHAT:
        if item in what:
            begun = time.monotonic()
            said(f"fitting {item}")
            written += _FITS[item](folder, out, names.host if item == "host" else names.device, seed, said)
            said(f"{item}: {time.monotonic() - begun:.0f} s")
    return written


def _kernels(folder: Path, out: Path, name: str, seed: int, said: Said) -> list[Path]:
    table = read(folder, "kernels")
    # The two forms with most rows take nearly all the time, about as long as each other.
    with ProcessPoolExecutor(max_workers=2) as executor:
        models = fit_kernels(table, _limits(out, name, said), seed, said=said, executor=executor)
    file = out / f"{name}.npz"
    models.save(file)
    return [file]


def _limits(out: Path, name: str, said: Said) -> DeviceLimits:
    """Of the device: a file beside the models, else the shipped one of that name, else those of the reference device."""
    beside = out / f"{name}.toml"
    if beside.is_file() or name in device_names():
        return read_device(beside if beside.is_file() else name)
    said(f"{name}: no {beside}, so features go by the limits of {reference_device().name}")
    return reference_device()


def _lookups(folder: Path, out: Path, name: str, seed: int, said: Said) -> list[Path]:
    return [fit_and_write_lookups(folder, out, _limits(out, name, said), name, seed, said)]


def _baselines(folder: Path, out: Path, name: str, seed: int, said: Said) -> list[Path]:
    """What the fitted models are compared with: other forms, and the lookups' own forms shown some of the rows only."""
    asked = {"kernels": _kernel_baselines, "lookups": _lookup_baselines}
    results = [fit(folder, out, name, seed, said) for what, fit in asked.items() if read(folder, what).num_rows]
    if not results:
        raise InputError(f"{folder}: no kernel or lookup rows to fit; `steptime measure kernels` makes some")
    return results


def _lookup_baselines(folder: Path, out: Path, name: str, seed: int, said: Said) -> Path:
    return fit_and_write_lookup_baselines(folder, out, _limits(out, name, said), name, seed, said)


def _kernel_baselines(folder: Path, out: Path, name: str, seed: int, said: Said) -> Path:
    table = read(folder, "kernels")
    rows = [row for row in rows_of(table) if row.split != TEST]
    parts = {}
    for form, baseline in BASELINES.items():
        said(f"{form}: {len(rows):,} rows")
        parts[form] = pack(baseline.fit(rows, seed))
    file = baselines_file(out, name)
    write_archive(file, {"seed": seed}, parts)
    return file


def baselines_file(folder: Path, name: str) -> Path:
    """Where the baselines of a device are kept."""
    return folder / f"{name}-baselines.npz"


def _host(folder: Path, out: Path, name: str, seed: int, said: Said) -> list[Path]:  # noqa: ARG001
    """Of the rows of one rank alone and of what full traces beside them tell; nothing is drawn."""
    table = read(folder, "host")
    if not table.num_rows:
        raise InputError(f"{folder}: no host rows to fit; `steptime measure host` makes some")
    traces = sorted((folder / "traces").glob("*.kineto.json.gz"))
    said(f"host: {table.num_rows:,} rows, {len(traces)} traces")
    programs = [program for trace in traces for program in load([trace]).programs]
    file = out / f"{name}.json"
    fit_host(table.to_pylist(), programs).save(file)
    return [file]


def _fabrics(folder: Path, out: Path, name: str, seed: int, said: Said) -> list[Path]:  # noqa: ARG001
    """Of every fabric that has a description; nothing is drawn."""
    rows = read(folder, "collectives").to_pylist()
    if not rows:
        raise InputError(f"{folder}: no rows of collectives to fit; `steptime measure collectives` makes some")
    written = []
    for fabric in sorted({row["fabric"] for row in rows} & set(fabric_names())):
        tiers, fitted = fit_measured(read_fabric(fabric), rows)
        said(f"{fabric}: {len(fitted.points):,} messages, each by {fitted.reduction}")
        written.append(out / f"{fabric}.json")
        write_models(written[-1], tiers)
    if not written:
        raise InputError(f"{folder}: no described fabric among its collectives; `steptime fabric {folder}` describes one")
    return written


def _overlap(folder: Path, out: Path, name: str, seed: int, said: Said) -> list[Path]:  # noqa: ARG001
    """What collectives and kernels beside them do to each other, on every described fabric; nothing is drawn."""
    limits = _limits(out, name, said)
    rows = [row for row in overlap_rows(folder) if row["fabric"] in fabric_names()]
    steps = list(profiled_steps(folder))
    waited = [wait for wait in waits(steps, _fitted_fabric(out)) if split_of(wait.collective.case) == FIT] if steps else []
    said(f"overlap: {len(rows):,} rows of collectives, {len(steps)} profiled steps")
    overlaps = fit_overlaps(
        rows, kernels_beside(steps), moving=round(slowed_beside(waited)[0], 3), sms=limits.sms.value,
        source=f"measured set collectives and profiled steps on parts of {limits.title.split(',')[0]}",
    )  # fmt: skip
    file = out / OVERLAP.name
    write_overlaps(file, overlaps, "steptime fit --only overlap")
    return [file]


def _sharing(folder: Path, out: Path, name: str, seed: int, said: Said) -> list[Path]:  # noqa: ARG001
    """What ranks on shares of one GPU do to each other; nothing is drawn."""
    fabric, law = _fitted_fabric(out), Contention.of(replace(_limits(out, name, said), share=sharing.RANKS))
    if law is None:
        raise InputError(f"{name} says nothing of [contention]; begin with that of another device")
    exchanges, lookups = (
        sharing.measured_exchanges(folder, sharing.RANKS, fabric),
        sharing.measured_lookups_together(folder, sharing.RANKS),
    )
    said(f"sharing: {exchanges.begun_ns.shape[1]} exchanges, {len(lookups.begun_ns)} times lookups together")
    fitted = sharing.fit_contention(lookups, law)
    file = out / "sharing.toml"
    source = f"exchanges and lookups of {sharing.RANKS} ranks (steptime fit --only sharing)"
    sharing.write_sharing(file, sharing.fit_buffered_bytes(exchanges, fabric), fitted, source)
    return [file]


def _fitted_fabric(out: Path) -> Fabric:
    """The fabric of the profiled steps, with the models just fitted where there are any."""
    limits, file = read_fabric(STEP_FABRIC), out / f"{STEP_FABRIC}.json"
    return Fabric(limits, read_models(file)) if file.is_file() else Fabric.load(STEP_FABRIC)


_FITS: dict[str, Callable[[Path, Path, str, int, Said], list[Path]]] = {
    "kernels": _kernels,
    "lookups": _lookups,
    "host": _host,
    "fabrics": _fabrics,
    "overlap": _overlap,
    "sharing": _sharing,
    "baselines": _baselines,
}
