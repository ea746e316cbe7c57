"""How much of a window is covered by spans, for many ranks at once.

Spans are two arrays (row, rank) of starts and ends. Everything here is sorting and running maxima along the rows, so that
thousands of ranks cost a handful of array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._sim.core.timing import Nanoseconds


@dataclass(frozen=True, eq=False)
class Spans:
    """Starts and ends inside a window of `length_ns` per rank: 0 <= start <= end <= length."""

    start_ns: Nanoseconds  # (row, rank)
    end_ns: Nanoseconds
    length_ns: Nanoseconds  # (rank,)
    rows: int  # rows before folding; the parts of row r are r, r + rows, ...
    periodic: bool = False

    def keep(self, chosen: Nanoseconds) -> Spans:
        """The spans of some of the original rows."""
        parts = len(self.start_ns) // max(self.rows, 1)
        rows = (np.arange(parts)[:, None] * self.rows + chosen[None, :]).reshape(-1)
        return Spans(self.start_ns[rows], self.end_ns[rows], self.length_ns, len(chosen), self.periodic)

    def covered_ns(self) -> Nanoseconds:
        """Per rank: how much of the window at least one span covers."""
        return np.asarray(self.own_ns().sum(axis=0), dtype=np.int64)

    def own_ns(self) -> Nanoseconds:
        """Per original row and rank: its part of the covered time. Where spans overlap, the one that started first has it."""
        order, start, end = self._sorted()
        fresh = np.maximum(end - np.maximum(start, _reach_before(start, end)), 0)
        return self._by_row(order, fresh)

    def idle_before_ns(self) -> Nanoseconds:
        """Per original row and rank: the uncovered time that its start ends."""
        order, start, end = self._sorted()
        if not len(start):
            return self._by_row(order, start)
        gap = np.maximum(start - _reach_before(start, end), 0)
        gap[0] = start[0]
        if self.periodic:
            gap[0] += self.length_ns - end.max(axis=0)
        return self._by_row(order, gap)

    def _sorted(self) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
        order = np.argsort(self.start_ns, axis=0, kind="stable")
        return order, np.take_along_axis(self.start_ns, order, 0), np.take_along_axis(self.end_ns, order, 0)

    def _by_row(self, order: Nanoseconds, values: Nanoseconds) -> Nanoseconds:
        result = np.empty_like(values)
        np.put_along_axis(result, order, values, 0)
        return np.asarray(result.reshape(-1, self.rows, result.shape[1]).sum(axis=0) if self.rows else result, dtype=np.int64)


def fold(start: Nanoseconds, end: Nanoseconds, length: Nanoseconds) -> Spans:
    """Spans of a window that repeats every `length`: what sticks out at the end covers the beginning."""
    length = np.maximum(length, 1)
    begin = start % length
    stop = begin + np.minimum(end - start, length)
    over = np.maximum(stop - length, 0)
    # A span that does not wrap leaves an empty second part where it starts itself, so that it ends no gap of its own.
    again = np.where(over > 0, 0, begin)
    starts, ends = np.concatenate([begin, again]), np.concatenate([np.minimum(stop, length), again + over])
    return Spans(starts, ends, length, len(start), periodic=True)


def clip(start: Nanoseconds, end: Nanoseconds, begin: int, length: Nanoseconds) -> Spans:
    """The parts of spans inside a window from `begin`, seen once."""
    low, high = np.clip(start - begin, 0, length), np.clip(end - begin, 0, length)
    return Spans(low, high, np.asarray(length, dtype=np.int64), len(start))


def _reach_before(start: Nanoseconds, end: Nanoseconds) -> Nanoseconds:
    """Per sorted row: the latest end of the rows before it; its own start for the first."""
    reach = np.maximum.accumulate(end, axis=0)
    return np.concatenate([start[:1], reach[:-1]])
