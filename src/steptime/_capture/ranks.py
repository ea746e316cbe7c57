"""`capture_ranks`: a training step of a job of many ranks as a `Workload`, in one process and without a GPU.

Every rank is captured alone, in a world of ranks that do not answer (`world`). Ranks that do the same share one program.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from steptime._capture.answers import remembered
from steptime._capture.assemble import LEAF, MODE, assembled
from steptime._capture.capture import known_beside, one_iteration
from steptime._capture.collectives import with_collectives
from steptime._capture.ddp import captured_data_parallel
from steptime._capture.device import pretended
from steptime._capture.flat_sharding import captured_flat_sharding
from steptime._capture.letters import MissingLetterError, letters
from steptime._capture.log import CommLog, ranges
from steptime._capture.refusals import in_one_line
from steptime._capture.sharded import captured_sharding
from steptime._capture.turns import in_turn, many_stages, said_of_stages
from steptime._capture.watch import LoopIteration
from steptime._capture.world import Called, GroupRecorder, World, world
from steptime._garbage import little_collection, no_collection
from steptime._notices import Basis
from steptime._program.execution import to_program
from steptime._program.formats.execution_trace import read
from steptime._program.program import MOST_RANKS, Program
from steptime._program.workload import Workload
from steptime.errors import InputError

MOST_CAPTURED = 64
"""Ranks that are captured one by one: a rank takes from a second to half a minute."""

OP_STREAM = "op_stream"
"""In a program's `meta`: for every op the stream that it launches on, where that is not the stream of compute (0) for all."""


@dataclass(frozen=True)
class CapturedRank:
    """The step of one rank, how groups like its own divide the ranks of the job, and what its first step called."""

    program: Program
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    calls: Sequence[Called]
    messages: tuple[str, ...] = ()


def capture_ranks(
    function: Callable[[], Any], *, ranks: int, alike: bool = False, name: str = "", warm_up: int = 1
) -> Workload:
    """The workload of `ranks` ranks that each call `function`, which makes the model and gives the training step.

    Where they are not known to do `alike`, the first and the last are compared, and all captured only where these differ; of
    more ranks than are captured each, rank 0 stands for all.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"{ranks} ranks cannot be captured; expected 1 to {MOST_RANKS}")
    with remembered(), tempfile.TemporaryDirectory(prefix="steptime") as folder:  # what one rank was answered, the others are
        try:
            return _captured(function, ranks, alike, name, warm_up)
        except MissingLetterError:
            return _captured_in_turn(function, ranks, name, warm_up, Path(folder))


def _captured(function: Callable[[], Any], ranks: int, alike: bool, name: str, warm_up: int) -> Workload:
    captured = [capture_rank(function, 0, ranks, name=name, warm_up=warm_up)]
    messages = captured[0].messages
    if ranks > MOST_CAPTURED and not alike:
        messages += (Basis(f"{ranks} ranks are too many to compare or to capture each, so that rank 0 was taken for all"),)
    elif ranks > 1 and not alike:
        difference = first_difference(captured[0].calls, _calls(function, ranks - 1, ranks, name))
        if difference:
            captured += [capture_rank(function, rank, ranks, name=name, warm_up=warm_up) for rank in range(1, ranks)]
            messages += (f"ranks 0 and {ranks - 1} do different things ({difference}); all {ranks} ranks were captured",)
        else:
            messages += (Basis(f"ranks 0 and {ranks - 1} do the same, op by op; rank 0 was taken for all {ranks} ranks"),)
    owners = (0,) * ranks if len(captured) < ranks else ()
    return Workload(tuple(each.program for each in captured), ranks, name, messages, owners=owners, groups=captured[0].groups)


def _captured_in_turn(function: Callable[[], Any], ranks: int, name: str, warm_up: int, folder: Path) -> Workload:
    """Every rank, where some wait for objects of others: the stages of a pipeline."""
    if ranks > MOST_CAPTURED:
        raise InputError(f"{name}: {many_stages(ranks, MOST_CAPTURED)}")

    def run(rank: int) -> CapturedRank | None:
        try:
            return capture_rank(function, rank, ranks, name=name, warm_up=warm_up, folder=folder)
        except MissingLetterError:
            return None

    captured = in_turn(range(ranks), run, folder, name)
    messages = (*captured[0].messages, said_of_stages(ranks))
    return Workload(tuple(each.program for each in captured), ranks, name, messages, groups=captured[0].groups)


def capture_rank(
    function: Callable[[], Any], rank: int, ranks: int, *, name: str = "", warm_up: int = 1, folder: Path | None = None
) -> CapturedRank:
    """The step of one rank alone, after so many steps of warm-up; `folder` has what other ranks sent it."""
    what = _what(function, rank, name)
    with no_collection(), little_collection(), in_one_line(what), ranked(rank, ranks, folder=folder) as (around, recorder):
        iteration = one_iteration(function, recorder, warm_up)
        return captured_rank(iteration, around, what)


def captured_rank(iteration: LoopIteration, around: World, what: str) -> CapturedRank:
    """An iteration as one rank of the job."""
    rank, ranks = around.rank, around.ranks
    log, calls = iteration.kept
    captured = assembled(read(iteration.data, what, bare=LEAF, around=MODE), iteration.notes)
    streamed = with_collectives(replace(captured.trace, rank=rank, world_size=ranks), log, around.groups())
    program = to_program(streamed.trace, rank=rank, world_size=ranks)
    meta = known_beside(program, iteration, captured)
    if any(streamed.streams):
        meta[OP_STREAM] = np.array(streamed.streams, dtype=np.int32)
    program = replace(program, meta=meta, orders=streamed.orders)
    return CapturedRank(program, around.partitions.sides(), calls, iteration.messages)


def _calls(function: Callable[[], Any], rank: int, ranks: int, name: str) -> Sequence[Called]:
    """What one rank calls in its first step: as good as a program to tell ranks apart, in a third of the time."""
    with no_collection(), in_one_line(_what(function, rank, name)), ranked(rank, ranks) as (_, recorder):
        calls: Sequence[Called] = one_iteration(function, recorder, 1, only_calls=True).kept[1]
    return calls


def _what(function: Callable[[], Any], rank: int, name: str) -> str:
    return f"{name or getattr(function, '__name__', 'captured')}, rank {rank}"


@contextmanager
def ranked(
    rank: int, ranks: int, *, joined: bool = True, devices: int = 1, folder: Path | None = None
) -> Iterator[tuple[World, GroupRecorder]]:
    """While it lasts, this process is one rank of a job on pretended devices, and a recorder answers for its device."""
    log = CommLog()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # PyTorch's own, about names it means to drop and tensors it cannot see into: of no use to who captures.
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning)
        streams = stack.enter_context(pretended(log, devices=devices))
        around = stack.enter_context(world(rank, ranks, streams, joined=joined))
        stack.enter_context(letters(rank, folder))
        for context in (captured_sharding, captured_flat_sharding, captured_data_parallel, ranges, remembered):
            stack.enter_context(context())
        yield around, stack.enter_context(GroupRecorder(around.collectives, log))


def first_difference(first: Sequence[Called], other: Sequence[Called]) -> str:
    """What the first calls are that differ between two ranks; empty where none do, so that one program serves both."""
    for index, (left, right) in enumerate(zip_longest(first, other)):
        if left != right:
            return f"call {index}: {_text(left)} and {_text(right)}"
    return ""


def _text(call: Called | None) -> str:
    if call is None:
        return "nothing"
    name, shapes, splits = call
    parts = [*(str(list(shape)) for shape, _ in shapes), *(str(list(split)) for split in splits)]
    return f"{name}({', '.join(parts)})"
