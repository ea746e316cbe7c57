"""`captured_script`: the workload of a training script as it is, which runs in a process of its own (`child`).

The process and all that it starts are gone when the call returns, whatever it ends with. PyTorch is not imported here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from steptime._capture.outcome import (
    CALLS,
    COMPILING,
    LAUNCHER,
    LETTER,
    LONGEST_COMPILING,
    PROGRAM,
    Outcome,
    ScriptTask,
)
from steptime._capture.turns import in_turn, many_stages, said_of_stages
from steptime._notices import Basis, Caveat
from steptime._program.load import load
from steptime._program.program import MOST_RANKS, Program
from steptime._program.workload import Description, Workload, fixed
from steptime.errors import InputError

LIMIT_S = 120.0
"""How long a script may run before its steady iteration is found, compiling not counted, if nothing else is said."""

MOST_CAPTURED = 64
"""Ranks that are run one by one where they differ."""

_DEVICES_OF_A_NODE = 8
_GRACE_S = 15.0  # the process ends itself; it is ended where it cannot
_ROOT = str(Path(__file__).parents[2])
_START = """import sys
if {root!r} not in sys.path:
    sys.path.append({root!r})
from steptime._garbage import no_collection
with no_collection():
    from steptime._capture.child import main
main({folder!r})
"""


def announcement(script: str | Path) -> str:
    """What is said before a script runs."""
    return (
        f"{script} runs here until it has trained a few steps, on a simulated GPU and with your permissions: "
        "what it downloads, logs or writes is real; torch.save is skipped"
    )


@dataclass(frozen=True)
class Script:
    """A training script with its arguments."""

    path: Path
    arguments: tuple[str, ...] = ()
    limit_s: float = LIMIT_S
    compile: str | None = None  # a mode of torch.compile, where the script compiles nothing itself, or "off"

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise InputError(f"{self.path}: no such file; name a training script, or a function in one (file.py:function)")
        if not 0 < self.limit_s < float("inf"):
            raise InputError(f"--limit {self.limit_s:g}: expected seconds, more than none")

    def workload(self, ranks: int | None, platform_ranks: int | None = None) -> Workload:
        """On so many ranks; where none are given, on those of the platform if the script joins a process group."""
        count = ranks or platform_ranks or 1
        if count > MOST_RANKS:
            raise InputError(f"{count} ranks cannot be captured; expected 1 to {MOST_RANKS}")
        with tempfile.TemporaryDirectory(prefix="steptime") as letters:
            task = ScriptTask(
                str(self.path), self.arguments, self.path.name, self.limit_s,
                ranks=count, devices=min(count, _DEVICES_OF_A_NODE), world=count > 1, letters=letters,
                compile=self.compile,
            )  # fmt: skip
            first = _Run.of(task)
            if first.task.ranks != count and ranks is not None:
                started = first.task.ranks
                raise InputError(
                    f"{self.path}: starts {started} processes itself, not {ranks}; leave --ranks out, or give {started}"
                )
            if first.waits:
                first, result = _in_turn(first)
            else:
                result = self._alone(first, count) if not first.outcome.joined else _ranked(first)
        description = Description(parameters=first.program.meta.get("parameters"))
        return replace(result, name=self.path.stem, description=description, rebuild=RunAgain(self, ranks))

    def _alone(self, first: _Run, ranks: int) -> Workload:
        messages = first.outcome.messages
        if ranks > 1:
            messages += (Caveat(f"the script joins no process group: it is one rank, on one of {ranks} GPUs"),)
        program = replace(first.program, rank=0, world_size=1)
        return Workload((program,), 1, "", messages)


@dataclass(frozen=True)
class RunAgain:
    """Runs a script once more, on other ranks."""

    script: Script
    ranks: int | None

    def compiled(self, mode: str) -> Workload:
        """The same compiled in a mode, or "off"."""
        return replace(self, script=replace(self.script, compile=mode))()

    def __call__(
        self, *, batch: int | None = None, ranks: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> Workload:
        if settings:
            raise InputError(f"{self.script.path}: {fixed(batch, ranks, settings)}")
        if batch is not None:
            raise InputError(f"{self.script.path}: {fixed_batch(batch)}")
        return self.script.workload(self.ranks if ranks is None else ranks)


def fixed_batch(batch: int) -> str:
    """Why a script cannot be given a batch."""
    return f"--batch {batch}: pass the batch to the script itself, after -- (as in -- --batch-size {batch})"


def _in_turn(first: _Run) -> tuple[_Run, Workload]:
    """The job of ranks that send each other objects, as stages of a pipeline do: every one runs."""
    ranks = first.task.ranks
    if ranks > MOST_CAPTURED:
        raise InputError(f"{first.task.name}: {many_stages(ranks, MOST_CAPTURED)}")

    def run(rank: int) -> _Run | None:
        result = first.as_rank(rank)
        return None if result.waits else result

    runs = in_turn(range(ranks), run, Path(first.task.letters), first.task.name)
    messages = (*runs[0].outcome.messages, said_of_stages(ranks))
    return runs[0], Workload(tuple(run.program for run in runs), ranks, "", messages, groups=runs[0].workload.groups)


def _ranked(first: _Run) -> Workload:
    """The job of all ranks: those that do the same share a program."""
    ranks = first.task.ranks
    runs, owners, messages = [first], (0,) * ranks, first.outcome.messages
    if ranks > MOST_CAPTURED:
        messages += (Basis(f"{ranks} ranks are too many to compare or to run each, so that rank 0 was taken for all"),)
    elif ranks > 1:
        last = first.as_rank(ranks - 1)
        difference = _difference(first, last)
        if difference:
            second = first.as_rank(1) if ranks > 2 else last
            alike = ranks == 2 or not _difference(second, last)  # rank 0 does something of its own
            others = [second] if alike else [second, *(first.as_rank(rank) for rank in range(2, ranks - 1)), last]
            runs += others
            owners = (0, *[1] * (ranks - 1)) if alike else tuple(range(ranks))
            shared = "rank 1 was taken for all but rank 0" if alike else f"all {ranks} ranks were run"
            messages += (f"ranks 0 and {ranks - 1} do different things ({difference}); {shared}",)
        else:
            messages += (Basis(f"ranks 0 and {ranks - 1} do the same, op by op; rank 0 was taken for all {ranks} ranks"),)
    shared_by = owners if len(runs) < ranks else ()
    programs = tuple(run.program for run in runs)
    return Workload(programs, ranks, "", messages, owners=shared_by, groups=first.workload.groups)


def _difference(one: _Run, other: _Run) -> str:
    for index, (left, right) in enumerate(zip_longest(one.calls, other.calls, fillvalue="nothing")):
        if left != right:
            return f"call {index}: {left[:100]} and {right[:100]}"
    return ""


@dataclass(frozen=True)
class _Run:
    """One run of a script that ended with a program, or where it waits for an object of another rank."""

    task: ScriptTask
    outcome: Outcome
    calls: Sequence[str] = ()
    made: Workload | None = None

    @property
    def waits(self) -> bool:
        """Whether it waits for an object that another rank sends."""
        return self.outcome.again == LETTER

    @property
    def workload(self) -> Workload:
        """What was made of it."""
        assert self.made is not None
        return self.made

    @property
    def program(self) -> Program:
        """Of the rank that ran."""
        return self.workload.programs[0]

    def as_rank(self, rank: int) -> _Run:
        """The script as another rank."""
        return _Run.of(replace(self.task, rank=rank))

    @staticmethod
    def of(task: ScriptTask) -> _Run:
        """Runs a script, in another way where it turns out to need one."""
        for _ in range(4):  # a group to join, other ranks, an early look
            with tempfile.TemporaryDirectory(prefix="steptime") as name:
                folder = Path(name)
                outcome = _ended(task, folder)
                if outcome.error:
                    raise InputError(outcome.error)
                if outcome.again == LETTER:
                    return _Run(task, outcome)
                if not outcome.again:
                    calls = folder / CALLS
                    lines = calls.read_text().splitlines() if calls.exists() else []
                    return _Run(task, outcome, lines, load([folder / PROGRAM]))
            task = replace(task, early=True) if outcome.again == "early" else _in_world(task, outcome.processes)
        raise InputError(f"{task.name}: starts processes of its own in a way that is not followed; run it as one rank")


def _in_world(task: ScriptTask, processes: int) -> ScriptTask:
    ranks = processes or task.ranks
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"{task.name}: starts {ranks} processes; expected 1 to {MOST_RANKS}")
    return replace(task, world=True, ranks=ranks, devices=min(ranks, _DEVICES_OF_A_NODE))


def _ended(task: ScriptTask, folder: Path) -> Outcome:
    """Runs a process to its end."""
    task.write(folder)
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch's observer says on stderr when it begins and ends
    environment.setdefault("PYTHONHASHSEED", "0")  # the order of sets of names is the same in every run
    # What the script prints goes to stderr: answers are on stdout.
    process = subprocess.Popen(  # noqa: S603 (the user's own script, as he asks)
        [sys.executable, "-c", _START.format(root=_ROOT, folder=str(folder))],
        stdin=subprocess.DEVNULL, stdout=2, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        code = _waited(process, task.limit_s, folder)
    finally:
        _end_all(process)
    outcome = Outcome.read(folder)
    if outcome is not None:
        return outcome
    if code is None:
        raise InputError(f"{task.name}: had to be ended after {task.limit_s:g} s, busy in something that cannot be interrupted")
    died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    raise InputError(f"{task.name}: its process ended by itself ({died}) before an iteration was found")


def _waited(process: subprocess.Popen[bytes], limit_s: float, folder: Path) -> int | None:
    """The exit code of a process that ends itself in time, else none."""
    for _ in range(1 + LONGEST_COMPILING):
        with suppress(subprocess.TimeoutExpired):
            return process.wait(limit_s + _GRACE_S)
        if not (folder / COMPILING).exists():
            break
    return None


def _end_all(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
