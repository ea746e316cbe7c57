"""`pipelined_ns`: how long a step of stages takes, pass by pass, in the order of its schedule, with times of whole passes.

A pass begins when its stage is free and what it receives is there. A send begins when its pass ends and ends when the other
stage has come to its receive; until then it holds SMs and slows the passes beside it, which in interleaved schedules is much of
the step. How much of a stage's time that is follows from the play, and the play from it: it is played a few times.

Layouts with one schedule and as many micro-batches differ in times alone and are played together: every time is an array.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.schedules import BACKWARD, FORWARD, Action, Move, moves

Floats = npt.NDArray[np.float64]
_Message = tuple[str, int, int]  # its way, the chunk of the model that sends it, micro-batch

# Slowdowns move half of the way after each play, for all of it would swing; after so many plays steps move by a hundredth.
_PLAYS = 4


@dataclass(frozen=True)
class ChunkTimes:
    """Of one micro-batch through one chunk of a stage."""

    forward_ns: float
    first_ns: float  # forward, of the first micro-batch: parameters may be gathered beside it
    backward_ns: float
    last_ns: float  # backward, of the last micro-batch: gradients may be reduced beside it
    head_forward_ns: float  # behind the last chunk of the model
    head_backward_ns: float
    sent_ns: float  # from stage to stage

    def least_ns(self, parallel: Parallelism, micro_batches: int) -> float:
        """Of all micro-batches through the last stage, and of one through the others: without sends, and what they slow."""
        passes = self.first_ns + self.last_ns + (micro_batches - 1) * (self.forward_ns + self.backward_ns)
        head = micro_batches * (self.head_forward_ns + self.head_backward_ns)
        return parallel.chunks * passes + head + (parallel.pipeline - 1) * (self.first_ns + self.last_ns)


@dataclass(frozen=True)
class StageTimes:
    """`ChunkTimes` of several layouts, as arrays."""

    forward_ns: Floats
    first_ns: Floats
    backward_ns: Floats
    last_ns: Floats
    head_forward_ns: Floats
    head_backward_ns: Floats
    sent_ns: Floats

    def of(self, action: Action, *, head: bool, micro_batches: int) -> Floats:
        """Of a pass by itself."""
        if action.way == FORWARD:
            alone = self.first_ns if action.micro_batch == 0 else self.forward_ns
            return alone + self.head_forward_ns if head else alone
        alone = self.last_ns if action.micro_batch == micro_batches - 1 else self.backward_ns
        return alone + self.head_backward_ns if head else alone


def pipelined_ns(parallel: Parallelism, micro_batches: int, times: StageTimes, beside: Floats) -> Floats:
    """From the first pass to the last; passes take `beside` times as long while something is sent."""
    pipeline = _Pipeline([_Stage.of(parallel, number, micro_batches) for number in range(parallel.pipeline)], times)
    for _ in range(_PLAYS - 1):
        pipeline.play()
        pipeline.slow(beside)
    return pipeline.play()


@dataclass
class _Stage:
    """Where a stage has come to, and when its passes ran."""

    order: list[tuple[Action | Move, _Message | None]]
    heads: frozenset[int]  # places of passes that have the head behind them
    at: int = 0
    free: Floats = field(default_factory=lambda: np.zeros(1))
    received: Floats | None = None  # when what the next pass receives is there
    flying: dict[str, _Message] = field(default_factory=dict)  # sends and receives that nobody waited for yet
    done: list[tuple[str, Floats, Floats, tuple[_Message, ...]]] = field(default_factory=list)  # with sends under way
    slower: dict[str, Floats] = field(default_factory=lambda: {FORWARD: np.ones(1), BACKWARD: np.ones(1)})

    @classmethod
    def of(cls, parallel: Parallelism, number: int, micro_batches: int) -> _Stage:
        """With the messages of its moves: what the next pass receives, what the last one sends, what was sent last."""
        order = list(moves(parallel, number, micro_batches))
        messages: list[_Message | None] = []
        passes = [place for place, each in enumerate(order) if isinstance(each, Action)]
        sent: dict[str, _Message] = {}
        asked = iter([at for at, each in enumerate(order) if isinstance(each, Move) and each.what == "ask"])
        heads = set()
        for place, each in enumerate(order):
            if isinstance(each, Action):
                messages.append(None)
                if each.chunk * parallel.pipeline + number == parallel.pipeline * parallel.chunks - 1:
                    heads.add(place)
                continue
            if each.what in ("ask", "wait"):
                messages.append(sent.get(each.way))  # what is asked for is known where it is awaited
                continue
            at = bisect_left(passes, place)
            action = order[passes[at - 1 if each.what == "send" else at]]
            assert isinstance(action, Action)
            before = 0 if each.what == "send" else -1 if each.way == FORWARD else 1
            message = each.way, action.chunk * parallel.pipeline + number + before, action.micro_batch
            messages.append(message)
            if each.what == "send":
                sent[each.way] = message
            elif each.what == "await":
                messages[next(asked)] = message
        return cls(list(zip(order, messages, strict=True)), frozenset(heads))


class _Pipeline:
    """All stages and what is between them."""

    def __init__(self, stages: Sequence[_Stage], times: StageTimes) -> None:
        self._stages, self._times = stages, times
        self._micro_batches = 1 + max(each.micro_batch for each, _ in stages[0].order if isinstance(each, Action))
        self._sent: dict[_Message, Floats] = {}
        self._come: dict[_Message, Floats] = {}
        self._ended: dict[_Message, Floats] = {}
        self._order: list[_Stage] = []  # whose turn it is, which is the same in every play

    def play(self) -> Floats:
        """When the last stage is through."""
        for known in (self._sent, self._come, self._ended):
            known.clear()
        for stage in self._stages:
            stage.at, stage.free, stage.done = 0, np.zeros_like(self._times.sent_ns), []
            stage.flying.clear()
        if self._order:
            for stage in self._order:
                self._turn(stage, *stage.order[stage.at])
                stage.at += 1
        else:
            while sum(self._advance(stage) for stage in self._stages):
                pass
        assert all(stage.at == len(stage.order) for stage in self._stages)
        return np.asarray(np.max([stage.free for stage in self._stages], axis=0))

    def _advance(self, stage: _Stage) -> bool:
        """Goes on as far as others have come; whether it came any further."""
        began = stage.at
        while stage.at < len(stage.order) and self._turn(stage, *stage.order[stage.at]):
            stage.at += 1
            self._order.append(stage)
        return stage.at > began

    def _turn(self, stage: _Stage, each: Action | Move, message: _Message | None) -> bool:
        """One pass or move; whether it could be made."""
        if isinstance(each, Action):
            start = stage.free if stage.received is None else np.maximum(stage.free, stage.received)
            alone = self._times.of(each, head=stage.at in stage.heads, micro_batches=self._micro_batches)
            stage.free, stage.received = start + alone * stage.slower[each.way], None
            stage.done.append((each.way, start, stage.free, tuple(stage.flying.values())))
            return True
        assert message is not None
        if each.what == "send":
            self._sent[message] = stage.free
            stage.flying[each.way] = message
            return True
        if each.what == "ask":
            self._come[message] = stage.free
            stage.flying[f"{each.what} {message}"] = message
            return True
        if each.what == "receive":
            self._come.setdefault(message, stage.free)
        end = self._end(message)
        if end is None:
            return False
        if each.what == "wait":
            stage.free = np.maximum(stage.free, end)
            stage.flying.pop(each.way, None)
        else:
            stage.received = end
            stage.flying.pop(f"ask {message}", None)
        return True

    def _end(self, message: _Message) -> Floats | None:
        """When both have come to a message and it is through."""
        if message not in self._ended and message in self._sent and message in self._come:
            self._ended[message] = np.maximum(self._sent[message], self._come[message]) + self._times.sent_ns
        return self._ended.get(message)

    def slow(self, beside: Floats) -> None:
        """What passes take beside the sends of their stage, in the mean of each way, as they were played last."""
        for stage in self._stages:
            for way in (FORWARD, BACKWARD):
                took, held = np.zeros_like(stage.free), np.zeros_like(stage.free)
                for each, start, end, sends in stage.done:
                    if each == way:
                        took += end - start
                        held += self._held(start, end, sends)
                share = held / np.maximum(took, 1.0)
                stage.slower[way] = (stage.slower[way] + 1.0 / (share / beside + 1.0 - share)) / 2.0

    def _held(self, start: Floats, end: Floats, sends: Sequence[_Message]) -> Floats:
        """How long of a pass one of the sends before it was under way."""
        until = start
        for message in sends:
            until = np.maximum(until, self._ended[message])
        return np.minimum(end, until) - start
