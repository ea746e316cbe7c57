"""`capture`: what a training step does on one GPU, without a GPU and without memory for its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from steptime._capture.assemble import assembled
from steptime._capture.device import parameters_alive, pretended
from steptime._capture.log import CommLog
from steptime._capture.record import Recorder, observed
from steptime._capture.refusals import in_one_line
from steptime._program.execution import to_program
from steptime._program.formats.execution_trace import read
from steptime._program.program import Program

OUTSIDE = "outside_bytes"
"""In a program's `meta`: bytes of each storage that lies on the device while the step runs and that none of its ops names."""

PARAMETERS = "parameters"
"""In a program's `meta`: how many parameters its modules have, trained or not."""


def capture(function: Callable[[], Any], *, warm_up: int = 1, name: str = "") -> Program:
    """The training step that a function makes, or is.

    The function makes model, optimiser and inputs on the device `cuda` and returns the step, a callable without arguments;
    one that returns nothing callable is the step itself. After `warm_up` steps the next one is recorded: gradients are
    cleared and the optimiser has its state, as in every later step.
    """
    what = name or getattr(function, "__name__", "captured")
    with in_one_line(what), pretended(CommLog()), Recorder() as recorder:
        step = function()
        if not callable(step):
            step, warm_up = function, max(0, warm_up - 1)  # it has just run once
        for _ in range(warm_up):
            step()
        with recorder.noting():
            data = observed(step)
        outside = recorder.unnamed_bytes()
        parameters = parameters_alive()
    program = to_program(assembled(read(data, what), recorder.notes), rank=0, world_size=1)
    more = {OUTSIDE: outside} if outside else {}
    return replace(program, meta={**program.meta, **more, PARAMETERS: parameters})
