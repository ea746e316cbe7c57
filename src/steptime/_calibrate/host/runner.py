"""Runs probes in one process under one profiler mode: skips what is done, says what cannot be run, keeps every row."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from steptime._calibrate.harness.budget import Progress
from steptime._calibrate.harness.collector import no_collector
from steptime._calibrate.harness.session import Session
from steptime._calibrate.harness.setting import LostContextError
from steptime._calibrate.host.answer import Answer
from steptime._calibrate.host.bench import Bench
from steptime._calibrate.host.loading import load
from steptime._calibrate.host.probe import Probe, Times
from steptime._calibrate.host.recording import Recording, recording
from steptime._calibrate.host.reference import Reference, between
from steptime._measurements.sets import measured_set
from steptime._measurements.store import key_of

# Probes between which the garbage collector runs. Starting and ending a profiler takes a good part of a second as well.
AT_ONCE = 240
# Names of probes that ended a process; each rank keeps its run and the name of its running one in a file, which a sudden end
# leaves behind.
FATAL_FILE = "host_fatal.txt"


@dataclass
class Runner:
    """Goes through its probes `passes` times, so that the bursts of one are seconds apart: adjacent ones share a bad patch.

    `seconds` count from the first pass; `source` replaces the probes' own where it is not empty.
    """

    bench: Bench
    session: Session
    mode: str
    seconds: float
    passes: int = 1
    source: str = ""
    done: Counter[str] = field(default_factory=Counter)
    _answers: dict[int, Answer] = field(default_factory=dict)
    _failed: set[int] = field(default_factory=set)
    _pass_ends_at: float = 0.0

    def run(self, probes: Sequence[Probe], progress: Progress) -> None:
        """All probes, in order and over again, until time is up; their rows are written at the end, whatever it is."""
        self._take_over()
        fatal = fatal_names(self.session.folder)
        wanted = dict(enumerate(probe for probe in probes if self._wanted(probe, fatal, progress)))
        load(self.bench, wanted.values())
        reference, began = Reference(self.bench), time.monotonic()
        gc.collect()
        gc.freeze()  # what is there now need not be looked through between the parts of every pass
        try:
            for ends_at in _ends_of_passes(began, self.seconds, self.passes):
                self._pass_ends_at = ends_at
                for part in _parts(wanted, AT_ONCE):
                    self._part(part, reference, progress)
                self._running.unlink(missing_ok=True)
        finally:
            gc.unfreeze()
            self._keep(len(wanted), progress)

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

    def _part(self, part: Mapping[int, Probe], reference: Reference, progress: Progress) -> None:
        """One recording of some probes; how much each launched is known when it has ended."""
        if not self._in_time() and not any(probe.together for probe in part.values()):
            return
        bench = self.bench
        bench.marking = self.mode == "cuda" and bench.cuda and all(probe.kinds == ("op",) for probe in part.values())
        bench.loops = 0
        looped: dict[int, tuple[int, int]] = {}  # probe -> which loop of the recording it was, how many calls that made
        found = Recording()
        try:
            with recording(self.mode, read=bench.marking) as found, no_collector():
                before = reference.read()
                for number, probe in part.items():
                    times = self._burst(number, probe, progress)
                    if times is not None:
                        after = reference.read()
                        self._answers[number].add(times, between(before, after))
                        looped[number] = bench.loops, bench.made
                        before = after
        finally:
            counts = found.launches()
            if bench.marking and len(counts) == bench.loops:
                for number, (loop, made) in looped.items():
                    self._answers[number].launches = counts[loop - 1] / made

    def _burst(self, number: int, probe: Probe, progress: Progress) -> Times | None:
        """A probe's times in this pass; none where there is no time for it, or where it failed before or now."""
        if not self._goes_on(number, probe):
            return None
        known = self._answers.get(number)
        answer = self._try(replace(known.probe, otherwise=None) if known else probe, progress)
        if answer is None:
            self._failed.add(number)
            return None
        progress.step()
        self._answers.setdefault(number, Answer(answer[0]))
        return answer[1]

    def _goes_on(self, number: int, probe: Probe) -> bool:
        goes_on = self._in_time() and number not in self._failed
        return bool(self.bench.group.decide(int(goes_on))) if probe.together else goes_on

    def _in_time(self) -> bool:
        return self.session.budget.left_s() > 0 and time.monotonic() < self._pass_ends_at

    def _keep(self, wanted: int, progress: Progress) -> None:
        for _, answer in sorted(self._answers.items()):
            for row in answer.rows():
                self.session.store.add("host", self.row(**{**row, "source": self.source or row["source"]}))
        self.session.store.flush()
        if left := wanted - len(self._answers.keys() | self._failed):
            progress.skip("no time left", left)

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
            raise LostContextError(f"{probe.name} broke the device's context: {error}") from error


def fatal_names(folder: Path) -> set[str]:
    """Probes that ended a process before."""
    file = folder / FATAL_FILE
    return set(file.read_text(encoding="utf-8").splitlines()) if file.exists() else set()


def _alternatives(probe: Probe) -> list[Probe]:
    return [probe, *(_alternatives(probe.otherwise) if probe.otherwise else ())]


def _parts(probes: Mapping[int, Probe], at_once: int) -> Iterator[dict[int, Probe]]:
    """In order, so many at a time; single ops apart from others, because only their loops are marked and others spin too."""
    for _, same in groupby(probes.items(), key=lambda entry: entry[1].kinds == ("op",)):
        row = list(same)
        yield from (dict(row[first : first + at_once]) for first in range(0, len(row), at_once))


def _ends_of_passes(begins_at: float, seconds: float, passes: int) -> list[float]:
    """Where time is short, what comes first in the list gets all its bursts: each pass may take as long as the others.

    The first, which has to load and to compile, twice as long.
    """
    return [begins_at + seconds * (number + 2) / (passes + 1) for number in range(passes)]
