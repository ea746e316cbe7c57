"""Parameters and activations shared by ranks, as PyTorch records it: tensor parallelism as in Megatron-LM, and FSDP2.

Tensor parallelism splits a layer's first matrix by columns and its second by rows, so that a layer's half needs one all_reduce
of its output in forward and one of its input's gradient in backward (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3).

FSDP2 has a unit per layer and one for the rest, gathered before use, reduced and scattered after. In forward a unit is gathered
when it is reached; in backward the gather of the unit before is issued when a unit begins. Shards are fp32 (of the weights' own
dtype without mixed precision), gathered in the dtype of the weights, and gradients are reduced in fp32:
`MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`.

Three things are written differently from what PyTorch records, because a program of ops has one stream that computes.
Collectives are said to be asynchronous, for they run on streams of their own. The copy out of a gathered buffer is written with
what it makes as its result, for that memory is new every time. And the copy into the buffer to reduce is the list copy that
it amounts to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steptime._build.emit.emitter import CONTIGUOUS, Emitter, view_strides
from steptime._build.emit.layers import embedding
from steptime._build.emit.losses import places_in_part
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import DATA, FSDP, TENSOR, strides_of
from steptime._build.transformer.config import Transformer
from steptime._program.program import Tensor


def enter(tape: Tape, x: Tensor) -> Tensor:
    """What goes into a layer split by columns: itself, and the sum of its gradients in backward."""
    emit = tape.emit
    if emit.group_size(TENSOR) == 1:
        return x
    y = emit.view(x)
    with emit.write("_CopyToModelParallelRegion", (x,), (y,), sequence=emit.sequence):
        emit.op("view_as", (x, x), (y,))

    def backward(gradient: Tensor) -> Tensor:
        if view_strides(gradient.shape, strides_of(gradient), (gradient.numel,)) is None:
            gradient = emit.contiguous(gradient)
        else:
            emit.op("contiguous", (gradient, CONTIGUOUS), (gradient,))
        emit.wait(emit.all_reduce((gradient,), TENSOR, asynchronous=False), TENSOR)
        return gradient

    return tape.node("_CopyToModelParallelRegionBackward", (x,), y, backward)


def leave(tape: Tape, x: Tensor) -> Tensor:
    """What comes out of a layer split by rows, summed over the ranks."""
    emit = tape.emit
    if emit.group_size(TENSOR) == 1:
        return x
    y = emit.view(x)
    with emit.write("_ReduceFromModelParallelRegion", (x,), (y,), sequence=emit.sequence):
        emit.wait(emit.all_reduce((x,), TENSOR, asynchronous=False), TENSOR)
    return tape.node("_ReduceFromModelParallelRegionBackward", (x,), y, lambda gradient: gradient)


def split_embedding(tape: Tape, weight: Tensor, ids: Tensor) -> Tensor:
    """Megatron-LM's `VocabParallelEmbedding`: rows that another rank holds come out as zeros, and the ranks sum."""
    emit = tape.emit
    places, hidden = places_in_part(emit, ids, weight.shape[0])
    x = embedding(tape, weight, places)
    y = emit.view(x)
    column = emit.view(hidden, (*ids.shape, 1))
    emit.op("masked_fill_", (x, column, 0.0), (y,), node=True)
    tape.node("MaskedFillBackward0", (x,), y, lambda gradient: emit.new("masked_fill", (gradient, column, 0)))
    return leave(tape, y)


@dataclass(slots=True, eq=False)
class _Unit:
    """Parameters that are gathered and reduced together."""

    name: str
    parameters: tuple[Tensor, ...]  # whole, while they are gathered
    shards: tuple[Tensor, ...]  # of rank 0, which has the largest
    gathered: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()  # of the shards

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the shards."""
        return tuple(shard.numel for shard in self.shards)

    @property
    def suffix(self) -> str:
        """How labels name it."""
        return f" ({self.name})" if self.name else ""


class Unsharded:
    """What a `Model` does with parameters around the units that hold them: nothing, where they are always there."""

    def unit(self, name: str, parameters: list[Tensor]) -> None:
        """Says which parameters belong together: a layer's, or, with an empty name, all that are in no layer."""

    def root(self) -> None:
        """Before the forward pass."""

    def layer(self, name: str, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs a layer with its parameters there."""
        del name
        return run(x)

    def finished(self, y: Tensor) -> None:
        """After the forward pass gave `y`."""


class FullySharded(Unsharded):
    """All units of a model under FSDP2."""

    def __init__(self, tape: Tape, config: Transformer) -> None:
        self._tape, self._emit = tape, tape.emit
        self._ways = config.parallel.fsdp
        self._dtype = config.dtype
        self._units: dict[str, _Unit] = {}
        self._order: list[_Unit] = []  # as forward reached the layers
        tape.at_end(self._finish)

    @property
    def shards(self) -> list[Tensor]:
        """What the optimiser updates."""
        return [shard for unit in self._all() for shard in unit.shards]

    @property
    def gradients(self) -> list[Tensor]:
        """Of the shards, once the backward pass is written."""
        return [gradient for unit in self._all() for gradient in unit.gradients]

    def _all(self) -> list[_Unit]:
        return [self._units[""], *(unit for name, unit in self._units.items() if name)]

    def unit(self, name: str, parameters: list[Tensor]) -> None:
        """Keeps a shard of each parameter."""
        shapes = [(-(-each.shape[0] // self._ways), *each.shape[1:]) for each in parameters]
        shards = tuple(self._emit.tensor(shape, "float32") for shape in shapes)
        self._units[name] = _Unit(name, tuple(parameters), shards)

    # Forward

    def root(self) -> None:
        """Before the forward pass: what is in no layer is gathered, and stays."""
        emit, unit = self._emit, self._units[""]
        self._order = []
        with emit.write("FSDP::root_pre_forward"):
            emit.write("FSDP::inputs_to_device")
        emit.write("FSDP::cast_forward_inputs")
        with emit.write("FSDP::pre_forward"):
            self._gather(unit)
            self._copy_out(unit)

    def layer(self, name: str, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Gathers a layer's parameters, runs it, and lets go of them; asks for them again in backward."""
        emit, unit = self._emit, self._units[name]
        emit.write("FSDP::cast_forward_inputs")
        with emit.write(f"FSDP::pre_forward{unit.suffix}"):
            self._gather(unit)
            self._copy_out(unit)
            x = self._registered(unit, x)
        y = run(x)
        emit.write(f"FSDP::post_forward{unit.suffix}")
        before = self._order[-1] if self._order else None
        self._order.append(unit)
        self._tape.before_node_of(y, lambda: self._begin(unit, before))
        return y

    def finished(self, y: Tensor) -> None:
        """Asks for the last layer's parameters as soon as the backward pass begins."""
        self._emit.write("FSDP::post_forward")
        root, last = self._units[""], self._order[-1]
        self._tape.before_node_of(y, lambda: self._begin(root, last))

    def _registered(self, unit: _Unit, x: Tensor) -> Tensor:
        """The function whose backward comes when the unit's gradients are there."""
        emit = self._emit
        y = emit.view(x)
        with emit.write("RegisterPostBackwardFunction", (x,), sequence=emit.sequence), emit.op("view_as", (x, x), (y,)):
            emit.op("view", (x, x.shape), (y,))

        def backward(gradient: Tensor) -> Tensor:
            self._reduce(unit)
            return gradient

        return self._tape.node("RegisterPostBackwardFunctionBackward", (x,), y, backward)

    # Backward

    def _begin(self, unit: _Unit, before: _Unit | None) -> None:
        with self._emit.write(f"FSDP::pre_backward{unit.suffix}"):
            if unit.name:
                self._copy_out(unit)
            if before is not None:
                with self._emit.write(f"FSDP::backward_prefetch for {before.name}"):
                    self._gather(before)

    def _finish(self) -> None:
        with self._emit.write("FSDP::root_post_backward_callback"):
            self._reduce(self._units[""])

    def _reduce(self, unit: _Unit) -> None:
        emit, tape = self._emit, self._tape
        emit.write(f"FSDP::post_backward_accumulate{unit.suffix}")
        emit.write(f"FSDP::post_backward_reshard{unit.suffix}")
        gradients = tuple(tape.gradients.pop(each.id or 0) for each in unit.parameters)
        with emit.write(f"FSDP::post_backward_reduce{unit.suffix}"):
            part = sum(unit.sizes)
            whole = emit.empty_from_python((self._ways * part,), "float32")
            self._copy_in(whole, gradients)
            reduced = emit.empty_from_python((part,), "float32")
            emit.reduce_scatter(reduced, whole, FSDP)
            if emit.group_size(DATA) > 1:
                emit.all_reduce((reduced,), DATA)
            self._keep(unit, reduced)

    def _copy_in(self, whole: Tensor, gradients: tuple[Tensor, ...]) -> None:
        emit, rows = self._emit, self._rows(whole)
        with (
            emit.write("fsdp::chunk_cat", (gradients, 0, self._ways, rows)),
            emit.op("_chunk_cat", (gradients, 0, self._ways, rows)),
        ):
            places = _places(emit, whole, [each.shape for each in gradients])
            emit.op("_foreach_copy_", (places, gradients, False))

    def _keep(self, unit: _Unit, reduced: Tensor) -> None:
        """The shards' gradients: views of what was reduced, or added to those before."""
        emit, at, result = self._emit, 0, []
        for shard in unit.shards:
            result.append(emit.strided(reduced, shard.shape, strides_of(shard), offset=at))
            at += shard.numel
        if not unit.gradients:
            unit.gradients = tuple(result)
            return
        for held, gradient in zip(unit.gradients, result, strict=True):
            emit.op("add_", (held, gradient, 1), (held,))

    # Gathering

    def _rows(self, whole: Tensor) -> Tensor:
        """A buffer with a row per rank."""
        return self._emit.viewed(whole, (self._ways, whole.numel // self._ways), (self._ways, -1))

    def _gather(self, unit: _Unit) -> None:
        emit, part = self._emit, sum(unit.sizes)
        with emit.write(f"FSDP::all_gather{unit.suffix}"):
            shards = unit.shards
            if shards[0].dtype != self._dtype:
                low = emit.empty_from_python((part,), self._dtype)
                shards = _split(emit, low, unit.sizes)
                emit.op("_foreach_copy_", (shards, _flat(emit, unit.shards), False))
            whole = emit.empty_from_python((self._ways * part,), self._dtype)
            shard = emit.view(whole, (part,))
            with emit.write("fsdp::all_gather_copy_in", (shards, whole, unit.sizes, part, 0), (shard, whole)):
                emit.op("narrow", (whole, 0, 0, part), (shard,))
                emit.op("_foreach_copy_", (_split(emit, shard, unit.sizes), _flat(emit, shards), False))
            emit.all_gather(whole, shard, FSDP)
            unit.gathered = whole

    def _copy_out(self, unit: _Unit) -> None:
        emit, whole = self._emit, unit.gathered
        assert whole is not None
        with emit.write(f"FSDP::all_gather_copy_out{unit.suffix}"):
            rows = self._rows(whole)
            result = tuple(
                emit.view(parameter, (self._ways, size)) for parameter, size in zip(unit.parameters, unit.sizes, strict=True)
            )
            with emit.write("fsdp::split_with_sizes_copy", (rows, unit.sizes, 1), (result,)):
                emit.op("split_with_sizes_copy", (rows, unit.sizes, 1), (result,))
        unit.gathered = None


def _split(emit: Emitter, whole: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """`whole.split_with_sizes(sizes)` of one dimension."""
    places = _places(emit, whole, [(size,) for size in sizes])
    emit.op("split_with_sizes", (whole, tuple(sizes), 0), (places,))
    return places


def _places(emit: Emitter, whole: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    result, at = [], whole.offset
    for shape in shapes:
        built = emit.view(whole, shape, offset=at)
        result.append(built)
        at += built.numel
    return tuple(result)


def _flat(emit: Emitter, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(each if len(each.shape) == 1 else emit.view(each, (each.numel,)) for each in tensors)
