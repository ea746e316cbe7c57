"""`measure compiled`: steps eager and compiled, in turns; memory of both, and the kernels of one profiled step of each.

A case has processes of its own. Those of a wave are made and compiled side by side, each with a cache of its own; then they are
timed one after the other while nothing else runs, and only then profiled. A wave is as many as the host's memory holds. Rows
are stored one by one, so that a run that is cut off goes on where it was. Sources that Inductor wrote are kept beside.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import ClockReader, completed
from steptime._calibrate.harness.ranks import QUIET, Layout, mps
from steptime._calibrate.harness.session import Session, clock_file
from steptime._measurements.store import Store, key_of
from steptime_lab.measurements.sets import COMPILED

if TYPE_CHECKING:
    from steptime_lab.workloads.compiled import CompiledCase

JOB = "compiled"
FORMS = EAGER, WITH = ("eager", "compiled")
# Of a wave: processes, and seconds that making and compiling may take; of a case: seconds that timing and profiling may.
_WAVE, _PREPARE_S, _TURN_S = 38, 240.0, 40.0
_POLL_S = 0.05
CODES, CACHES = "compiled-sources.tar.gz", "caches"


@dataclass
class Started:
    """A case and its processes."""

    case: CompiledCase
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def file(self, what: str) -> Path:
        """Of what its processes and this one tell each other."""
        return self.folder / f"{self.case.name}.{what}"

    @property
    def failed(self) -> bool:
        """Whether a process ended before the row was there."""
        return any(process.poll() is not None for process in self.processes) and not self.file("json").exists()

    def end(self) -> None:
        """Whatever still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def run(session: Session, options: Options) -> None:
    """Waves of cases, those of one rank first."""
    waiting = due(session, options)
    progress = session.progress(JOB, len(waiting))
    store = Store(
        session.folder, completed(session.recipe), "parent", clock_mhz=ClockReader(clock_file(session.folder, session.recipe))
    )
    with ExitStack() as stack:
        daemon: Mapping[str, str] = {}
        for wave in waves(waiting):
            if session.budget.left_s() < _TURN_S:
                break
            if wave[-1].ranks > 1 and options.device == "cuda" and not daemon:
                daemon = stack.enter_context(mps())
            for started in _timed(session, options, wave, daemon):
                if (row := _row_file(started)) is None:
                    session.warn(f"{started.case.name}: not measured; its last words are in {started.file('log').name}")
                    progress.skip("failed")
                    continue
                for form in FORMS:
                    store.add(COMPILED, row[form])
                store.flush()
                progress.step()
            _keep_sources(session.folder)
    progress.close()


def names(_: Options) -> list[str]:
    """What `--only` may name: cases, architectures and modes."""
    from steptime_lab.workloads.compiled import DEFAULT, GRAPHS, HOST, cases

    return [DEFAULT, GRAPHS, HOST, *{case.architecture: None for case in cases().values()}, *cases()]


def due(session: Session, options: Options) -> list[CompiledCase]:
    """Cases that were asked for and have no rows yet; of a trial, the first of each mode and number of ranks."""
    from steptime_lab.workloads.compiled import HOST, cases, host_cases

    done = session.store.done(COMPILED)
    wanted = set(options.only)
    result, seen = [], set()
    every = [*(host_cases().values() if HOST in wanted else ())]
    every += [each for each in cases().values() if not wanted or {each.name, each.architecture, each.mode} & wanted]
    for case in every:
        if case.ranks not in options.ranks:
            continue
        kind = (case.mode, case.ranks)
        asked = {"name": case.name, "form": WITH, "share": case.ranks}
        if not done[key_of(COMPILED, asked)] and not (options.small and not wanted and kind in seen):
            result.append(case)
        seen.add(kind)
    return result


def waves(waiting: Sequence[CompiledCase]) -> list[list[CompiledCase]]:
    """Cases that wait for their turns side by side, those of several ranks last."""
    found: list[list[CompiledCase]] = []
    for case in sorted(waiting, key=lambda each: each.ranks > 1):
        if not found or sum(each.ranks for each in found[-1]) + case.ranks > _WAVE:
            found.append([])
        found[-1].append(case)
    return found


def _timed(session: Session, options: Options, wave: Sequence[CompiledCase], daemon: Mapping[str, str]) -> Iterator[Started]:
    """Starts a wave, as many at once as there are cores, waits until it is ready, and gives one after the other its turn."""
    folder = session.folder / "turns"
    folder.mkdir(exist_ok=True)
    every: list[Started] = []
    try:
        ends = time.monotonic() + min(_PREPARE_S, 0.6 * session.budget.left_s())
        while time.monotonic() < ends:
            busy = sum(each.case.ranks for each in every if not each.file("ready").exists() and not each.failed)
            if len(every) < len(wave) and (not busy or busy + wave[len(every)].ranks <= len(os.sched_getaffinity(0))):
                every.append(_start(session, options, wave[len(every)], folder, daemon))
            elif len(every) == len(wave) and not busy:
                break
            else:
                time.sleep(_POLL_S)
        for each in every:
            if each.file("ready").exists() and session.budget.left_s() > 0:
                each.file("go").touch()
                _wait(each)
            each.end()
            yield each
    finally:
        for each in every:
            each.end()


def _wait(started: Started) -> None:
    ends = time.monotonic() + _TURN_S
    while time.monotonic() < ends and any(process.poll() is None for process in started.processes):
        time.sleep(_POLL_S)


def _start(session: Session, options: Options, case: CompiledCase, folder: Path, daemon: Mapping[str, str]) -> Started:
    started = Started(case, folder)
    for what in ("ready", "go", "json"):
        started.file(what).unlink(missing_ok=True)
    caches = (session.folder / CACHES / case.name).absolute()
    layout = Layout(case.ranks, share_gpu=case.ranks > 1, device=options.device)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    plan = json.dumps(
        {
            "case": case.name,
            "folder": str(folder.absolute()),
            "small": options.small,
            "locks": str(folder.absolute() / "benchmarks"),
        }
    )
    for rank in range(case.ranks):
        environment = {
            **os.environ, **(daemon if case.ranks > 1 else {}), **layout.environment(rank), **QUIET, "MASTER_PORT": port,
            "TORCHINDUCTOR_CACHE_DIR": str(caches), "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip
        if case.ranks == 1:
            environment.pop("STEPTIME_CORES")
        with started.file("log" if rank == 0 else f"log{rank}").open("wb") as log:
            command = [sys.executable, "-m", "steptime_lab.measure.compiled.worker", plan]
            started.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return started


def _row_file(started: Started) -> dict[str, dict[str, Any]] | None:
    """The rows of both forms, as rank 0 wrote them."""
    try:
        found: dict[str, dict[str, Any]] = json.loads(started.file("json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _keep_sources(folder: Path) -> None:
    """What Inductor wrote, as one archive: a file per graph, named by its case."""
    with tarfile.open(folder / CODES, "w:gz", compresslevel=6) as archive:
        for file in sorted((folder / CACHES).rglob("*.py")):
            text = file.read_text(encoding="utf-8", errors="replace")
            if "def call(" in text and "async_compile" in text:
                case = file.relative_to(folder / CACHES).parts[0]
                archive.add(file, f"{case}/{file.name}")
