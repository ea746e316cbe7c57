"""Runs the blocks of `measure power` as loops of CUDA graphs and reads power and clock meanwhile."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from steptime._calibrate.device.meter import CardUse, Meter
from steptime._calibrate.device.probes import Probes, clock_hz
from steptime_lab.measure.op_calls import Arena, PreparedCall
from steptime_lab.measure.power.blocks import Block, Piece

# Of a block, what goes by before its power is read: the regulator settles within a second.
_SETTLE = 0.25
# A loop is queued so far ahead.
_GROUP_S, _GROUPS_AHEAD = 0.05, 3
_WARM_UP = 2


@dataclass(frozen=True)
class GraphLoop:
    """A block made ready: `replay` queues one round of it."""

    replay: Callable[[], None]
    pause_cycles: int


class PowerBench:
    """The card of one process."""

    def __init__(self, arena: Arena, meter: Meter) -> None:
        self.arena = arena
        self.meter = meter
        self.probes = Probes()

    def measure(self, block: Block) -> dict[str, Any]:
        """The row of a block."""
        if block.kind == "rest":
            return self._row(block, self._rest(block.seconds), None, [1e9 * block.seconds], 0)
        loop = self._loop(block)
        with self.meter.watching() as watch:
            self._run(loop.replay, block.seconds * _SETTLE)
            torch.cuda.synchronize()
            first, begun_s = self.probes.stamp(), time.perf_counter()
            times_ns = self._run(loop.replay, block.seconds * (1 - _SETTLE))
            second = self.probes.stamp()
            torch.cuda.synchronize()
            drawn = watch.between(begun_s, time.perf_counter())
        return self._row(block, drawn, clock_hz(first, second), times_ns, loop.pause_cycles)

    def kernel_rows(self, calls: Sequence[Piece], load: Piece | None, seconds: float) -> list[dict[str, Any]]:
        """Each call timed again and again, every time behind a stretch of `load` that holds the clock down, or of rest."""
        ready = [(piece, run) for piece in calls if (run := self._tried(piece)) is not None]
        calls = [piece for piece, _ in ready]
        busy = None if load is None else self._prepared(load)
        times: list[list[float]] = [[] for _ in calls]
        clocks: list[list[float]] = [[] for _ in calls]
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            marks = [self._timed(run, busy) for _, run in ready]
            torch.cuda.synchronize()
            for index, (begin, end, first, second) in enumerate(marks):
                times[index].append(begin.elapsed_time(end) * 1e6 / calls[index].count)
                clocks[index].append(clock_hz(first, second))
        name = "load" if load is not None else "light"
        return [
            self._row(Block(f"{name} {_op(piece)}", name, (piece,)), None, _median(clock), time_ns, 0)
            for piece, time_ns, clock in zip(calls, times, clocks, strict=True)
            if time_ns
        ]

    def burst(self, piece: Piece, seconds: float) -> dict[str, Any]:
        """Times of a product from rest on, one after the other: how soon the regulator answers."""
        run = self._prepared(piece)
        run()
        torch.cuda.synchronize()
        time.sleep(2.0)
        marks = [self._mark()]
        stamps = [self.probes.stamp()]
        ends = time.perf_counter() + seconds
        with self.meter.watching() as watch:
            begun_s = time.perf_counter()
            while time.perf_counter() < ends:
                run()
                marks.append(self._mark())
                if len(marks) % 8 == 0:
                    stamps.append(self.probes.stamp())
                    marks[-8].synchronize()
            torch.cuda.synchronize()
            drawn = watch.between(begun_s, time.perf_counter())
        times_ns = [a.elapsed_time(b) * 1e6 / piece.count for a, b in pairwise(marks)]
        row = self._row(Block("burst", "burst", (piece,), seconds=seconds), drawn, clock_hz(stamps[0], stamps[-1]), times_ns, 0)
        row["clocks_mhz"] = [clock_hz(a, b) / 1e6 for a, b in pairwise(stamps)]
        return row

    def _rest(self, seconds: float) -> CardUse:
        torch.cuda.synchronize()
        with self.meter.watching() as watch:
            time.sleep(seconds)
            return watch.between(time.perf_counter() - seconds / 2, time.perf_counter())

    def _timed(self, run: Callable[[], None], busy: Callable[[], None] | None) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
        if busy is not None:
            busy()
        else:
            torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call]
        first = self.probes.stamp()
        begin = self._mark()
        run()
        end = self._mark()
        return begin, end, first, self.probes.stamp()

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _loop(self, block: Block) -> GraphLoop:
        runs = [self._prepared(piece) for piece in block.pieces]

        def once() -> None:
            for run in runs:
                run()

        for _ in range(_WARM_UP):
            once()
        torch.cuda.synchronize()
        begin, end = self._mark(), None
        once()
        end = self._mark()
        end.synchronize()
        busy_ns = begin.elapsed_time(end) * 1e6
        most = self.meter.most_clock_hz or 2e9
        pause = int(busy_ns * (1 / block.duty - 1) * most / 1e9)
        if any(piece.probe for piece in block.pieces):
            return GraphLoop(once, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
            if pause:
                torch.cuda._sleep(pause)  # type: ignore[no-untyped-call]
        return GraphLoop(graph.replay, pause)

    def _prepared(self, piece: Piece) -> Callable[[], None]:
        if piece.call is None:
            probe = getattr(self.probes, piece.probe)
            return lambda: probe(max(1, round(piece.sms * self.probes.sms)), piece.ns)
        prepared = PreparedCall(piece.call, self.arena)
        args, kwargs = prepared.fresh()

        def run() -> None:
            torch.backends.cuda.matmul.allow_tf32 = piece.tf32
            for _ in range(piece.count):
                these, those = (args, kwargs) if piece.resident else prepared.fresh()
                prepared.op(*these, **those)

        return run

    def _tried(self, piece: Piece) -> Callable[[], None] | None:
        """Ready to run, or None where it does not."""
        try:
            run = self._prepared(piece)
            run()
            torch.cuda.synchronize()
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        return run

    def _run(self, replay: Callable[[], None], seconds: float) -> list[float]:
        """Rounds for so long; ns per round, of groups of them."""
        count, waiting, times = 1, deque([self._mark()]), []
        counts: deque[int] = deque()
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends or counts:
            if time.perf_counter() < ends:
                for _ in range(count):
                    replay()
                waiting.append(self._mark())
                counts.append(count)
            if len(counts) >= _GROUPS_AHEAD or time.perf_counter() >= ends:
                begin, of = waiting.popleft(), counts.popleft()
                waiting[0].synchronize()
                times.append(begin.elapsed_time(waiting[0]) * 1e6 / of)
                count = max(1, int(_GROUP_S * 1e9 / times[-1]))
        return times

    def _row(
        self, block: Block, drawn: CardUse | None, clock: float | None, times_ns: list[float], pause: int
    ) -> dict[str, Any]:
        return {
            "block": block.name,
            "kind": block.kind,
            "pieces": pieces_text(block),
            "duty": block.duty,
            "pause_cycles": pause,
            "power_w": None if drawn is None else drawn.power_w,
            "reading_w": None if drawn is None else drawn.reading_w,
            "clock_mhz": None if clock is None else clock / 1e6,
            "clock_reading_mhz": None if drawn is None or drawn.clock_hz is None else drawn.clock_hz / 1e6,
            "temperature_c": None if drawn is None else drawn.temperature_c,
            "capped": None if drawn is None else drawn.capped,
            "heated": None if drawn is None else drawn.heated,
            "limit_w": self.meter.limit_w,
            "uuid": self.meter.uuid,
            "clocks_mhz": None,
            "times_ns": times_ns,
        }


def pieces_text(block: Block) -> str:
    """What a block repeats, as its row has it."""
    return json.dumps([_as_json(piece) for piece in block.pieces])


def _as_json(piece: Piece) -> dict[str, Any]:
    called = {} if piece.call is None else {"call": json.loads(piece.call.to_json())}
    return {
        **called,
        "count": piece.count,
        "tf32": piece.tf32,
        "resident": piece.resident,
        "probe": piece.probe,
        "sms": piece.sms,
        "ns": piece.ns,
    }


def _op(piece: Piece) -> str:
    return piece.probe if piece.call is None else f"{piece.call.op} {'tf32' if piece.tf32 else ''}".strip()


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
