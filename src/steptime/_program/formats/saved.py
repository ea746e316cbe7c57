"""The saved form of a `Workload`: one JSON file (`.json`, `.json.gz`), or a folder with one such file per rank.

Fields of `Workload` and `Program` are saved as their types say, except those that `_PROGRAM` and `_WORKLOAD` describe: columns
are lists, so that the text is compact and diffs are readable. The same workload always gives the same bytes.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np

from steptime import _notices as notices
from steptime._files import write_output
from steptime._lookups.workload import WorkloadLookups
from steptime._program.formats import Format, TraceReader
from steptime._program.program import (
    DEFAULT_SWITCHES,
    MOST_RANKS,
    NEVER,
    CallKind,
    Calls,
    Collective,
    ColumnTable,
    IntColumn,
    Ops,
    Phase,
    Program,
    Signature,
    Stream,
    StreamOrder,
    Switches,
    Tensor,
    Thread,
    Value,
    WorkKind,
    Works,
)
from steptime._program.repetition import Repetition
from steptime._program.workload import Description, Workload
from steptime.errors import InputError

VERSION = 4
# Version 1 had neither lookups, unnamed memory nor a description; up to version 2 there were neither switches nor orders,
# up to version 3 warnings alone among notices.
_READABLE = range(1, VERSION + 1)
KEY = "steptime_workload"

_SUFFIXES = (".json", ".json.gz")
# Marks what JSON has no form for: tuples, arrays, infinities, dictionaries with such marks or with other keys than texts.
_TUPLE, _ARRAY, _FLOAT, _DICT = "$tuple", "$array", "$float", "$dict"
# Times and sums of durations up to here (18 years) leave the simulator's arithmetic room before it wraps around.
_LATEST_NS = 2**59
# Whole numbers of tensors and arguments are below this; sums of their products stay finite.
_MOST = 2**64
_ARRAY_TYPES = ("int8", "int32", "int64", "float64", "bool")


@dataclass(frozen=True)
class _Form:
    """How a field is saved: its type in JSON, and the way there and back."""

    type: Any
    plain: Callable[[Any], Any]
    restored: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _rows(kind: type[Any]) -> _Form:
    """Instances of a dataclass, each as the list of its fields."""
    row: Any = tuple[tuple(get_type_hints(kind).values())]  # type: ignore[misc]
    return _Form(list[row], lambda values: [astuple(each) for each in values], lambda rows: tuple(kind(*row) for row in rows))


def _table(kind: type[ColumnTable]) -> _Form:
    def restored(columns: Mapping[str, list[int]]) -> ColumnTable:
        if set(columns) != set(kind.TYPES):
            raise ValueError(f"columns {', '.join(sorted(set(columns) ^ set(kind.TYPES)))} of {kind.__name__}")
        return kind.from_columns(columns)

    return _Form(dict[str, list[int]], lambda table: {name: each.tolist() for name, each in table.columns().items()}, restored)


def _plain_value(value: Value) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(each) for each in value]
    if isinstance(value, Tensor):
        named = ((field, getattr(value, field.name)) for field in fields(Tensor))
        return {field.name: each for field, each in named if field.default is MISSING or each != field.default}
    return _plain(value, "argument")


_TENSOR_FIELDS = frozenset(get_type_hints(Tensor))


def _value(plain: Any) -> Value:
    if isinstance(plain, list):
        return tuple(_value(each) for each in plain)
    if isinstance(plain, dict) and _FLOAT not in plain:
        if not plain.keys() <= _TENSOR_FIELDS:
            raise ValueError(f"a tensor with {min(plain.keys() - _TENSOR_FIELDS)}")
        return _counted(msgspec.convert(plain, Tensor))
    scalar: Value = _restored(plain)
    if isinstance(scalar, int) and abs(scalar) >= _MOST:
        raise ValueError(f"a number of {len(str(scalar))} digits among the arguments of an op")
    return scalar


def _counted(tensor: Tensor) -> Tensor:
    """The tensor, if its elements can be counted."""
    numbers = (*tensor.shape, *(tensor.strides or ()), tensor.offset or 0)
    if max(map(abs, numbers)) >= _MOST or math.prod(each for each in tensor.shape if each) >= _MOST:
        raise ValueError("a tensor with more elements than any memory holds")
    return tensor


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


def _plain_signature(signature: Signature) -> list[Any]:
    """Inputs, outputs and, where a script changed any, the switches that are not as by default."""
    sides: list[Any] = [list(map(_plain_value, side)) for side in (signature.inputs, signature.outputs)]
    named = {field.name: getattr(signature.switches, field.name) for field in fields(Switches)}
    changed = {name: value for name, value in named.items() if value != getattr(DEFAULT_SWITCHES, name)}
    return [*sides, changed] if changed else sides


def _signature(row: list[Any]) -> Signature:
    if not 2 <= len(row) <= 3 or not all(isinstance(side, list) for side in row[:2]):
        raise ValueError("a signature that is not inputs, outputs and switches")
    inputs, outputs = (tuple(map(_value, side)) for side in row[:2])
    if len(row) == 2:
        return Signature(inputs, outputs)
    switches = msgspec.convert(row[2], dict[str, bool])
    if not switches.keys() <= _SWITCHES:
        raise ValueError(f"a switch {min(switches.keys() - _SWITCHES)}")
    return Signature(inputs, outputs, Switches(**switches))


_SWITCHES = frozenset(field.name for field in fields(Switches))
_SIGNATURES = _Form(list[list[Any]], lambda each: list(map(_plain_signature, each)), lambda rows: tuple(map(_signature, rows)))
_NOTICES = _Form(list[str | dict[str, str]], notices.saved, notices.restored)
_META = _Form(dict[str, Any], lambda meta: _plain(dict(meta), "meta"), _restored)


def _forms(kind: type[Any], special: Mapping[str, _Form]) -> Mapping[str, _Form]:
    """The form of every field of a dataclass that makes it what it is."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.compare]
    return {name: special.get(name) or _Form(hints[name], _same, _same) for name in names}


def _repetition(plain: Mapping[str, Any]) -> Repetition:
    columns = {name: tuple(plain[name]) for name in ("starts", "kinds", "order", "names")}
    return Repetition(**columns, twins={int(name): int(twin) for name, twin in plain["twins"]})


_PROGRAM = _forms(
    Program,
    {
        "threads": _rows(Thread), "streams": _rows(Stream), "collectives": _rows(Collective), "ops": _table(Ops),
        "calls": _table(Calls), "works": _table(Works), "signatures": _SIGNATURES, "meta": _META, "orders": _rows(StreamOrder),
        "warnings": _NOTICES,
        "repetition": _Form(
            dict[str, Any] | None,
            lambda each: None if each is None else {**asdict(each), "twins": [*each.twins.items()]},
            lambda plain: None if plain is None else _repetition(plain),
        ),
    },
)  # fmt: skip
# What few programs have: left out of their files.
_RARE: Mapping[str, Any] = {"orders": [], "repetition": None}
_SavedProgram: Any = msgspec.defstruct(
    "_SavedProgram",
    [(name, form.type) for name, form in _PROGRAM.items() if name not in _RARE]
    + [(name, _PROGRAM[name].type, default) for name, default in _RARE.items()],
    forbid_unknown_fields=True,
)


def _plain_program(program: Program) -> dict[str, Any]:
    there = {name: form for name, form in _PROGRAM.items() if name not in _RARE or getattr(program, name)}
    return {name: form.plain(getattr(program, name)) for name, form in there.items()}


def _program(saved: Any) -> Program:
    program = Program(**{name: form.restored(getattr(saved, name)) for name, form in _PROGRAM.items()})
    _check(program)
    return program


_WORKLOAD = _forms(
    Workload,
    {
        "programs": _Form(
            list[_SavedProgram], lambda each: list(map(_plain_program, each)), lambda each: tuple(map(_program, each))
        ),
        "meta": _META,
        "warnings": _NOTICES,
        "lookups": _Form(Any, WorkloadLookups.to_dict, lambda plain: WorkloadLookups.from_dict(plain, "lookups")),
    },
)
# What not every workload has: left out of its file where it is as by default.
_OPTIONAL: Mapping[str, Any] = {
    "owners": (), "groups": {}, "lookups": None, "unnamed": {}, "description": Description()
}  # fmt: skip
_SavedWorkload: Any = msgspec.defstruct(
    "_SavedWorkload",
    [(KEY, int)]
    + [(name, form.type) for name, form in _WORKLOAD.items() if name not in _OPTIONAL]
    + [(name, _WORKLOAD[name].type, default) for name, default in _OPTIONAL.items()],
    forbid_unknown_fields=True,
)
_SavedVersion: Any = msgspec.defstruct("_SavedVersion", [(KEY, int)])


class _Drawn(msgspec.Struct):
    """A timeline that `--trace` wrote, with what was played in it."""

    played: msgspec.Raw = msgspec.Raw(b"")


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


def joined(parts: Sequence[tuple[str, Workload]]) -> Workload:
    """One workload from the files of a folder, each given with its name."""
    first = parts[0][1]
    for name, part in parts:
        if (part.name, part.world_size) != (first.name, first.world_size):
            result = f"{part.name!r} with {part.world_size} ranks, expected {first.name!r} with {first.world_size}"
            raise InputError(f"{name}: of another job ({result}); keep one job per folder")
    programs = sorted((program for _, part in parts for program in part.programs), key=lambda program: program.rank)
    return replace(first, programs=tuple(programs))


def encode(workload: Workload, path: Path) -> bytes:
    """The workload as JSON; `path` is where it is to go."""
    values = {name: getattr(workload, name) for name in _WORKLOAD}
    document = {KEY: VERSION}
    for name, value in values.items():
        if name not in _OPTIONAL or value != _OPTIONAL[name]:
            document[name] = _WORKLOAD[name].plain(value)
    try:
        return msgspec.json.encode(document)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InputError(f"{path}: cannot be written as JSON ({error})") from error


def _write_file(workload: Workload, programs: Sequence[Program], path: Path) -> None:
    data = encode(replace(workload, programs=tuple(programs)), path) + b"\n"
    write_output(path, gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)


def decode(data: bytes, source: str) -> Workload:
    """The workload in the decompressed bytes of one file."""
    try:
        data = bytes(msgspec.json.decode(data, type=_Drawn).played) or data
        version = getattr(msgspec.json.decode(data, type=_SavedVersion), KEY)
        if version not in _READABLE:
            raise InputError(f"saved in version {version}, this steptime reads 1 to {VERSION}; use a matching steptime")
        saved = msgspec.json.decode(data, type=_SavedWorkload)
        values = {name: getattr(saved, name) for name in _WORKLOAD}
        return _checked(
            Workload(
                **{
                    name: value if name in _OPTIONAL and value == _OPTIONAL[name] else _WORKLOAD[name].restored(value)
                    for name, value in values.items()
                }
            )
        )
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        line = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise InputError(f"{source}: not a saved workload, or damaged ({line}); save it again") from error


def _checked(workload: Workload) -> Workload:
    world_size = workload.world_size
    if not max(program.world_size for program in workload.programs) <= world_size <= MOST_RANKS:
        raise ValueError(f"a job of {world_size} ranks")
    if any(not 0 <= rank < world_size for sides in workload.groups.values() for side in sides for rank in side):
        raise ValueError(f"a group with ranks that a job of {world_size} has not")
    return workload


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
    _check_meetings(program)
    for each in (ops, calls, works):
        _check_times(program.rank, each.start_ns, each.end_ns)
    _check_orders(program)
    _check_numbers(program)


def _check_meetings(program: Program) -> None:
    """A rank comes to each meeting of a group once."""
    met: set[tuple[str, tuple[int, ...], int]] = set()
    for index in program.works.collective[program.works.collective >= 0].tolist():
        each = program.collectives[index]
        key = (each.group, each.ranks, each.sequence)
        if key in met:
            raise ValueError(f"rank {program.rank}: collective {each.sequence} of group {each.group[:40]!r} occurs twice")
        met.add(key)


_ORDERED = (CallKind.LAUNCH, CallKind.STREAM_WAIT, CallKind.EVENT_SYNC, CallKind.DEVICE_SYNC)
_MOST_STREAMS = 2**16


def _check_orders(program: Program) -> None:
    last = 0
    for order in program.orders:
        known = order.kind in _ORDERED and max(order.stream, order.of) < _MOST_STREAMS and min(order.stream, order.of) >= -1
        if not known or not last <= order.op <= len(program.ops) or not -1 <= order.before <= len(program.ops):
            raise ValueError(f"rank {program.rank}: {order} is no order of streams among {len(program.ops)} ops")
        last = order.op


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
    return head.lstrip()[:1] == b"{" and f'"{KEY}"'.encode() in head[:64]


def _read_file(reader: TraceReader) -> Workload:
    data = reader.read_all()
    if reader.damage is not None:
        raise InputError(f"{reader.source}: the compressed data is damaged or cut short ({reader.damage}); save it again")
    return decode(data, reader.source)


FORMAT = Format("saved", _recognises, _read_file)
