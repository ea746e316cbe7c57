"""`Divided`: ways to cut a task's tables into shards: as far as memory needs it, and further where tables are large."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import COLUMN_WISE, DATA_PARALLEL, EVERYWHERE, QUAD, ROW_WISE, TABLE_WISE, Division
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.divided import analytic_ns
from steptime._shard.evaluate.kinds_analytic import everywhere_ns
from steptime._shard.search.state import Budget, Evaluate, Floats, Search
from steptime._shard.task.memory import memory_of, rank_limit
from steptime._shard.task.shortage import packed, pinned_of
from steptime._shard.task.task import Task

# Shares of a rank's mean load above which a table is divided, one attempt each.
_DIVIDED_ABOVE = (0.5, 1.0, 0.25)
# Slices narrower than this are not tried: lookups of such rows were not measured.
_LEAST_COLUMNS = 16
# Parts of a rank's room that tables are cut down to where they do not fit, one attempt after the other.
_CUT_TO_FIT = (1, 2, 4, 8)

# Copies that are tried whatever they cost: the first one pays for a lookup and a collective that the next ones share.
_FIRST_COPIES = 8

Make = Callable[[Dlrm, int], Evaluate]
"""Of a model whose tables are the shards, on so many ranks: what evaluates plans."""


class Divided:
    """A task on a platform: divisions of its tables, and searches among the plans of each."""

    def __init__(self, task: Task, platform: Platform, budget: Budget, make: Make) -> None:
        self.task, self.platform, self.budget = task, platform, budget
        self._make = make
        self.limit, self.outside_bytes = rank_limit(platform.device.limits, task.ranks, task.constraints.memory_bytes)

    def search(self, division: Division, evaluations: int) -> Search | None:
        """A search among the plans of a division; None where none fits."""
        task = self.task
        shards = division.shard_tables(task.tables)
        memory = memory_of(task.model, division, task.ranks, self.limit, self.outside_bytes)
        pinned = pinned_of(task, division)
        start = packed(memory, pinned, task.ranks) if shards else None
        if start is None:
            return None
        added = analytic_ns(task.model, division, self.platform, task.ranks)
        evaluate = self._make(replace(task.model, tables=shards), task.ranks)
        result = Search(shards, task.ranks, memory, pinned, evaluate, self.budget.with_evaluations(evaluations), added)
        result.by = "packed"
        result.ask(start, beyond=True)
        return result

    @property
    def divisible(self) -> bool:
        """Whether any table may be divided at all."""
        return any(set(self.task.allowed(place)) - {TABLE_WISE} for place in range(len(self.task.tables)))

    def first(self) -> Division:
        """Tables whole where they may be and fit, else cut as far as it takes; where nothing packs, the least cut."""
        tried = [self._cut_to_fit(parts) for parts in _CUT_TO_FIT]
        return next((item for item in tried if self._packs(item)), tried[0])

    def _packs(self, division: Division) -> bool:
        task = self.task
        memory = memory_of(task.model, division, task.ranks, self.limit, self.outside_bytes)
        return packed(memory, pinned_of(task, division), task.ranks) is not None

    def _cut_to_fit(self, parts: int) -> Division:
        """Every table that takes more than such a part of a rank is cut, where it may be."""
        task, division = self.task, Division.whole(len(self.task.tables))
        memory = memory_of(task.model, division, task.ranks, self.limit, self.outside_bytes)
        room = max(memory.room // parts, 1)
        for index, size in enumerate(memory.shard_bytes.tolist()):
            allowed = task.allowed(index)
            if TABLE_WISE in allowed and size <= room:
                continue
            kind = next((kind for kind in (COLUMN_WISE, ROW_WISE, DATA_PARALLEL) if kind in allowed), None)
            if kind is not None:
                most = max(task.tables[index].dim // QUAD, 1)
                division = division.with_table(index, kind, max(min(most, math.ceil(size / room)), min(most, 2)))
        return division

    def further(self, division: Division, loads: Floats, saved_ns: Floats, most: int) -> Iterator[Division]:
        """Divisions with the tables cut whose loads, [tables], are large beside the mean of a rank, or others copied.

        `saved_ns` is about what the step would take less without a table; at most so many divisions of each kind.
        """
        mean = float(loads.sum()) / self.task.ranks
        sliced, by_rows = (
            [self._cut(division, loads, share * mean, kind) for share in _DIVIDED_ABOVE] for kind in (COLUMN_WISE, ROW_WISE)
        )
        copied = self._copied(division, saved_ns)
        copied[1:1] = [self._cut(item, loads, _DIVIDED_ABOVE[0] * mean, COLUMN_WISE) for item in copied[:1]]
        seen = {division}
        for entry in (sliced, copied, by_rows):
            new = [item for item in dict.fromkeys(entry) if item not in seen][:most]
            seen.update(new)
            yield from new

    def _cut(self, division: Division, loads: Floats, above: float, kind: str) -> Division:
        for index in np.flatnonzero(loads > above).tolist():
            table = self.task.tables[index]
            if kind not in self.task.allowed(index) or division.kinds[index] != TABLE_WISE:
                continue
            most = min(table.dim // max(_LEAST_COLUMNS, QUAD), self.task.ranks)
            slices = min(most, math.ceil(loads[index] / max(above, 1e-9)))
            if kind in EVERYWHERE or slices > 1:
                division = division.with_table(index, kind, slices)
        return division

    def _copied(self, division: Division, saved_ns: Floats) -> list[Division]:
        """Copies of tables on every rank where that costs less than it saves, the most promising first.

        Tables whose gradients are small beside what they save come first; more and more of them are tried.
        """
        task = self.task
        free = [
            place
            for place in range(len(task.tables))
            if DATA_PARALLEL in task.allowed(place) and division.kinds[place] == TABLE_WISE and saved_ns[place] > 0
        ]
        order = sorted(free, key=lambda place: task.tables[place].nbytes / saved_ns[place])
        results: list[tuple[float, Division]] = []
        count = 1
        while count <= len(order) - (len(order) == len(task.tables)):  # a step without shards is not evaluated
            some = [task.tables[place] for place in order[:count]]
            saved = float(saved_ns[order[:count]].sum())
            gained = saved - everywhere_ns(task.model, some, DATA_PARALLEL, self.platform, task.ranks)
            if count > _FIRST_COPIES and gained < -saved:
                break
            copied = division
            for place in order[:count]:
                copied = copied.with_table(place, DATA_PARALLEL)
            results.append((gained, copied))
            count = max(2 * count if count < _FIRST_COPIES else 0, count * 4 // 3)
        return [item for gained, item in sorted(results, key=lambda pair: -pair[0]) if gained > 0]
