"""Runs probes in one process: skips what is done, says what cannot be run, keeps every row."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from steptime._calibrate.harness.group import no_collector
from steptime._calibrate.harness.session import LostContextError, Progress, Session
from steptime._measurements.sets import HOST
from steptime._measurements.store import key_of
from steptime_lab.measure.host.bench import HostBench, HostSpeed, Probe, Reference, Times, between
from steptime_lab.measure.host.representative import load

# Probes between which the garbage collector runs. Starting and ending a profiler takes a good part of a second as well.
AT_ONCE = 240


class ProbeTimes:
    """What the bursts of a probe, or of its alternative, took so far; `launches` per call where a recording shows them."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.launches: float | None = None
        self._times: tuple[list[float], ...] = tuple([] for _ in probe.kinds)
        self._speeds: tuple[list[HostSpeed], ...] = tuple([] for _ in probe.kinds)

    def add(self, times: Times, speed: HostSpeed) -> None:
        """One pass: a list of times per kind, all of them taken at about this speed."""
        for kept, speeds, values in zip(self._times, self._speeds, times, strict=True):
            kept.extend(values)
            speeds.extend([speed] * len(values))

    def rows(self) -> list[dict[str, Any]]:
        """One per kind, less what is the same for all rows of a process; none before the first pass."""
        return [
            {
                "kind": kind, "op": self.probe.op, "call": self.probe.call, "source": self.probe.source,
                "phase": self.probe.phase, "launches": self.launches, "times_ns": times,
                "reference_cpu_ns": [speed.cpu_ns for speed in speeds],
                "reference_launch_ns": [speed.launch_ns for speed in speeds],
            }
            for kind, times, speeds in zip(self.probe.kinds, self._times, self._speeds, strict=True) if times
        ]  # fmt: skip


@dataclass
class Runner:
    """Goes through its probes `passes` times, so that the bursts of one are seconds apart: adjacent ones share a bad patch.

    `seconds` count from the first pass; `source` replaces the probes' own where it is not empty.
    """

    bench: HostBench
    session: Session
    seconds: float
    passes: int = 1
    source: str = ""
    mode: str = "off"  # the profiler, as rows have it
    done: Counter[str] = field(default_factory=Counter)
    avoided: frozenset[str] = frozenset()  # names of probes that ended a process
    _results: dict[int, ProbeTimes] = field(default_factory=dict)
    _failed: set[int] = field(default_factory=set)
    _pass_ends_at: float = 0.0

    def run(self, probes: Sequence[Probe], progress: Progress) -> None:
        """All probes, in order and over again, until time is up; their rows are written at the end, whatever it is."""
        self.bench.group.barrier()
        wanted = dict(enumerate(probe for probe in probes if self._wanted(probe, progress)))
        load(self.bench, wanted.values())
        reference, began = Reference(self.bench), time.monotonic()
        gc.collect()
        gc.freeze()  # what is there now need not be looked through between the blocks of every pass
        try:
            for ends_at in _ends_of_passes(began, self.seconds, self.passes):
                self._pass_ends_at = ends_at
                for block in _blocks(wanted, AT_ONCE):
                    self._run_block(block, reference, progress)
        finally:
            gc.unfreeze()
            self._store(len(wanted), progress)

    def row(self, kind: str, op: str, times_ns: list[float], **more: Any) -> dict[str, Any]:
        """A row of the set under this runner's conditions."""
        return {
            "kind": kind, "op": op, "call": "", "source": self.source or "sweep", "phase": "other", "profiler": self.mode,
            "launches": None, "cores": len(os.sched_getaffinity(0)), "share": self.bench.group.share, "times_ns": times_ns,
            **more,
        }  # fmt: skip

    def around(self, block: Mapping[int, Probe]) -> AbstractContextManager[None]:  # noqa: ARG002
        """What a block of probes runs in; a profiler, where one is a condition."""
        return nullcontext()

    def starts(self, probe: Probe) -> None:
        """Called before a probe runs."""

    def ran(self, number: int) -> None:
        """Called after a probe ran."""

    def _wanted(self, probe: Probe, progress: Progress) -> bool:
        """Ranks that have to run a probe together follow the first one's decision."""
        wanted = not self._is_done(probe) and probe.name not in self.avoided
        if probe.together:
            wanted = bool(self.bench.group.decide(int(wanted)))
        if not wanted:
            progress.skip("measured before, or ended a process")
        return wanted

    def _is_done(self, probe: Probe) -> bool:
        rows = [self.row(kind, each.op, [], call=each.call, phase=each.phase) for each in probe.ways() for kind in each.kinds]
        return any(self.done[key_of(HOST, row)] for row in rows)

    def _run_block(self, block: Mapping[int, Probe], reference: Reference, progress: Progress) -> None:
        """Some probes one after another, with the host's speed before and after each."""
        if not self._in_time() and not any(probe.together for probe in block.values()):
            return
        with self.around(block), no_collector():
            before = reference.read()
            for number, probe in block.items():
                times = self._burst(number, probe, progress)
                if times is not None:
                    after = reference.read()
                    self._results[number].add(times, between(before, after))
                    self.ran(number)
                    before = after

    def _burst(self, number: int, probe: Probe, progress: Progress) -> Times | None:
        """A probe's times in this pass; none where there is no time for it, or where it failed before or now."""
        if not self._goes_on(number, probe):
            return None
        known = self._results.get(number)
        answer = self._try(replace(known.probe, otherwise=None) if known else probe, progress)
        if answer is None:
            self._failed.add(number)
            return None
        progress.step()
        self._results.setdefault(number, ProbeTimes(answer[0]))
        return answer[1]

    def _goes_on(self, number: int, probe: Probe) -> bool:
        goes_on = self._in_time() and number not in self._failed
        return bool(self.bench.group.decide(int(goes_on))) if probe.together else goes_on

    def _in_time(self) -> bool:
        return self.session.budget.left_s() > 0 and time.monotonic() < self._pass_ends_at

    def _store(self, wanted: int, progress: Progress) -> None:
        for _, result in sorted(self._results.items()):
            for row in result.rows():
                self.session.store.add(HOST, self.row(**{**row, "source": self.source or row["source"]}))
        self.session.store.flush()
        if left := wanted - len(self._results.keys() | self._failed):
            progress.skip("no time left", left)

    def _try(self, probe: Probe, progress: Progress) -> tuple[Probe, Times] | None:
        """The probe's times, or those of its alternative."""
        reason = ""
        self.starts(probe)
        for way in probe.ways():
            try:
                return way, way.measure(self.bench)
            except (torch.OutOfMemoryError, MemoryError):
                reason = "does not fit"
                if self.bench.cuda:
                    torch.cuda.empty_cache()
            # What an op raises on arguments it does not like is not to be foreseen; one probe less is no harm.
            except Exception as error:
                reason = f"cannot be run ({type(error).__name__})"
            self._check_device(way)
        progress.skip(reason)
        return None

    def _check_device(self, probe: Probe) -> None:
        try:
            self.bench.synchronize()
        except RuntimeError as error:
            raise LostContextError(f"{probe.name} broke the device's context: {error}") from error


def _blocks(probes: Mapping[int, Probe], at_once: int) -> Iterator[dict[int, Probe]]:
    """In order, so many at a time; single ops apart from others, because only their loops are marked and others spin too."""
    for _, same in groupby(probes.items(), key=lambda entry: entry[1].kinds == ("op",)):
        row = list(same)
        yield from (dict(row[first : first + at_once]) for first in range(0, len(row), at_once))


def _ends_of_passes(begins_at: float, seconds: float, passes: int) -> list[float]:
    """Where time is short, what comes first in the list gets all its bursts: each pass may take as long as the others.

    The first, which has to load and to compile, twice as long.
    """
    return [begins_at + seconds * (number + 2) / (passes + 1) for number in range(passes)]
