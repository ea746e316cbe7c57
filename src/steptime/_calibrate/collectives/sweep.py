"""The sweep of one group of ranks: laps of cases, one repeat of each in every pass of a lap, rows flushed after it."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from steptime._calibrate.collectives.cases import (
    MAIN,
    SENTINEL,
    CollectiveCase,
    Place,
    blocks,
    calls_of,
    cost_ns,
    fitting,
    laps,
    once_ns,
    repeats_of,
)
from steptime._calibrate.collectives.timing import Buffers, CollectiveBench, Reading, call_of, result_of
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Budget, Progress, Session
from steptime._measurements.sets import COLLECTIVES
from steptime._units import MIB


class LapReadings:
    """Readings of some cases; a pass adds one of each, with that of the sentinel in the same block."""

    def __init__(self, cases: Sequence[CollectiveCase], ranks: int, passes: int) -> None:
        self.cases = cases
        # (ranks, cases, passes, own | sentinel, fields of a reading)
        self._readings = np.full((ranks, len(cases), passes, 2, len(Reading())), math.nan)

    def add(self, repeat: int, readings: np.ndarray) -> None:
        """One pass, of shape (ranks, cases, 2, fields); NaN where it was not a case's turn."""
        self._readings[:, :, repeat] = readings

    def results(self) -> Iterator[tuple[CollectiveCase, dict[str, Any] | None]]:
        """Every case with the measured columns of its row."""
        for number, case in enumerate(self.cases):
            own, beside = self._readings[:, number, :, 0], self._readings[:, number, :, 1]
            # NaN where the sentinel is not timed; it begins at 0.
            yield case, result_of(case, own, reference_ns=beside[:, :, 1].max(axis=0))

    def sentinels(self) -> np.ndarray:
        """What the sentinel took in each block, in order, of shape (ranks, blocks, fields)."""
        flat = np.moveaxis(self._readings[:, :, :, 1], 2, 1).reshape(len(self._readings), -1, len(Reading()))
        known = flat[:, ~np.isnan(flat[:, :, 1]).any(axis=0)]
        # All cases of a block carry the same one.
        _, first = np.unique(known[0, :, 1], return_index=True)
        result: np.ndarray = known[:, np.sort(first)]
        return result


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
            sentinel = self._row(SENTINEL, result_of(SENTINEL, result.sentinels())) if self._guarded else None
            for row in filter(None, [*rows, sentinel]) if self.group.rank == 0 else ():
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


# The largest is DDP's bucket.
SIZES = (1024, 64 * 1024, 512 * 1024, 2 * MIB, 8 * MIB, 25 * MIB)


def sample(group: Group, session: Session, fabric: str, *, seconds: float = 3.0, largest_bytes: int = SIZES[-1]) -> int:
    """Adds rows of all_reduce and all_to_all at a few sizes; how many. Every rank calls it; one rank alone adds none.

    `fabric` names the settings the group was started with. Takes no longer than `seconds`, nor than the session has left.
    """
    if group.ranks == 1:
        return 0
    place = Place(group.ranks, fabric, group.share)
    cases = [CollectiveCase(name, fitting(name, size, group.ranks)) for size in SIZES for name in MAIN if size <= largest_bytes]
    budget = Budget(min(session.budget.ends_at, Budget.of_minutes(seconds / 60).ends_at + 1.0))
    result = Sweep(group, replace(session, budget=budget), place, cases)
    result.supported(cases)
    collecting = gc.isenabled()
    gc.disable()
    try:
        return result.measure(cases, Progress("collectives, a sample", len(cases), budget, quiet=True), seed=0)
    finally:
        if collecting:
            gc.enable()
