"""What is said of a task that does not fit: how much is short, where, and what would help, each tried before it is said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import COLUMN_WISE, QUAD, ROW_WISE, TABLE_WISE, Division
from steptime._models.memory.fit import Fit, Remedy
from steptime._remedies import sentence
from steptime._shard.memory import Memory, memory_of, packed
from steptime._shard.task import Task
from steptime._units import size_words
from steptime.errors import InputError

_MOST_RANKS = 1 << 14


def shortage(task: Task, division: Division, memory: Memory, outside_bytes: int) -> InputError:
    """Return why the division does not fit, and what would help."""
    helps = sentence(_Trials(task, division, memory, outside_bytes).candidates())
    return InputError(f"{task.model.name} does not fit on {task.ranks} ranks: {_short(task, memory)}. {helps}")


def _short(task: Task, memory: Memory) -> str:
    """What is short, and where."""
    room, there = size_words(memory.room), memory.room * task.ranks
    if memory.room <= 0:
        return f"every rank needs {size_words(memory.rank_bytes)} before it holds a table, and has {size_words(memory.limit)}"
    total = int(memory.shard_bytes.sum())
    needed = f"tables need {size_words(total)} with state and buffers"
    if total > there:
        return f"{needed}, all ranks together have {size_words(there)}: {size_words(total - there)} are short"
    largest = int(np.argmax(memory.shard_bytes))
    need, name = int(memory.shard_bytes[largest]), memory.names[largest]
    if need > memory.room:
        short = size_words(need - memory.room)
        return (
            f"table {name!r} needs {size_words(need)} with state and buffers, a rank has {room} for tables: {short} are short"
        )
    for rank in range(task.ranks):
        names = {table.name for table in task.tables if task.constraints.pinned.get(table.name) == rank}
        used = int(sum(size for each, size in zip(memory.names, memory.shard_bytes, strict=True) if each in names))
        if used > memory.room:
            return f"the {len(names)} tables pinned to rank {rank} need {size_words(used)}, it has {room} for tables"
    return (
        f"{needed}, all ranks together have {size_words(there)}, and no way was found to pack them whole: the largest, "
        f"{name!r}, takes {need / memory.room:.0%} of a rank"
    )


@dataclass(frozen=True)
class _Trials:
    """A division that does not fit, and what becomes of it with changes."""

    task: Task
    division: Division
    memory: Memory
    outside_bytes: int

    def candidates(self) -> Iterator[Remedy]:
        """Yield changes of the machine, of how tables are divided, and of the model."""
        task = self.task
        yield from self._more_ranks()
        yield from self._cut()
        model, everything = task.model, int(self.memory.shard_bytes.sum())
        state = sum(map(model.state_bytes, task.tables))
        if state:
            yield self._tried(f"optimizer sgd, without state ({size_words(state)} less)", replace(model, optimizer="sgd"))
        weights = sum(table.nbytes for table in task.tables)
        saved = weights / 2 / max(everything, 1)
        yield self._tried(f"rows in 16 bits ({size_words(weights // 2)} less)", model, saved=saved)
        if model.batch > 1 and model.batch // 2 % task.ranks == 0:
            yield self._tried("half the batch", model.with_batch(model.batch // 2))
        change = f"ranks with more memory than {size_words(self.memory.limit)}"
        yield Remedy(change, self._fit(replace(self.memory, limit=self.memory.rank_bytes + everything)))

    def _tried(self, change: str, model: Dlrm, division: Division | None = None, saved: float = 0.0) -> Remedy:
        """A change of model or division, of which shards take a share less."""
        memory = memory_of(model, division or self.division, self.task.ranks, self.memory.limit, self.outside_bytes)
        memory = replace(memory, shard_bytes=np.ceil(memory.shard_bytes * (1.0 - saved)).astype(np.int64))
        return Remedy(change, self._fit(memory, division))

    def _fit(self, memory: Memory, division: Division | None = None, ranks: int = 0) -> Fit | None:
        """What the fullest rank needs where shards are packed; None where no way to pack them is found."""
        ranks = ranks or self.task.ranks
        plan = packed(memory, self.task.pinned_shards(division or self.division), ranks)
        return None if plan is None else Fit.of_ranks(dict(enumerate(memory.used(plan, ranks).tolist())), memory.limit)

    def _more_ranks(self) -> Iterator[Remedy]:
        """Yield the fewest ranks that are enough, or a few more: they are tried a sixteenth apart.

        More ranks need less each, so that what was found for some stands for all up to twice as many.
        """
        task, division = self.task, self.division
        ranks, known, result = task.ranks + 1, task.ranks, self.memory
        while ranks <= _MOST_RANKS:
            if ranks >= 2 * known:
                known, result = ranks, memory_of(task.model, division, ranks, self.memory.limit, self.outside_bytes)
            packs = result.shard_bytes.max(initial=0) <= result.room and result.shard_bytes.sum() <= result.room * ranks
            fit = self._fit(result, ranks=ranks) if packs and task.model.batch % ranks == 0 else None
            if fit is not None:
                yield Remedy(f"{ranks} ranks instead of {task.ranks}", fit, ranks=ranks)
                return
            ranks += max(1, ranks // 16)

    def _cut(self) -> Iterator[Remedy]:
        """Yield the largest tables in slices of columns, or by rows where they have too few columns."""
        task, division, room = self.task, self.division, max(self.memory.room, 1)
        model = task.model
        sizes = memory_of(model, Division.whole(len(task.tables)), task.ranks, self.memory.limit).shard_bytes.tolist()
        large = [index for index, size in enumerate(sizes) if size > room // 4 and division.kinds[index] == TABLE_WISE]
        large = [index for index in large if task.tables[index].name not in task.constraints.pinned]
        if not large or model.interaction == "dot":
            return
        for kind in (COLUMN_WISE, ROW_WISE):
            cut = division
            for index in large:
                most = max(task.tables[index].dim // QUAD, 1)
                cut = cut.with_table(index, kind, min(most, task.ranks, max(2, math.ceil(4 * sizes[index] / room))))
            names = ", ".join(repr(task.tables[index].name) for index in large[:3]) + (", ..." if len(large) > 3 else "")
            allowed = "" if all(kind in task.allowed(index) for index in large) else f" (allow {kind})"
            found = self._tried(f"{kind} of the {len(large)} largest tables ({names}){allowed}", model, cut)
            yield found
            if found.fit is not None:
                return
