"""`scheduled`: nodes of one segment in groups, each a kernel or a call, in an order in which they can run.

As Inductor's scheduler (torch/_inductor/scheduler.py): pairs that share most bytes are joined first, where their loops agree
and no cycle comes of it, until nothing more can be joined.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from steptime._fuse.nodes import LoopKind, LoopNode, Value
from steptime._fuse.splits import Processors, mixed, parts

_ROUNDS = 10
_MOST_READERS = 64  # of a value that are looked at together
_MOST_NODES = 64  # of a kernel


class FusedGroup:
    """Nodes that become one kernel. `columns` are those that sum down columns in a kernel that goes along rows."""

    __slots__ = ("calls", "columns", "first", "inner", "last", "nodes", "reads", "reduced", "size", "split", "writes")

    def __init__(self, number: int, node: LoopNode, processors: Processors) -> None:
        self.nodes, self.columns = [number], list[int]()
        self.first = self.last = number
        self.calls = node.kind is LoopKind.CALL
        loop = node.loop
        self.size, self.reduced, self.inner = loop.size, loop.reduced, loop.inner
        self.split = parts(loop.size, loop.reduced, processors, inner=loop.inner) if node.kind is LoopKind.REDUCTION else 1
        self.reads = {each.value for each in node.reads} | set(node.after)
        self.writes = set(node.writes)

    @property
    def reduces(self) -> bool:
        """Whether it has a reduction."""
        return self.reduced > 1

    def join(self, other: FusedGroup, *, down: bool) -> None:
        """Takes another group in; `down`: its sums go down columns."""
        if not self.reduces and other.reduces:
            self.size, self.reduced, self.inner, self.split = other.size, other.reduced, other.inner, other.split
        self.nodes = sorted((*self.nodes, *(() if down else other.nodes)))
        self.columns = sorted((*self.columns, *other.columns, *(other.nodes if down else ())))
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.writes |= other.writes
        self.reads |= other.reads


class _Scheduler:
    def __init__(self, nodes: Mapping[int, LoopNode], values: Sequence[Value], processors: Processors) -> None:
        self._nodes, self._values = nodes, values
        self._group = {number: FusedGroup(number, node, processors) for number, node in nodes.items()}
        self._writer = {value: number for number, node in nodes.items() for value in node.writes}
        self._readers: dict[int, list[int]] = defaultdict(list)
        for number, node in nodes.items():
            for value in {each.value for each in node.reads} | set(node.after):
                self._readers[value].append(number)

    def run(self) -> list[FusedGroup]:
        for _ in range(_ROUNDS):
            if not self._round():
                break
        return self._ordered()

    def _round(self) -> bool:
        pairs: dict[tuple[int, int], tuple[FusedGroup, FusedGroup]] = {}
        for value, readers in self._readers.items():
            users = [self._group[number] for number in readers[:_MOST_READERS]]
            if value in self._writer:
                users.append(self._group[self._writer[value]])
            loops = list({id(each): each for each in users if not each.calls}.values())
            for place, one in enumerate(loops):
                for other in loops[place + 1 :]:
                    first, second = (one, other) if one.first <= other.first else (other, one)
                    pairs[id(first), id(second)] = (first, second)
        scored = [(self._shared(*pair), -pair[1].first, -pair[0].first, pair) for pair in pairs.values()]
        scored.sort(key=lambda each: each[:3], reverse=True)
        joined = False
        gone: set[int] = set()
        for score, _, _, (first, second) in scored:
            if score <= 0 or id(first) in gone or id(second) in gone:
                continue
            how = self._agree(first, second)
            if how is None or self._cycle(first, second):
                continue
            kept, taken = (second, first) if how == "reversed" else (first, second)
            kept.join(taken, down=how in ("down", "reversed"))
            for number in (*taken.nodes, *taken.columns):
                self._group[number] = kept
            gone.add(id(taken))
            joined = True
        return joined

    def _shared(self, first: FusedGroup, second: FusedGroup) -> int:
        common = (first.reads & second.reads) | (first.writes & second.reads) | (second.writes & first.reads)
        return sum(self._values[each].nbytes for each in common)

    def _agree(self, first: FusedGroup, second: FusedGroup) -> str | None:
        """How two groups fit into one kernel: `same` loops, or sums `down` columns beside others (`reversed`: in the first)."""
        if len(first.nodes) + len(second.nodes) > _MOST_NODES or (second.columns and first.columns):
            return None
        if any(set(self._nodes[number].after) & first.writes for number in second.nodes):
            return None
        if not first.reduces and not second.reduces:
            return "same" if first.size == second.size else None
        if first.reduces and second.reduces:
            if (first.size, first.reduced, first.inner) == (second.size, second.reduced, second.inner):
                dependent = first.writes & second.reads
                return None if dependent and first.split > 1 else "same"
            return self._across(first, second)
        rows, loop = (first, second) if first.reduces else (second, first)
        if loop.size == rows.size:
            return "same" if loop is second or rows.split == 1 else None
        whole = loop.size == rows.size * rows.reduced and rows.inner
        after = loop is second and bool(rows.writes & loop.reads)
        return "same" if whole and not (after and rows.split > 1) else None

    def _across(self, first: FusedGroup, second: FusedGroup) -> str | None:
        """Sums along rows and sums down columns of the same data."""
        if (first.size, first.reduced) != (second.reduced, second.size) or first.inner == second.inner:
            return None
        if first.columns or second.columns:
            return None
        along, down = (first, second) if first.inner else (second, first)
        sums = all(self._nodes[each].loop.sums for each in down.nodes if self._nodes[each].loop.reduced > 1)
        full = any(self._values[each].tensor.numel >= along.size * along.reduced for each in along.reads & down.reads)
        if not sums or not full or along.split > 1 or not mixed(along.size, along.reduced):
            return None
        if (
            along.writes & down.reads
            or down.writes & along.reads
            or any(self._nodes[each].loop.reduced == 1 for each in down.nodes)
        ):
            return None
        return "down" if along is first else "reversed"

    def _cycle(self, first: FusedGroup, second: FusedGroup) -> bool:
        """Whether one of two groups needs a third that needs the other."""
        limit = max(first.last, second.last)
        seen: set[int] = {id(first), id(second)}
        stack: list[FusedGroup] = []

        def follow(group: FusedGroup, *, direct: bool) -> bool:
            for value in group.writes:
                for reader in self._readers[value]:
                    after = self._group.get(reader)
                    if after is None:
                        continue
                    if after is first or after is second:
                        if not direct:
                            return True
                    elif id(after) not in seen and after.first <= limit:
                        seen.add(id(after))
                        stack.append(after)
            return False

        follow(first, direct=True)
        follow(second, direct=True)
        while stack:
            if follow(stack.pop(), direct=False):
                return True
        return False

    def _ordered(self) -> list[FusedGroup]:
        """Groups so that what one reads is there, else as the ops come."""
        groups = list({id(each): each for each in self._group.values()}.values())
        needs: dict[int, set[int]] = {id(each): set() for each in groups}
        followers: dict[int, list[FusedGroup]] = defaultdict(list)
        for group in groups:
            for value in group.reads:
                writer = self._writer.get(value)
                before = None if writer is None else self._group[writer]
                if before is not None and before is not group and id(before) not in needs[id(group)]:
                    needs[id(group)].add(id(before))
                    followers[id(before)].append(group)
        ready = [(each.last, each.first, place) for place, each in enumerate(groups) if not needs[id(each)]]
        heapq.heapify(ready)
        place_of = {id(each): place for place, each in enumerate(groups)}
        result = []
        while ready:
            group = groups[heapq.heappop(ready)[2]]
            result.append(group)
            for after in followers[id(group)]:
                needs[id(after)].discard(id(group))
                if not needs[id(after)]:
                    heapq.heappush(ready, (after.last, after.first, place_of[id(after)]))
        assert len(result) == len(groups), "groups need each other"
        return result


def scheduled(nodes: Mapping[int, LoopNode], values: Sequence[Value], processors: Processors) -> list[FusedGroup]:
    """Groups of the nodes of one segment, in order."""
    return _Scheduler(nodes, values, processors).run()
