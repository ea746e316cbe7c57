"""The process in which a training script runs as it is, until its steady iteration is found: started by `launch`.

The script is `__main__`, with its own arguments, and its folder is the first that it imports from. What is found, or went
wrong, lies in the folder that the parent named; then the process ends at once, wherever the script is.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed import device_mesh, distributed_c10d

from steptime._capture.answers import remembered
from steptime._capture.capture import program_of_one
from steptime._capture.compiled.modes import compiled_as, spent
from steptime._capture.device import pretended
from steptime._capture.letters import MissingLetterError
from steptime._capture.log import CommLog
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
from steptime._capture.record import Recorder
from steptime._capture.refusals import failure, innermost_line
from steptime._capture.vision_ops import declared_when_imported
from steptime._capture.watch import FoundError, LoopIteration, LoopWatch, tamed, watched
from steptime._garbage import little_collection
from steptime._processes import end_with_parent
from steptime._program.formats import saved
from steptime._program.workload import Workload
from steptime.errors import InputError

_OFTEN_S = 0.25  # how often the guard looks at the clock


@dataclass
class Child:
    """One run of a script."""

    task: ScriptTask
    folder: Path
    joined: bool = False  # the script has made a process group
    watch: LoopWatch | None = None
    finish: Callable[[LoopIteration], None] | None = None

    def run(self) -> None:
        """Runs the script; does not come back."""
        said: dict[str, None] = {}
        with ExitStack() as stack:
            stack.enter_context(compiled_as(self.task.compile))
            recorder = self._entered(stack)
            stack.enter_context(tamed(said))
            for owner, name, stand_in in self._replaced():
                stack.enter_context(patch.object(owner, name, stand_in))

            def found(iteration: LoopIteration) -> NoReturn:
                assert self.finish is not None
                try:
                    self.finish(iteration)
                except InputError as error:
                    self.end(Outcome(error=str(error)))
                self.end(Outcome(joined=self.joined, messages=(*iteration.messages, *said)))

            self.watch = stack.enter_context(watched(LoopWatch(recorder, found, early=self.task.early)))
            try:
                run_as_main(Path(self.task.script), self.task.arguments)
                ended = "ended"
            except SystemExit as left:
                ended = f"left with exit code {left.code}" if left.code not in (None, 0) else "ended"
            except FoundError:
                raise
            except MissingLetterError:
                self.end(Outcome(again=LETTER))
            except BaseException as error:
                if not self.task.world and isinstance(error, KeyError) and error.args and error.args[0] in LAUNCHER:
                    self.end(Outcome(again="world"))
                if self.watch.last is None:
                    self.end(Outcome(error=str(failure(error, self.task.name))))
                ended = f"failed ({failure(error, self.task.name)})"
            last = self.watch.last
            if last is None:
                self._trained_too_little(ended)
            found(replace(last, messages=(*last.messages, f"the script {ended} before an iteration had repeated")))

    def _entered(self, stack: ExitStack) -> Recorder:
        task = self.task
        if not task.world:
            for context in (little_collection(), pretended(CommLog(recording=True), devices=task.devices), remembered()):
                stack.enter_context(context)
            recorder: Recorder = stack.enter_context(Recorder())
            self.finish = lambda iteration: self._save(program_of_one(iteration, task.name))
            return recorder
        from steptime._capture.ranks import captured_rank, ranked  # noqa: PLC0415 (a job of one rank does without)

        around, of_group = stack.enter_context(
            ranked(task.rank, task.ranks, joined=False, devices=task.devices, folder=Path(task.letters))
        )

        def finish(iteration: LoopIteration) -> None:
            result = captured_rank(iteration, around, task.name)
            (self.folder / CALLS).write_text("\n".join(map(repr, result.calls)))
            self._save(result.program, groups=result.groups)

        self.finish = finish
        return of_group

    def _save(self, program: Any, **kwargs: Any) -> None:
        saved.write(Workload((program,), self.task.ranks, self.task.name, **kwargs), self.folder / PROGRAM)

    def _trained_too_little(self, ended: str) -> NoReturn:
        assert self.watch is not None
        seen = self.watch.seen
        marks = seen.optimizer_steps or seen.backward_passes
        if marks > 1 and not self.task.early:
            self.end(Outcome(again="early"))
        needed = "an iteration is known from two optimiser steps on" if marks else "no training step ran with these arguments"
        self.end(Outcome(error=f"{self.task.name}: {ended}; {seen.words()}: {needed}"))

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """Ways to become one rank of several."""
        # As `world` has them where there is one to join.
        init = torch.distributed.init_process_group

        def join(*args: Any, **kwargs: Any) -> Any:
            if not self.task.world:
                self.end(Outcome(again="world"))
            self.joined = True
            return init(*args, **kwargs)

        def spawn(function: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
            if not self.task.world or nprocs != self.task.ranks:
                self.end(Outcome(again="world", processes=nprocs))
            self.joined = True
            function(self.task.rank, *args)

        for owner in (torch.distributed, distributed_c10d, device_mesh):
            yield owner, "init_process_group", join
        yield torch.multiprocessing, "spawn", spawn

    def end(self, outcome: Outcome) -> NoReturn:
        """Leaves the outcome and ends the process."""
        file = self.folder / "outcome.part"
        file.write_text(json.dumps(outcome.document()))
        file.rename(self.folder / "outcome.json")
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)

    def _compiling_s(self) -> float:
        """What PyTorch's compiler has taken, which is none of the script's time."""
        seconds = spent.seconds()
        if seconds:
            (self.folder / COMPILING).touch()
        return min(seconds, LONGEST_COMPILING * self.task.limit_s)

    def guard(self, began_s: float) -> None:
        """Ends the process at its limit, with what was seen."""
        main = threading.main_thread().ident
        while time.monotonic() - began_s < self.task.limit_s + self._compiling_s():
            time.sleep(_OFTEN_S)
        seen = "" if self.watch is None else f"{self.watch.seen.words()}, "
        line = innermost_line(sys._current_frames().get(main or 0))
        last = f"it was last at {line}" if line else "it was being read"
        text = f"{self.task.name}: had no iteration that repeats after {self.task.limit_s:g} s; {seen}{last}"
        self.end(Outcome(error=f"{text}; --limit SECONDS waits longer"))


def run_as_main(script: Path, arguments: tuple[str, ...]) -> None:
    """Runs a file as `python file.py ARGUMENTS` does. What it draws without a seed is the same in every run."""
    random.seed(0)
    np.random.seed(0)
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def main(folder: str) -> None:
    """Runs the task that lies in a folder."""
    began_s = time.monotonic()
    declared_when_imported()
    child = Child(ScriptTask.read(Path(folder)), Path(folder))
    end_with_parent(os.getppid())
    threading.Thread(target=child.guard, args=(began_s,), daemon=True).start()
    child.run()
