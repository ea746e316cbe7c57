"""`TaskDivisions`: ways to cut a task's tables into shards: as far as memory needs it, and further where tables are large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np

from steptime._build.dlrm.plan import (
    COLUMN_WISE,
    DATA_PARALLEL,
    EVERYWHERE,
    GRID,
    QUAD,
    ROW_WISE,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
    Division,
    Plan,
    Shard,
)
from steptime._build.dlrm.workload import dlrm_workload
from steptime._models.memory.fit import has_room
from steptime._platforms.platform import Platform
from steptime._shard.memory import Memory, memory_of, packed, rank_limit
from steptime._shard.search_state import Evaluates, Floats, Search, SearchBudget
from steptime._shard.task import FREE, Places, Task
from steptime._sim.modelled.prediction import memory_of as replayed

# Shares of a rank's mean load above which a table is divided, one attempt each.
_DIVIDED_ABOVE = (0.5, 1.0, 0.25)
# Slices narrower than this are not tried: lookups of such rows were not measured.
_LEAST_COLUMNS = 16
# Parts of a rank's room that tables are cut down to where they do not fit, one attempt after the other.
_CUT_TO_FIT = (1, 2, 4, 8)
# Kinds that a table is cut by where it may not stay whole or does not fit, in this order.
NODE_KINDS = (TABLE_ROW_WISE, TABLE_COLUMN_WISE, GRID)
_CUT_ORDER = (COLUMN_WISE, ROW_WISE, *NODE_KINDS, DATA_PARALLEL)
# Slices of a table that is cut both ways.
_GRID_SLICES = 2
# Copies are tried by ones, twos, fours up to so many, then by thirds more.
_DOUBLED = 8
# Divisions with tables that every rank has a part of, of each kind at most: for each a step is played.
_MOST_PLAYED = 4


class TaskDivisions:
    """A task on a platform: divisions of its tables, and searches among the plans of each."""

    def __init__(self, task: Task, platform: Platform, budget: SearchBudget, evaluator: Evaluates) -> None:
        self.task, self.platform, self.budget, self.evaluator = task, platform, budget, evaluator
        self.limit, self.outside_bytes = rank_limit(platform.device.limits, task.ranks, task.constraints)
        self.per_node = node_ranks(platform, task.ranks)

    def search(self, division: Division, evaluations: int) -> Search | None:
        """A search among the plans of a division, which begins with one; None where none fits."""
        task, memory = self.task, self.memory(division)
        shards, pinned = division.shard_tables(task.tables), task.pinned_shards(division)
        start = packed(memory, pinned, task.ranks)
        if start is None:
            return None
        budget = self.budget.with_evaluations(evaluations)
        result = Search(division, shards, task.ranks, memory, pinned, self.evaluator, budget, by="packed")
        result.ask(start, beyond=True)
        return result

    def memory(self, division: Division) -> Memory:
        """What the shards of a division take."""
        return memory_of(self.task.model, division, self.task.ranks, self.limit, self.outside_bytes)

    @property
    def divisible(self) -> bool:
        """Whether any table may be divided at all."""
        return any(set(self.task.allowed(index)) - {TABLE_WISE} for index in range(len(self.task.tables)))

    def first(self) -> Division:
        """Tables whole where they may be and fit, else cut as far as it takes; where nothing packs, the least cut."""
        tried = [self._cut_to_fit(parts) for parts in _CUT_TO_FIT]
        return next((item for item in tried if self._packs(item)), tried[0])

    def _packs(self, division: Division) -> bool:
        return packed(self.memory(division), self.task.pinned_shards(division), self.task.ranks) is not None

    def _cut_to_fit(self, parts: int) -> Division:
        """Every table that takes more than such a part of a rank is cut, where it may be."""
        task, division = self.task, Division.whole(len(self.task.tables))
        memory = self.memory(division)
        room = max(memory.room // parts, 1)
        held = np.zeros(task.ranks // self.per_node)
        for index, size in enumerate(memory.shard_bytes.tolist()):
            allowed = task.allowed(index)
            if TABLE_WISE in allowed and size <= room:
                continue
            kind = next((kind for kind in _CUT_ORDER if kind in allowed), None)
            if kind in NODE_KINDS:
                division = self._on_nodes(division, index, str(kind), held)
            elif kind is not None:
                slices = task.constraints.slices(task.tables[index], max(math.ceil(size / room), 2), QUAD)
                division = division.with_table(index, kind, slices)
        return division

    def further(self, search: Search, loads: Floats, saved_ns: Floats, most: int) -> Iterator[Division]:
        """Divisions with the tables cut whose loads, [tables], are large beside the mean of a rank, or others copied.

        `search` has plans of the division to go on from, `saved_ns` is about what the step would take less without a table; at
        most so many divisions of each kind.
        """
        division = search.division
        mean = float(loads.sum()) / self.task.ranks
        sliced, by_rows = (
            [self._cut(division, loads, share * mean, kind) for share in _DIVIDED_ABOVE] for kind in (COLUMN_WISE, ROW_WISE)
        )
        copied = self._copied(search, saved_ns)
        copied[1:1] = [self._cut(item, loads, _DIVIDED_ABOVE[0] * mean, COLUMN_WISE) for item in copied[:1]]
        nodes = [self._by_node(search, item, loads, 0.0, TABLE_ROW_WISE) for item in (*copied[:1], division)]
        nodes += [self._by_node(search, division, loads, _DIVIDED_ABOVE[-1] * mean, kind) for kind in NODE_KINDS]
        seen = {division}
        few = min(most, _MOST_PLAYED)
        for entry, count in ((sliced, most), (copied, few), (by_rows, few), (nodes, few)):
            new = [item for item in dict.fromkeys(entry) if item not in seen][:count]
            seen.update(new)
            yield from new

    def _cut(self, division: Division, loads: Floats, above: float, kind: str) -> Division:
        for index in np.flatnonzero(loads > above).tolist():
            table = self.task.tables[index]
            if kind not in self.task.allowed(index) or division.kinds[index] != TABLE_WISE:
                continue
            wanted = min(math.ceil(loads[index] / max(above, 1e-9)), self.task.ranks)
            slices = self.task.constraints.slices(table, wanted, max(_LEAST_COLUMNS, QUAD))
            if kind in EVERYWHERE or slices > 1:
                division = division.with_table(index, kind, slices)
        return division

    def kept(self, search: Search, division: Division) -> Places:
        """The best plan's ranks for the shards that a division leaves as they are; others go where they belong or are dealt."""
        shards, place = search.division.shards(self.task.tables), dict[Shard, int]()
        place.update(zip(shards, search.best.rank_of, strict=True))
        new = division.shards(self.task.tables)
        dealt = cycle(range(self.task.ranks))
        ranks = [place[shard] if shard in place else next(dealt) for shard in new]
        return np.where((pinned := self.task.pinned_shards(division)) == FREE, ranks, pinned).astype(np.intp)

    def shortest_ns(self, search: Search, division: Division) -> float:
        """About what no plan of a division is shorter than: a plan like the best one if its ranks all had as much to do."""
        ranks = self.kept(search, division)
        one = self.evaluator.evaluate(ranks[None, :], division, exact=True)
        tables = division.shard_tables(self.task.tables)
        columns = np.bincount(ranks, weights=[table.columns for table in tables], minlength=self.task.ranks)
        uneven = sum(float(part.max() - part.mean()) for part in (one.forward_ns, one.backward_ns))
        uneven += float(one.exchange_ns.max()) * (1.0 - float(columns.mean()) / max(float(columns.max()), 1.0))
        device = float(one.device_ns[0]) - uneven
        return max(device, float(one.step_ns[0])) if one.host_bound[0] else device

    def fullest_bytes(self, plan: Plan) -> int:
        """What a plan's fullest rank holds, about."""
        division, owners = plan.divided(self.task.tables)
        return int(self.memory(division).used(list(owners), self.task.ranks).max())

    def fits(self, plan: Plan) -> bool:
        """Whether the ranks of a plan have room for what the allocator's replay says of them."""
        built = dlrm_workload(self.task.model, self.task.ranks, plan)
        return has_room(int(replayed(built, self.platform)["peak_bytes"]), self.limit)

    def _by_node(self, search: Search, division: Division, loads: Floats, above: float, kind: str) -> Division:
        """The whole tables with larger loads on nodes, each where least is to do; others stay where the best plan has them."""
        count = self.task.ranks // self.per_node
        if count < 2:
            return division
        held = np.zeros(count)
        shards = search.division.shards(self.task.tables)
        cut = [index for index in np.argsort(-loads, kind="stable").tolist() if loads[index] > above]
        cut = [index for index in cut if kind in self.task.allowed(index) and division.kinds[index] == TABLE_WISE]
        for shard, rank in zip(shards, search.best.rank_of, strict=True):
            held[rank // self.per_node] += (
                0.0 if shard.table in cut or division.slices[shard.table] == 0 else loads[shard.table]
            )
        for index in cut:
            division = self._on_nodes(division, index, kind, held, float(loads[index]))
        return division

    def _on_nodes(self, division: Division, index: int, kind: str, held: Floats, load: float = 1.0) -> Division:
        """A table on the nodes with least to do, which then have its load too."""
        wanted = {TABLE_COLUMN_WISE: self.per_node, GRID: min(_GRID_SLICES, len(held))}.get(kind, 1)
        parts = self.task.constraints.slices(self.task.tables[index], wanted, max(_LEAST_COLUMNS, QUAD)) if wanted > 1 else 1
        slices, parts = (parts, 1) if kind == TABLE_COLUMN_WISE else (0, min(parts, len(held)))
        nodes = np.argsort(held, kind="stable")[:parts]
        held[nodes] += load / parts
        return division.on_nodes(index, kind, tuple(sorted(nodes.tolist())), self.per_node, slices)

    def _copied(self, search: Search, saved_ns: Floats) -> list[Division]:
        """Copies of tables on every rank where that costs less than it saves, the most promising first.

        Tables whose gradients are small beside what they save come first; more and more of them are tried. What copies cost is
        evaluated for the fewest and the most of them, with the other tables as in the best plan, and in between grows with
        their bytes.
        """
        task, division = self.task, search.division
        free = [
            index
            for index in range(len(task.tables))
            if DATA_PARALLEL in task.allowed(index) and division.kinds[index] == TABLE_WISE and saved_ns[index] > 0
        ]
        order = sorted(free, key=lambda index: task.tables[index].nbytes / saved_ns[index])
        counts = _growing(len(order) - (len(order) == len(task.tables)))  # a step without shards is not evaluated
        if not counts:
            return []
        nbytes = np.cumsum([float(task.tables[index].nbytes) for index in order])
        saved = np.cumsum(saved_ns[order])
        ends = sorted({counts[0], counts[-1]})
        costs = [self._copies_ns(search, order[:count]) + float(saved[count - 1]) for count in ends]
        gained = [float(saved[count - 1] - np.interp(nbytes[count - 1], nbytes[np.array(ends) - 1], costs)) for count in counts]
        copies = [_with_copies(division, order[:count]) for count in counts]
        return [item for more, item in sorted(zip(gained, copies, strict=True), key=lambda pair: -pair[0]) if more > 0]

    def _copies_ns(self, search: Search, tables: Sequence[int]) -> float:
        """How much longer the step of the best plan is with copies of these tables instead of their shards."""
        shards = search.division.shards(self.task.tables)
        others = [rank for rank, shard in zip(search.best.rank_of, shards, strict=True) if shard.table not in tables]
        copied = _with_copies(search.division, tables)
        result = self.evaluator.evaluate(np.array([others], dtype=np.intp), copied, exact=True)
        return float(result.step_ns[0]) - search.best.step_ns


def node_ranks(platform: Platform, ranks: int) -> int:
    """How many ranks a node has; all of them where they do not fill nodes evenly."""
    per_node = ranks if platform.fabric is None else min(platform.fabric.limits.gpus_per_node, ranks)
    return per_node if ranks % per_node == 0 else ranks


def _with_copies(division: Division, tables: Sequence[int]) -> Division:
    for index in tables:
        division = division.with_table(index, DATA_PARALLEL)
    return division


def _growing(most: int) -> list[int]:
    """Numbers of copies that are tried."""
    counts = [1] if most > 0 else []
    while counts and (count := max(2 * counts[-1] if counts[-1] < _DOUBLED else 0, counts[-1] * 4 // 3)) <= most:
        counts.append(count)
    return counts
