"""The sweep of one group of ranks: blocks of cases, repeats spread over each block, rows flushed after it."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steptime.measure.budget import Progress
from steptime.measure.collectives.calls import Buffers, call_of
from steptime.measure.collectives.cases import SENTINEL, Case, blocks, calls_of, cost_ns, fitting
from steptime.measure.collectives.choices import Table, choice_of
from steptime.measure.collectives.fabrics import Place
from steptime.measure.collectives.timing import Bench, Reading, result_of
from steptime.measure.group import Group
from steptime.measure.session import Session
from steptime.units import MIB

# Sizes that make NCCL connect what it uses: small, middling and large messages go different ways.
_FIRST_SIZES = (4096, 256 * 1024, 4 * MIB, 32 * MIB)
# Kept back for the last flush and for leaving the group.
_RESERVE_S = 1.0


class Sweep:
    """One group's measurements at one place."""

    def __init__(self, group: Group, session: Session, place: Place, choices: Table, cases: Sequence[Case]) -> None:
        self.group = group
        self.session = session
        self.place = place
        self.choices = choices
        self.buffers = Buffers(group, cases)
        self.bench = Bench(group, self.buffers)
        self._guarded = any(c.collective == SENTINEL.collective and c.size_bytes >= SENTINEL.size_bytes for c in cases)
        self._pace = 1.0  # seconds that cases take over what was planned for them

    def supported(self, cases: Sequence[Case]) -> set[str]:
        """The collectives this backend can do; makes it connect what it will use."""
        largest = {case.collective: max(c.size_bytes for c in cases if c.collective == case.collective) for case in cases}
        return {name for name, size in largest.items() if self.group.all_agree(self._tried(name, size))}

    def _tried(self, collective: str, largest_bytes: int) -> bool:
        sizes = [fitting(collective, size, self.group.ranks) for size in _FIRST_SIZES]
        try:
            for size in [size for size in sizes if size <= largest_bytes] or [largest_bytes]:
                for _ in range(2):
                    call_of(Case(collective, size), self.group, self.buffers)()
            self.group.synchronize()
        except (RuntimeError, NotImplementedError, ValueError):
            return False
        return True

    def measure(self, cases: Sequence[Case], progress: Progress, seed: int) -> int:
        """Blocks while there is time; how many rows were added. A block that does not fit is left out, smaller ones may fit."""
        added = 0
        for number, block in enumerate(blocks(cases, self.group.ranks, seed)):
            planned_s = sum(cost_ns(case, self.group.ranks) for case in block) / 1e9
            if not self.group.decide(int(self.session.budget.left_s() - _RESERVE_S > planned_s * self._pace)):
                progress.skip("no time left", len(block))
                continue
            began = time.monotonic()
            guarded = [*block, SENTINEL] if number and self._guarded and SENTINEL not in block else block
            failed = self._block(guarded, seed + number)
            if failed:
                progress.skip("failed or without company to the end", failed)
            progress.step(len(block) - failed)
            added += len(guarded) - failed
            self._pace = 0.5 * self._pace + 0.5 * (time.monotonic() - began) / planned_s
        return added

    def _block(self, block: Sequence[Case], seed: int) -> int:
        """Measures a block and flushes its rows; how many of its cases failed."""
        self.buffers.refill()
        most = max(case.repeats for case in block)
        readings = np.full((len(block), most, len(Reading())), math.nan)
        order = random.Random(seed)
        for repeat in range(most):
            turn = [number for number, case in enumerate(block) if repeat < case.repeats]
            order.shuffle(turn)
            for number in turn:
                readings[number, repeat] = self._read(block[number])
        ranks = np.asarray(self.group.gather_rows(readings.ravel().tolist())).reshape(self.group.ranks, *readings.shape)
        rows = [self._row(case, ranks[:, number]) for number, case in enumerate(block)]
        for row in filter(None, rows):
            if self.group.rank == 0:
                self.session.store.add("collectives", row)
        self.session.store.flush()
        return sum(row is None for row in rows)

    def _read(self, case: Case) -> Reading:
        try:
            return self.bench.read(case)
        except RuntimeError as error:
            self.session.warn(f"{case.collective} of {case.size_bytes} bytes: {str(error).splitlines()[0]}")
            return Reading()

    def _row(self, case: Case, readings: np.ndarray) -> dict[str, Any] | None:
        result = result_of(case, readings)
        if result is None:
            return None
        choice = choice_of(case, self.choices)
        return {
            **self.place.columns(), **case.columns(), **result,
            "calls": calls_of(case, self.group.ranks),
            "algorithm": choice.algorithm, "protocol": choice.protocol, "channels": choice.channels,
            "rank": case.late_rank or 0,
        }  # fmt: skip


def sweep(group: Group, session: Session, plan: Mapping[str, Any], wanted: Sequence[Sequence[Case]]) -> None:
    """Measures what is wanted at the plan's place and not yet there."""
    place = Place.from_dict(plan["place"])
    done = set(plan["done"])
    left = [[case for case in tier if case.key(place) not in done] for tier in wanted]
    every = [case for tier in left for case in tier]
    if not every:
        return
    progress = session.progress(f"collectives, {place.ranks} ranks, {place.fabric}", len(every))
    found = Sweep(group, session, place, plan["choices"], every)
    able = found.supported(every)
    gc.collect()
    gc.disable()
    for number, tier in enumerate(left):
        for name in {case.collective for case in tier} - able:
            progress.skip(f"no {name} here", sum(case.collective == name for case in tier))
        found.measure([case for case in tier if case.collective in able], progress, int(plan["seed"]) + 1000 * number)
    gc.enable()
    progress.close()
