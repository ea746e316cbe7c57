"""Which part of a long step is written: of equal layers the first, one more and the last, of equal micro-batches the same, of
equal chunks one; and in which order a step runs what was written (`steptime._program.repetition`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from steptime._build.emit.writer import next_part
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.schedules import BACKWARD, FORWARD, Action, Move, moves

# More passes of micro-batches through layers than these are written as a sample.
_WRITTEN_OUT = 24
_ONLY, _FIRST, _MIDDLE, _LAST = "only", "first", "middle", "last"
_BEGIN, _END = "begin", "end"
_EXCHANGES = 2  # of tokens in a layer with experts, either way
_RECEIVED = ("receive", "ask", "await")


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Consecutive layers of a model, with the embedding before them where they are the first, and the head after the last."""

    layers: range
    first: bool
    last: bool


def layers_of(parallel: Parallelism, layers: int) -> list[range]:
    """The layers of every chunk, in order of the model; what does not divide goes to the first ones."""
    count = parallel.pipeline * parallel.chunks
    sizes = parallel.stages or [layers // count + (number < layers % count) for number in range(count)]
    starts = [sum(sizes[:number]) for number in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def parts_of(config: Transformer, stage: int) -> tuple[ModelPart, ...]:
    """The chunks of a stage, each as many chunks behind the one before as there are stages."""
    parallel, every = config.parallel, layers_of(config.parallel, config.layers)
    numbers = range(stage, len(every), parallel.pipeline)
    return tuple(ModelPart(every[number], number == 0, number == len(every) - 1) for number in numbers)


@dataclass(frozen=True, eq=False)
class Sampling:
    """What of a stage's step is written, under which names of sections, and what a step makes of them."""

    config: Transformer
    stage: int

    @cached_property
    def parts(self) -> tuple[ModelPart, ...]:
        """The chunks of the stage."""
        return parts_of(self.config, self.stage)

    @cached_property
    def kinds(self) -> tuple[tuple[bool, bool, tuple[str, ...]], ...]:
        """Per chunk its ends and the kinds of its layers; equal for stages whose samples are equal."""
        return tuple((part.first, part.last, tuple(map(self.layer_kind, part.layers))) for part in self.parts)

    def layer_kind(self, index: int) -> str:
        """What kind of layer stands there: layers of one kind run the same ops."""
        return f"{self.config.layer_kind(index)} {self.config.recomputes(index)}"

    @property
    def copies(self) -> bool:
        """Whether gradients are reduced in buckets, which are not as layers are."""
        parallel = self.config.parallel
        return parallel.fsdp == 1 and (parallel.data * parallel.context > 1 or parallel.zero > 0)

    @cached_property
    def sampled(self) -> bool:
        """Whether a sample is written."""
        long = sum(len(part.layers) for part in self.parts) * self.micro_batches > _WRITTEN_OUT
        return long or self.config.parallel.overlap_moe_expert_parallel_comm

    @property
    def micro_batches(self) -> int:
        """How many there are."""
        return self.config.gradient_accumulation

    def kind(self, micro_batch: int) -> str:
        """What is special about a micro-batch."""
        if not self.sampled:
            return str(micro_batch)
        if self.micro_batches == 1:
            return _ONLY
        return {0: _FIRST, self.micro_batches - 1: _LAST}.get(micro_batch, _MIDDLE)

    def whole(self, kind: str) -> bool:
        """Whether micro-batches of a kind are written with all layers: those with buckets of gradients or of parameters."""
        parallel = self.config.parallel
        every = parallel.zero > 1 and parallel.pipeline == 1
        return not self.sampled or (self.copies and (kind in (_ONLY, _LAST) or every or (parallel.zero > 0 and kind == _FIRST)))

    def like(self, chunk: int, kind: str) -> int:
        """The chunk that stands for this one."""
        return chunk if self.whole(kind) else self.kinds.index(self.kinds[chunk])

    def standing(self, chunk: int, kind: str) -> list[int]:
        """Per layer of a chunk the one that is written for it: itself at either end, else the first of its kind."""
        layers = self.parts[chunk].layers
        if self.whole(kind):
            return list(layers)
        inside: dict[str, int] = {}
        for index in layers[1:-1]:
            inside.setdefault(self.layer_kind(index), index)
        ends = {layers[0], layers[-1]} if layers else set[int]()
        return [index if index in ends else inside[self.layer_kind(index)] for index in layers]

    # Names of sections; none where the whole step is written

    def of_layer(self, chunk: int, kind: str, way: str, layer: int) -> str:
        """Of a layer's pass; below the first layer stands what is before all layers, above the last what is behind them."""
        return f"{way} {kind} {chunk} {layer - self.parts[chunk].layers.start}" if self.sampled else ""

    def behind(self, chunk: int, kind: str) -> str:
        """Of what follows the last node of a backward pass."""
        return f"behind {kind} {chunk}" if self.sampled else ""

    def of_move(self, move: Move) -> str:
        """Of a receive, a send or a wait."""
        return f"{move.what} {move.way}" if self.sampled else ""

    @property
    def begin(self) -> str:
        """Of what is before all micro-batches."""
        return _BEGIN if self.sampled else ""

    @property
    def end(self) -> str:
        """Of what is behind them."""
        return _END if self.sampled else ""

    # Orders

    def written(self) -> Iterator[Action | Move]:
        """What is written, in order: the step, or a micro-batch of every kind through a chunk of every kind, and every move."""
        everything = moves(self.config.parallel, self.stage, self.micro_batches)
        if not self.sampled:
            yield from everything
            return
        there = {each for each in everything if isinstance(each, Move)}
        numbers = sorted({0, min(1, self.micro_batches - 1), self.micro_batches - 1})
        for way in (FORWARD, BACKWARD):
            for number in numbers:
                kind = self.kind(number)
                chunks = [chunk for chunk in range(len(self.parts)) if self.like(chunk, kind) == chunk]
                for chunk in chunks if way == FORWARD else reversed(chunks):
                    yield from (each for what in ("receive", "ask", "await") if (each := Move(what, way)) in there)
                    yield Action(way, chunk, number)
                    yield from (each for each in (Move("send", way), Move("wait", way)) if each in there)

    def order(self) -> Iterator[str]:
        """The sections as a step runs them."""
        if not self.sampled:
            return
        yield self.begin
        for each in self._in_turns(list(moves(self.config.parallel, self.stage, self.micro_batches))):
            if isinstance(each, Move):
                yield self.of_move(each)
            elif isinstance(each, Action):
                yield from self._of_action(each)
            else:
                for one, other in zip_longest(*map(self._of_action, each)):
                    yield from (name for name in (one, other) if name is not None)
        yield self.end

    def _of_action(self, action: Action) -> Iterator[str]:
        kind = self.kind(action.micro_batch)
        chunk = self.like(action.chunk, kind)
        part = self.parts[chunk]
        places = [part.layers.start - 1, *self.standing(chunk, kind), part.layers.stop]
        if action.way == BACKWARD:
            places = places[::-1] if part.first else places[:0:-1]
        for place in places:
            name = self.of_layer(chunk, kind, action.way, place)
            yield name
            if place in part.layers and self.config.layer_kind(place).startswith("experts"):
                for _ in range(_EXCHANGES if self.config.parallel.overlap_moe_expert_parallel_comm else 0):
                    name = next_part(name)
                    yield name
        if action.way == BACKWARD:
            yield self.behind(chunk, kind)

    def _in_turns(self, order: list[Action | Move]) -> Iterator[Action | Move | tuple[Action, Action]]:
        """A backward pass and the forward pass after it as one, where their exchanges run beside each other.

        What the second needs is received before both, and what the first made is sent after both.
        """
        if not self.config.parallel.overlap_moe_expert_parallel_comm:
            yield from order
            return
        first: Action | None = None  # a backward pass that waits for the forward pass after it
        between: list[Move] = []
        for each in order:
            if isinstance(each, Move):
                if first is None:
                    yield each
                else:
                    between.append(each)
            elif first is not None and each.way == FORWARD:
                yield from (move for move in between if move.what in _RECEIVED)
                yield first, each
                yield from (move for move in between if move.what not in _RECEIVED)
                first, between = None, []
            else:
                if first is not None:
                    yield first
                yield from between
                first, between = (each, []) if each.way == BACKWARD else (None, [])
                if first is None:
                    yield each
        if first is not None:
            yield first
        yield from between
