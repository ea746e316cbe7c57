"""The saved form of a `Workload`: one JSON file (`.json`, `.json.gz`), or a folder with one such file per rank.

Columns are lists, so that the text is compact and diffs are readable; the same workload always gives the same bytes.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from steptime._files import write_output
from steptime._lookups.workload import WorkloadLookups
from steptime._program.formats import Format, Progress
from steptime._program.formats.files import TolerantReader, TraceFile, open_stream
from steptime._program.program import (
    MOST_RANKS,
    NEVER,
    CallKind,
    Calls,
    Collective,
    Ops,
    Phase,
    Program,
    Signature,
    Stream,
    Tensor,
    Thread,
    Value,
    WorkKind,
    Works,
)
from steptime._program.table import IntColumn, Table
from steptime._program.workload import Description, UnnamedMemory, Workload
from steptime.errors import InputError

VERSION = 2
# Version 1 had neither lookups, unnamed memory nor a description.
_READABLE = range(1, VERSION + 1)
KEY = "steptime_workload"

_GZIP_MAGIC = b"\x1f\x8b"
_SUFFIXES = (".json", ".json.gz")
# Marks what JSON has no form for: tuples, arrays, infinities, dictionaries with such marks or with other keys than texts.
_TUPLE, _ARRAY, _FLOAT, _DICT = "$tuple", "$array", "$float", "$dict"
# Times and sums of durations up to here (18 years) leave the simulator's arithmetic room before it wraps around.
_LATEST_NS = 2**59
_ARRAY_TYPES = ("int8", "int32", "int64", "float64", "bool")

_Table = TypeVar("_Table", bound=Table)
_CollectiveRow = tuple[str, str, list[int], int, int, int, str, list[int], list[int], int | None]


class _SavedTensor(msgspec.Struct, forbid_unknown_fields=True):
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    id: int | None = None
    storage: int | None = None
    offset: int = 0
    device: str | None = None


class _SavedProgram(msgspec.Struct, forbid_unknown_fields=True):
    rank: int
    world_size: int
    names: list[str]
    threads: list[tuple[int, str]]
    streams: list[tuple[int, int, int | None]]
    ops: dict[str, list[int]]
    calls: dict[str, list[int]]
    works: dict[str, list[int]]
    collectives: list[_CollectiveRow]
    signatures: list[tuple[list[Any], list[Any]]]
    steps: list[int]
    origin_ns: int
    device_name: str
    source: str
    warnings: list[str]
    meta: dict[str, Any]


class _SavedWorkload(msgspec.Struct, forbid_unknown_fields=True):
    steptime_workload: int
    name: str
    world_size: int
    warnings: list[str]
    meta: dict[str, Any]
    programs: list[_SavedProgram]
    owners: list[int] = []
    groups: dict[str, list[list[int]]] = {}
    lookups: Any = None
    unnamed: dict[str, UnnamedMemory] = {}
    description: Description = Description()


class _Version(msgspec.Struct):
    steptime_workload: int


def is_saved(head: bytes) -> bool:
    """Whether decompressed bytes begin like a saved workload."""
    return head.lstrip()[:1] == b"{" and f'"{KEY}"'.encode() in head[:64]


def write(workload: Workload, path: Path) -> None:
    """Save as one file where the path ends in `.json` or `.json.gz`, else as a folder with one file per rank."""
    if path.name.endswith(_SUFFIXES):
        _write_file(workload, workload.programs, path)
        return
    if workload.owners:
        raise InputError(
            f"{path}: ranks of this workload share programs; save it as one file, with a name in .json or .json.gz"
        )
    files = {path / f"rank{program.rank}.json.gz": program for program in workload.programs}
    stale = sorted(each.name for each in path.glob("rank*.json.gz") if each not in files)
    if stale:
        raise InputError(f"{path}: holds {stale[0]}, which is not a rank of this workload; choose an empty folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be made a folder ({error.strerror}); choose another place") from error
    for file, program in files.items():
        _write_file(workload, (program,), file)


def read(path: Path) -> Workload:
    """The workload saved in a file or a folder."""
    if not path.is_dir():
        return _read_path(path)
    files = sorted(path.glob("rank*.json.gz"))
    if not files:
        raise InputError(f"{path}: no rank*.json.gz in this folder; expected a workload saved by steptime")
    return joined([(str(file), _read_path(file)) for file in files])


def joined(parts: Sequence[tuple[str, Workload]]) -> Workload:
    """One workload from the files of a folder, each given with its name."""
    first = parts[0][1]
    for name, part in parts:
        if (part.name, part.world_size) != (first.name, first.world_size):
            result = f"{part.name!r} with {part.world_size} ranks, expected {first.name!r} with {first.world_size}"
            raise InputError(f"{name}: of another job ({result}); keep one job per folder")
    programs = sorted((program for _, part in parts for program in part.programs), key=lambda program: program.rank)
    return replace(first, programs=tuple(programs))


def _write_file(workload: Workload, programs: Sequence[Program], path: Path) -> None:
    document = {
        KEY: VERSION,
        "name": workload.name,
        "world_size": workload.world_size,
        "warnings": list(workload.warnings),
        "meta": _plain(dict(workload.meta), "meta"),
        "programs": [_saved(program) for program in programs],
        **({"owners": workload.owners} if workload.owners else {}),
        **({"groups": dict(workload.groups)} if workload.groups else {}),
        **({"lookups": workload.lookups.to_dict()} if workload.lookups else {}),
        **({"unnamed": {str(rank): asdict(memory) for rank, memory in workload.unnamed.items()}} if workload.unnamed else {}),
        **({"description": asdict(workload.description)} if workload.description != Description() else {}),
    }
    try:
        data = msgspec.json.encode(document) + b"\n"
    except (UnicodeEncodeError, OverflowError) as error:
        raise InputError(f"{path}: cannot be written as JSON ({error})") from error
    write_output(path, gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)


def _saved(program: Program) -> dict[str, Any]:
    return {
        "rank": program.rank,
        "world_size": program.world_size,
        "names": program.names,
        "threads": [astuple(thread) for thread in program.threads],
        "streams": [astuple(stream) for stream in program.streams],
        "ops": _lists(program.ops),
        "calls": _lists(program.calls),
        "works": _lists(program.works),
        "collectives": [astuple(each) for each in program.collectives],
        "signatures": [[[_plain_value(v) for v in s.inputs], [_plain_value(v) for v in s.outputs]] for s in program.signatures],
        "steps": program.steps,
        "origin_ns": program.origin_ns,
        "device_name": program.device_name,
        "source": program.source,
        "warnings": program.warnings,
        "meta": _plain(dict(program.meta), "meta"),
    }


def _lists(table: Table) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in table.columns().items()}


def _plain_value(value: Value) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(each) for each in value]
    if isinstance(value, Tensor):
        return {"shape": value.shape, "dtype": value.dtype, **_identity(value)}
    return _plain(value, "argument")


def _identity(tensor: Tensor) -> dict[str, Any]:
    fields = {"strides": tensor.strides, "id": tensor.id, "storage": tensor.storage, "device": tensor.device}
    present = {name: value for name, value in fields.items() if value is not None}
    return {**present, "offset": tensor.offset} if tensor.offset else present


def _value(plain: Any) -> Value:
    if isinstance(plain, list):
        return tuple(_value(each) for each in plain)
    if isinstance(plain, dict) and _FLOAT not in plain:
        return Tensor(**msgspec.structs.asdict(msgspec.convert(plain, _SavedTensor)))
    scalar: Value = _restored(plain)
    return scalar


def _plain(value: Any, where: str) -> Any:
    """JSON for a value of `meta`, exact enough to restore it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(each, where) for each in value]}
    if isinstance(value, list):
        return [_plain(each, where) for each in value]
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.name in _ARRAY_TYPES:
        return {_ARRAY: [value.dtype.name, [_plain(each, where) for each in value.tolist()]]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _plain(each, f"{where}.{key}") for key, each in value.items()}
        return {_DICT: [[_plain(key, where), _plain(each, where)] for key, each in value.items()]}
    raise InputError(
        f"{where}: a {type(value).__name__} cannot be saved; expected numbers, texts, lists, dictionaries, columns"
    )


def _restored(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_restored(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if _FLOAT in plain:
        return float(plain[_FLOAT])
    if _TUPLE in plain:
        return tuple(_restored(each) for each in plain[_TUPLE])
    if _DICT in plain:
        return {_restored(key): _restored(each) for key, each in plain[_DICT]}
    if _ARRAY in plain:
        name, values = plain[_ARRAY]
        if name not in _ARRAY_TYPES:
            raise ValueError(f"column of {name}")
        return np.array(_restored(values), dtype=name)
    return {key: _restored(each) for key, each in plain.items()}


def decode(data: bytes, source: str) -> Workload:
    """The workload in the decompressed bytes of one file."""
    try:
        version = msgspec.json.decode(data, type=_Version).steptime_workload
        if version not in _READABLE:
            raise InputError(f"saved in version {version}, this steptime reads 1 to {VERSION}; use a matching steptime")
        saved = msgspec.json.decode(data, type=_SavedWorkload)
        programs = tuple(_program(each) for each in saved.programs)
        if not max((p.world_size for p in programs), default=0) <= saved.world_size <= MOST_RANKS:
            raise ValueError(f"a job of {saved.world_size} ranks")
        groups = {name: tuple(map(tuple, sides)) for name, sides in saved.groups.items()}
        if any(not 0 <= rank < saved.world_size for sides in groups.values() for side in sides for rank in side):
            raise ValueError(f"a group with ranks that a job of {saved.world_size} has not")
        return Workload(
            programs,
            saved.world_size,
            saved.name,
            tuple(saved.warnings),
            meta=_restored(saved.meta),
            owners=tuple(saved.owners),
            groups=groups,
            lookups=None if saved.lookups is None else WorkloadLookups.from_dict(saved.lookups, "lookups"),
            unnamed={int(rank): memory for rank, memory in saved.unnamed.items()},
            description=saved.description,
        )
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise InputError(f"{source}: not a saved workload, or damaged ({_line(error)}); save it again") from error


def _read_path(path: Path) -> Workload:
    return decode(_bytes(path), str(path))


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: the compressed data is damaged or cut short ({_line(error)}); save it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path and permissions") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def _program(saved: _SavedProgram) -> Program:
    program = Program(
        rank=saved.rank,
        world_size=saved.world_size,
        names=tuple(saved.names),
        threads=tuple(Thread(*each) for each in saved.threads),
        streams=tuple(Stream(*each) for each in saved.streams),
        ops=_table(Ops, saved.ops),
        calls=_table(Calls, saved.calls),
        works=_table(Works, saved.works),
        collectives=tuple(_collective(each) for each in saved.collectives),
        signatures=tuple(Signature(tuple(map(_value, i)), tuple(map(_value, o))) for i, o in saved.signatures),
        steps=tuple(saved.steps),
        origin_ns=saved.origin_ns,
        device_name=saved.device_name,
        source=saved.source,
        warnings=tuple(saved.warnings),
        meta=_restored(saved.meta),
    )
    _check(program)
    return program


def _collective(row: _CollectiveRow) -> Collective:
    kind, group, ranks, sequence, bytes_in, bytes_out, dtype, in_splits, out_splits, root = row
    splits = (tuple(in_splits), tuple(out_splits))
    return Collective(kind, group, tuple(ranks), sequence, bytes_in, bytes_out, dtype, *splits, root)


def _table(kind: type[_Table], columns: Mapping[str, list[int]]) -> _Table:
    if set(columns) != set(kind.TYPES):
        wrong = sorted(set(columns) ^ set(kind.TYPES))
        raise ValueError(f"columns {', '.join(wrong)} of {kind.__name__}")
    return kind.from_columns(columns)


def _check(program: Program) -> None:
    """Every index must point at something: a damaged file must not become a wrong number."""
    ops, calls, works = program.ops, program.calls, program.works
    names, threads, streams = len(program.names), len(program.threads), len(program.streams)
    bounds = (
        ("ops.name", ops.name, 0, names), ("ops.thread", ops.thread, 0, threads), ("ops.parent", ops.parent, -1, len(ops)),
        ("ops.phase", ops.phase, 0, len(Phase)), ("ops.signature", ops.signature, -1, len(program.signatures)),
        ("calls.kind", calls.kind, 0, len(CallKind)), ("calls.api", calls.api, 0, names),
        ("calls.thread", calls.thread, 0, threads), ("calls.op", calls.op, -1, len(ops)),
        ("calls.stream", calls.stream, -1, streams), ("calls.awaits", calls.awaits, -1, len(works)),
        ("calls.after", calls.after, -1, len(calls)), ("works.kind", works.kind, 0, len(WorkKind)),
        ("works.name", works.name, 0, names), ("works.stream", works.stream, 0, streams),
        ("works.call", works.call, -1, len(calls)), ("works.collective", works.collective, -1, len(program.collectives)),
    )  # fmt: skip
    for name, column, low, high in bounds:
        wrong = np.flatnonzero((column < low) | (column >= high))
        if len(wrong):
            raise ValueError(f"rank {program.rank}: {name}[{wrong[0]}] is {column[wrong[0]]}, expected {low} to {high - 1}")
    if (ops.parent >= np.arange(len(ops))).any():
        raise ValueError(f"rank {program.rank}: an op is enclosed by itself or by a later one")
    if (works.collective[works.kind == WorkKind.COLLECTIVE] < 0).any():
        raise ValueError(f"rank {program.rank}: a collective that is not described")
    for each in (ops, calls, works):
        _check_times(program.rank, each.start_ns, each.end_ns)
    _check_numbers(program)


def _check_times(rank: int, start: IntColumn, end: IntColumn) -> None:
    wrong = np.flatnonzero((start < NEVER) | (end < start) | (end > _LATEST_NS))
    if len(wrong):
        row = wrong[0]
        raise ValueError(f"rank {rank}: a span from {start[row]} to {end[row]} ns, expected 0 to {_LATEST_NS} or {NEVER}")
    if float((end - start).sum(dtype=np.float64)) > _LATEST_NS:
        raise ValueError(f"rank {rank}: durations that add up to more than {_LATEST_NS} ns")


def _check_numbers(program: Program) -> None:
    queues = (stream.queue or 0 for stream in program.streams)
    members = (rank for collective in program.collectives for rank in collective.ranks)
    for name, values, high in (
        ("rank", [program.rank], program.world_size), ("world_size", [program.world_size - 1], MOST_RANKS),
        ("rank of a collective", members, MOST_RANKS), ("queue", queues, 2**31), ("step", program.steps, 2**31),
        ("origin_ns", [abs(program.origin_ns)], 2**63),
    ):  # fmt: skip
        wrong = next((value for value in values if not 0 <= value < high), None)
        if wrong is not None:
            raise ValueError(f"rank {program.rank}: {name} is {wrong}, expected less than {high} and no negative number")
    if len(set(program.steps)) < len(program.steps):
        raise ValueError(f"rank {program.rank}: a step occurs twice")


def _recognises(head: bytes, _name: str) -> bool:
    return is_saved(head)


def _read_file(file: TraceFile, progress: Progress | None) -> Workload:
    with open_stream(file) as stream:
        reader = TolerantReader(stream)
        data = reader.read_all(progress)
    if reader.damage is not None:
        raise InputError(f"{file}: the compressed data is damaged or cut short ({reader.damage}); save it again")
    return decode(data, str(file))


FORMAT = Format("saved", _recognises, _read_file)
