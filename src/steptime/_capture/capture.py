"""`capture`: what a training step does on one GPU, without a GPU and without memory for its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from steptime._capture.assemble import assembled
from steptime._capture.pretended import pretended
from steptime._capture.record import Recorder, observed
from steptime._capture.refusals import failure
from steptime._models.memory.peak import PeakMemory, peak_memory
from steptime._program.execution import ExecutionTrace, to_program
from steptime._program.formats.execution_trace import read
from steptime._program.program import Program

OUTSIDE = "outside_bytes"
"""In a program's `meta`: bytes of each storage that lies on the device while the step runs and that none of its ops names."""


@dataclass(frozen=True)
class Captured:
    """A step that was never run. `outside_bytes` are storages on the device that no op of the step names: further batches."""

    program: Program
    trace: ExecutionTrace
    outside_bytes: tuple[int, ...] = ()

    @property
    def peak_memory(self) -> PeakMemory:
        """How much device memory the step takes at most."""
        return peak_memory(self.program, outside_bytes=self.outside_bytes)


def capture(function: Callable[[], Any], *, warm_up: int = 1, name: str = "") -> Captured:
    """The training step that a function makes, or is.

    The function makes model, optimiser and inputs on the device `cuda` and returns the step, a callable without arguments;
    one that returns nothing callable is the step itself. After `warm_up` steps the next one is recorded: gradients are
    cleared and the optimiser has its state, as in every later step.
    """
    what = name or getattr(function, "__name__", "captured")
    with pretended():
        recorder = Recorder()
        try:
            with recorder:
                step = function()
                if not callable(step):
                    step, warm_up = function, max(0, warm_up - 1)  # it has just run once
                for _ in range(warm_up):
                    step()
                with recorder.noting():
                    data = observed(step)
                outside = recorder.unnamed_bytes()
        except (Exception, SystemExit) as error:
            raise failure(error, what) from error
    trace = assembled(read(data, what), recorder.notes)
    program = to_program(trace, rank=0, world_size=1)
    if outside:
        program = replace(program, meta={**program.meta, OUTSIDE: outside})
    return Captured(program, trace, outside)
