"""A `Transformer` as a `Workload`: one program that all ranks run, and who meets whom in its collectives."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.gradients import Optimizer, Reducer
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import DATA, FSDP, TENSOR
from steptime._build.transformer.config import KIND, Parallelism, Transformer
from steptime._build.transformer.model import Model, Weights
from steptime._build.transformer.parallel import FullySharded, Unsharded
from steptime._program.program import Program, Tensor
from steptime._program.workload import Description, Workload


def build(config: Transformer) -> Workload:
    """The workload of a training step."""
    groups = groups_of(config.parallel)
    program = _program(config, {name: sets[0] for name, sets in groups.items()})
    everybody = config.ranks
    named = {"0" if len(sets) == 1 else name: sets for name, sets in groups.items()}
    return Workload(
        programs=(program,),
        world_size=everybody,
        name=config.title,
        meta={KIND: config.to_dict()},
        owners=(0,) * everybody if everybody > 1 else (),
        groups=named if everybody > 1 else {},
        description=_described(config),
    )


def _described(config: Transformer) -> Description:
    ways = asdict(config.parallel)
    return Description(
        batch=config.batch,
        sequence=config.sequence,
        precision=config.precision,
        parallelism={kind: count for kind, count in ways.items() if count > 1},
        parameters=_parameter_count(config),
    )


def _parameter_count(config: Transformer) -> int:
    """Of the whole model, however ranks share it."""
    tape = Tape(Emitter(source=config.title))
    Weights(tape, replace(config, parallel=Parallelism()), Unsharded())
    return sum(each.numel for each in tape.parameters)


def groups_of(parallel: Parallelism) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Who meets whom: ranks of one tensor-parallel group are neighbours, then those that shard, then whole copies."""
    ranks, tensor, fsdp = parallel.ranks, parallel.tensor, parallel.fsdp
    inner = tensor * fsdp
    result = {
        TENSOR: tuple(tuple(range(first, first + tensor)) for first in range(0, ranks, tensor)),
        FSDP: tuple(
            tuple(range(first + offset, first + inner, tensor)) for first in range(0, ranks, inner) for offset in range(tensor)
        ),
        DATA: tuple(tuple(range(offset, ranks, inner)) for offset in range(inner)),
    }
    sizes = {TENSOR: tensor, FSDP: fsdp, DATA: parallel.data}
    return {name: sets for name, sets in result.items() if sizes[name] > 1}


def _program(config: Transformer, groups: dict[str, tuple[int, ...]]) -> Program:
    emit = Emitter(world_size=config.ranks, source=config.title, groups=groups, tf32=config.precision == "tf32")
    _write(config, emit, Tape(emit, "bfloat16" if config.autocast else ""))
    result = f"{config.title}: built from a config, never run; its kernels and times need models of a device and a host"
    return replace(emit.program(), warnings=(result,))


def _write(config: Transformer, emit: Emitter, tape: Tape) -> None:
    """Writes the step: the parts of the batch, forward and backward, then the optimiser's."""
    sharded = FullySharded(tape, config) if config.parallel.fsdp > 1 else None
    model = Model(tape, config, sharded or Unsharded())
    optimizer = Optimizer(emit, config.optimizer, sharded.shards if sharded else tape.parameters)
    copies = config.parallel.data > 1 and sharded is None  # DistributedDataParallel
    optimizer.zero_grad()
    for part in range(config.gradient_accumulation):
        with emit.write("DistributedDataParallel.forward") if copies else nullcontext():
            if copies and part == 0 and model.buffers:
                _give_buffers(emit, model.buffers)
            loss = model.loss()
        # Parts but the last run under no_sync: their gradients stay where they are.
        if copies and part == config.gradient_accumulation - 1:
            Reducer(tape, tape.parameters, DATA)
        tape.backward(loss)
    optimizer.step(sharded.gradients if sharded else [tape.gradients[each.id or 0] for each in tape.parameters])


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
