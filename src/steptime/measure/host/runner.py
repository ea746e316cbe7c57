"""Runs probes in one process under one profiler mode: skips what is done, says what cannot be run, keeps every row."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from steptime.measure.budget import Progress
from steptime.measure.host.bench import Bench, no_collection
from steptime.measure.host.probe import Probe, Times
from steptime.measure.host.recording import Recording, recording
from steptime.measure.session import Session
from steptime.measurements.sets import measured_set
from steptime.measurements.store import key_of

# Probes after which rows are written. Starting and ending a profiler takes a good part of a second, so it records more.
AT_ONCE = {"off": 40, "after": 40}
PER_RECORDING = 120
# Names of probes that ended a process; each rank keeps its run and the name of its running one in a file, which a sudden end
# leaves behind.
FATAL_FILE = "host_fatal.txt"


class BrokenContextError(RuntimeError):
    """The device no longer answers in this process; a new one goes on without the probe that did it."""


@dataclass
class Runner:
    """`ends_at` is a moment of the monotonic clock; `source` replaces the probes' own where it is not empty."""

    bench: Bench
    session: Session
    mode: str
    ends_at: float
    source: str = ""
    done: Counter[str] = field(default_factory=Counter)

    def run(self, probes: Sequence[Probe], progress: Progress) -> None:
        """All probes, in order, until time is up."""
        self._take_over()
        fatal = fatal_names(self.session.folder)
        wanted = [probe for probe in probes if self._wanted(probe, fatal, progress)]
        at_once = AT_ONCE.get(self.mode, PER_RECORDING)
        for part in _parts(wanted, at_once):
            self._together(part, progress)
            self.session.store.flush()
            gc.collect()
        self._running.unlink(missing_ok=True)

    @property
    def _running(self) -> Path:
        return self.session.folder / f"host_running-{self.bench.group.rank}.txt"

    def _take_over(self) -> None:
        """What ran when an earlier process of this run ended suddenly is not tried again; another run was cut off whole."""
        if self._running.exists():
            run, _, name = self._running.read_text(encoding="utf-8").partition(" ")
            if run == self.session.recipe.run:
                with (self.session.folder / FATAL_FILE).open("a", encoding="utf-8") as file:
                    file.write(f"{name}\n")
            self._running.unlink()
        self.bench.group.barrier()

    def row(self, kind: str, op: str, times_ns: list[float], **more: Any) -> dict[str, Any]:
        """A row of the set under this runner's conditions."""
        return {
            "kind": kind, "op": op, "call": "", "source": self.source or "sweep", "phase": "other", "profiler": self.mode,
            "launches": None, "cores": len(os.sched_getaffinity(0)), "share": self.bench.group.share, "times_ns": times_ns,
            **more,
        }  # fmt: skip

    def _wanted(self, probe: Probe, fatal: set[str], progress: Progress) -> bool:
        """Ranks that have to run a probe together follow the first one's decision."""
        wanted = not self._is_done(probe) and probe.name not in fatal
        if probe.together:
            wanted = bool(self.bench.group.decide(int(wanted)))
        if not wanted:
            progress.skip("measured before, or ended a process")
        return wanted

    def _is_done(self, probe: Probe) -> bool:
        rows = [
            self.row(kind, one.op, [], call=one.call, phase=one.phase) for one in _alternatives(probe) for kind in one.kinds
        ]
        return any(self.done[key_of(measured_set("host"), row)] for row in rows)

    def _together(self, probes: Sequence[Probe], progress: Progress) -> None:
        """One recording of some probes; how much each launched is known when it has ended."""
        rows: list[dict[str, Any]] = []
        bench = self.bench
        bench.marking = self.mode == "cuda" and bench.cuda and probes[0].kinds == ("op",)
        bench.loops = 0
        found = Recording()
        try:
            with recording(self.mode, read=bench.marking) as found, no_collection():
                for probe in probes:
                    rows.extend(self._asked(probe, progress))
        finally:
            self._keep(rows, found.launches())

    def _asked(self, probe: Probe, progress: Progress) -> list[dict[str, Any]]:
        """The rows of one probe; instead of `launches`, which loop of the recording it was and how many calls it made."""
        if not self._goes_on(probe):
            progress.skip("no time left")
            return []
        answer = self._try(probe, progress)
        if answer is None:
            return []
        progress.step()
        return [{**row, "launches": (self.bench.loops, self.bench.made)} for row in self._rows(*answer)]

    def _keep(self, rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> None:
        known = self.bench.marking and len(counts) == self.bench.loops
        for row in rows:
            loop, made = row["launches"]
            self.session.store.add("host", {**row, "launches": counts[loop - 1] / made if known else None})

    def _goes_on(self, probe: Probe) -> bool:
        """What ranks do together takes little time and comes last, so it has until the end of the whole budget."""
        in_budget = self.session.budget.left_s() > 0
        if probe.together:
            return bool(self.bench.group.decide(int(in_budget)))
        return in_budget and time.monotonic() < self.ends_at

    def _rows(self, probe: Probe, times: Times) -> list[dict[str, Any]]:
        source = self.source or probe.source
        return [
            self.row(kind, probe.op, list(values), call=probe.call, source=source, phase=probe.phase)
            for kind, values in zip(probe.kinds, times, strict=True)
        ]

    def _try(self, probe: Probe, progress: Progress) -> tuple[Probe, Times] | None:
        """The probe's answer, or that of the one to ask otherwise."""
        reason = ""
        self._running.write_text(f"{self.session.recipe.run} {probe.name}", encoding="utf-8")
        for one in _alternatives(probe):
            try:
                return one, one.measure(self.bench)
            except (torch.OutOfMemoryError, MemoryError):
                reason = "does not fit"
                if self.bench.cuda:
                    torch.cuda.empty_cache()
            # What an op raises on arguments it does not like is not to be foreseen; one probe less is no harm.
            except Exception as error:
                reason = f"cannot be run ({type(error).__name__})"
            self._check_device(one)
        progress.skip(reason)
        return None

    def _check_device(self, probe: Probe) -> None:
        try:
            self.bench.synchronize()
        except RuntimeError as error:
            raise BrokenContextError(f"{probe.name} broke the device's context: {error}") from error


def fatal_names(folder: Path) -> set[str]:
    """Probes that ended a process before."""
    file = folder / FATAL_FILE
    return set(file.read_text(encoding="utf-8").splitlines()) if file.exists() else set()


def _alternatives(probe: Probe) -> list[Probe]:
    return [probe, *(_alternatives(probe.otherwise) if probe.otherwise else ())]


def _parts(probes: Sequence[Probe], at_once: int) -> Iterator[list[Probe]]:
    """In order, so many at a time; single ops apart from others, because only their loops are marked and others spin too."""
    for _, same in groupby(probes, key=lambda probe: probe.kinds == ("op",)):
        row = list(same)
        yield from (row[first : first + at_once] for first in range(0, len(row), at_once))
