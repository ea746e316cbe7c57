"""The measurements that come with the package: one Parquet file per set, and the execution traces of the step cases."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

import steptime_lab
from steptime._measurements.store import read
from steptime.errors import InputError
from steptime_lab.measurements.programs import FILE_NAME, CasePrograms, read_programs

FOLDER = Path(steptime_lab.__file__).parent / "data" / "measurements"
BASELINES = Path(steptime_lab.__file__).parent / "data" / "baselines"


def shipped(name: str) -> pa.Table:
    """The shipped rows of a set; an empty table where none came with the package."""
    return read(FOLDER, name)


def shipped_programs(name: str) -> CasePrograms:
    """The execution traces of a shipped step case."""
    result = read_programs(FOLDER / FILE_NAME, [name])
    if not result:
        raise InputError(f"no programs of {name!r} are shipped; the names are in the column `name` of the set steps")
    return result[0]
