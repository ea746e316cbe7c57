"""`steptime measure noise` and `steptime measure merge`: what is done with measurements once they are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from steptime._calibrate.harness.command import LineParser
from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import read, write_part
from steptime.errors import InputError
from steptime_lab.measurements.collectives import choices_of, with_choices
from steptime_lab.measurements.noise import Floor, Noise, noise_by, noise_of
from steptime_lab.measurements.sets import SETS, measured_set
from steptime_lab.measurements.shipped import FILE_NAME as PROGRAMS
from steptime_lab.measurements.shipped import FOLDER, merge_rows, pack

SCHEMA_VERSION = 1

# By which column a set's floor is divided.
DIVIDED_BY = {"kernels": "family", "lookups": "direction", "host": "profiler", "collectives": "ranks", "steps": "workload"}
HEADER = ("set", "rows", "keys", "within a process", "between processes", "between machines")


def noise(arguments: Sequence[str]) -> int:
    """Prints the noise floor of a folder of measurements, by default of those that came with the package."""
    parser = LineParser(prog="steptime measure noise", description="How far repeats of one question lie apart: median (90 %).")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="measurements; by default the shipped ones")
    parser.add_argument("--parts", action="store_true", help="also by family, direction, ranks, workload")
    parser.add_argument("--json", action="store_true", help="as JSON")
    given = parser.parse_args(list(arguments))
    result = noises(given.folder, parts=given.parts)
    if not result:
        raise InputError(f"{given.folder}: no measurements there; measure some with `steptime measure JOB -o DIR`")
    if given.json:
        content = {"schema_version": SCHEMA_VERSION, "sets": [item.to_dict() for item in result], "warnings": []}
        print(json.dumps(content, indent=2))
    else:
        print("\n".join(noise_lines(result)))
    return 0


def noises(folder: Path, *, parts: bool) -> list[Noise]:
    """The floors of the sets in a folder that have rows."""
    results = []
    for name, measured in SETS.items():
        table = read(folder, measured)
        if not table.num_rows or not measured.timed:
            continue
        results.append(noise_of(measured, table))
        if parts and name in DIVIDED_BY:
            results += noise_by(measured, table, DIVIDED_BY[name])
    return results


def noise_lines(found: Sequence[Noise]) -> list[str]:
    """A table in Markdown, which reads well on a screen too."""
    rows = [HEADER, tuple("-" * len(word) for word in HEADER)]
    for item in found:
        floors = (item.within, item.between_processes, item.between_machines)
        rows.append((item.name, f"{item.rows:,}", f"{item.keys:,}", *(_said(floor) for floor in floors)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]


def _said(floor: Floor | None) -> str:
    if floor is None:
        return "not repeated"
    return f"{100 * floor.median:.2f} % ({100 * floor.p90:.1f}), {floor.keys:,} keys"


def merge(arguments: Sequence[str]) -> int:
    """Puts the measurements of several folders into one, a file per set; rows that are already there are not repeated."""
    parser = LineParser(prog="steptime measure merge", description="The measurements of several folders in one.")
    parser.add_argument("folders", type=Path, nargs="+", help="folders that `steptime measure` wrote")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument("--only", default="", help="names of sets, separated by commas")
    given = parser.parse_args(list(arguments))
    missing = [str(folder) for folder in given.folders if not folder.is_dir()]
    if missing:
        raise InputError(f"{missing[0]}: no such folder")
    wanted = [name for name in given.only.split(",") if name] or list(SETS)
    for name in wanted:
        if any(read(folder, measured_set(name)).num_rows for folder in given.folders):
            count = merge_rows(given.folders, name, given.out / f"{name}.parquet")
            print(f"{name}: {count} rows in {given.out / f'{name}.parquet'}")
    if "collectives" in wanted:
        _join_choices(given.folders, given.out)
    if not given.only and any((folder / "traces").is_dir() for folder in given.folders):
        count = pack(given.folders, given.out / PROGRAMS)
        print(f"programs: {count} cases in {given.out / PROGRAMS}")
    return 0


def _join_choices(folders: Sequence[Path], out: Path) -> None:
    """What NCCL said it chooses goes into the rows that were merged, now or earlier."""
    file, choices = out / "collectives.parquet", choices_of(folders)
    if choices and file.exists():
        write_part(file, with_choices(read(out, COLLECTIVES), choices).unify_dictionaries().combine_chunks())
        print(f"collectives: {len(choices)} choices of NCCL joined")
