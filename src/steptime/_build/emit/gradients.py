"""What becomes of gradients, as PyTorch records it: DistributedDataParallel reduces them in buckets, an optimiser applies them.

Buckets are those of PyTorch from the second step on, when they were made anew in the order in which gradients come: the first
closes at 1 MiB, the others at 25 MiB, with the tensor that goes over still in (torch/csrc/distributed/c10d/reducer.cpp,
`compute_bucket_assignment_by_size`; `kDefaultFirstBucketBytes` and the default of `bucket_cap_mb`).

Optimisers are PyTorch's defaults on a GPU (foreach), or fused. fp16 weights are updated as by Megatron-LM and DeepSpeed:
gradients are copied to fp32 and their norm is taken, the masters are updated, and the weights are copied from them. Row-wise
Adagrad is that of `steptime_lab.workloads.table_batched.rowwise_adagrad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from steptime._build.emit.emitter import DTYPE_NUMBERS, Emitter
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import GROUP, strides_of
from steptime._program.program import Tensor
from steptime._units import MIB, dtype_bytes

FIRST_BUCKET_BYTES = 1 * MIB
BUCKET_BYTES = 25 * MIB
# Elements of a bucket of Megatron-LM on up to 40 ranks (megatron/core/distributed: the larger of this and a million a rank).
IN_PLACE_BUCKET = 40 * 10**6


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


class InPlaceReducer:
    """Sums over ranks of gradients that are kept in fp32, where they are: Megatron-LM's `DistributedDataParallel`."""

    def __init__(self, tape: Tape, parameters: Sequence[Tensor], group: str = GROUP) -> None:
        self._tape, self._group = tape, group
        self._wrapped = {parameter.id for parameter in parameters}
        if tape.emit.group_size(group) > 1:
            tape.before_backward(self._lay_out)

    def _lay_out(self, order: tuple[Tensor, ...]) -> None:
        wrapped = [parameter for parameter in order if parameter.id in self._wrapped]
        sizes = accumulate(parameter.numel for parameter in wrapped)
        buckets: dict[int, list[Tensor]] = {}
        for parameter, end in zip(wrapped, sizes, strict=True):
            buckets.setdefault((end - 1) // IN_PLACE_BUCKET, []).append(parameter)
        for bucket in buckets.values():
            missing = {parameter.id for parameter in bucket}
            for parameter in bucket:
                self._tape.hook(parameter, partial(self._ready, bucket, missing, parameter))

    def _ready(self, bucket: list[Tensor], missing: set[int | None], parameter: Tensor, gradient: Tensor) -> None:
        """Divides by the number of ranks and sums when the last gradient of a bucket is there."""
        del gradient
        missing.discard(parameter.id)
        if not missing:
            mains = tuple(self._tape.mains[each.id or 0] for each in bucket)
            self._tape.emit.op("_foreach_mul_", (mains, 1.0))
            self._tape.emit.all_reduce(mains, self._group)


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


# Optimisers

# AdamW's coefficients and the bias corrections of a third step, rounded as traces are; no time depends on them.
_DECAY, _FIRST, _SECOND, _EPSILON, _RATE = 1.0, 0.1, 0.999, 0.0, 0.00005
_CORRECTION, _FIRST_CORRECTION = 0.054745, 0.271
_SGD = "SGD"
# Optimisers by what configs call them: the class, and how many tensors like a parameter each keeps for it.
_KINDS = {
    "sgd": (_SGD, 0), "sgd_fused": (_SGD, 0), "adagrad": ("Adagrad", 1),
    "adam": ("Adam", 2), "adam_fused": ("Adam", 2), "adamw": ("AdamW", 2), "adamw_fused": ("AdamW", 2),
}  # fmt: skip
ROWWISE_ADAGRAD = "RowwiseAdagrad"


def zero_grad(emit: Emitter, label: str = _SGD) -> AbstractContextManager[None]:
    """An optimiser lets go of the gradients, or what is written inside clears them."""
    return emit.write(f"Optimizer.zero_grad#{label}.zero_grad")


def step_of(emit: Emitter, label: str = _SGD) -> AbstractContextManager[None]:
    """What is written inside is the step of an optimiser."""
    return emit.write(f"Optimizer.step#{label}.step")


def sgd(emit: Emitter, weights: Sequence[Tensor], gradients: Sequence[Tensor], rate: float) -> None:
    """The update of SGD over dense gradients."""
    emit.op("_foreach_add_", (tuple(weights), tuple(gradients), -rate))


def mean_squares(emit: Emitter, rows: Tensor) -> Tensor:
    """Of every row of a gradient: what row-wise Adagrad adds to the row's state."""
    squares, count = emit.tensor(rows.shape), rows.shape[0]
    with emit.op("square", (rows,), (squares,)):
        emit.power(rows, 2, squares)
    means = emit.tensor((count,))
    with emit.op("mean", (squares, (1,), False, None), (means,)):
        emit.strided(means, (count, 1), (1, 0))
    return means


def divided_rows(emit: Emitter, rows: Tensor, roots: Tensor) -> Tensor:
    """A gradient divided by the roots of its rows' states."""
    emit.op("add_", (roots, emit.number(), 1), (roots,))
    return emit.new("div", (rows, emit.unsqueezed(roots, 1)))


class Optimizer:
    """Updates parameters in place; its state is there before the step."""

    def __init__(
        self,
        emit: Emitter,
        kind: str,
        weights: Sequence[Tensor],
        rate: float = _RATE,
        *,
        mains: Sequence[Tensor] = (),
        masters: bool = False,
    ) -> None:
        """`mains`: sums of gradients in fp32, which stay from step to step. `masters`: weights of 16 bits are updated in fp32,
        as those in fp16 and those with mains always are."""
        self._emit, self._kind, self._rate = emit, kind, rate
        self._weights = tuple(weights)
        self._mains = tuple(mains)
        wide = bool(mains) or (masters and weights[0].dtype != "float32")
        self._mixed = bool(weights) and (wide or weights[0].dtype == "float16")
        self._masters = self._like_masters() if self._mixed else self._weights
        self._label, moments = _KINDS[kind]
        self._moments = tuple(self._like_masters() for _ in range(moments))
        self._counts = tuple(emit.tensor((), device=None if self.fused else "cpu") for _ in weights)
        self._scaling: tuple[Tensor, Tensor] | None = None

    def _like_masters(self) -> tuple[Tensor, ...]:
        like = ((each.shape, "float32" if self._mixed else each.dtype, each.strides) for each in self._weights)
        return tuple(self._emit.tensor(shape, dtype, strides=strides) for shape, dtype, strides in like)

    def zero_grad(self, buffers: Sequence[Tensor] = ()) -> None:
        """Lets go of the gradients, or clears those that stay; `buffers` are such that lie elsewhere."""
        kept = (*self._mains, *buffers)
        with zero_grad(self._emit, self._label):
            if kept:
                self._emit.op("_foreach_zero_", (kept,))

    @property
    def fused(self) -> bool:
        """Whether one kernel does it all."""
        return self._kind.endswith("_fused")

    def step(self, gradients: Sequence[Tensor], scaling: tuple[Tensor, Tensor] | None = None) -> None:
        """Writes one update; a fused one may be given the scale of the gradients and whether one of them is infinite."""
        emit, self._scaling = self._emit, scaling
        ways: dict[str, Callable[[tuple[Tensor, ...]], None]] = {
            "sgd": self._sgd, "sgd_fused": self._fused_sgd, "adagrad": self._adagrad, "adam": self._adam,
            "adam_fused": self._fused_adam, "adamw": self._adam, "adamw_fused": self._fused_adam,
        }  # fmt: skip
        update = ways[self._kind]
        with step_of(emit, self._label):
            if not self._mixed:
                update(tuple(gradients))
                return
            wide = self._mains or tuple(gradients)
            if wide[0].dtype != "float32":
                wide = self._like_masters()
                emit.op("_foreach_copy_", (wide, tuple(gradients), False))
            emit.op("_foreach_norm", (wide, 2, None), (tuple(emit.tensor(()) for _ in wide),))
            update(wide)
            emit.op("_foreach_copy_", (self._weights, self._masters, False))

    def _sgd(self, gradients: tuple[Tensor, ...]) -> None:
        sgd(self._emit, self._masters, gradients, self._rate)

    def _fused_sgd(self, gradients: tuple[Tensor, ...]) -> None:
        rest = (0.0, 0.0, self._rate, 0.0, False, False, False)
        self._emit.op("_fused_sgd_", (self._masters, gradients, (), *rest, *self._scale_and_check()))

    def _fused_adam(self, gradients: tuple[Tensor, ...]) -> None:
        (first, second), scaling = self._moments, self._scale_and_check()
        self._emit.op("_foreach_add_", (self._counts, 1))
        decayed = self._kind == "adamw_fused"
        rest = (self._rate, 0.9, 0.999, 0.01 if decayed else 0.0, _EPSILON, False, False)
        name = "_fused_adamw_" if decayed else "_fused_adam_"
        self._emit.op(name, (self._masters, gradients, first, second, (), self._counts, *rest, *scaling))
        if self._scaling is not None:  # a step that was skipped does not count
            self._emit.op("_foreach_sub_", (self._counts, (self._scaling[1],) * len(self._counts), 1))

    def _scale_and_check(self) -> tuple[Tensor | None, Tensor | None]:
        if self._scaling is None:
            return None, None
        for each in self._scaling:
            self._emit.placed(each, non_blocking=self._label != _SGD)
        return self._scaling

    def _adagrad(self, gradients: tuple[Tensor, ...]) -> None:
        emit, (squares,), count = self._emit, self._moments, len(self._masters)
        self._count_up()
        self._read_counts()
        emit.op("_foreach_addcmul_", (squares, gradients, gradients, 1))
        roots = self._roots(squares)
        emit.op("_foreach_add_", (roots, _EPSILON))
        steps = tuple(emit.tensor(each.shape, each.dtype, strides=each.strides) for each in gradients)
        with emit.op("_foreach_mul", (gradients, (-self._rate,) * count), (steps,)):
            for each in steps:
                emit.empty_strided(each)
        emit.op("_foreach_addcdiv_", (self._masters, steps, roots, 1))

    def _roots(self, squares: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        emit = self._emit
        roots = tuple(emit.tensor(each.shape, each.dtype, strides=each.strides) for each in squares)
        with emit.op("_foreach_sqrt", (squares,), (roots,)):
            for each in roots:
                emit.empty_strided(each)
        return roots

    def _adam(self, gradients: tuple[Tensor, ...]) -> None:
        """Adam and AdamW, which lets weights decay first."""
        emit, (first, second), count = self._emit, self._moments, len(self._masters)
        self._count_up()
        if self._kind == "adamw":
            emit.op("_foreach_mul_", (self._masters, _DECAY))
        emit.op("_foreach_lerp_", (first, gradients, _FIRST))
        emit.op("_foreach_mul_", (second, _SECOND))
        emit.op("_foreach_addcmul_", (second, gradients, gradients, round(1.0 - _SECOND, 6)))
        self._read_counts()
        self._read_counts()  # once for each of the two bias corrections
        roots = self._roots(second)
        emit.op("_foreach_div_", (roots, (_CORRECTION,) * count))
        emit.op("_foreach_add_", (roots, _EPSILON))
        emit.op("_foreach_addcdiv_", (self._masters, first, roots, (round(-self._rate / _FIRST_CORRECTION, 6),) * count))

    def _read_counts(self) -> None:
        for each in self._counts:
            with self._emit.op("item", (each,), (3.0,)):
                self._emit.op("_local_scalar_dense", (each,), (3.0,))

    def _count_up(self) -> None:
        """One step more, counted on the host for every parameter."""
        emit, item, single = self._emit, self._emit.number("float32"), DTYPE_NUMBERS["float32"]
        emit.op("empty", ((), single, 0, "cpu", False, None), (item,))
        emit.op("to", (item, "cpu", single, False, False, None), (item,))
        emit.op("lift_fresh", (item,), (item,))
        with emit.op("detach_", (item,), (item,)):
            emit.write("detach_", (item,))
        with emit.op("_foreach_add_", (self._counts, item, 1.0)):
            for each in self._counts:
                emit.op("add_", (each, item, 1.0), (each,))
