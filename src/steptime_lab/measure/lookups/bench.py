"""Runs lookups in batches under one profile each: forward and backward, caches cold, and for some of them warm."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from steptime._calibrate.harness.clock import Clock, clock_of
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Progress, Session, Setting
from steptime._units import NS_PER_MS
from steptime_lab.measure.device_profile import COLD, WARM, MarkersError, Segment, batches_of, profile_on, skip_failed, told_by
from steptime_lab.measure.lookups.cases import LookupCase
from steptime_lab.measure.lookups.prepared import Memory, PreparedLookup, held_bytes


def row_of(
    prepared: PreparedLookup, direction: str, cache: str, repeats: Sequence[Segment], setting: Setting
) -> dict[str, Any] | None:
    """The row of a lookup in one direction and cache state; nothing where nothing was launched."""
    told = told_by(repeats)
    if told is None:
        return None
    case, every = prepared.case, prepared.statistics
    return {
        **case.asked(direction, cache, setting.share, setting.others),
        "tables": len(case.dims),
        "series": case.series,
        "pooling": [item.pooling for item in every],
        "pooling_spread": [item.pooling_spread for item in every],
        "lookups": [item.lookups for item in every],
        "unique": [item.unique for item in every],
        "reuse": [list(item.reuse) for item in every],
        **told,
    }


_RUNS = 3
# Long enough for the host to issue all runs before the first one starts, so that what is timed is the device alone.
_AHEAD_NS = 30 * NS_PER_MS


def event_times_ns(prepared: PreparedLookup, flush: Callable[[], None], clock: Clock) -> tuple[float, float]:
    """Median time of the forward and of the backward pass with cold caches, gaps between their kernels included."""
    clock.wait(clock.mark())
    clock.run_ahead(_AHEAD_NS)
    runs = []
    for _ in range(_RUNS):
        flush()
        begun = clock.mark()
        out = prepared.forward()
        looked_up = clock.mark()
        flush()
        turned = clock.mark()
        prepared.backward(out)
        runs.append((begun, looked_up, turned, clock.mark()))
    clock.wait(runs[-1][-1])
    times_ns = [(clock.between_ns(a, b), clock.between_ns(c, d)) for a, b, c, d in runs]
    forward, backward = np.median(np.array(times_ns), axis=0)
    return float(forward), float(backward)


FORWARD, BACKWARD = "forward", "backward"

# Cases per profile: about a second, so that little is lost with a process.
_BATCH = 60
# What the prepared cases of one batch may hold, of all device memory, over the ranks that share it.
_HELD_SHARE = 0.1
_CPU_HELD_BYTES = 1 << 28
# Blocks that the allocator keeps beyond this share of a rank's memory are given back between batches.
_KEPT_SHARE = 0.75

_REPEATS, _WARM_REPEATS = 3, 2
_WARM_CASES = 0.6  # share of cases that are measured warm too, but for those that always are
_EVENT_CASES = 0.02  # share of cases that are timed with events too
_LONG_ENOUGH_NS = 20_000


@dataclass
class _ReadyLookup:
    """A case with what its repeats did so far."""

    prepared: PreparedLookup
    segments: dict[tuple[str, str], list[Segment]] = field(default_factory=dict)
    failed: bool = False

    @property
    def warm(self) -> bool:
        return self.prepared.case.warm or self.prepared.case.draw("warm") < _WARM_CASES


class LookupBench:
    """Measures batches of cases on one rank."""

    def __init__(self, group: Group, session: Session, memory: Memory, progress: Progress) -> None:
        self.group, self._session, self._memory, self._progress = group, session, memory, progress
        self._cuda = group.device.type == "cuda"
        self._total_bytes = torch.cuda.mem_get_info(group.device)[1] if self._cuda else 0
        self._warned: set[str] = set()

    def alone(self) -> LookupBench:
        """The same, not waiting for other ranks."""
        return LookupBench(replace(self.group, ranks=1), self._session, self._memory, self._progress)

    def batches(self, cases: Sequence[LookupCase]) -> Iterator[list[LookupCase]]:
        """Cut by count and by the bytes that prepared cases hold: the same on every rank."""
        limit = _HELD_SHARE * self._total_bytes / self.group.share if self._cuda else _CPU_HELD_BYTES
        return batches_of(cases, held_bytes, _BATCH, limit)

    def measure(self, batch: Sequence[LookupCase], setting: Setting) -> list[dict[str, Any]]:
        """The rows of a batch: two or four for every case that runs."""
        ready = [item for item in map(self._prepare, batch) if item is not None]
        self.group.barrier()
        gc.collect()
        gc.disable()
        try:
            self._profile(ready, setting)
        except MarkersError as error:
            self._progress.skip("the profile lost records", len(ready))
            self._session.warn(f"a batch of {len(ready)} lookups is dropped: {error}")
            return []
        finally:
            gc.enable()
        rows = [row for item in ready for row in self._rows(item, setting)]
        ready.clear()
        if self._cuda and torch.cuda.memory_reserved() > _KEPT_SHARE * self._total_bytes / self.group.share:
            torch.cuda.empty_cache()
        return rows

    def try_out(self, cases: Sequence[LookupCase]) -> None:
        """Runs cases unrecorded: kernels are compiled and libraries loaded at their first use."""
        for case in cases:
            item = self._prepare(case)
            if item is not None:
                self._issue(item, COLD, lambda _: None)
        self.group.synchronize()

    def _prepare(self, case: LookupCase) -> _ReadyLookup | None:
        try:
            return _ReadyLookup(PreparedLookup(case, self._memory))
        except Exception as error:  # torch's, Triton's and our own have no other ancestor in common
            self._say(case, error)
            return None

    def _profile(self, ready: Sequence[_ReadyLookup], setting: Setting) -> None:
        random = np.random.default_rng([setting.seed, len(ready)])
        owners: list[tuple[_ReadyLookup, str, str] | None] = []
        with profile_on(self.group.device) as profile:
            for repeat in range(_REPEATS):
                for index in random.permutation(len(ready)):
                    item = ready[index]
                    owners += self._issue(item, COLD, profile.mark)
                    if item.warm and repeat < _WARM_REPEATS:
                        owners += self._issue(item, WARM, profile.mark)
        for segment, owner in zip(profile.segments(), owners, strict=True):
            if owner is not None:
                owner[0].segments.setdefault(owner[1:], []).append(segment)

    def _issue(self, one: _ReadyLookup, cache: str, mark: Callable[[str], None]) -> list[tuple[_ReadyLookup, str, str] | None]:
        """One forward and one backward run; says for every segment it marked whose it is (nobody's: what was between them)."""
        owners: list[tuple[_ReadyLookup, str, str] | None] = []
        if one.failed:
            return owners
        try:
            mark("between")
            owners.append(None)
            self._between(one, cache, first=True)
            mark(FORWARD)
            owners.append((one, FORWARD, cache))
            out = one.prepared.forward()
            mark("between")
            owners.append(None)
            self._between(one, cache, first=False)
            mark(BACKWARD)
            owners.append((one, BACKWARD, cache))
            one.prepared.backward(out)
        except Exception as error:
            # What was launched of it is not a whole run.
            owners[-1] = None
            one.failed = True
            self._say(one.prepared.case, error)
        return owners

    def _between(self, one: _ReadyLookup, cache: str, *, first: bool) -> None:
        if cache == COLD:
            self._memory.flush()
        elif first:
            one.prepared.forward()

    def _rows(self, one: _ReadyLookup, setting: Setting) -> list[dict[str, Any]]:
        case = one.prepared.case
        results = [
            row_of(one.prepared, direction, cache, segments, setting) for (direction, cache), segments in one.segments.items()
        ]
        rows = [row for row in results if row is not None]
        if one.failed or not rows:
            if not one.failed:
                self._progress.skip("launches nothing on the device")
            return []
        self._progress.step()
        if case.draw("events") < _EVENT_CASES and case.optimizer != "adagrad":
            self._add_events(one, rows)
        return rows

    def _add_events(self, one: _ReadyLookup, rows: Sequence[dict[str, Any]]) -> None:
        try:
            result = event_times_ns(one.prepared, self._memory.flush, clock_of(self.group))
        except Exception as error:
            self._say(one.prepared.case, error)
            return
        for row in rows:
            if row["cache"] == COLD and (not self._cuda or float(np.median(row["times_ns"])) >= _LONG_ENOUGH_NS):
                row["event_ns"] = result[row["direction"] == BACKWARD]

    def _say(self, case: LookupCase, error: Exception) -> None:
        reason = skip_failed(self.group, self._progress, error, str(case))
        if reason and reason not in self._warned:
            self._warned.add(reason)
            self._session.warn(f"a lookup of {len(case.dims)} tables ({case.implementation}) failed: {reason}")
