"""`capture_ranks`: a training step of a job of many ranks as a `Workload`, in one process and without a GPU.

Every rank is captured alone, in a world of ranks that do not answer (`groups_world`). Ranks that do the same share one program.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steptime._capture.assemble import assembled
from steptime._capture.capture import OUTSIDE
from steptime._capture.collectives.answers import remembered
from steptime._capture.collectives.kernels import unlaunched
from steptime._capture.collectives.ranges import ranges
from steptime._capture.collectives.recorder import GroupRecorder
from steptime._capture.collectives.same import Called, first_difference
from steptime._capture.collectives.trace import with_collectives
from steptime._capture.collectives.world import World, streams_of, world
from steptime._capture.parallel.ddp import captured_data_parallel
from steptime._capture.parallel.sharded import captured_sharding
from steptime._capture.pretended import pretended
from steptime._capture.record import observed
from steptime._capture.refusals import failure
from steptime._program.execution import ExecutionTrace, to_program
from steptime._program.formats.execution_trace import read
from steptime._program.program import MOST_RANKS, Program
from steptime._program.workload import Workload
from steptime.errors import InputError

Distinct = str | Sequence[int]

MOST_CAPTURED = 64
"""Ranks that are captured one by one unasked: a rank takes from a second to half a minute."""

OP_STREAM = "op_stream"
"""In a program's `meta`: for every op the stream that it launches on, where that is not the stream of compute (0) for all."""


@dataclass(frozen=True)
class CapturedRank:
    """The step of one rank: its trace, the stream of every op, and how groups like its own divide the ranks of the job."""

    rank: int
    trace: ExecutionTrace
    streams: tuple[int, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    outside_bytes: tuple[int, ...] = ()  # of storages on the device that no op of the step names
    calls: tuple[Called, ...] = ()  # of its first step


def capture_ranks(
    function: Callable[[], Any], *, ranks: int, distinct: Distinct = "ends", name: str = "", warm_up: int = 1
) -> Workload:
    """The workload of `ranks` ranks that each call `function`, which makes the model and gives the training step.

    `distinct` says which ranks do different things: `one` (all do the same), `all` (each its own), some ranks (each of them its
    own, the others what rank 0 does), or `ends`: the first and the last are compared, and all captured only where these differ;
    of more ranks than are captured each, rank 0 stands for all.
    """
    _check(ranks, distinct)

    def one(rank: int) -> CapturedRank:
        return capture_rank(function, rank, ranks, name=name, warm_up=warm_up)

    if distinct != "ends" or ranks == 1:
        return _workload([one(rank) for rank in _named(distinct, ranks)], ranks, name, ())
    first = one(0)
    if ranks > MOST_CAPTURED:
        text = f"{ranks} ranks are too many to compare or to capture each, so that rank 0 was taken for all"
        return _workload([first], ranks, name, [f"{text}; distinct=[...] names ranks that get a program of their own"])
    difference = first_difference(first.calls, _calls(function, ranks - 1, ranks, name))
    if not difference:
        text = f"ranks 0 and {ranks - 1} do the same, op by op; rank 0 was taken for all {ranks} ranks"
        return _workload([first], ranks, name, [f"{text}; distinct='all' captures each"])
    text = f"ranks 0 and {ranks - 1} do different things ({difference})"
    messages = [f"{text}; all {ranks} ranks were captured; distinct='one' takes rank 0 for all"]
    return _workload([first, *map(one, range(1, ranks))], ranks, name, messages)


def _check(ranks: int, distinct: Distinct) -> None:
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"{ranks} ranks cannot be captured; expected 1 to {MOST_RANKS}")
    if isinstance(distinct, str):
        if distinct not in ("one", "all", "ends"):
            raise InputError(f"distinct is {distinct!r}; expected 'one', 'all', 'ends' or the ranks that differ from rank 0")
    elif not all(0 <= rank < ranks for rank in distinct):
        raise InputError(f"distinct names ranks {list(distinct)}; expected some of 0 to {ranks - 1}")


def _named(distinct: Distinct, ranks: int) -> Sequence[int]:
    """The ranks that have a program of their own."""
    if isinstance(distinct, str):
        return range(ranks) if distinct == "all" else (0,)
    return sorted({0, *distinct})


def _workload(captured: Sequence[CapturedRank], ranks: int, name: str, messages: Sequence[str]) -> Workload:
    programs = tuple(_program(each, ranks) for each in captured)
    own = {program.rank for program in programs}
    owners = tuple(rank if rank in own else 0 for rank in range(ranks)) if len(own) < ranks else ()
    return Workload(programs, ranks, name, tuple(messages), owners=owners, groups=captured[0].groups)


def _program(captured: CapturedRank, ranks: int) -> Program:
    program = to_program(captured.trace, rank=captured.rank, world_size=ranks)
    meta = dict(program.meta)
    if captured.outside_bytes:
        meta[OUTSIDE] = captured.outside_bytes
    if any(captured.streams):
        meta[OP_STREAM] = np.array(captured.streams, dtype=np.int32)
    return replace(program, meta=meta)


def capture_rank(function: Callable[[], Any], rank: int, ranks: int, *, name: str = "", warm_up: int = 1) -> CapturedRank:
    """The step of one rank alone, after so many steps of warm-up."""
    what = _what(function, rank, name)
    with _no_collection():
        try:
            with _ranked(rank, ranks) as (around, recorder):
                step = _first_step(function, recorder)
                for _ in range(warm_up - 1):
                    step()
                around.log.recording = True
                with recorder.noting():
                    data = observed(step)
                groups = around.groups()
        except (Exception, SystemExit) as error:
            raise failure(error, what) from error
        trace = assembled(read(data, what), recorder.notes)
        result = with_collectives(replace(trace, rank=rank, world_size=ranks), around.log, groups)
    sides, outside = around.partitions.sides(), recorder.unnamed_bytes()
    return CapturedRank(rank, result.trace, result.streams, sides, outside, tuple(recorder.calls))


def _calls(function: Callable[[], Any], rank: int, ranks: int, name: str) -> Sequence[Called]:
    """What one rank calls in its first step: as good as a program to tell ranks apart, in a third of the time."""
    with _no_collection():
        try:
            with _ranked(rank, ranks) as (_, recorder):
                _first_step(function, recorder)
        except (Exception, SystemExit) as error:
            raise failure(error, _what(function, rank, name)) from error
    return recorder.calls


def _what(function: Callable[[], Any], rank: int, name: str) -> str:
    return f"{name or getattr(function, '__name__', 'captured')}, rank {rank}"


def _first_step(function: Callable[[], Any], recorder: GroupRecorder) -> Callable[[], Any]:
    """Runs a step that a function makes, or is, for the first time, and lists its calls."""
    recorder.listing = True
    step = function()
    if callable(step):
        recorder.calls.clear()
        step()
    recorder.listing = False
    return step if callable(step) else function


@contextmanager
def _ranked(rank: int, ranks: int) -> Iterator[tuple[World, GroupRecorder]]:
    """While it lasts, this process is one rank of a job on pretended devices, and a recorder answers for its device."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # PyTorch's own, about names it means to drop and tensors it cannot see into: of no use to who captures.
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning)
        stack.enter_context(pretended())
        around = stack.enter_context(world(rank, ranks))
        for context in (captured_sharding, captured_data_parallel, ranges, remembered, unlaunched):
            stack.enter_context(context())
        stack.enter_context(streams_of(around))
        yield around, stack.enter_context(GroupRecorder(around.collectives))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python does not look for circles of garbage meanwhile: a large step makes a million objects that all stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
