"""Gradients and the optimiser's state shared among data-parallel ranks (ZeRO 1 and 2), as Megatron-LM's distributed optimiser.

Parameters lie in one buffer, and so do their gradients (Megatron-core, `param_and_grad_buffer.py`): as `grad_reduce_in_fp32`
says, with every micro-batch added as it comes, by the products themselves where layers are fused.
Buffers are cut into buckets of 40 million parameters, or a million for every rank if that is more, in the order in which
gradients come. A bucket of the last micro-batch is scaled and scattered as soon as it is full; a rank updates fp32 masters of
its part of every bucket, copies them to its part of the parameters, and the next step gathers these bucket by bucket, the next
one while the layers of this one run. Without `overlap_grad_reduce` there is one bucket, scattered after backward; without
`overlap_param_gather` buckets are gathered after the update.

ZeRO 2 has no buffer of gradients: those of a bucket are put together in every micro-batch, scattered, and added to the rank's
part, as DeepSpeed does (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5.2). In a pipeline, a chunk has such a buffer from
the first of its backward passes to the last, which scatters it: Llama 3 was trained so (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from steptime._build.emit.gradients import IN_PLACE_BUCKET
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import TENSOR
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.fsdp import Unsharded, added
from steptime._program.program import Tensor

# Megatron-core's defaults (distributed_data_parallel.py): parameters of a bucket at least, and for every rank.
_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK = IN_PLACE_BUCKET, 1_000_000


def least_bucket(ways: int) -> int:
    """Parameters that a bucket has at least, among so many ranks."""
    return max(_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK * ways)


@dataclass(slots=True, eq=False)
class _SharedBucket:
    """A piece of a buffer whose gradients are scattered together, and whose parameters are gathered together."""

    group: str
    ways: int
    parameters: tuple[Tensor, ...]
    start: int  # of its first element in the buffer
    missing: int = 0  # gradients that are not there yet
    whole: Tensor | None = None  # gradients of a micro-batch, where no buffer keeps them
    part: Tensor | None = None  # this rank's gradients
    pending: tuple[Tensor, int] | None = None  # what is being scattered, and by what
    gather: int | None = None  # what brings its parameters

    @property
    def part_size(self) -> int:
        """Elements of one rank, of which the last may lie behind the parameters."""
        return -(-sum(each.numel for each in self.parameters) // self.ways)


@dataclass(slots=True, eq=False)
class _Buffer:
    """Parameters one behind the other."""

    group: str
    memory: Tensor
    gradients: Tensor
    parameters: list[Tensor] = field(default_factory=list)
    size: int = 0


class DistributedOptimizer(Unsharded):
    """Parameters of one part of a model that data-parallel ranks all have, and update together."""

    def __init__(self, tape: Tape, config: Transformer) -> None:
        self._tape, self._emit, self._config, self._parallel = tape, tape.emit, config, config.parallel
        staged = self._parallel.pipeline > 1
        self._wide = config.reduce_dtype
        self._buffers: dict[str, _Buffer] = {}
        self._units: dict[str, tuple[Tensor, ...]] = {}
        self._summed: set[int | None] = set()
        self._known: list[_SharedBucket] = []
        self._bucket_of: dict[int | None, _SharedBucket] = {}
        self._to_gather: Iterator[_SharedBucket] | None = None
        self._begun = self._made = False
        # Whether gradients are put together anew in every micro-batch, or in a buffer that is there while a chunk needs it.
        self._anew, self._passing = (self._parallel.zero > 1 and each for each in (not staged, staged))

    # Parameters

    def place(self, tape: Tape, shape: Sequence[int], config: Transformer, group: str) -> Tensor:
        """A parameter behind the last one in the buffer of the ranks that have it."""
        emit = self._emit
        if group not in self._buffers:
            self._buffers[group] = _Buffer(group, emit.tensor((1,), config.dtype), emit.tensor((1,), self._wide))
        buffer = self._buffers[group]
        weight = emit.view(buffer.memory, shape, offset=buffer.size)
        main = emit.view(buffer.gradients, shape, offset=buffer.size)
        buffer.size += weight.numel
        buffer.parameters.append(weight)
        if self._anew:
            return tape.parameter(weight, partial(self._put, weight))
        if config.fused and config.dtype == "bfloat16":
            tape.mains[weight.id or 0] = main
        return tape.parameter(weight, partial(added, emit, main))

    def unit(self, name: str, parameters: list[Tensor], summed: list[Tensor], experts: Sequence[Tensor] = ()) -> None:
        """Remembers what a layer needs."""
        del experts
        self._units[name] = tuple(parameters)
        self._summed = {each.id for each in summed}

    @property
    def _buckets(self) -> list[_SharedBucket]:
        """All buckets, in the order in which gradients come: from the last parameter to the first."""
        if not self._known:
            self._known = [bucket for buffer in self._buffers.values() for bucket in self._cut(buffer)]
            self._bucket_of = {each.id: bucket for bucket in self._known for each in bucket.parameters}
        return self._known

    def _cut(self, buffer: _Buffer) -> Iterator[_SharedBucket]:
        ways, end = self._emit.group_size(buffer.group), buffer.size
        least = least_bucket(ways)
        current: list[Tensor] = []
        for parameter in reversed(buffer.parameters):
            current.append(parameter)
            full = self._parallel.overlap_grad_reduce and end - parameter.offset >= least
            if full or parameter is buffer.parameters[0]:
                yield _SharedBucket(buffer.group, ways, tuple(current), parameter.offset, len(current))
                current, end = [], parameter.offset

    @property
    def shards(self) -> list[Tensor]:
        """This rank's part of the parameters."""
        return [self._part_of(bucket, self._buffers[bucket.group].memory) for bucket in self._buckets]

    @property
    def gradients(self) -> list[Tensor]:
        """Of this rank's part, once they are there."""
        return [bucket.part for bucket in self._buckets if bucket.part is not None]

    @property
    def buffers(self) -> list[Tensor]:
        """Gradients that stay from step to step."""
        return self._gradient_buffers() if self._parallel.zero == 1 else []

    def _gradient_buffers(self) -> list[Tensor]:
        return [self._emit.view(buffer.gradients, (buffer.size,)) for buffer in self._buffers.values()]

    def _part_of(self, bucket: _SharedBucket, memory: Tensor) -> Tensor:
        return self._emit.view(memory, (bucket.part_size,), offset=bucket.start)

    def _whole_of(self, bucket: _SharedBucket, memory: Tensor) -> Tensor:
        return self._emit.view(memory, (bucket.part_size * bucket.ways,), offset=bucket.start)

    # Parameters that the step before updated, in forward

    def root(self) -> None:
        """Before a forward pass: the first of a step waits for the first parameters."""
        if self._begun or not self._parallel.overlap_param_gather:
            return
        self._begun = True
        self._to_gather = iter([bucket for bucket in reversed(self._buckets) if bucket.ways > 1])
        self._ask_next()
        self._need(next(iter(self._buffers.values())).parameters[:1])

    def layer(self, name: str, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs a layer when its parameters are there."""
        self._need(self._units[name])
        y = run(x)
        *_, last, _ = self._units  # what is in no layer comes last
        if name == last:
            self._need(self._units[""])
        return y

    def _need(self, parameters: Sequence[Tensor]) -> None:
        for each in parameters if self._to_gather is not None else ():
            bucket = self._bucket_of[each.id]
            while bucket.gather is None and bucket.ways > 1 and self._ask_next():
                pass
            if bucket.gather is not None and bucket.gather >= 0:
                self._emit.wait(bucket.gather, bucket.group)
                bucket.gather = -1
                self._ask_next()

    def _ask_next(self) -> bool:
        bucket = next(self._to_gather, None) if self._to_gather is not None else None
        if bucket is not None:
            bucket.gather = self._gather(bucket)
        return bucket is not None

    def _gather(self, bucket: _SharedBucket) -> int:
        memory = self._buffers[bucket.group].memory
        return self._emit.all_gather(self._whole_of(bucket, memory), self._part_of(bucket, memory), bucket.group)

    # Gradients, in backward

    def _put(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """A gradient goes to its place among those of its bucket in this micro-batch."""
        emit, bucket = self._emit, self._bucket_of[parameter.id]
        if parameter.id in self._summed:
            emit.wait(emit.all_reduce((gradient,), TENSOR, asynchronous=False), TENSOR)
        if bucket.whole is None:
            bucket.whole = emit.empty_from_python((bucket.part_size * bucket.ways,), self._wide)
        place = emit.view(bucket.whole, parameter.shape, offset=parameter.offset - bucket.start)
        emit.op("copy_", (place, gradient, False), (place,))
        return place

    def reduce(self, *, last: bool) -> None:
        """Says that a backward pass comes: gradients of the last one are scattered, or those of each where none are kept."""
        if self._passing and not self._made:
            self._made = True
            with self._emit.backward_thread():
                for buffer in self._gradient_buffers():
                    self._emit.zeros(buffer, from_python=True)
        if not (last or self._anew):
            return
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            for each in bucket.parameters if bucket.part is None and bucket.pending is None else ():
                self._tape.hook(each, partial(self._ready, bucket, each))

    @property
    def _at_once(self) -> bool:
        """Whether buckets are scattered as they are full, not when backward is over; where there is one, that is the same."""
        return self._parallel.overlap_grad_reduce or self._parallel.zero > 1

    def _ready(self, bucket: _SharedBucket, parameter: Tensor, gradient: Tensor) -> None:
        if self._passing and parameter.id in self._summed:
            self._emit.wait(self._emit.all_reduce((gradient,), TENSOR, asynchronous=False), TENSOR)
        bucket.missing -= 1
        if not bucket.missing and self._at_once:
            self._scatter(bucket)

    def finish(self) -> None:
        """After the last backward pass: every rank has the gradients of its part."""
        for bucket in self._buckets if not self._at_once else ():
            self._scatter(bucket)
        for bucket in self._buckets:
            self._arrived(bucket)

    def _scatter(self, bucket: _SharedBucket) -> None:
        emit = self._emit
        self._arrived(bucket)
        whole = bucket.whole or self._whole_of(bucket, self._buffers[bucket.group].gradients)
        bucket.whole = None
        if bucket.ways == 1:
            bucket.pending = whole, -1
            return
        emit.op("mul_", (whole, emit.number()), (whole,))  # the mean over the ranks
        part = emit.view(whole, (bucket.part_size,))
        if self._parallel.zero > 1:
            part = emit.empty_from_python((bucket.part_size,), self._wide)
        bucket.pending = part, emit.reduce_scatter(part, whole, bucket.group)

    def _arrived(self, bucket: _SharedBucket) -> None:
        """What was scattered last is this rank's, or is added to it."""
        if bucket.pending is None:
            return
        part, number = bucket.pending
        bucket.pending = None
        if number >= 0:
            self._emit.wait(number, bucket.group)
        if bucket.part is None:
            bucket.part = part
        else:
            self._emit.op("add_", (bucket.part, part, 1), (bucket.part,))

    def updated(self) -> None:
        """After the update: all ranks get all parameters, unless the next step asks for them."""
        if not self._parallel.overlap_param_gather:
            gathers = [(self._gather(bucket), bucket.group) for bucket in self._buckets if bucket.ways > 1]
            for number, group in gathers:
                self._emit.wait(number, group)
