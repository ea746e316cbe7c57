"""A `Transformer` as a `Workload`: a program for every stage of its pipeline, and who meets whom in its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import group_names
from steptime._build.transformer.config import KIND, VOCABULARY_MULTIPLE, Transformer
from steptime._build.transformer.fsdp import Unsharded
from steptime._build.transformer.parallelism import DEGREES, Parallelism, groups_of
from steptime._build.transformer.sampling import Sampling
from steptime._build.transformer.schedules import BACKWARD, FORWARD
from steptime._build.transformer.stages import EMBEDDING, StageProgram, between
from steptime._build.transformer.weights import Weights
from steptime._notices import Basis
from steptime._program.program import Program
from steptime._program.workload import COMPILE, Description, Workload

# What tensor cores read at once: cuBLAS takes its fastest kernels where rows begin at multiples of it (NVIDIA, "Matrix
# Multiplication Background User's Guide", section 2).
_ALIGNED_BYTES = 16
_BITS = {"fp32": 32, "tf32": 32, "fp8": 8, "mxfp8": 8, "nvfp4": 4}

_Sets = tuple[tuple[int, ...], ...]


def build(config: Transformer) -> Workload:
    """The workload of a training step."""
    groups = {**groups_of(config.parallel), **_stage_groups(config)}
    everybody, size = config.ranks, config.parallel.in_stage
    called = group_names({name: sets[0] for name, sets in groups.items()}, everybody)
    named = {called[name]: sets for name, sets in groups.items()}
    return Workload(
        programs=_programs(config, groups),
        world_size=everybody,
        name=config.title,
        meta={KIND: config.to_dict()} | ({COMPILE: config.compile} if config.compile != "off" else {}),
        owners=tuple(rank - rank % size for rank in range(everybody)) if everybody > 1 else (),
        groups=named if everybody > 1 else {},
        description=_described(config),
        warnings=tuple(_assumed(config)),
    )


def _assumed(config: Transformer) -> Iterator[str]:
    """What a config leaves open and the program settles, and sizes that cost more than their neighbours."""
    yield from _unaligned(config)
    if config.experts.count:
        load = config.experts.imbalance
        shared = "all get as many tokens" if load == 1 else f"the busiest rank gets {load:g} times the mean of tokens"
        if config.experts.capacity:
            yield Basis(f"experts: every one gets {config.experts.capacity:g} times the mean of tokens (experts.capacity)")
            return
        text = f"experts: {shared} (experts.imbalance), and all experts of a rank as many"
        yield text if load == 1 else Basis(text)


def _unaligned(config: Transformer) -> Iterator[str]:
    """Rows of matrices that begin at no multiple of 16 bytes: products then take kernels that are far slower."""
    multiple = _ALIGNED_BYTES * 8 // _BITS.get(config.precision, 16)
    parts = config.parallel.tensor
    sizes = {"width": config.width, "heads": config.heads * config.head_size // parts, "feed_forward": config.inner // parts}
    sizes["a head's width"] = config.head_size
    if config.experts.count:
        sizes["the experts' width"] = config.expert_inner // max(config.parallel.expert_tensor, 1)
    if config.attention == "unfused":
        sizes["sequence"] = config.sequence // config.parallel.context
    rows, of_head = config.vocabulary_rows // parts, min(multiple, _ALIGNED_BYTES * 8 // 16)  # the head has 16 bits at least
    if config.head == "language_model" and rows % of_head:
        yield (
            f"vocabulary: {rows} rows on a rank are no multiple of {of_head}, as {config.precision} needs for its fastest "
            f"kernels; pad_vocab = {VOCABULARY_MULTIPLE}, as Megatron-LM pads, can be far faster"
        )
    for name, size in sizes.items():
        if size % multiple:
            near = f"{size // multiple * multiple} or {-(-size // multiple) * multiple}"
            yield (
                f"{name}: {size} elements on a rank are no multiple of {multiple}, as {config.precision} needs for its fastest "
                f"kernels; {near} can be far faster"
            )


def _programs(config: Transformer, groups: dict[str, _Sets]) -> tuple[Program, ...]:
    """The programs of all stages; those that differ in their order and their neighbours alone share the sample."""
    result: list[Program] = []
    known: dict[tuple[object, ...], int] = {}
    text = f"{config.title}: built from a config, never run; its kernels and times need models of a device and a host"
    for stage in range(config.parallel.pipeline):
        rank, sampling = stage * config.parallel.in_stage, Sampling(config, stage)
        mine = {name: own for name, sets in groups.items() for own in sets if rank in own}
        first = known.setdefault(sampling.kinds, stage) if sampling.sampled else stage
        if first == stage:
            result.append(replace(StageProgram(sampling, rank, mine).program(), warnings=(text,)))
        else:
            result.append(_moved(result[first], first, sampling, mine))
    return tuple(result)


def _moved(sample: Program, first: int, sampling: Sampling, groups: dict[str, tuple[int, ...]]) -> Program:
    """The program of one stage as that of another of its kind: its neighbours and the order of its micro-batches."""
    parallel, stage = sampling.config.parallel, sampling.stage
    shift = (stage - first) * parallel.in_stage
    names = {
        between((first + by) % parallel.pipeline, parallel, way): between((stage + by) % parallel.pipeline, parallel, way)
        for way, back in ((FORWARD, -1), (BACKWARD, 1))
        for by in (0, back)
    }
    collectives = []
    for each in sample.collectives:
        group = names.get(each.group, each.group)
        ranks = groups[group] if group in groups else tuple(rank + shift for rank in each.ranks)
        collectives.append(replace(each, group=group, ranks=ranks))
    assert sample.repetition is not None
    repetition = sample.repetition.reordered(list(sampling.order()))
    return replace(sample.of_rank(sample.rank + shift), collectives=tuple(collectives), repetition=repetition)


def _stage_groups(config: Transformer) -> dict[str, _Sets]:
    """Who hands activations and their gradients to whom, and who shares an embedding: every rank with those of other stages."""
    parallel, size = config.parallel, config.parallel.in_stage
    count = parallel.pipeline
    if count == 1:
        return {}
    result: dict[str, _Sets] = {}
    for stage in range(count):
        for way in (FORWARD, BACKWARD):
            other = stage + (1 if way == FORWARD else -1)
            if parallel.chunks > 1 or other in range(count):
                pairs = ((stage * size + rank, other % count * size + rank) for rank in range(size))
                result[between(stage, parallel, way)] = tuple((min(pair), max(pair)) for pair in pairs)
    if config.tied_head and config.head == "language_model":
        result[EMBEDDING] = tuple((rank, (count - 1) * size + rank) for rank in range(size))
    return result


def _described(config: Transformer) -> Description:
    ways = {kind: getattr(config.parallel, kind) for kind in DEGREES}
    parameters, active = _parameter_counts(config)
    return Description(
        batch=config.batch,
        sequence=config.sequence,
        precision=config.precision,
        numerics=config.numerics,
        parallelism={kind: count for kind, count in ways.items() if count > 1},
        parameters=parameters,
        active_parameters=active,
    )


def _parameter_counts(config: Transformer) -> tuple[int, int]:
    """Of the whole model, however ranks share it: all, and those that a token meets."""
    tape = Tape(Emitter(source=config.title))
    weights = Weights(tape, replace(config, parallel=Parallelism(), gradient_accumulation=1, pad_vocab=1), Unsharded())
    total = sum(each.numel for each in weights.all)
    experts = config.experts
    unseen = sum(each.numel // experts.count * (experts.count - experts.top_k) for each in weights.of_experts)
    return total, total - unseen
