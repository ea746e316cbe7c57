"""`Reducer`: what DistributedDataParallel adds to a step: gradients copied into buckets, reduced as they fill, copied back.

Buckets are those of PyTorch from the second step on, when they were made anew in the order in which gradients come: the first
closes at 1 MiB, the others at 25 MiB, with the tensor that goes over still in (torch/csrc/distributed/c10d/reducer.cpp,
`compute_bucket_assignment_by_size`; `kDefaultFirstBucketBytes` and the default of `bucket_cap_mb`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import GROUP, strides_of
from steptime._program.program import Tensor
from steptime._units import MIB, dtype_bytes

FIRST_BUCKET_BYTES = 1 * MIB
BUCKET_BYTES = 25 * MIB


@dataclass(slots=True)
class _Bucket:
    flat: Tensor
    parameters: tuple[Tensor, ...]
    starts: tuple[int, ...]
    views: tuple[Tensor, ...]  # where each gradient goes
    missing: int  # gradients that are not there yet


class Reducer:
    """The gradients of one wrapped module; on a single rank there is nothing to do."""

    def __init__(self, tape: Tape, parameters: Sequence[Tensor], group: str = GROUP) -> None:
        self._tape, self._group = tape, group
        self._wrapped = {parameter.id for parameter in parameters}
        self._buckets: tuple[_Bucket, ...] = ()
        if tape.emit.world_size > 1:
            tape.before_backward(self._lay_out)

    def forward(self) -> AbstractContextManager[None]:
        """What is written inside is the wrapped module's forward pass."""
        return self._tape.emit.write("DistributedDataParallel.forward") if self._tape.emit.world_size > 1 else nullcontext()

    def _lay_out(self, order: tuple[Tensor, ...]) -> None:
        emit, results = self._tape.emit, []
        for parameters in buckets_of([parameter for parameter in order if parameter.id in self._wrapped]):
            *starts, size = accumulate((parameter.numel for parameter in parameters), initial=0)
            flat = emit.tensor((size,), parameters[0].dtype)
            views = tuple(emit.view(flat, each.shape, offset=at) for each, at in zip(parameters, starts, strict=True))
            bucket = _Bucket(flat, parameters, tuple(starts), views, len(parameters))
            results.append(bucket)
            for view, parameter in zip(views, parameters, strict=True):
                self._tape.hook(parameter, partial(self._ready, bucket, view))
        self._buckets = tuple(results)

    def _ready(self, bucket: _Bucket, view: Tensor, gradient: Tensor) -> None:
        """A gradient is there: divided by the number of ranks on its way into the bucket, which leaves when it is full."""
        emit = self._tape.emit
        with emit.write("torch::distributed::reducer::mul_out", (view,)):
            emit.op("mul", (gradient, emit.number(), view), (view,))
        bucket.missing -= 1
        if not bucket.missing:
            emit.all_reduce((bucket.flat,), self._group)
            if not any(each.missing for each in self._buckets):
                self._tape.at_end(self._copy_back)

    def _copy_back(self) -> None:
        emit = self._tape.emit
        for bucket in self._buckets:
            pairs = list(zip(bucket.parameters, bucket.starts, strict=True))
            views = [emit.strided(bucket.flat, each.shape, strides_of(each), offset=at) for each, at in pairs]
            for parameter, view in zip(bucket.parameters, views, strict=True):
                gradient = self._tape.gradients[parameter.id or 0]
                with emit.write("torch.distributed.ddp.reducer::copy_bucket_to_grad", (parameter,)):
                    emit.op("copy_", (gradient, view, False), (gradient,))


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
