"""Plays a stretch of one lane for all ranks and scenarios at once: the max-plus recurrence of the simulator.

Along a lane, with `before` the least distance to the node before and `cost` the time that the node itself takes,

    end[i] = max(end[i - 1] + before[i], waited[i]) + cost[i],    waited[i] = max over edges of (end[source] + lag).

With P the running sum of before + cost this is end[i] = P[i] + max(end[-1], max over j <= i of (waited[j] + cost[j] - P[j])):
sums and running maxima only, so a stretch needs a handful of array operations whatever its length.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from steptime._sim.core.graph import FROM_START, EdgeKind, LaneGraph
from steptime._sim.core.timing import Nanoseconds, Timing
from steptime._units import LONG_AGO

Rows = npt.NDArray[np.int64]

# From this many ranks x scenarios on, node by node over rows that stay in the cache beats passes over the whole stretch.
WIDE = 384
# From so many rows on, and so many ranks x scenarios (of maxima a quarter), running sums and maxima go block by block.
_BLOCKED, _LONG_ROW = 128, 128
_LAGS: dict[int, str] = {EdgeKind.LAUNCH: "latency_ns", EdgeKind.WAIT: "release_ns", EdgeKind.HAND_OVER: "gap_ns"}
_SYNC = EdgeKind.SYNC

Lags = tuple[Nanoseconds | int | None, ...]
Sums = MutableMapping[tuple[int, bool], tuple[Nanoseconds, Nanoseconds, Lags]]
"""Of stretches played before, and whether they opened a stream: P, cost - P, and the lags of edges (None: by durations, which
departures change). They stay while a window is repeated."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Edges of one kind into a stretch, at most one per node."""

    kind: EdgeKind
    node: Rows | None  # index in the stretch; None: every node has one
    source: Rows | slice
    table_row: Rows | slice  # whose timing gives the lag


@dataclass(frozen=True, eq=False)
class Stretch:
    """Nodes `first` to `stop` (row numbers) of one lane, with the edges into them."""

    host: bool
    first: int
    stop: int
    opens_lane: bool  # holds the first node of its lane
    half: int  # row of the last node's first half where only that half is played, else -1
    table_row: Rows | slice
    layers: tuple[Layer, ...]


def stretch_of(graph: LaneGraph, lane: int, first: int, stop: int, half: int) -> Stretch:
    """Cut the nodes `first` to `stop` out of a lane, once per graph."""
    key = (lane, first, stop, half)
    if key not in graph.stretches:
        graph.stretches[key] = _cut(graph, lane, first, stop, half)
    result: Stretch = graph.stretches[key]
    return result


def _cut(graph: LaneGraph, lane: int, first: int, stop: int, half: int) -> Stretch:
    low, high = int(graph.edge_start[first]), int(graph.edge_start[stop])
    node = np.repeat(np.arange(first, stop), np.diff(graph.edge_start[first : stop + 1])) - first
    kind, source = graph.edge_kind[low:high], graph.edge_source[low:high]
    table_row = graph.table_row[first:stop]
    layers: list[Layer] = []
    for each in EdgeKind:
        chosen = np.flatnonzero(kind == each)
        while len(chosen):
            _, once = np.unique(node[chosen], return_index=True)
            picked = chosen[once]
            everywhere = len(picked) == stop - first
            rows = graph.table_row[source[picked]] if each in FROM_START else table_row[node[picked]]
            layers.append(Layer(each, None if everywhere else node[picked], _compact(source[picked]), _compact(rows)))
            chosen = np.delete(chosen, once)
    opens = first == graph.opening[lane] + 1
    return Stretch(lane < graph.threads, first, stop, bool(opens), half, _compact(table_row), tuple(layers))


def _compact(rows: Rows) -> Rows | slice:
    """The rows as a slice where they are consecutive, so that reading them copies nothing."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def play(stretch: Stretch, graph: LaneGraph, timing: Timing, ends: Nanoseconds, sums: Sums, *, continued: bool) -> None:
    """Write the ends of a stretch into `ends` (row, rank, scenario). `continued`: the stream ran work before the window."""
    if ends.shape[1] * ends.shape[2] >= WIDE:
        _play_wide(stretch, graph, timing, ends, continued)
    else:
        key = (id(stretch), stretch.opens_lane and not stretch.host and not continued)
        single = ends.shape[1:] == (1, 1)
        if key not in sums:
            sums[key] = _sums(stretch, timing, opens=key[1], single=single)
        _play_narrow(stretch, timing, _column(ends) if single else ends, *sums[key])
    if stretch.half >= 0:
        ends[stretch.half] = ends[stretch.stop - 1]


def _column(values: Nanoseconds) -> Nanoseconds:
    """Of one rank and scenario, without axes for these: numpy takes a fifth of the time to pick rows out of it."""
    return values[:, 0, 0]


def _sums(stretch: Stretch, timing: Timing, *, opens: bool, single: bool) -> tuple[Nanoseconds, Nanoseconds, Lags]:
    before = (timing.gap_ns if stretch.host else timing.spacing_ns)[stretch.table_row]
    cost = (timing.call_ns if stretch.host else timing.duration_ns)[stretch.table_row]
    if opens:
        before = before.copy()
        before[0] = 0
    if stretch.half >= 0:
        cost = cost.copy()
        cost[-1] = 0
    total = before + cost
    _accumulate(np.add, total)
    lags = [None if each.kind in FROM_START else _lag(each.kind, timing, each.table_row) for each in stretch.layers]
    if not single:
        return total, cost - total, tuple(lags)
    lags = [_column(each) if isinstance(each, np.ndarray) else each for each in lags]
    return _column(total), _column(cost - total), tuple(lags)


def _accumulate(ufunc: np.ufunc, values: Nanoseconds) -> None:
    """In place, along the first axis. Numpy goes down column after column, which caches do not like where rows are long.

    So rows are taken in blocks: within all blocks at once, and then what a block ends with goes on through the next.
    """
    count, width = len(values), math.prod(values.shape[1:])
    if count < _BLOCKED or width < (_LONG_ROW if ufunc is np.add else _LONG_ROW // 4):
        ufunc.accumulate(values, axis=0, out=values)
        return
    size = max(math.isqrt(count), 1)
    whole = count // size * size
    blocks = values[:whole].reshape(whole // size, size, *values.shape[1:])
    for row in range(1, size):
        ufunc(blocks[:, row - 1], blocks[:, row], out=blocks[:, row])
    for before, block in pairwise(blocks):
        ufunc(block, before[-1], out=block)
    for row in range(max(whole, 1), count):
        ufunc(values[row - 1], values[row], out=values[row])


def _play_narrow(
    stretch: Stretch, timing: Timing, ends: Nanoseconds, total: Nanoseconds, rest: Nanoseconds, lags: Lags
) -> None:
    front, out = ends[stretch.first - 1], ends[stretch.first : stretch.stop]
    if not stretch.layers:
        np.add(total, front, out=out)
        return
    waited = np.empty(out.shape, dtype=np.int64)
    waited.fill(LONG_AGO)
    for layer, lag in zip(stretch.layers, lags, strict=True):
        if lag is None:
            duration_ns = timing.duration_ns[layer.table_row]
            reached = ends[layer.source] - (_column(duration_ns) if ends.ndim == 1 else duration_ns)
        else:
            reached = ends[layer.source] + lag
        if layer.node is None:
            np.maximum(waited, reached, out=waited)
        else:
            waited[layer.node] = np.maximum(waited[layer.node], reached)
    waited += rest
    _accumulate(np.maximum, waited)
    np.maximum(waited, front, out=waited)
    np.add(waited, total, out=out)


def _play_wide(stretch: Stretch, graph: LaneGraph, timing: Timing, ends: Nanoseconds, continued: bool) -> None:
    before = timing.gap_ns if stretch.host else timing.spacing_ns
    cost = timing.call_ns if stretch.host else timing.duration_ns
    starts = graph.edge_start[stretch.first : stretch.stop + 1].tolist()
    reached = np.empty_like(ends[0])
    for i, row in enumerate(graph.table_row[stretch.first : stretch.stop].tolist()):
        end = ends[stretch.first + i]
        if i == 0 and stretch.opens_lane and not stretch.host and not continued:
            end[...] = ends[stretch.first - 1]
        else:
            np.add(ends[stretch.first + i - 1], before[row], out=end)
        for edge in range(starts[i], starts[i + 1]):
            kind = int(graph.edge_kind[edge])
            source = ends[int(graph.edge_source[edge])]
            if kind in (EdgeKind.ARRIVAL, EdgeKind.QUEUE_ARRIVAL):
                np.maximum(end, source, out=end)
            else:
                lagging = int(graph.table_row[graph.edge_source[edge]]) if kind in FROM_START else row
                np.add(source, _lag(kind, timing, lagging), out=reached)
                np.maximum(end, reached, out=end)
        if stretch.half < 0 or stretch.first + i < stretch.stop - 1:
            np.add(end, cost[row], out=end)


def _lag(kind: int, timing: Timing, row: int | Rows | slice) -> Nanoseconds | int:
    """How long after its source an edge lets the node's own time begin. The row is the node's; from a start, the source's."""
    if kind in _LAGS:
        lag: Nanoseconds = getattr(timing, _LAGS[kind])[row]
        return lag
    if kind == _SYNC:
        return timing.return_ns[row] - timing.call_ns[row]
    return -timing.duration_ns[row] if kind in FROM_START else 0
