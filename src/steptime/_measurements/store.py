"""A folder of measurements: rows are appended as Parquet parts, whole or not at all, and read back as one table per set.

DIR/<set>/<run>-<process>-<number>.parquet
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from steptime._files import whole
from steptime._measurements.recipe import Recipe, spread_of
from steptime._measurements.sets import MeasuredSet
from steptime.errors import InputError

SCHEMA_VERSION = 1
_VERSION_KEY = b"steptime_measurements"
_PAGE_BYTES = 1 << 26  # what is compressed together

# Nanoseconds of eleven days, bytes of a petabyte: nothing that is measured has more.
_MOST = 1e15
_REFERENCE = "reference_"  # what such columns hold was timed beside each repeat

Row = Mapping[str, Any]


def key_of(measured: MeasuredSet, row: Row) -> str:
    """A digest of what was asked: 16 hexadecimal digits, the same on every machine."""
    question = json.dumps([row[name] for name in measured.case], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(f"{measured.name}:{question}".encode()).hexdigest()[:16]


@dataclass
class Store:
    """Where one process of one run puts its rows."""

    folder: Path
    recipe: Recipe
    process: str
    rank: int = 0
    clock_mhz: Callable[[], float | None] = lambda: None  # the SM clock since it was last asked
    _waiting: dict[str, tuple[MeasuredSet, list[dict[str, Any]]]] = field(default_factory=dict)
    _parts: Counter[str] = field(default_factory=Counter)

    def done(self, measured: MeasuredSet) -> Counter[str]:
        """How many rows each key of a set already has in this folder, whoever measured them; trial rows only for a trial."""
        result: Counter[str] = Counter()
        for path in _parts_of(self.folder, measured):
            part = read_part(path, measured, ["key", "command"])
            pairs = zip(part["key"].to_pylist(), part["command"].to_pylist(), strict=True)
            result.update(key for key, command in pairs if _is_trial(self.recipe.command) or not _is_trial(command))
        return result

    def add(self, measured: MeasuredSet, row: Row) -> None:
        """Keeps a row until the next `flush`. `time_ns`, `spread`, `key` and the recipe are filled in from the rest."""
        times = [float(value) for value in row["times_ns"]]
        full = {
            "rank": self.rank,
            "sm_clock_mhz": None,
            **dict.fromkeys(measured.added),
            "time_ns": float(np.median(times)),
            "spread": spread_of(times),
            **row,
            "key": key_of(measured, row),
            "process": self.process,
            "times_ns": times,
            **self.recipe.to_dict(),
        }
        expected, there = set(measured.schema.names), set(full)
        if expected != there:
            raise ValueError(
                f"{measured.name}: missing columns {sorted(expected - there)}, unknown columns {sorted(there - expected)}"
            )
        self._waiting.setdefault(measured.name, (measured, []))[1].append(full)

    def waiting(self) -> int:
        """Rows that a crash now would lose."""
        return sum(len(rows) for _, rows in self._waiting.values())

    def flush(self) -> None:
        """Writes what waits, one new part per set. A part appears under its name only when it is complete."""
        clock = self.clock_mhz()
        for name, (measured, rows) in self._waiting.items():
            for row in rows:
                row["sm_clock_mhz"] = clock if row["sm_clock_mhz"] is None else row["sm_clock_mhz"]
            path = self.folder / name / f"{self.recipe.run}-{self.process}-{self._parts[name]:04d}.parquet"
            write_part(path, pa.Table.from_pylist(rows, schema=measured.schema))
            self._parts[name] += 1
        self._waiting.clear()


def _is_trial(command: str) -> bool:
    """Whether a command measured with few repeats, to try things out: what it found does not stand for the real thing."""
    return "--small" in command.split()


def write_part(path: Path, table: pa.Table, level: int = 9) -> None:
    """One Parquet file, complete or absent; `level` of compression: 19 takes twenty times as long for a tenth less."""
    stamped = table.replace_schema_metadata({_VERSION_KEY: str(SCHEMA_VERSION).encode()})
    with whole(path) as unfinished:
        pq.write_table(stamped, unfinished, **small_encoding(stamped.schema, level))


def small_encoding(schema: pa.Schema, level: int) -> dict[str, Any]:
    """How Parquet takes least for measurements.

    Times differ in their last digits, and counts in a list from one to the next: byte by byte they take a tenth to a half less
    than as numbers or by dictionary. Statistics in lists (fp32) come again and again in whole rows, which compression finds if
    they are left as they are; so do texts that have no dictionary in memory either. Of what else there is, few values differ.
    """
    leaves = list(_leaves(schema))
    split = [name for name, nested, kind in leaves if _differs(kind, nested=nested)]
    plain = [name for name, nested, kind in leaves if (nested and pa.types.is_float32(kind)) or pa.types.is_string(kind)]
    return {
        "compression": "zstd",
        "compression_level": level,
        "use_dictionary": [name for name, _, _ in leaves if name not in {*split, *plain}],
        "use_byte_stream_split": split,
        "data_page_size": _PAGE_BYTES,
        "dictionary_pagesize_limit": _PAGE_BYTES,
    }


def _differs(kind: pa.DataType, *, nested: bool) -> bool:
    if nested:
        return bool(pa.types.is_float64(kind) or pa.types.is_integer(kind))
    return bool(pa.types.is_floating(kind) or pa.types.is_fixed_size_binary(kind))


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, bool, pa.DataType]]:
    """Paths of the columns as Parquet has them, whether they are lists, and what they hold."""
    for column in schema:
        path, kind = column.name, column.type
        while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        yield path, path != column.name, kind


def read_part(path: Path, measured: MeasuredSet, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one file; one clear line when it is not what it should be."""
    try:
        schema = pq.read_schema(path)
        version = (schema.metadata or {}).get(_VERSION_KEY, b"").decode()
        if version != str(SCHEMA_VERSION):
            raise InputError(f"{path}: measurements of version {version or 'none'}, this steptime reads {SCHEMA_VERSION}")
        missing = [name for name in measured.schema.names if name not in schema.names and name not in measured.added]
        if missing:
            raise InputError(f"{path}: not a part of the set {measured.name}, column {missing[0]!r} is missing")
        wanted = list(columns or measured.schema.names)
        table = pq.read_table(path, columns=[name for name in wanted if name in schema.names])
        for name in [name for name in wanted if name not in schema.names]:
            table = table.append_column(measured.schema.field(name), pa.nulls(table.num_rows, measured.schema.field(name).type))
        table = table.select(wanted).cast(pa.schema([measured.schema.field(name) for name in wanted]))
        _check_values(path, table, measured)
        return table
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({error}); measure it again or remove it") from error


def _check_values(path: Path, table: pa.Table, measured: MeasuredSet) -> None:
    """Nothing is missing that every row has, and numbers are some that can be."""
    holes = [name for name in measured.required if name in table.schema.names and table[name].null_count]
    if holes:
        raise InputError(f"{path}: column {holes[0]!r} of the set {measured.name} has rows without a value; measure them again")
    for name in table.schema.names:
        wrong = _wrong_numbers(table[name])
        if wrong:
            raise InputError(f"{path}: column {name!r} of the set {measured.name} has {wrong}; measure these rows again")
    if not measured.timed or "times_ns" not in table.schema.names or not table.num_rows:
        return
    if not pc.min(pc.list_value_length(table["times_ns"])).as_py():
        raise InputError(f"{path}: column 'times_ns' has rows without repeats")
    timed = () if measured.slopes else ("times_ns",)
    for name in (*timed, *(name for name in table.schema.names if name.startswith(_REFERENCE))):
        least = pc.min(pc.list_flatten(table[name])).as_py()
        if least is not None and least <= 0:
            raise InputError(f"{path}: column {name!r} has times of 0 or less; measure these rows again")


def _wrong_numbers(column: pa.ChunkedArray) -> str:
    """What a column has that no measurement gives; empty where there is nothing."""
    entries = column
    while pa.types.is_list(entries.type) or pa.types.is_fixed_size_list(entries.type):
        entries = pc.list_flatten(entries)
        if entries.null_count:
            return "lists with an entry missing"
    if pa.types.is_floating(entries.type):
        if pc.all(pc.is_finite(entries)).as_py() is False:
            return "values that are no numbers"
        return f"values beyond {_MOST:g}" if (pc.max(pc.abs(entries)).as_py() or 0) > _MOST else ""
    if pa.types.is_integer(entries.type):
        ends = pc.min_max(entries).as_py()
        return f"counts that are not from 0 to {_MOST:g}" if (ends["min"] or 0) < 0 or (ends["max"] or 0) > _MOST else ""
    return ""


def read(folder: Path, measured: MeasuredSet) -> pa.Table:
    """Every row of a set in a folder, in the order of the parts' names; an empty table when there is none."""
    parts = [read_part(path, measured) for path in _parts_of(folder, measured)]
    return pa.concat_tables(parts) if parts else measured.schema.empty_table()


def devices_of_rows(folder: Path) -> dict[str, list[str]]:
    """Of every set in a folder, the device that each row was measured on."""
    result: dict[str, list[str]] = defaultdict(list)
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")]):
        try:
            if _VERSION_KEY in (pq.read_schema(path).metadata or {}):
                name = path.stem if path.parent == folder else path.parent.name
                result[name] += pq.read_table(path, columns=["device"])["device"].to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: not a readable Parquet file ({error}); measure it again or remove it") from error
    return dict(result)


def _parts_of(folder: Path, measured: MeasuredSet) -> list[Path]:
    """The part files of a set: those in its folder, or the one merged file of its name."""
    merged = folder / f"{measured.name}.parquet"
    return [*([merged] if merged.exists() else []), *sorted((folder / measured.name).glob("*.parquet"))]
