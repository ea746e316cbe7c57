"""`Parallelism`: how a job's ranks share a model and its batch, and who meets whom.

Ranks lie as Megatron-LM and torchtitan lay them out: those of one tensor-parallel group are neighbours, then come those that
share sequences, those that shard, whole copies, and outermost the stages of a pipeline. Expert parallelism takes no ranks of
its own: the ranks of a stage that share everything else hold different experts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields

from steptime._build.emit.writer import CONTEXT, DATA, EXPERT, EXPERT_DATA, FSDP, TENSOR
from steptime.errors import InputError

Groups = Mapping[str, tuple[tuple[int, ...], ...]]
"""Per name, the sets of ranks that meet under it."""

DEGREES = ("data", "fsdp", "tensor", "pipeline", "context", "expert")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "schedule": ("1f1b", "gpipe", "interleaved"),
    "context_exchange": ("ring", "all_to_all", "all_gather"),
}
_MOST_NAMED = 24
_OF_FSDP = ("reshard_after_forward", "no_sync")
_OF_ZERO = ("overlap_grad_reduce", "overlap_param_gather")


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How many ways each kind of parallelism divides the job; all but `expert` multiply to the ranks."""

    data: int = 1  # whole copies: DistributedDataParallel, or replicas of what FSDP shards (HSDP)
    fsdp: int = 1  # parameters sharded: FSDP2, a unit per layer
    tensor: int = 1  # every layer's matrices split by columns and rows, as Megatron-LM does
    pipeline: int = 1  # stages of layers
    context: int = 1  # parts of every sequence
    expert: int = 1  # parts of a layer's experts, among the ranks of a stage
    sequence: bool = False  # between the split matrices, tensor-parallel ranks share the tokens (sequence parallelism)
    tp_comm_overlap: bool = False  # with `sequence`: tokens travel inside products, as Megatron-LM calls it (async TP)
    zero: int = 0  # what data-parallel ranks share: 1 the optimiser's state, 2 gradients too
    # With `fsdp`; left out: in pipelines false and true, as torchtitan and torch.distributed.pipelining do, else true and false
    reshard_after_forward: bool | None = None  # layers are gathered again in backward
    no_sync: bool | None = None  # micro-batches but the last keep gradients whole
    # As Megatron-LM calls it; left out: true with bf16, false with fp16, as its own default is (megatron/training/arguments.py)
    grad_reduce_in_fp32: bool | None = None  # gradients of 16-bit parameters are summed and exchanged in fp32
    # With `zero`, as Megatron-LM calls them and its recipes for speed have them
    overlap_grad_reduce: bool = True  # buckets of gradients are scattered beside the backward pass
    overlap_param_gather: bool = True  # parameters are gathered beside the forward pass
    schedule: str = "1f1b"  # of a pipeline's micro-batches
    overlap_p2p_comm: bool = False  # of interleaved pipelines, as Megatron-LM calls it: receives run beside the pass before
    # Of experts, as Megatron-LM calls it: forward and backward passes take turns, exchanges of each run beside the other
    overlap_moe_expert_parallel_comm: bool = False
    chunks: int = 1  # parts of the model on every rank of an interleaved pipeline (virtual stages)
    stages: tuple[int, ...] = ()  # layers of each stage, or of each chunk in order of the model; empty: as even as can be
    batch_p2p_sync: bool = False  # hosts wait for all that a stage sends and receives, as Megatron-LM's do (its name for it)
    context_exchange: str = "ring"  # how ranks of one sequence see each other's keys and values
    expert_tensor: int = 1  # tensor-parallel ranks that share every expert: 1, or as many as `tensor`

    @property
    def gathers_again(self) -> bool:
        """Whether FSDP gathers a layer in backward, too."""
        return self.pipeline == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    @property
    def gathers_once(self) -> bool:
        """Whether what FSDP gathered stays from the first micro-batch to the last."""
        return self.pipeline > 1 and not self.gathers_again

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether FSDP reduces gradients of all micro-batches together."""
        return self.pipeline > 1 if self.no_sync is None else self.no_sync

    @property
    def reduces_at_end(self) -> bool:
        """Whether it does so when all backward passes are over, not beside the last one: torch.distributed.pipelining."""
        return self.pipeline > 1 and self.keeps_whole_gradients

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.in_stage * self.pipeline

    @property
    def in_stage(self) -> int:
        """Ranks of one stage of the pipeline."""
        return self.data * self.fsdp * self.context * self.tensor

    @property
    def replicas(self) -> int:
        """Ranks, or groups of them, that get samples of their own."""
        return self.data * self.fsdp

    def to_dict(self) -> dict[str, int | bool | str | list[int]]:
        """What a config says: what is not as it is by default, and always the oldest three."""
        result: dict[str, int | bool | str | list[int]] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("data", "fsdp", "tensor") or value != each.default:
                result[each.name] = list(value) if isinstance(value, tuple) else value
        return result


def groups_of(parallel: Parallelism) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Who meets whom in collectives; groups of one rank are left out. FSDP shards over the ranks of a sequence too."""
    tensor, context, shards, data = parallel.tensor, parallel.context, parallel.fsdp, parallel.data
    whole = context if shards == 1 else 1  # ranks of a sequence hold copies where nobody shards
    within = {
        TENSOR: _strided(parallel.in_stage, tensor, 1),
        CONTEXT: _strided(parallel.in_stage, context, tensor),
        FSDP: _strided(parallel.in_stage, shards * context if shards > 1 else 1, tensor),
        DATA: _strided(parallel.in_stage, data * whole, tensor * context * shards // whole),
    }
    if parallel.expert > 1:
        between = parallel.expert_tensor
        within[EXPERT] = _strided(parallel.in_stage, parallel.expert, between)
        held = parallel.in_stage // (parallel.expert * between)
        within[EXPERT_DATA] = _strided(parallel.in_stage, held, parallel.expert * between)
    return {
        name: tuple(
            tuple(first + rank for rank in group) for first in range(0, parallel.ranks, parallel.in_stage) for group in sets
        )
        for name, sets in within.items()
        if len(sets[0]) > 1
    }


def resized(sizes: Mapping[str, int], ranks: int, where: str, chosen: Collection[str] = ()) -> dict[str, int]:
    """What `data` and `fsdp` become on so many ranks: they share the batch as before, and everything else stays as it is.

    `sizes` are those of the degrees, 1 where one is missing. Those that are `chosen` stay, whatever they are.
    """
    degree = {key: sizes.get(key, 1) for key in DEGREES if key != "expert"}
    shards = degree["fsdp"] > 1 and (degree["data"] == 1 or "data" in chosen) and "fsdp" not in chosen
    grows = "fsdp" if shards else "data"
    kept = {key: size for key, size in degree.items() if key != grows and (key != "data" or key in chosen)}
    multiple = math.prod(kept.values())
    if grows in chosen and ranks == multiple * degree[grows]:
        return {key: degree[key] for key in ("data", "fsdp")}
    if ranks < 1 or ranks % multiple or grows in chosen:
        said = kept | ({grows: degree[grows]} if grows in chosen else {})
        text = " and ".join(f"parallel.{key} = {size}" for key, size in said.items() if size > 1)
        wanted = f"they make {math.prod(said.values())}" if grows in chosen else f"give a multiple of {multiple}"
        raise InputError(f"{where}: {ranks} ranks with {text or 'one replica'}; {wanted}")
    return {"data": kept.get("data", 1), "fsdp": kept.get("fsdp", 1), grows: ranks // multiple}


def _strided(ranks: int, size: int, stride: int) -> list[tuple[int, ...]]:
    """Groups of `size` ranks, `stride` apart."""
    span = size * stride
    return [tuple(range(first + offset, first + span, stride)) for first in range(0, ranks, span) for offset in range(stride)]


def wrong_parallelism(parallel: Parallelism, layers: int) -> Iterator[str]:
    """What does not go together, each with what would."""
    for key, known in CHOICES.items():
        if getattr(parallel, key) not in known:
            yield f"parallel.{key} is {getattr(parallel, key)!r}; expected {', '.join(known[:-1])} or {known[-1]}"
    yield from _wrong_switches(parallel)
    if parallel.sequence and parallel.tensor == 1:
        yield "parallel.sequence shares tokens among tensor-parallel ranks; give parallel.tensor of 2 or more, or leave it out"
    if parallel.tp_comm_overlap and not parallel.sequence:
        yield "parallel.tp_comm_overlap is of ranks that share tokens; give parallel.sequence = true too, or leave it out"
    if parallel.zero not in range(3):
        yield f"parallel.zero is {parallel.zero!r}; expected 0, 1 or 2 (parallel.fsdp shards parameters too, as ZeRO 3 does)"
    if parallel.zero and parallel.fsdp > 1:
        yield "parallel.zero is of data-parallel ranks, and parallel.fsdp shards as ZeRO 3 does; give one of the two"
    yield from _wrong_stages(parallel, layers)
    yield from _wrong_experts(parallel)


def _wrong_switches(parallel: Parallelism) -> Iterator[str]:
    for key in (*_OF_FSDP, "grad_reduce_in_fp32"):
        if not isinstance(getattr(parallel, key), bool | None):
            yield f"parallel.{key} is {getattr(parallel, key)!r}; expected true or false"
        if key in _OF_FSDP and getattr(parallel, key) is not None and parallel.fsdp == 1:
            yield f"parallel.{key} is of FSDP; give parallel.fsdp of 2 or more, or leave it out"
    for key in ("sequence", "tp_comm_overlap", "batch_p2p_sync", *_OF_ZERO):
        if not isinstance(getattr(parallel, key), bool):
            yield f"parallel.{key} is {getattr(parallel, key)!r}; expected true or false"
        if key in _OF_ZERO and not getattr(parallel, key) and not parallel.zero:
            yield f"parallel.{key} is of ranks that share an optimiser; give parallel.zero = 1 or 2, or leave it out"


def _wrong_stages(parallel: Parallelism, layers: int) -> Iterator[str]:
    stages = parallel.pipeline * parallel.chunks
    if parallel.batch_p2p_sync and (parallel.pipeline == 1 or parallel.chunks > 1):
        yield "parallel.batch_p2p_sync is of a pipeline that is not interleaved; give parallel.pipeline of 2 or more, no chunks"
    if (parallel.schedule == "interleaved") != (parallel.chunks > 1):
        yield (
            f"parallel.schedule is {parallel.schedule!r} with chunks {parallel.chunks}; "
            "give 'interleaved' and 2 or more chunks, or neither"
        )
    overlaps: object = parallel.overlap_p2p_comm  # what a file says may be anything
    if not isinstance(overlaps, bool):
        yield f"parallel.overlap_p2p_comm is {overlaps!r}; expected true or false"
    elif overlaps and parallel.chunks == 1:
        yield "parallel.overlap_p2p_comm is of interleaved pipelines; give parallel.chunks of 2 or more, or leave it out"
    if parallel.chunks > 1 and parallel.pipeline == 1:
        yield "parallel.chunks are of a pipeline; give parallel.pipeline of 2 or more"
    if parallel.stages and len(parallel.stages) != stages:
        yield f"parallel.stages has {len(parallel.stages)} numbers for {stages} stages (pipeline x chunks); give {stages}"
    if parallel.stages and (sum(parallel.stages) != layers or min(parallel.stages) < 0):
        yield f"parallel.stages has {sum(parallel.stages)} layers of {layers}; give layers of 0 or more that add up to {layers}"
    if stages > layers and not parallel.stages:
        yield (
            f"{stages} stages of a pipeline (pipeline {parallel.pipeline} x chunks {parallel.chunks}) with {layers} layers; "
            f"give at most {layers}; they are equal with {dividing(layers)}"
        )


def _wrong_experts(parallel: Parallelism) -> Iterator[str]:
    overlaps: object = parallel.overlap_moe_expert_parallel_comm  # what a file says may be anything
    if not isinstance(overlaps, bool):
        yield f"parallel.overlap_moe_expert_parallel_comm is {overlaps!r}; expected true or false"
    elif overlaps and (parallel.expert == 1 or (parallel.pipeline > 1 and parallel.chunks == 1)):
        yield (
            "parallel.overlap_moe_expert_parallel_comm has backward passes beside forward ones exchange tokens, which stages "
            "of one chunk would wait for; give parallel.expert of 2 or more, in a pipeline 2 chunks or more, or leave it out"
        )
    if parallel.expert_tensor not in (1, parallel.tensor):
        yield (
            f"parallel.expert_tensor is {parallel.expert_tensor}; expected 1, or parallel.tensor {parallel.tensor} "
            "where every expert is split as the other layers are"
        )
        return
    share = parallel.in_stage // parallel.expert_tensor
    if share % parallel.expert:
        yield f"parallel.expert {parallel.expert} does not divide the {share} ranks of a stage; give {dividing(share)}"


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def dividing(*numbers: int) -> str:
    """What divides all of some numbers, in words."""
    fits = divisors(math.gcd(*numbers))
    if len(fits) > _MOST_NAMED:
        return f"one of {', '.join(map(str, fits[:_MOST_NAMED]))} or another divisor of {math.gcd(*numbers)}"
    return f"one of {', '.join(map(str, fits))}" if len(fits) > 1 else str(fits[0])
