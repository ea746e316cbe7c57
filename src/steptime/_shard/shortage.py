"""What is said of a task that does not fit: how much is short, where, and what would help, each tried before it is said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import COLUMN_WISE, QUAD, ROW_WISE, TABLE_WISE, Division
from steptime._shard.memory import Memory, memory_of, packed
from steptime._shard.task import Task
from steptime._units import MIB
from steptime.errors import InputError

_GIB = 1024 * MIB
_MOST_RANKS = 1 << 14


def shortage(task: Task, division: Division, memory: Memory, outside_bytes: int) -> InputError:
    """Why the division does not fit, and three things that would help."""
    helps = list(_helps(task, division, memory, outside_bytes))[:3]
    listed = "; ".join(f"({number}) {item}" for number, item in enumerate(helps, 1)) or "a smaller model"
    return InputError(
        f"{task.model.name} does not fit on {task.ranks} ranks: {_short(task, memory)}. What would help: {listed}"
    )


def _short(task: Task, memory: Memory) -> str:
    if memory.room <= 0:
        return f"every rank needs {_gib(memory.rank_bytes)} before it holds a table, and has {_gib(memory.limit)}"
    total = int(memory.shard_bytes.sum())
    if total > memory.room * task.ranks:
        return (
            f"tables need {_gib(total)} with state and buffers, all ranks together have {_gib(memory.room * task.ranks)}: "
            f"{_gib(total - memory.room * task.ranks)} are short"
        )
    largest = int(np.argmax(memory.shard_bytes))
    need = int(memory.shard_bytes[largest])
    if need > memory.room:
        return (
            f"table {memory.names[largest]!r} needs {_gib(need)} with state and buffers, a rank has {_gib(memory.room)} for "
            f"tables: {_gib(need - memory.room)} are short"
        )
    for rank in range(task.ranks):
        held = [index for index, table in enumerate(task.tables) if task.constraints.pinned.get(table.name) == rank]
        names = {task.tables[index].name for index in held}
        used = int(sum(size for name, size in zip(memory.names, memory.shard_bytes, strict=True) if name in names))
        if used > memory.room:
            return f"the {len(held)} tables pinned to rank {rank} need {_gib(used)}, it has {_gib(memory.room)} for tables"
    return (
        f"tables need {_gib(total)} of {_gib(memory.room * task.ranks)}, and no way was found to pack them whole: the largest, "
        f"{memory.names[largest]!r}, takes {need / memory.room:.0%} of a rank"
    )


def _helps(task: Task, division: Division, memory: Memory, outside_bytes: int) -> Iterator[str]:
    """What alone is enough first; then what goes some of the way, with how much."""
    part: list[str] = []
    ranks = _enough_ranks(task, division, memory, outside_bytes)
    if ranks is not None:
        yield f"{ranks} ranks instead of {task.ranks}"
    for item, enough in (_cut(task, division, memory, outside_bytes), *_changed(task, division, memory, outside_bytes)):
        if enough:
            yield item
        elif item:
            part.append(f"{item}, which alone is not enough")
    yield f"ranks with {_gib(_enough_memory(task, division, memory))} instead of {_gib(memory.limit)}"
    yield from part


def _fits(task: Task, model: Dlrm, division: Division, memory: Memory, outside_bytes: int, saved: float = 1.0) -> bool:
    result = memory_of(model, division, task.ranks, memory.limit, outside_bytes)
    if saved != 1.0:
        result = replace(result, shard_bytes=np.ceil(result.shard_bytes * saved).astype(np.int64))
    return packed(result, task.pinned_shards(division), task.ranks) is not None


def _enough_memory(task: Task, division: Division, memory: Memory) -> int:
    """The least limit, to a MiB, under which all is packed."""
    pinned = task.pinned_shards(division)
    low, high = memory.limit, memory.rank_bytes + int(memory.shard_bytes.sum())
    while high - low > MIB:
        middle = (low + high) // 2
        if packed(replace(memory, limit=middle), pinned, task.ranks) is None:
            low = middle
        else:
            high = middle
    return high


def _enough_ranks(task: Task, division: Division, memory: Memory, outside_bytes: int) -> int | None:
    """The fewest ranks that are enough, or a few more: they are tried a sixteenth apart.

    More ranks need less each, so that what was found for some stands for all up to twice as many.
    """
    ranks, known, result = task.ranks + 1, task.ranks, memory
    while ranks <= _MOST_RANKS:
        if ranks >= 2 * known:
            known, result = ranks, memory_of(task.model, division, ranks, memory.limit, outside_bytes)
        enough = result.shard_bytes.max(initial=0) <= result.room and result.shard_bytes.sum() <= result.room * ranks
        if enough and task.model.batch % ranks == 0 and packed(result, task.pinned_shards(division), ranks) is not None:
            return ranks
        ranks += max(1, ranks // 16)
    return None


def _cut(task: Task, division: Division, memory: Memory, outside_bytes: int) -> tuple[str, bool]:
    """The largest tables in slices of columns, or by rows where they have too few columns."""
    model, room = task.model, max(memory.room, 1)
    sizes = memory_of(model, Division.whole(len(task.tables)), task.ranks, memory.limit).shard_bytes.tolist()
    large = [index for index, size in enumerate(sizes) if size > room // 4 and division.kinds[index] == TABLE_WISE]
    large = [index for index in large if task.tables[index].name not in task.constraints.pinned]
    if not large or model.interaction == "dot":
        return "", False
    for kind in (COLUMN_WISE, ROW_WISE):
        cut = division
        for index in large:
            most = max(task.tables[index].dim // QUAD, 1)
            cut = cut.with_table(index, kind, min(most, task.ranks, max(2, math.ceil(4 * sizes[index] / room))))
        names = ", ".join(repr(task.tables[index].name) for index in large[:3]) + (", ..." if len(large) > 3 else "")
        if _fits(task, model, cut, memory, outside_bytes):
            allowed = "" if all(kind in task.allowed(index) for index in large) else f" (allow {kind})"
            return f"{kind} of the {len(large)} largest tables ({names}){allowed}", True
    return "", False


def _changed(task: Task, division: Division, memory: Memory, outside_bytes: int) -> Iterator[tuple[str, bool]]:
    """Another optimiser, dtype or batch."""
    model = task.model
    state = sum(map(model.state_bytes, task.tables))
    if state:
        without = replace(model, optimizer="sgd")
        yield f"optimizer sgd, without state: {_gib(state)} less", _fits(task, without, division, memory, outside_bytes)
    weights = sum(table.nbytes for table in task.tables)
    everything = int(memory.shard_bytes.sum())
    saved = 1 - weights / 2 / max(everything, 1)
    yield f"rows in 16 bits: {_gib(weights // 2)} less", _fits(task, model, division, memory, outside_bytes, saved)
    halved = model.batch // 2
    if halved and halved % task.ranks == 0:
        less = max(everything - weights - state, 0) // 2
        yield f"half the batch: about {_gib(less)} less", _fits(task, model.with_batch(halved), division, memory, outside_bytes)


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB // 10 else f"{nbytes / MIB:.1f} MiB"
