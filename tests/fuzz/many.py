"""Many cases on several processes: what failed is written as it happens, and a case that cannot be stopped ends its process."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.kinds import case_of, place_of
from tests.fuzz.player import Outcome, played

# Of wall time: the player's own limit counts CPU time and needs Python to run now and then.
STUCK_SECONDS = 120.0
# What is remembered of cases is forgotten with the process that played them.
CASES_OF_A_PROCESS = 200
SAYS_SECONDS = 15.0


@dataclass
class Tally:
    """What came of cases, by kind of input."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    cpu_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by kind of input
    slowest: float = 0.0
    peak_bytes: int = 0

    def add(self, kind: str, number: int, outcome: Outcome) -> dict[str, Any] | None:
        """Counts a case; what failed, as a row."""
        self.outcomes.setdefault(kind, Counter())[outcome.kind] += 1
        self.cpu_seconds[kind] += outcome.cpu_seconds
        self.slowest = max(self.slowest, outcome.cpu_seconds)
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        if not outcome.bad:
            return None
        row = {"kind": kind, "case": number, "outcome": outcome.kind, "message": outcome.message}
        self.failures.append(row)
        return row

    @property
    def count(self) -> int:
        """Cases in all."""
        return sum(sum(each.values()) for each in self.outcomes.values())

    def lines(self) -> Iterator[str]:
        """A table by kind, and what the cases took."""
        for kind, counts in sorted(self.outcomes.items()):
            took = f"{self.cpu_seconds[kind] / sum(counts.values()):.3f} s"
            yield f"{kind:20}{took}  " + "  ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        mean = sum(self.cpu_seconds.values()) / max(1, self.count)
        yield (
            f"{self.count} cases, {len(self.failures)} bad; {mean:.3f} s of CPU time each, {self.slowest:.1f} s at most; "
            f"{self.peak_bytes / 1e9:.2f} GB at most"
        )


@dataclass(frozen=True)
class Played:
    """Which case it was and what came of it."""

    index: int
    kind: str
    number: int
    outcome: Outcome


def play(kind: str, number: int) -> Outcome:
    """One case, in this process."""
    with TemporaryDirectory(prefix="fuzz-") as folder:
        return played(case_of(kind, number), Path(folder) / f"{kind}-{number}")


def play_many(indices: Sequence[int], places: Sequence[tuple[str, int]], jobs: int) -> Iterator[Played]:
    """The cases at these places, as they end."""
    queue = list(zip(indices, places, strict=True))[::-1]
    workers: dict[Connection, _Worker] = {}
    try:
        while queue or workers:
            while queue and len(workers) < jobs:
                worker = _Worker.of([queue.pop() for _ in range(min(CASES_OF_A_PROCESS, _share(len(queue), jobs)))])
                workers[worker.pipe] = worker
            for pipe in wait(list(workers), timeout=1.0):
                assert isinstance(pipe, Connection)
                worker = workers[pipe]
                try:
                    yield worker.ended(pipe.recv())
                except EOFError:
                    del workers[pipe]
                    yield from _lost(worker, queue)
            for worker in [each for each in workers.values() if each.stuck()]:
                worker.process.kill()
    finally:
        for worker in workers.values():
            worker.process.kill()


def _share(waiting: int, jobs: int) -> int:
    """Of what waits: less towards the end, so that all processes end together."""
    return max(1, min(waiting, -(-waiting // (2 * jobs))))


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    cases: list[tuple[int, tuple[str, int]]]
    done: int = 0
    since: float = 0.0

    @classmethod
    def of(cls, cases: list[tuple[int, tuple[str, int]]]) -> _Worker:
        context = get_context("fork")
        pipe, end = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(cases, end))
        process.start()
        end.close()
        return cls(process, pipe, cases, since=time.monotonic())

    def ended(self, outcome: Outcome) -> Played:
        index, (kind, number) = self.cases[self.done]
        self.done, self.since = self.done + 1, time.monotonic()
        return Played(index, kind, number, outcome)

    def stuck(self) -> bool:
        return self.done < len(self.cases) and time.monotonic() - self.since > STUCK_SECONDS


def _lost(worker: _Worker, queue: list[tuple[int, tuple[str, int]]]) -> Iterator[Played]:
    """What a process that ended leaves: the case it died of, and those that another has to play."""
    worker.process.join()
    if worker.done == len(worker.cases):
        return
    queue += worker.cases[: worker.done : -1]
    yield worker.ended(Outcome("died", f"the process ended with {worker.process.exitcode}", 0.0, 0))


def _work(cases: list[tuple[int, tuple[str, int]]], end: Connection) -> None:
    for _, (kind, number) in cases:
        end.send(play(kind, number))


@dataclass
class _Progress:
    """How far a run is: all cases before `next` are done."""

    next: int
    count: int
    beyond: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    def add(self, index: int) -> None:
        self.beyond.add(index)
        while self.next in self.beyond:
            self.beyond.remove(self.next)
            self.next += 1

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def line(self, tally: Tally) -> str | None:
        """Once in a while; a run that is cut off goes on with the case that it names."""
        if time.monotonic() - self.said < SAYS_SECONDS:
            return None
        self.said = time.monotonic()
        done = f"{tally.count} of {self.count}, {len(tally.failures)} bad, {self.seconds:.0f} s"
        return f"... {done}; go on with --from {self.next}"


def fuzz(first: int, count: int, jobs: int, out: Path | None, seconds: float | None, kinds: Sequence[str]) -> Tally:
    """Plays cases, says how far it is once in a while, and writes what failed as it happens, and at the end the table."""
    indices = range(first, first + count)
    places = [place_of(index) if not kinds else (kinds[index % len(kinds)], index // len(kinds)) for index in indices]
    tally, progress = Tally(), _Progress(first, count)
    with (out or Path(os.devnull)).open("a", encoding="utf-8") as file:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        for each in play_many(indices, places, jobs):
            progress.add(each.index)
            row = tally.add(each.kind, each.number, each.outcome)
            if row is not None:
                say(json.dumps(row))
            line = progress.line(tally)
            if line is not None:
                say(line)
            if seconds is not None and progress.seconds > seconds:
                say(f"stopped after {seconds:.0f} s; go on with --from {progress.next}")
                break
        for line in tally.lines():
            say(line)
    return tally
