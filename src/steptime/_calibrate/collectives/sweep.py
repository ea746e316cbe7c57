"""The sweep of one group of ranks: laps of cases, one repeat of each in every pass of a lap, rows flushed after it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from steptime._calibrate.collectives.calls import Buffers, call_of
from steptime._calibrate.collectives.cases import (
    SENTINEL,
    CollectiveCase,
    blocks,
    calls_of,
    cost_ns,
    fitting,
    laps,
    once_ns,
    repeats_of,
)
from steptime._calibrate.collectives.fabrics import Place
from steptime._calibrate.collectives.readings import LapReadings
from steptime._calibrate.collectives.timing import CollectiveBench, Reading, result_of
from steptime._calibrate.harness.budget import Progress
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Session
from steptime._measurements.sets import COLLECTIVES
from steptime._units import MIB

# Sizes that make NCCL connect what it uses: small, middling and large messages go different ways.
_FIRST_SIZES = (4096, 256 * 1024, 4 * MIB, 32 * MIB)
# Kept back for the last flush and for leaving the group.
_RESERVE_S = 1.0


class Sweep:
    """One group's measurements at one place."""

    def __init__(
        self,
        group: Group,
        session: Session,
        place: Place,
        cases: Sequence[CollectiveCase],
        bench: type[CollectiveBench] = CollectiveBench,
    ) -> None:
        self.group = group
        self.session = session
        self.place = place
        self.buffers = Buffers(group, cases)
        self.bench = bench(group, self.buffers)
        self._guarded = any(c.collective == SENTINEL.collective and c.size_bytes >= SENTINEL.size_bytes for c in cases)
        self._pace = 1.0  # seconds that cases take over what was planned for them

    def supported(self, cases: Sequence[CollectiveCase]) -> set[str]:
        """The collectives this backend can do; makes it connect what it will use."""
        largest = {case.collective: max(c.size_bytes for c in cases if c.collective == case.collective) for case in cases}
        return {name for name, size in largest.items() if self.group.all_agree(self._tried(name, size))}

    def _tried(self, collective: str, largest_bytes: int) -> bool:
        sizes = [fitting(collective, size, self.group.ranks) for size in _FIRST_SIZES]
        try:
            for size in [size for size in sizes if size <= largest_bytes] or [largest_bytes]:
                for _ in range(2):
                    call_of(CollectiveCase(collective, size), self.group, self.buffers)()
            self.group.synchronize()
        except (RuntimeError, NotImplementedError, ValueError):
            return False
        return True

    def measure(self, cases: Sequence[CollectiveCase], progress: Progress, seed: int) -> int:
        """What there is time for, in order; how many cases have a row now."""
        added = 0
        for number, lap in enumerate(laps(cases, self.place)):
            fitting_in = self.group.decide(self._how_many(lap))
            if fitting_in < len(lap):
                progress.skip("no time left", len(lap) - fitting_in)
            if fitting_in:
                failed = self._lap(lap[:fitting_in], seed + number)
                added += fitting_in - failed
                if failed:
                    progress.skip("failed or without company to the end", failed)
                progress.step(fitting_in - failed)
        return added

    def _how_many(self, lap: Sequence[CollectiveCase]) -> int:
        """How many of the first cases there is time for, with all their repeats."""
        left_ns = 1e9 * (self.session.budget.left_s() - _RESERVE_S)
        taken_ns = accumulate(cost_ns(case, self.place) * self._pace for case in lap)
        return sum(taken < left_ns for taken in taken_ns)

    def _lap(self, lap: Sequence[CollectiveCase], seed: int) -> int:
        """Passes over some cases, each in an order of its own; their rows are flushed; how many failed."""
        wanted = [repeats_of(case, self.place) for case in lap]
        result = LapReadings(lap, self.group.ranks, max(wanted))
        order = random.Random(seed)
        try:
            for repeat in range(max(wanted)):
                turn = [number for number, repeats in enumerate(wanted) if repeat < repeats]
                planned_s = sum(once_ns(lap[number], self.group.ranks) for number in turn) / 1e9
                if repeat and not self.group.decide(int(self.session.budget.left_s() > planned_s * self._pace)):
                    break
                order.shuffle(turn)
                began = time.monotonic()
                self._pass(result, repeat, turn)
                self._pace = 0.5 * self._pace + 0.5 * (time.monotonic() - began) / planned_s
        finally:
            rows = [self._row(*item) for item in result.results()]
            for row in filter(None, [*rows, self._sentinel_row(result)]) if self.group.rank == 0 else ():
                self.session.store.add(COLLECTIVES, row)
            self.session.store.flush()
        return sum(row is None for row in rows)

    def _pass(self, lap: LapReadings, repeat: int, turn: Sequence[int]) -> None:
        """One repeat of every case whose turn it is; the sentinel in every block."""
        self.buffers.refill()
        readings = np.full((len(lap.cases), 2, len(Reading())), math.nan)  # per case: its own, and its block's sentinel
        numbers = iter(turn)
        for block in blocks([lap.cases[number] for number in turn], self.group.ranks):
            sentinel = self._read(SENTINEL) if self._guarded else Reading()
            for case, number in zip(block, numbers, strict=False):
                readings[number] = self._read(case), sentinel
        every = np.asarray(self.group.gather_rows(readings.ravel().tolist()))
        lap.add(repeat, every.reshape(self.group.ranks, *readings.shape))

    def _read(self, case: CollectiveCase) -> Reading:
        try:
            return self.bench.read(case)
        except RuntimeError as error:
            self.session.warn(f"{case.collective} of {case.size_bytes} bytes: {str(error).splitlines()[0]}")
            return Reading()

    def _row(self, case: CollectiveCase, result: dict[str, Any] | None) -> dict[str, Any] | None:
        if result is None:
            return None
        return {
            **self.place.columns(), **case.columns(), **result,
            "calls": calls_of(case, self.group.ranks),
            # NCCL is asked apart from the times, and what it said is joined later: measurements.choices.
            "algorithm": "", "protocol": "", "channels": None,
            "rank": case.late_rank or 0,
        }  # fmt: skip

    def _sentinel_row(self, lap: LapReadings) -> dict[str, Any] | None:
        return self._row(SENTINEL, result_of(SENTINEL, lap.sentinels())) if self._guarded else None
