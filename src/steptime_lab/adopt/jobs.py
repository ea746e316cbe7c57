"""Which measuring jobs an adoption runs, what share of its time each gets, and what of that is left."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from steptime._calibrate.harness.command import CALIBRATE, Options
from steptime._calibrate.harness.ranks import RanksError
from steptime._calibrate.harness.session import Budget, Session
from steptime._files import write_whole
from steptime._hardware.description import read_json
from steptime.errors import InputError
from steptime_lab.measure.command import JOBS

SCHEMA_VERSION = 1
FILE = "progress.json"
# Shares of the time: of a machine with one GPU, collectives' goes to the others. Most of a step's error is its kernels'.
SHARES: Mapping[str, float] = {
    "kernels": 0.46, "lookups": 0.10, "host": 0.10, "calibrate": 0.08, "power": 0.16, "collectives": 0.10
}  # fmt: skip
# A calibration with less than the first takes a sample of its steps; it always gets the second, which that takes.
_WHOLE_CALIBRATION_S, _LEAST_CALIBRATION_S = 45.0, 20.0
# Power and host that are measured for less say no more than those of the nearest known machine; a calibration tells its speed.
_LEAST_OF = {"power": 60.0, "host": 40.0}
# A job that has less than this left is not started again: joining and warming up takes most of it.
LEAST_S = 12.0


@dataclass(frozen=True, slots=True)
class Share:
    """A job and the seconds that it may take in all."""

    job: str
    seconds: float


def shares(minutes: float, gpus: int) -> list[Share]:
    """The jobs of an adoption, in the order they run."""
    chosen = {job: share for job, share in SHARES.items() if gpus > 1 or job != "collectives"}
    for job, least_s in _LEAST_OF.items():
        if 60.0 * minutes * chosen[job] / sum(chosen.values()) < least_s:
            del chosen[job]
    return [Share(job, 60.0 * minutes * share / sum(chosen.values())) for job, share in chosen.items()]


@dataclass
class Spent:
    """Seconds that each job has had so far, kept beside the rows: a run that was cut off goes on with what is left."""

    file: Path
    seconds: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> Spent:
        """Of this folder; nothing was spent where there is no file."""
        file = folder / FILE
        if not file.exists():
            return cls(file, {})
        content = read_json(file, "what `steptime adopt` wrote of its progress")
        seconds = content.get("seconds")
        numbers = isinstance(seconds, dict) and all(isinstance(value, int | float) for value in seconds.values())
        if content.get("schema_version") != SCHEMA_VERSION or not numbers:
            raise InputError(f"{file}: not the progress that this steptime writes; remove it to measure every share anew")
        return cls(file, {str(job): float(value) for job, value in dict(seconds or {}).items()})

    @contextmanager
    def on(self, job: str) -> Iterator[None]:
        """Counts what a job takes, however it ends."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[job] = round(self.seconds.get(job, 0.0) + time.monotonic() - begun, 1)
            write_whole(self.file, json.dumps({"schema_version": SCHEMA_VERSION, "seconds": self.seconds}, indent=1) + "\n")


def measure(session: Session, options: Options, asked: Sequence[Share], spent: Spent) -> None:
    """Runs every job for what is left of its share."""
    for share in asked:
        left_s = share.seconds - spent.seconds.get(share.job, 0.0)
        if left_s < min(LEAST_S, share.seconds):
            continue
        asked_of_job = options
        if share.job == CALIBRATE.name:
            left_s = max(left_s, _LEAST_CALIBRATION_S)
            asked_of_job = replace(options, small=left_s < _WHOLE_CALIBRATION_S)
        print(f"adopt: {share.job}, {left_s:.0f} s", file=sys.stderr, flush=True)
        within = replace(session, budget=Budget.of_minutes(left_s / 60))
        with spent.on(share.job):
            try:
                JOBS[share.job].load().run(within, asked_of_job)
            except (RanksError, InputError) as error:
                # What it had flushed is kept, and the others are not to suffer from it.
                session.warn(f"{share.job}: {error}")
