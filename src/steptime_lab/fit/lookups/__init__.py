"""From measured lookups to files of fitted lookup models, and of what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pyarrow as pa

from steptime._hardware.device import DeviceLimits
from steptime._measurements.store import read
from steptime._models.engine.archive import Archive, write_archive
from steptime._models.engine.splits import FIT, VALIDATION
from steptime._models.engine.stored import Arrays, pack, unpack
from steptime._models.lookups.fitted import Kind, group_of, lookups_file
from steptime._models.lookups.forms import FORMS, LookupForm, load_form
from steptime.errors import InputError
from steptime_lab.baselines.lookups import BASELINES
from steptime_lab.fit.lookups.fitting import HELD_OUT, fit_held_out, fit_lookups
from steptime_lab.measurements.lookups import FILE_NAME as STREAMS
from steptime_lab.measurements.lookups import MeasuredLookups, Streams, measured_lookups, streams_of, summarised

Said = Callable[[str], None]
Forms = dict[Kind, LookupForm]


def fit_and_write_lookups(folder: Path, out: Path, limits: DeviceLimits, name: str, seed: int, said: Said) -> Path:
    """The lookup models of a device; gives the file."""
    with ProcessPoolExecutor(max_workers=2) as executor:
        table, measured = read_lookups(folder, said=said, executor=executor)
        models = fit_lookups(table, measured, limits, seed, said=said, executor=executor)
    file = lookups_file(out, name)
    models.save(file)
    return file


def read_lookups(
    folder: Path, *, said: Said = lambda _: None, executor: Executor | None = None
) -> tuple[pa.Table, dict[Kind, MeasuredLookups]]:
    """Measured lookups with the statistics of their index streams; new ones are drawn, and kept beside the rows."""
    table = read(folder, "lookups")
    if not table.num_rows:
        raise InputError(f"{folder}: no lookup rows; `steptime measure lookups` makes some")
    streams = Streams.load(folder / STREAMS)
    missing = streams.missing(streams_of(table))
    if missing:
        said(f"drawing {len(missing):,} index streams again, for their statistics")
        streams = streams.with_more(summarised(missing, executor))
        streams.save(folder / STREAMS)
    return table, measured_lookups(table, streams)


def fit_and_write_lookup_baselines(folder: Path, out: Path, limits: DeviceLimits, name: str, seed: int, said: Said) -> Path:
    """Other forms on the same rows, and the models' own shown some of the rows only; gives the file."""
    with ProcessPoolExecutor(max_workers=2) as executor:
        _, measured = read_lookups(folder, said=said, executor=executor)
        said("lookups: forms that are shown some of the rows only")
        parts = {
            f"{test}: {group_of(kind)}": pack(form)
            for test, forms in fit_held_out(measured, limits, seed, executor=executor).items()
            for kind, form in forms.items()
        }
    for baseline, form_maker in BASELINES.items():
        said(f"lookups: {baseline}")
        for kind, item in measured.items():
            parts[f"{baseline}: {group_of(kind)}"] = pack(form_maker.fit(item.of(FIT, VALIDATION), seed))
    file = lookup_baselines_file(out, name)
    write_archive(file, {"seed": seed}, parts)
    return file


def lookup_baselines_file(folder: Path, name: str) -> Path:
    """Where the baselines of a device's lookup models are kept."""
    return folder / f"{name}-lookups-baselines.npz"


def read_lookup_baselines(file: Path) -> tuple[dict[str, Forms], dict[str, Forms]]:
    """Baselines by name, and by held-out test the forms that did not see what it asks."""
    archive = Archive.open(file)

    def read_forms(name: str, load: Callable[[Kind, Arrays], LookupForm]) -> Forms:
        parts = {kind: f"{name}: {group_of(kind)}" for kind in FORMS}
        return {kind: load(kind, archive.part(part)) for kind, part in parts.items() if part in archive.parts}

    baselines = {name: read_forms(name, lambda _, arrays, rule=rule: unpack(rule, arrays)) for name, rule in BASELINES.items()}  # type: ignore[misc]
    held_out = {test: read_forms(test, load_form) for test in HELD_OUT}
    return baselines, held_out
