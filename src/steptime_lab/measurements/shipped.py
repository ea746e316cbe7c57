"""The measurements that come with the package: one Parquet file per set, and the programs of the measured steps.

Of each case there is one execution trace per distinct program, all cases in one Parquet file: traces of the batch sizes of a
model differ in a few numbers, so that one compressed column takes half of what files take.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import steptime_lab
from steptime._files import whole
from steptime._measurements.store import read, read_part, write_part
from steptime._program.execution import to_program
from steptime._program.formats.execution_trace import read as read_execution_trace
from steptime._program.program import Program
from steptime.errors import InputError
from steptime_lab.measurements.sets import measured_set

SCHEMA_VERSION = 1
_VERSION_KEY = b"steptime_programs"
FILE_NAME = "programs.parquet"
# 225 cases: 12 MB in 6 s; level 16 takes 15 times as long for 7 % less. A case is read without unpacking the rest.
_LEVEL, _GROUP = 19, 16
_OWNERS, _TRACE = ".programs.json", ".et.json.gz"

_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string()),  # the case in `steps`
        pa.field("rank", pa.int16()),  # the first rank that runs this program
        pa.field("owners", pa.list_(pa.int16())),  # per rank of the case, the rank whose program it runs
        pa.field("trace", pa.large_string()),  # as PyTorch's ExecutionTraceObserver writes it, less what no reader needs
    ]
)

FOLDER = Path(steptime_lab.__file__).parent / "data" / "measurements"
BASELINES = Path(steptime_lab.__file__).parent / "data" / "baselines"


@dataclass(frozen=True, slots=True)
class CasePrograms:
    """What each rank of a case runs: `traces[owners[rank]]` is the execution trace, JSON text, of a rank."""

    name: str
    owners: tuple[int, ...]
    traces: dict[int, str]

    def write(self, folder: Path) -> list[Path]:
        """One compressed trace per rank, as `steptime inspect` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for rank, owner in enumerate(self.owners):
            path = folder / f"{self.name}.rank{rank}{_TRACE}"
            path.write_bytes(gzip.compress(self.traces[owner].encode(), 9, mtime=0))
            written.append(path)
        return written


def program_of(case: CasePrograms, owner: int) -> Program:
    """The program that a rank of a shipped case runs."""
    return to_program(read_execution_trace(case.traces[owner].encode(), case.name), rank=owner, world_size=len(case.owners))


def pack(folders: Iterable[Path], target: Path) -> int:
    """Puts the traces that `measure steps` left in folders into one file, beside those already there; how many cases."""
    result = {case.name: case for case in read_programs(target)} if target.exists() else {}
    for folder in folders:
        for file in sorted((folder / "traces").glob(f"*{_OWNERS}")):
            case = _recorded(file)
            result.setdefault(case.name, case)
    rows = [
        {"name": case.name, "rank": rank, "owners": list(case.owners), "trace": trace}
        for case in sorted(result.values(), key=lambda case: case.name)
        for rank, trace in sorted(case.traces.items())
    ]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA.with_metadata({_VERSION_KEY: str(SCHEMA_VERSION)}))
    with whole(target) as unfinished:
        pq.write_table(
            table, unfinished, compression="zstd", compression_level=_LEVEL, use_dictionary=False, row_group_size=_GROUP
        )
    return len(result)


def merge_rows(folders: Iterable[Path], name: str, target: Path) -> int:
    """Writes the rows of a set from several folders into one file, without repeating any; how many there are."""
    measured = measured_set(name)
    tables = [read(folder, measured) for folder in folders]
    if target.exists():
        tables.insert(0, read_part(target, measured))
    rows = pa.concat_tables(tables)
    seen: set[tuple[Any, ...]] = set()
    keep = []
    for index, identity in enumerate(zip(*(rows[c].to_pylist() for c in ("key", "run", "process", "times_ns")), strict=True)):
        hashable = (*identity[:3], tuple(identity[3]))
        if hashable not in seen:
            seen.add(hashable)
            keep.append(index)
    # One dictionary per column: rows from many parts carry one each, which Parquet would store again and again.
    write_part(target, rows.take(keep).unify_dictionaries().combine_chunks(), _LEVEL)
    return len(keep)


def read_programs(file: Path, names: Iterable[str] | None = None) -> list[CasePrograms]:
    """The cases of a file, or those of some names, by name."""
    try:
        version = (pq.read_schema(file).metadata or {}).get(_VERSION_KEY, b"").decode()
        if version != str(SCHEMA_VERSION):
            raise InputError(f"{file}: programs of version {version or 'none'}, this steptime reads {SCHEMA_VERSION}")
        wanted = None if names is None else pc.field("name").isin(list(names))
        rows = pq.read_table(file, filters=wanted).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file}: not a readable Parquet file ({error})") from error
    traces: dict[str, dict[int, str]] = {}
    for row in rows:
        traces.setdefault(row["name"], {})[row["rank"]] = row["trace"]
    owners = {row["name"]: tuple(row["owners"]) for row in rows}
    return [CasePrograms(name, owners[name], traces[name]) for name in sorted(traces)]


def _recorded(file: Path) -> CasePrograms:
    """A case as `measure steps` leaves it: a list of owners, and a trace for each of them."""
    name = file.name.removesuffix(_OWNERS)
    try:
        owners = tuple(json.loads(file.read_text(encoding="utf-8"))["programs"])
        traces = {
            owner: gzip.decompress((file.parent / f"{name}.rank{owner}{_TRACE}").read_bytes()).decode() for owner in set(owners)
        }
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: the programs of {name} are incomplete ({error}); measure its steps again") from error
    return CasePrograms(name, owners, traces)


def shipped(name: str) -> pa.Table:
    """The shipped rows of a set; an empty table where none came with the package."""
    return read(FOLDER, measured_set(name))


def shipped_programs(name: str) -> CasePrograms:
    """The execution traces of a shipped step case."""
    result = read_programs(FOLDER / FILE_NAME, [name])
    if not result:
        raise InputError(f"no programs of {name!r} are shipped; the names are in the column `name` of the set steps")
    return result[0]
