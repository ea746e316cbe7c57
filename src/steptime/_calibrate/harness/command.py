"""Jobs and their options: runs a measuring job from a command line, in this machine's conditions.

It needs nothing but torch, numpy, pyarrow and the standard library, so that the lab's `python -m steptime_lab.measure JOB ...`
works where nothing else is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from steptime._calibrate.harness.conditions import NO_GPU, Clocks, disturbances, gpus, recipe, strangers
from steptime._calibrate.harness.ranks import FAILED, LATE
from steptime._calibrate.harness.session import Session, clock_file
from steptime._measurements.store import devices_of_rows
from steptime._units import DURATION, MINUTES
from steptime.errors import InputError, printable


@dataclass(frozen=True, slots=True)
class Job:
    """Its module has `run(session, options)` for the command, `work(group, session, plan)` for every rank it starts, and
    `names(options)` where `--only` may name something. It is imported when the job runs."""

    name: str
    about: str
    module: str
    ranks: tuple[int, ...] = (1,)  # by default
    minutes: float = 5.0  # by default
    command: str = "steptime measure"
    takes_plans: bool = False  # whether it has --plans
    takes_seconds: bool = False  # whether it has --seconds and --warm-up

    @property
    def words(self) -> str:
        """The command line that runs it."""
        return f"{self.command} {self.name}"

    def load(self) -> ModuleType:
        """The module."""
        return import_module(self.module)


CALIBRATE = Job(
    "calibrate",
    "this machine's host and fabric (with --from-run RECORDING instead, they and the device are taken from a recording)",
    "steptime._calibrate.calibrate",
    minutes=1.5,
    command="steptime",
)


# At its power cap a card takes up to 7 % longer once it is warm; seconds of each case by default.
WARM_UP_S, TIMED_S = 5.0, 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """Which ranks, on what, how much. A job ignores what does not concern it."""

    ranks: tuple[int, ...] = (1,)
    share_gpu: bool = False
    device: str = "cuda"  # cuda | cpu (for trying things out)
    small: bool = False  # a handful of cases of each kind
    seed: int = 0
    only: tuple[str, ...] = ()  # names of families, collectives or workloads; empty: all
    plans: Path | None = None  # of sharding tasks, timed beside those of the rules; then no other tasks are
    warm_up_s: float = WARM_UP_S  # of every case, before it is timed for `seconds`
    seconds: float = TIMED_S


class LineParser(argparse.ArgumentParser):
    """Says what was wrong in the one line that every command says it in."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls when it does not understand."""
        raise InputError(f"{message} (see {self.prog} --help)")


SCHEMA_VERSION = 1

# A case that takes longer hangs.
_MOST_S = 60.0
# How many names an error lists.
_NAMES = 20


def minutes(text: str) -> float:
    """How long, as a number of minutes or with a unit."""
    return MINUTES.parse(text, "--minutes")


def _seconds(flag: str) -> Callable[[str], float]:
    return lambda text: DURATION.parse(text, flag)


def parser(job: Job) -> argparse.ArgumentParser:
    """The options of one job."""
    about = f"Measures {job.about}. Interrupted, it goes on where it was."
    made = LineParser(prog=job.words, allow_abbrev=False, description=about)
    made.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder to append rows to, as Parquet")
    made.add_argument(
        "--minutes", type=minutes, default=job.minutes, metavar="TIME", help=f"stop after so many ({job.minutes:g}), or 90s, 2m"
    )
    usual = ",".join(map(str, job.ranks))
    made.add_argument("--ranks", default="", metavar="N,N", help=f"rank counts ({usual}, or as many as there are GPUs)")
    made.add_argument("--share-gpu", action="store_true", help="all ranks on the first GPU, through CUDA MPS")
    made.add_argument(
        "--only",
        default="",
        help="names of families, kinds, collectives, workloads or cases; in steps also timed, traced, profiled, repeats",
    )
    made.add_argument("--small", action="store_true", help="a few cases of each kind, as a trial")
    made.add_argument("--seed", type=int, default=0, help="random seed of the cases (0)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it without a GPU")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    if job.takes_plans:
        about = "JSON, task: name: table: rank; only these tasks, these plans beside those of the rules"
        made.add_argument("--plans", type=Path, default=None, metavar="FILE", help=about)
    if job.takes_seconds:
        for flag, usual_s, when in (("--warm-up", WARM_UP_S, "before"), ("--seconds", TIMED_S, "of")):
            made.add_argument(
                flag, type=_seconds(flag), default=usual_s, metavar="S", help=f"seconds {when} timing ({usual_s:g})"
            )
    return made


def run_job(job: Job, arguments: Sequence[str]) -> int:
    """Runs a job with the options of a command line."""
    # Whoever ends a run in time (timeout, a batch system) gets what Ctrl-C gets: rows kept, nothing left running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given = parser(job).parse_args(list(arguments))
    options = Options(
        ranks=_ranks(given.ranks) if given.ranks else _usual_ranks(job, given.share_gpu or given.device == "cpu"),
        share_gpu=given.share_gpu,
        device=given.device,
        small=given.small,
        seed=given.seed,
        only=tuple(name for name in given.only.split(",") if name),
        plans=getattr(given, "plans", None),
        warm_up_s=getattr(given, "warm_up", WARM_UP_S),
        seconds=getattr(given, "seconds", TIMED_S),
    )
    return measure(job, given.out, given.minutes, options, [*job.words.split(), *arguments], as_json=given.json)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run added to a folder: rows by set, what was not as it should be, and how long it took."""

    added: dict[str, int]
    warnings: list[str]
    seconds: float


def measure(job: Job, folder: Path, minutes: float, options: Options, command: Sequence[str], *, as_json: bool = False) -> int:
    """Runs a job in this machine's conditions and says what it added."""
    run = measured(job, folder, minutes, options, command)
    _say(job.name, folder, run.added, run.warnings, run.seconds, as_json)
    failures = [warning for warning in run.warnings if FAILED in warning or LATE in warning]
    if failures and not run.added:
        raise InputError(f"{job.name}: nothing was measured, its ranks failed: {failures[-1]}")
    return 0


def measured(job: Job, folder: Path, minutes: float, options: Options, command: Sequence[str]) -> Measured:
    """Runs a job in this machine's conditions."""
    check(options)
    if not minutes > 0:
        raise InputError(f"--minutes {minutes:g}; expected more than 0")
    for flag, value in (("--warm-up", options.warm_up_s), ("--seconds", options.seconds)):
        if not 0 <= value < _MOST_S:
            raise InputError(f"{flag} {value:g}; expected seconds, 0 or more and less than {_MOST_S:g}")
    module = job.load()
    _check_only(job.name, options, module)
    begun = time.monotonic()
    cuda = options.device == "cuda"
    made = recipe(_without_paths(command), need_gpu=cuda)
    session = Session.start(folder, made, minutes)
    for line in strangers() if cuda else []:
        session.warn(f"another process is on the GPU: {line}; its work is in these times")
    for setting in disturbances(os.environ):
        session.warn(f"{setting} is set and in these times, though no row says so")
    before = _rows_of(folder, made.device)
    try:
        with _watched(session, cuda):
            module.run(session, options)
    except KeyboardInterrupt:
        session.warn(f"interrupted; what was measured is in {folder}, and the same command goes on from there")
        raise
    counts = {name: len(rows) - before.get(name, 0) for name, rows in devices_of_rows(folder).items()}
    return Measured({name: count for name, count in counts.items() if count}, session.warnings, time.monotonic() - begun)


def _rows_of(folder: Path, device: str) -> dict[str, int]:
    """How many rows each set has; raises where they are another device's, for what that one did would count as done on this."""
    rows = devices_of_rows(folder)
    for name, devices in rows.items():
        others = sorted({str(other or "cpu") for other in devices} - {device or "cpu"})
        if others:
            raise InputError(
                f"{folder}: holds {name} of {others[0]}, this is {device or 'cpu'}; give every device a folder (-o)"
            )
    return {name: len(devices) for name, devices in rows.items()}


def check(options: Options) -> None:
    """Says in one line why these options cannot be measured on this machine."""
    if options.device != "cuda":
        return
    found = len(gpus())
    if not found:
        raise InputError(NO_GPU)
    most = max(options.ranks)
    if most > found and not options.share_gpu:
        raise InputError(f"--ranks {most} on {found} GPU(s): give fewer, or --share-gpu to run them on parts of one")


def _check_only(job: str, options: Options, module: ModuleType) -> None:
    """A name that nothing has would measure nothing and call it done."""
    if not options.only or not hasattr(module, "names"):
        return
    known = list(module.names(options))
    unknown = [name for name in options.only if name not in known]
    if unknown:
        some = ", ".join(known[:_NAMES]) + (f" and {len(known) - _NAMES} more" if len(known) > _NAMES else "")
        raise InputError(f"--only {unknown[0]}: unknown name for {job}; choose from {some}")


@contextmanager
def _watched(session: Session, cuda: bool) -> Iterator[None]:
    file = clock_file(session.folder, session.recipe)
    if not cuda:
        yield
        return
    try:
        with Clocks(file, gpus()[0]["number"]) as clocks:
            yield
        moved = clocks.moved()
    finally:
        file.unlink(missing_ok=True)
    if moved:
        session.warn(f"{moved}; every row says the clock it was taken at")


def _say(job: str, folder: Path, added: dict[str, int], warnings: list[str], seconds: float, as_json: bool) -> None:
    if as_json:
        content = {
            "schema_version": SCHEMA_VERSION,
            "job": job,
            "folder": str(folder),
            "rows_added": added,
            "seconds": round(seconds, 1),
            "warnings": warnings,
        }
        print(json.dumps(content, indent=2))
        return
    rows = ", ".join(f"{count} {name}" for name, count in added.items()) or "no"
    print(f"{job}: {rows} rows added to {folder} in {seconds:.0f} s")


def _usual_ranks(job: Job, any_number: bool) -> tuple[int, ...]:
    """The job's default rank counts; on GPUs of their own, those that there are GPUs for."""
    fitting = tuple(count for count in job.ranks if any_number or count <= len(gpus()))
    return fitting or (min(job.ranks),)


def _ranks(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise InputError(f"--ranks {text!r}: expected whole numbers with commas between, as in 2,4") from error
    if not found or min(found) < 1:
        raise InputError(f"--ranks {text!r}: a job needs at least one rank")
    return found


def _without_paths(command: Sequence[str]) -> list[str]:
    """The command without where its output went: a recipe names no folder of somebody's machine."""
    kept = list(command)
    for flag in ("-o", "--out"):
        if flag in kept[:-1]:
            kept[kept.index(flag) + 1] = "DIR"
    return [re.sub(r"^(--out=|-o=?)(?=.).*", r"\1DIR", word) for word in kept]


def fail(error: Exception | str) -> int:
    """One line on stderr, exit code 2."""
    print(f"steptime: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    return 2
