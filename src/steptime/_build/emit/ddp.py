"""`Reducer`: what DistributedDataParallel adds to a step: gradients copied into buckets, reduced as they fill, copied back.

Buckets are those of PyTorch from the second step on, when they were made anew in the order in which gradients come: the first
closes at 1 MiB, the others at 25 MiB, with the tensor that goes over still in (torch/csrc/distributed/c10d/reducer.cpp,
`compute_bucket_assignment_by_size`; `kDefaultFirstBucketBytes` and the default of `bucket_cap_mb`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from steptime._build.emit.autograd import Tape
from steptime._build.emit.layers import number
from steptime._program.program import Tensor
from steptime._units import MIB, dtype_bytes

FIRST_BUCKET_BYTES = 1 * MIB
BUCKET_BYTES = 25 * MIB


@dataclass(frozen=True, slots=True)
class _Bucket:
    flat: Tensor
    parameters: tuple[Tensor, ...]
    views: tuple[Tensor, ...]  # where each gradient goes
    starts: tuple[int, ...]


class Reducer:
    """The gradients of one wrapped module; on a single rank there is nothing to do."""

    def __init__(self, tape: Tape, parameters: Sequence[Tensor]) -> None:
        self._tape = tape
        self._own = {parameter.id for parameter in parameters}
        self._buckets: tuple[_Bucket, ...] = ()
        self._missing: list[int] = []
        if tape.emit.world_size > 1:
            tape.before_backward(self._lay_out)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What is written inside is the wrapped module's forward pass."""
        if self._tape.emit.world_size == 1:
            yield
            return
        with self._tape.emit.around("DistributedDataParallel.forward"):
            yield

    def _lay_out(self, order: tuple[Tensor, ...]) -> None:
        emit, own = self._tape.emit, [parameter for parameter in order if parameter.id in self._own]
        results = []
        for parameters in buckets_of(own):
            starts = [0]
            for parameter in parameters:
                starts.append(starts[-1] + parameter.numel)
            flat = emit.tensor((starts[-1],), parameters[0].dtype)
            views = tuple(emit.view(flat, each.shape, offset=at) for each, at in zip(parameters, starts, strict=False))
            results.append(_Bucket(flat, parameters, views, tuple(starts[:-1])))
        self._buckets = tuple(results)
        self._missing = [len(bucket.parameters) for bucket in results]
        for number_of, bucket in enumerate(results):
            for index, parameter in enumerate(bucket.parameters):
                self._tape.hook(parameter, partial(self._ready, number_of, index))

    def _ready(self, bucket: int, place: int, gradient: Tensor) -> None:
        """A gradient is there: divided by the number of ranks on its way into the bucket, which leaves when it is full."""
        emit, held = self._tape.emit, self._buckets[bucket]
        view = held.views[place]
        with emit.around("torch::distributed::reducer::mul_out", (view,)):
            emit.op("aten::mul", (gradient, number(emit, "float64"), view), (view,))
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            emit.all_reduce((held.flat,))
            if not any(self._missing):
                self._tape.at_end(self._copy_back)

    def _copy_back(self) -> None:
        emit = self._tape.emit
        for bucket in self._buckets:
            places = list(zip(bucket.parameters, bucket.starts, strict=True))
            views = [emit.as_strided(bucket.flat, each.shape, _strides(each), at, said=True) for each, at in places]
            for parameter, view in zip(bucket.parameters, views, strict=True):
                gradient = self._tape.gradients[parameter.id or 0]
                with emit.around("torch.distributed.ddp.reducer::copy_bucket_to_grad", (parameter,)):
                    emit.op("aten::copy_", (gradient, view, False), (gradient,))


def buckets_of(parameters: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Parameters of one dtype by bucket, in the order in which their gradients come."""
    buckets: list[tuple[Tensor, ...]] = []
    current: list[Tensor] = []
    nbytes = 0
    for parameter in parameters:
        current.append(parameter)
        nbytes += parameter.numel * dtype_bytes(parameter.dtype)
        if nbytes >= (BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES):
            buckets.append(tuple(current))
            current, nbytes = [], 0
    return [*buckets, tuple(current)] if current else buckets


def _strides(tensor: Tensor) -> tuple[int, ...]:
    assert tensor.strides is not None
    return tensor.strides
