"""What a stage of a pipeline does in which order: GPipe, 1F1B and interleaved 1F1B, with what it sends and receives.

GPipe runs all forward passes, then all backward passes (Huang et al., arXiv 1811.06965). 1F1B runs as many forward passes as
there are stages from this one on, then one of each in turn (Narayanan et al., PipeDream, arXiv 1806.03377). Interleaved 1F1B
does so with several chunks of the model on every rank, in rounds of as many micro-batches as there are stages (Narayanan et
al., arXiv 2104.04473, section 2.2).

A send that goes to the rank of the next receive leaves in one batch with it, as in PyTorch's and Megatron-LM's schedules: what
is computed next waits for both. Another send runs beside what is computed next, and the send after it waits. With
`overlap_p2p_comm` what the pass after next needs is asked for before the next one begins, as Megatron-LM does it with chunks.
With `batch_p2p_sync` nothing runs beside a pass: the host waits for a batch before it goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from steptime._build.transformer.parallelism import Parallelism

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """One pass of a micro-batch through a chunk of the model."""

    way: str  # forward | backward
    chunk: int
    micro_batch: int


class Move(NamedTuple):
    """Something between passes: a receive, asking for one and waiting for it apart, a send, or waiting for the last send."""

    what: str  # receive | ask | await | send | wait
    way: str  # of what is moved: activations go forward, their gradients backward


def actions(parallel: Parallelism, stage: int, micro_batches: int) -> list[Action]:
    """The passes of a stage, in order."""
    if parallel.pipeline == 1:
        return [Action(way, 0, number) for number in range(micro_batches) for way in (FORWARD, BACKWARD)]
    forward, backward = (_passes(parallel, way, micro_batches) for way in (FORWARD, BACKWARD))
    if parallel.schedule == "gpipe":
        return [*forward, *backward]
    left = parallel.pipeline - stage - 1
    ahead = left + 1 if parallel.chunks == 1 else 2 * left + (parallel.chunks - 1) * parallel.pipeline + 1
    ahead = min(ahead, len(forward))
    pairs = zip(backward, forward[ahead:], strict=False)
    behind = backward[len(forward) - ahead :]
    return [*forward[:ahead], *(each for pair in pairs for each in pair), *behind]


def _passes(parallel: Parallelism, way: str, micro_batches: int) -> list[Action]:
    """All passes one way: rounds of micro-batches through one chunk after the other, backward from the last chunk."""
    chunks, size = parallel.chunks, parallel.pipeline if parallel.chunks > 1 else micro_batches
    result = []
    for first in range(0, micro_batches, size):
        for turn in range(chunks):
            chunk = turn if way == FORWARD else chunks - 1 - turn
            result += [Action(way, chunk, number) for number in range(first, min(first + size, micro_batches))]
    return result


def moves(parallel: Parallelism, stage: int, micro_batches: int) -> Iterator[Action | Move]:
    """The passes of a stage with what it sends and receives between them."""
    flying: set[str] = set()  # ways of sends that nobody waited for yet
    before: Action | None = None
    passes = actions(parallel, stage, micro_batches)
    receives = [_receives(parallel, stage, action) for action in passes]
    ahead, held = parallel.overlap_p2p_comm, parallel.batch_p2p_sync
    if ahead and receives[0]:
        yield Move("ask", passes[0].way)
    for place, action in enumerate(passes):
        if receives[place]:
            if held:
                yield Move("ask", action.way)
            yield Move("await" if ahead or held else "receive", action.way)
            if before is not None and before.way != action.way and before.way in flying and parallel.chunks == 1:
                flying.remove(before.way)
                yield Move("wait", before.way)
        if ahead and any(receives[place + 1 : place + 2]):
            yield Move("ask", passes[place + 1].way)
        yield action
        if _sends(parallel, stage, action):
            if action.way in flying:
                yield Move("wait", action.way)
            yield Move("send", action.way)
            with_receive = any(receives[place + 1 : place + 2]) and passes[place + 1].way != action.way
            if held and not with_receive:
                yield Move("wait", action.way)
            else:
                flying.add(action.way)
        before = action
    for way in sorted(flying):
        yield Move("wait", way)


def _receives(parallel: Parallelism, stage: int, action: Action) -> bool:
    return not _at_end(parallel, stage, action.chunk, first=action.way == FORWARD)


def _sends(parallel: Parallelism, stage: int, action: Action) -> bool:
    return not _at_end(parallel, stage, action.chunk, first=action.way == BACKWARD)


def _at_end(parallel: Parallelism, stage: int, chunk: int, *, first: bool) -> bool:
    """Whether a chunk of a stage is the first or the last of the model."""
    return (stage, chunk) == ((0, 0) if first else (parallel.pipeline - 1, parallel.chunks - 1))
