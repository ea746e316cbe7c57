"""The program of one stage of a pipeline: its chunks of the model, their micro-batches, and what is between and after them.

A model without a pipeline is one stage. Where a step would be long, a sample of it is written (`sampling`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.gradients import InPlaceReducer, Optimizer, Reducer
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import DATA, EXPERT_DATA
from steptime._build.transformer.fsdp import FullySharded, Unsharded
from steptime._build.transformer.model import Model
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.sampling import Sampling
from steptime._build.transformer.schedules import BACKWARD, FORWARD, Action, Move
from steptime._build.transformer.tensor import sum_over_ranks
from steptime._build.transformer.zero import DistributedOptimizer
from steptime._program.program import Program, Tensor

EMBEDDING = "embedding"  # the group of the two stages that share an embedding's weights


def between(stage: int, parallel: Parallelism, way: str) -> str:
    """The group in which a stage hands on what it made of a micro-batch."""
    other = (stage + (1 if way == FORWARD else -1)) % parallel.pipeline
    return f"pipeline {way} {stage}->{other}"


class StageProgram:
    """Writes the step of one rank of a stage."""

    def __init__(self, sampling: Sampling, rank: int, groups: dict[str, tuple[int, ...]]) -> None:
        self._sampling, self._config = sampling, sampling.config
        config = self._config
        self._emit = emit = Emitter(
            rank=rank, world_size=config.ranks, source=config.title, groups=groups, tf32=config.precision == "tf32"
        )
        self._tape = Tape(emit, "bfloat16" if config.autocast else "")
        self._sharded: list[FullySharded | None] = []
        self._shared: list[DistributedOptimizer] = []  # by chunk, where there are any
        self._models: list[Model] = []
        for part in sampling.parts:
            sharded = FullySharded(self._tape, config) if config.parallel.fsdp > 1 else None
            shared = DistributedOptimizer(self._tape, config) if config.parallel.zero else None
            self._sharded.append(sharded)
            self._shared += [] if shared is None else [shared]
            self._models.append(Model(self._tape, config, sharded or shared or Unsharded(), part))
        self._copies = sampling.copies and not self._shared  # DistributedDataParallel
        self._given: dict[tuple[int, str], Tensor] = {}  # by chunk and micro-batch: what a forward pass was given
        self._made: dict[tuple[int, str], Tensor] = {}  # and what it made
        self._passed: dict[str, Tensor] = {}  # by way: what was received last, or is to be sent
        self._sent: dict[str, int] = {}  # by way: the last send
        self._asked: dict[str, tuple[Tensor, int]] = {}  # by way: what is being received
        self._twins: dict[int, int] = {}  # storages that a sample leaves out, each with one that it has

    def program(self) -> Program:
        """The whole step, or a sample of it."""
        sampling, emit = self._sampling, self._emit
        emit.section(sampling.begin)
        mains = () if self._shared else tuple(self._tape.mains.values())
        masters = self._config.state_dtype == "float32"
        optimizer = Optimizer(emit, self._config.optimizer, self._parameters, mains=mains, masters=masters)
        optimizer.zero_grad([buffer for shared in self._shared for buffer in shared.buffers])
        for model in self._models:
            model.begin()
        for each in sampling.written():
            if isinstance(each, Action):
                self._run(each)
            else:
                self._move(each)
        emit.section(sampling.end)
        with emit.backward_thread():  # as a part of the backward pass
            whole = [sharded for sharded in self._sharded if sharded is not None]
            for sharded in whole:
                sharded.settle(at_end=True)
            self._complete()
            for sharded in whole:
                sharded.finish()
            for shared in self._shared:
                shared.finish()
            self._share_embedding()
            summed = [each for model in self._models for each in model.summed]
            if summed and not any(self._sharded) and self._config.parallel.zero <= 1:
                sum_over_ranks(emit, [self._tape.gradients[each.id or 0] for each in summed])
        optimizer.step(self._gradients())
        for shared in self._shared:
            shared.updated()
        return emit.program(list(sampling.order()), self._twins)

    def _run(self, action: Action) -> None:
        chunk, kind = action.chunk, self._sampling.kind(action.micro_batch)
        if action.way == FORWARD:
            self._forward(chunk, kind, first=action.micro_batch == 0)
        else:
            self._backward(chunk, kind, last=action.micro_batch == self._sampling.micro_batches - 1)

    def _forward(self, chunk: int, kind: str, *, first: bool) -> None:
        emit, model, part = self._emit, self._models[chunk], self._sampling.parts[chunk]
        layers = list(dict.fromkeys(self._sampling.standing(chunk, kind)))
        sharded = self._sharded[chunk]
        if sharded is not None:
            sharded.first = first
        given = None if part.first else self._passed[FORWARD]
        emit.section(self._sampling.of_layer(chunk, kind, FORWARD, part.layers.start - 1))
        with emit.write("DistributedDataParallel.forward") if self._copies else nullcontext():
            if self._copies and first and model.buffers:
                _give_buffers(emit, model.buffers)
            made = model.forward(given, layers, partial(self._sampling.of_layer, chunk, kind))
        if given is not None:
            self._given[chunk, kind] = given
        self._made[chunk, kind] = self._passed[FORWARD] = made

    def _backward(self, chunk: int, kind: str, *, last: bool) -> None:
        tape, part, made = self._tape, self._sampling.parts[chunk], self._made.pop((chunk, kind))
        self._emit.section(self._sampling.of_layer(chunk, kind, BACKWARD, part.layers.stop))
        # Micro-batches but the last run under no_sync: their gradients stay where they are.
        if self._copies and last:
            if self._sampling.micro_batches > 1:
                self._complete()
            self._reduce(self._models[chunk])
        for shared in self._shared[chunk : chunk + 1]:
            shared.reduce(last=last)
        sharded = self._sharded[chunk]
        if sharded is not None:
            sharded.last = last
        gradient = None if part.last else self._passed[BACKWARD]
        tape.backward(made, gradient, self._sampling.behind(chunk, kind))
        if not part.first:
            given = self._given.pop((chunk, kind))
            self._passed[BACKWARD] = tape.gradients.pop(given.id or 0)

    def _reduce(self, model: Model) -> None:
        """Sums gradients over the ranks that hold the same parameters."""
        apart = {each.id for each in model.expert_parameters}
        reducer = InPlaceReducer if self._tape.mains else Reducer
        learnt = [each for each in model.weights.all if self._tape.is_parameter(each)]
        reducer(self._tape, [each for each in learnt if each.id not in apart], DATA)
        if self._emit.group_size(EXPERT_DATA) > 1:
            reducer(self._tape, model.expert_parameters, EXPERT_DATA)

    def _move(self, move: Move) -> None:
        emit, parallel, way, stage = self._emit, self._config.parallel, move.way, self._sampling.stage
        emit.section(self._sampling.of_move(move))
        group = between((stage + (-1 if way == FORWARD else 1)) % parallel.pipeline, parallel, way)
        if move.what in ("receive", "ask"):
            x = emit.empty_from_python(self._config.hidden_shape, self._config.dtype)
            self._asked[way] = x, emit.receive(x, group)
        if parallel.batch_p2p_sync and move.what in ("await", "wait"):
            emit.synchronize()
        if move.what in ("receive", "await"):
            x, number = self._asked.pop(way)
            emit.wait(number, group)
            self._passed[way] = self._tape.leaf(x) if way == FORWARD else x
        elif move.what == "send":
            self._sent[way] = emit.send(self._passed[way], between(stage, parallel, way))
        elif move.what == "wait":
            emit.wait(self._sent[way], between(stage, parallel, way))

    # The update

    @property
    def _parameters(self) -> list[Tensor]:
        """What the optimiser updates."""
        if any(self._sharded):
            return [shard for sharded in self._sharded if sharded is not None for shard in sharded.shards]
        if self._shared:
            return [shard for shared in self._shared for shard in shared.shards]
        return self._tape.parameters

    def _complete(self) -> None:
        """What a sample leaves out gets gradients, as the micro-batches that it leaves out make them."""
        sampling, kind = self._sampling, self._sampling.kind(0)
        for chunk, part in enumerate(sampling.parts):
            like = sampling.like(chunk, kind)
            for index, standing in zip(part.layers, sampling.standing(like, kind), strict=True):
                if (chunk, index) != (like, standing):
                    self._twins.update(self._alike(chunk, index, like, standing))

    def _gradients(self) -> list[Tensor]:
        """Of what the optimiser updates."""
        if any(self._sharded):
            return [gradient for sharded in self._sharded if sharded is not None for gradient in sharded.gradients]
        if self._shared:
            return [gradient for shared in self._shared for gradient in shared.gradients]
        return [self._tape.gradients[each.id or 0] for each in self._tape.parameters]

    def _alike(self, chunk: int, index: int, like: int, standing: int) -> Iterator[tuple[int, int]]:
        """Storages of a layer that a sample may have left out with those of one that it has, gradients for it included."""
        sharded, other = self._sharded[chunk], self._sharded[like]
        if sharded is not None and other is not None:
            pairs = sharded.alike(f"layers.{index}", other, f"layers.{standing}")
        else:
            weights, others = self._models[chunk].weights.of_layer[index], self._models[like].weights.of_layer[standing]
            pairs = list(zip(weights, others, strict=True))
            copies, twins = self._models[chunk].copies, self._models[like].copies
            for each, twin in tuple(pairs):
                pairs += zip(copies(each), twins(twin), strict=True)
            gradients, mains = self._tape.gradients, self._tape.mains
            for each, twin in tuple(pairs):
                if each.id not in gradients and twin.id in gradients:
                    held = gradients[twin.id or 0]
                    made = mains.get(each.id or 0) or self._emit.tensor(held.shape, held.dtype, strides=held.strides)
                    gradients[each.id or 0] = made
                    pairs.append((gradients[each.id or 0], held))
        yield from ((each.storage or 0, twin.storage or 0) for each, twin in pairs)

    def _share_embedding(self) -> None:
        """The first and the last stage add up the gradients of an embedding that both have, as Megatron-LM does."""
        if self._emit.group_size(EMBEDDING) == 1:
            return
        place = 0 if self._sampling.parts[0].first else -1
        tokens, sharded = self._models[place].weights.tokens, self._sharded[place]
        assert tokens is not None
        gradient = self._tape.gradients[tokens.id or 0] if sharded is None else sharded.gradients[0]
        self._emit.wait(self._emit.all_reduce((gradient,), EMBEDDING), EMBEDDING)


def _give_buffers(emit: Emitter, buffers: tuple[Tensor, ...]) -> None:
    """DistributedDataParallel gives all ranks the buffers of the first before a forward pass."""
    rows = tuple(emit.view(each, (each.numel,)) for each in buffers)
    flat = emit.tensor((sum(each.numel for each in rows),), rows[0].dtype)
    with emit.op("flatten_dense_tensors", (buffers,), (flat,)):
        emit.op("cat", (rows, 0), (flat,))
    emit.wait(emit.broadcast(flat, DATA), DATA)
    copies = [emit.view(flat, each.shape, offset=number * each.numel) for number, each in enumerate(buffers)]
    emit.op("unflatten_dense_tensors", (flat, buffers), (tuple(copies),))
    for buffer, copy in zip(buffers, copies, strict=True):
        emit.op("copy_", (buffer, copy, True), (buffer,))
