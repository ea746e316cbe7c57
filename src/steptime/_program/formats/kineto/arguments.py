"""The arguments of ops and kernels as Kineto writes them -> signatures, and collectives: who takes part and what they move.

Signatures come from `Input Dims`, `Input type`, `Input Strides` and `Concrete Inputs`. What is known of a collective comes,
best first, from the kernel's own arguments (recent PyTorch), completed by the `record_param_comms` op around its launch; the
`nccl:...` annotation around it; the kernel's name. Process groups come from those or from the trace's header; where nothing
says, the group is everyone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from steptime._program.collectives import MOST_BYTES, collective_kind, everyone, point_to_point
from steptime._program.formats.kineto.events import Args, RawSignature
from steptime._program.program import MOST_RANKS, Collective, IntColumn, Signature, SmallColumn, Tensor, Value, WorkKind, Works
from steptime._units import dtype_bytes, dtype_name

_COLLECTIVE_KERNEL = re.compile(r"^(?:void )?(?:ncclx?|rccl|mscclpp?)\w*(?:Kernel|_)", re.IGNORECASE)
# Longer numbers than these are neither ranks nor splits.
_NUMBER = re.compile(r"(?<!\d)\d{1,15}(?!\d)")
_DESCRIPTION = (
    "collective", "in_elements", "out_elements", "dtype", "in_splits", "out_splits",
    "group", "group_ranks", "group_size", "source_rank", "destination_rank",
)  # fmt: skip
# A float without digits behind its point.
_WHOLE_FLOAT = re.compile(r"(?<=\d)\.(?=$|[,\]\s])")
_WRAPPED = ("float64", "int64")
_NOT_TENSORS = {"", "Scalar", "ScalarList", "Int", "Double", "Bool", "None", "String", "Device"}


@dataclass(frozen=True)
class Sources:
    """Where descriptions of collectives may be found: per work row, or per launching op row."""

    by_work: dict[int, Args]  # row of the work table -> kernel arguments
    by_op: dict[int, Args]  # row of the op table -> record_param_comms arguments
    parent: SmallColumn  # of the op table
    op_name: SmallColumn
    names: list[str]
    header: dict[str, Any]
    rank: int
    world_size: int


def mark_collectives(works: Works, names: list[str]) -> Works:
    """The same works with communication kernels marked as collectives."""
    is_collective = np.array([bool(_COLLECTIVE_KERNEL.match(n)) for n in names], dtype=bool)
    kind = np.where((works.kind == WorkKind.KERNEL) & is_collective[works.name], WorkKind.COLLECTIVE, works.kind)
    return works.replace(kind=kind)


def least_world_size(descriptions: Iterable[Args]) -> int:
    """The fewest ranks a job with these collectives can have."""
    results = [1]
    for args in descriptions:
        results += [args.group_size] if type(args.group_size) is int and 0 < args.group_size <= MOST_RANKS else []
        results += [int(rank) + 1 for rank in _NUMBER.findall(str(args.group_ranks or "")) if int(rank) < MOST_RANKS]
    return max(results)


def describe(works: Works, rows: IntColumn, launch_op: SmallColumn, sources: Sources) -> tuple[Collective, ...]:
    """One description per given collective work; its place in the sequence of its group stays open (0)."""
    return tuple(_describe(row, int(launch_op[row]), works, sources) for row in rows.tolist())


def _describe(row: int, op: int, works: Works, sources: Sources) -> Collective:
    args = sources.by_work.get(row)
    annotation = ""
    while op >= 0:
        name = sources.names[sources.op_name[op]]
        if op in sources.by_op:
            args = _completed(args, sources.by_op[op])
        if not annotation and name.startswith(("nccl:", "c10d::")):
            annotation = name.split(":", 1)[1]
        op = int(sources.parent[op])
    kernel = sources.names[works.name[row]]
    if args is None or not isinstance(args.collective, str):
        kind = collective_kind(annotation or kernel)
        return Collective(kind, "", everyone(sources.world_size), 0)
    return _from_args(args, annotation or kernel, sources)


def _completed(args: Args | None, more: Args) -> Args:
    """What a kernel says, completed by what the op around its launch says."""
    if args is None:
        return more
    missing = {name: getattr(more, name) for name in _DESCRIPTION if getattr(args, name) in (None, "", "[]")}
    return msgspec.structs.replace(args, **missing)


def _from_args(args: Args, fallback: str, sources: Sources) -> Collective:
    kind = collective_kind(str(args.collective))
    dtype = dtype_name(str(args.dtype or ""))
    size = dtype_bytes(dtype)
    group = str(args.group) if args.group not in (None, "") else ""
    ranks = _ranks(args, group, sources)
    root = None
    if kind in ("send", "recv"):
        group, ranks, root = _pair(kind, args, group, sources)
    return Collective(
        kind=kind if kind != "unknown" else collective_kind(fallback),
        group=group,
        ranks=ranks,
        sequence=0,
        bytes_in=min(size * _count(args.in_elements), MOST_BYTES),
        bytes_out=min(size * _count(args.out_elements), MOST_BYTES),
        dtype=dtype,
        in_splits=_splits(args.in_splits),
        out_splits=_splits(args.out_splits),
        root=root,
    )


def _pair(kind: str, args: Args, group: str, sources: Sources) -> tuple[str, tuple[int, ...], int | None]:
    peer = args.destination_rank if kind == "send" else args.source_rank
    if not isinstance(peer, int) or not 0 <= peer < MOST_RANKS:
        return f"{group}:{kind}", (sources.rank,), None
    return point_to_point(group, *((sources.rank, peer) if kind == "send" else (peer, sources.rank)))


def _ranks(args: Args, group: str, sources: Sources) -> tuple[int, ...]:
    text = str(args.group_ranks or "")
    size = args.group_size if isinstance(args.group_size, int) else 0
    listed = tuple(int(r) for r in _NUMBER.findall(text))
    if listed and "..." not in text:
        return tuple(sorted(set(listed)))
    info = sources.header.get("distributedInfo")
    config = info.get("pg_config") if isinstance(info, dict) else None
    for entry in config if isinstance(config, list) else []:
        if isinstance(entry, dict) and str(entry.get("pg_name")) == group and isinstance(entry.get("ranks"), list):
            ranks = [r for r in entry["ranks"] if type(r) is int and 0 <= r < MOST_RANKS]
            if ranks:
                return tuple(sorted(set(ranks)))
    if size == 1:
        return (sources.rank,)
    if size and size != sources.world_size:
        return ()
    return everyone(sources.world_size)


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _splits(value: Any) -> tuple[int, ...]:
    if isinstance(value, str) and "..." not in value:
        return tuple(int(v) for v in _NUMBER.findall(value))
    return ()


def read_signatures(raw: Iterable[RawSignature]) -> tuple[Signature, ...]:
    """One Signature per distinct raw text, in the same order; unreadable ones are empty."""
    return tuple(_signature(*parts) for parts in raw)


def _signature(dims: bytes, types: bytes, strides: bytes, concrete: bytes) -> Signature:
    shapes, kinds = _list(dims), _list(types)
    steps, values = _list(strides), _list(concrete)
    inputs: list[Value] = []
    for index, shape in enumerate(shapes):
        kind = kinds[index] if index < len(kinds) and isinstance(kinds[index], str) else ""
        stride = steps[index] if index < len(steps) else None
        value = values[index] if index < len(values) else None
        inputs.append(_value(shape, kind, stride, value))
    return Signature(tuple(inputs))


def _value(shape: Any, kind: str, stride: Any, value: Any) -> Value:
    if kind.startswith("TensorList") and isinstance(shape, list):
        strides = stride if isinstance(stride, list) else []
        return tuple(
            Tensor(_ints(s), "", _ints(strides[i]) if i < len(strides) else None)
            for i, s in enumerate(shape)
            if isinstance(s, list)
        )
    if kind in _NOT_TENSORS or kind.startswith("GenericList"):
        return _literal(value)
    dtype = dtype_name(kind)
    # A number that Python gave, as dispatch wraps it: a tensor of the host without dimensions.
    device = "cpu" if shape == [] and dtype in _WRAPPED else None
    return Tensor(_ints(shape), dtype, _ints(stride) if isinstance(stride, list) and stride else None, device=device)


def _literal(value: Any) -> Value:
    """A scalar or list written as text."""
    if not isinstance(value, str):
        return value if isinstance(value, int | float) else None
    if value in ("", "None"):
        return None
    if value in ("True", "False"):
        return value == "True"
    try:
        decoded = msgspec.json.decode(_as_json(value))
    except (msgspec.DecodeError, RecursionError):
        return value
    if isinstance(decoded, list):
        return tuple(item for item in decoded if isinstance(item, int | float | str | bool))
    return decoded if isinstance(decoded, int | float) else value


def _as_json(text: str) -> str:
    """Numbers and truths as PyTorch writes them (`0.`, `[True, False]`) the way JSON has them."""
    if "True" in text or "False" in text:
        text = text.replace("True", "true").replace("False", "false")
    return _WHOLE_FLOAT.sub(r"\g<0>0", text)


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        return ()
    return tuple(v for v in values if type(v) is int and -(2**63) <= v < 2**63)


def _list(text: bytes) -> list[Any]:
    if not text:
        return []
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return []
    return decoded if isinstance(decoded, list) else []
