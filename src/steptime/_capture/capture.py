"""`capture`: what a training step does on one GPU, without a GPU and without memory for its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from steptime._capture.answers import remembered
from steptime._capture.assemble import LEAF, MODE, Assembled, assembled
from steptime._capture.device import pretended
from steptime._capture.log import CommLog
from steptime._capture.record import Recorder, observed
from steptime._capture.refusals import in_one_line
from steptime._capture.stream_orders import without_marks
from steptime._capture.watch import FoundError, LoopIteration, LoopWatch, leave, tamed, watched
from steptime._garbage import little_collection, no_collection
from steptime._program.execution import to_program
from steptime._program.formats.execution_trace import read
from steptime._program.program import PARAMETER_STORAGES, Program

OUTSIDE = "outside_bytes"
"""In a program's `meta`: bytes of each storage that lies on the device while the step runs and that none of its ops names."""

PARAMETERS = "parameters"
"""In a program's `meta`: how many parameters its modules have, trained or not."""


def capture(function: Callable[[], Any], *, warm_up: int = 1, name: str = "") -> Program:
    """The training step that a function makes, or is, or repeats.

    The function makes model, optimiser and inputs on the device `cuda` and returns the step, a callable without arguments;
    one that returns nothing callable is a training loop, or the step itself. Of a loop the iteration that repeats is recorded.
    Else, after `warm_up` steps the next one is: gradients are cleared and the optimiser has its state, as in every later step.
    """
    return captured_step(function, warm_up=warm_up, name=name)[0]


def captured_step(function: Callable[[], Any], *, warm_up: int = 1, name: str = "") -> tuple[Program, tuple[str, ...]]:
    """The same, and what is said of it."""
    what = name or getattr(function, "__name__", "captured")
    with in_one_line(what), little_collection(), pretended(CommLog(recording=True)), remembered(), Recorder() as recorder:
        iteration = one_iteration(function, recorder, warm_up)
    return program_of_one(iteration, what), iteration.messages


def one_iteration(function: Callable[[], Any], recorder: Recorder, warm_up: int, *, only_calls: bool = False) -> LoopIteration:
    """The step of a function: what it returns, what it repeats, or what it is. `only_calls`: its calls are listed, no more."""
    said: dict[str, None] = {}
    watch = LoopWatch(recorder, leave)
    recorder.keeps_storages = not only_calls
    recorder.list_calls()
    with tamed(said):
        try:
            with watched(watch):
                step = function()
        except FoundError as found:
            watch.last, step = found.iteration, None
        recorder.in_loop = False
        if watch.last is not None and not callable(step):
            return replace(watch.last, messages=(*watch.last.messages, *said))
        if callable(step):
            recorder.list_calls()
        else:
            step, warm_up = function, warm_up - 1  # it has just run once
            recorder.end_calls()
        for _ in range(warm_up):
            step()
            recorder.end_calls()
        if only_calls:
            return LoopIteration(b"", [], (), (), kept=recorder.kept())
        with recorder.noting():
            data = observed(step)
    messages = (*recorder.known.said, *recorder.reads.messages(), *said)
    return LoopIteration.observed(data, recorder, messages, watch.optimizers)


def program_of_one(iteration: LoopIteration, what: str) -> Program:
    """The program of a job of one rank."""
    with no_collection():
        captured = assembled(read(iteration.data, what, bare=LEAF, around=MODE), iteration.notes)
        streamed = without_marks(captured.trace)
        program = replace(to_program(streamed.trace, rank=0, world_size=1), orders=streamed.orders)
    return replace(program, meta=known_beside(program, iteration, captured))


def known_beside(program: Program, iteration: LoopIteration, captured: Assembled) -> dict[str, Any]:
    """A program's `meta` with what is known beside its ops."""
    of_parameters = sorted(captured.storages[each] for each in iteration.parameters.storages if each in captured.storages)
    more = {OUTSIDE: iteration.outside} if iteration.outside else {}
    return {
        **program.meta, **more, PARAMETERS: iteration.parameters.count, PARAMETER_STORAGES: np.array(of_parameters, np.int64),
    }  # fmt: skip
