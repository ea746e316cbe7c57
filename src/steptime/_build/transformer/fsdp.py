"""Parameters sharded by FSDP2, as PyTorch records it.

A unit per layer and one for the rest, gathered before use, reduced and scattered after. In forward a unit is gathered
when it is reached; in backward the gather of the unit before is issued when a unit begins. Shards are of the dtype of the
config's states, gathered in the dtype of the weights, and gradients are reduced in a dtype of their own, of 16-bit weights with
fp32 states `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`. Where micro-batches but the last are
not reduced (`set_requires_gradient_sync(False)`), their gradients stay whole, in the dtype of the reduction.

Three things are written differently from what PyTorch records, because a program of ops has one stream that computes.
Collectives are said to be asynchronous, for they run on streams of their own. The copy out of a gathered buffer is written with
what it makes as its result, for that memory is new every time. And the copy into the buffer to reduce is the list copy that
it amounts to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import DATA, EXPERT_DATA, FSDP, TENSOR, strides_of
from steptime._build.transformer.config import Transformer
from steptime._program.program import Tensor


@dataclass(slots=True, eq=False)
class _Unit:
    """Parameters that are gathered and reduced together."""

    name: str
    parameters: tuple[Tensor, ...]  # whole, while they are gathered
    shards: tuple[Tensor, ...]  # of rank 0, which has the largest
    gathered: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()  # of the shards
    whole: tuple[Tensor, ...] = ()  # of micro-batches that were not reduced
    summed: frozenset[int | None] = frozenset()  # ids of parameters whose gradients tensor-parallel ranks sum
    group: str = FSDP  # the ranks that share it
    ways: int = 1
    inner: _Unit | None = None  # the experts of a layer, which other ranks share
    learnt: tuple[int, ...] = ()  # places of the parameters that get gradients

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the shards."""
        return tuple(shard.numel for shard in self.shards)

    @property
    def both(self) -> tuple[_Unit, ...]:
        """Itself, and its experts where other ranks share them."""
        return (self,) if self.inner is None else (self, self.inner)

    @property
    def suffix(self) -> str:
        """How labels name it."""
        return f" ({self.name})" if self.name else ""


def added(emit: Emitter, main: Tensor, gradient: Tensor) -> Tensor:
    """A gradient that no product added to the sum of those before."""
    emit.op("add_", (main, gradient, 1), (main,))
    return main


class Unsharded:
    """What a `Model` does with parameters around the units that hold them: nothing, where they are always there."""

    def place(self, tape: Tape, shape: Sequence[int], config: Transformer, group: str) -> Tensor:
        """Makes a parameter, with the sum of its gradients where that is kept; `group` are the ranks that have the same one."""
        del group
        weight = tape.emit.tensor(shape, config.dtype)
        if not config.main_gradients:
            return tape.parameter(weight)
        tape.mains[weight.id or 0] = main = tape.emit.tensor(shape)
        return tape.parameter(weight, partial(added, tape.emit, main))

    def unit(self, name: str, parameters: list[Tensor], summed: list[Tensor], experts: Sequence[Tensor] = ()) -> None:
        """Says which parameters belong together: a layer's, or, with an empty name, all that are in no layer.

        Gradients of those in `summed`, which has those of other units too, are summed over tensor-parallel ranks. `experts`,
        of other units too, are those of which ranks hold different ones.
        """

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
        self._dtype, self._parallel = config.dtype, config.parallel
        self._kept, self._reduced = config.state_dtype, config.reduce_dtype
        self.first = self.last = True  # whether the micro-batch at hand is
        self._over = False  # whether all backward passes are
        # What is being reduced: a unit, its shards' gradients, and the numbers and groups of what reduces them.
        self._pending: tuple[_Unit, tuple[Tensor, ...], tuple[tuple[int, str], ...]] | None = None
        self._units: dict[str, _Unit] = {}
        self._order: list[_Unit] = []  # as forward reached the layers

    @property
    def shards(self) -> list[Tensor]:
        """What the optimiser updates."""
        return [unit.shards[place] for unit in self._all() for place in unit.learnt]

    @property
    def gradients(self) -> list[Tensor]:
        """Of the shards, once the backward pass is written."""
        return [gradient for unit in self._all() for gradient in unit.gradients]

    def _all(self) -> list[_Unit]:
        units = [self._units[""], *(unit for name, unit in self._units.items() if name)]
        return [each for unit in units for each in unit.both]

    def alike(self, name: str, other: FullySharded, like: str) -> list[tuple[Tensor, Tensor]]:
        """What a step does the same with in two units; one that was left out gets gradients as the other has."""
        result: list[tuple[Tensor, Tensor]] = []
        for unit, twin in zip(self._units[name].both, other._units[like].both, strict=True):
            if not unit.gradients:
                unit.gradients = tuple(self._emit.tensor(each.shape, each.dtype) for each in twin.gradients)
            if not unit.whole:
                unit.whole = tuple(self._emit.tensor(each.shape, each.dtype) for each in twin.whole or other._held(twin))
            pairs = zip((*unit.shards, *unit.gradients), (*twin.shards, *twin.gradients), strict=True)
            result += [*pairs, *zip(unit.whole, twin.whole or other._held(twin), strict=True)]
        return result

    def _held(self, unit: _Unit) -> tuple[Tensor, ...]:
        """Gradients that add up where they are."""
        return tuple(self._tape.gradients[each.id] for each in unit.parameters if each.id in self._tape.gradients)

    def finish(self) -> None:
        """After all backward passes: reduces what stayed whole."""
        self._over = True
        for unit in self._all() if self._parallel.reduces_at_end else ():
            self._reduce(unit)
        self.settle(at_end=True)

    def unit(self, name: str, parameters: list[Tensor], summed: list[Tensor], experts: Sequence[Tensor] = ()) -> None:
        """Keeps a shard of each parameter; experts are sharded by the ranks that hold the same ones, as in torchtitan."""
        apart = {each.id for each in experts}
        inner = [each for each in parameters if each.id in apart]
        own = [each for each in parameters if each.id not in apart]
        unit = self._made(name, own, FSDP, summed)
        unit.inner = self._made(f"{name}.experts", inner, EXPERT_DATA, summed) if inner else None
        self._units[name] = unit

    def _made(self, name: str, parameters: list[Tensor], group: str, summed: list[Tensor]) -> _Unit:
        ways = self._emit.group_size(group)
        shards = tuple(self._emit.tensor(_shard_of(each.shape, ways), self._kept) for each in parameters)
        ids, learnt = frozenset(each.id for each in summed), tuple(map(self._tape.is_parameter, parameters))
        places = tuple(place for place, each in enumerate(learnt) if each)
        return _Unit(name, tuple(parameters), shards, summed=ids, group=group, ways=ways, learnt=places)

    # Forward

    def root(self) -> None:
        """Before the forward pass: what is in no layer is gathered, and stays."""
        emit, unit = self._emit, self._units[""]
        self._order = []
        with emit.write("FSDP::root_pre_forward"):
            emit.write("FSDP::inputs_to_device")
        emit.write("FSDP::cast_forward_inputs")
        if unit.parameters:  # a stage within a pipeline has none outside its layers
            with emit.write("FSDP::pre_forward"):
                self._gather_for_forward(unit)

    def layer(self, name: str, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Gathers a layer's parameters, runs it, and lets go of them; asks for them again in backward."""
        emit, unit = self._emit, self._units[name]
        emit.write("FSDP::cast_forward_inputs")
        with emit.write(f"FSDP::pre_forward{unit.suffix}"):
            self._gather_for_forward(unit)
            x = self._registered(unit, x)
        y = run(x)
        emit.write(f"FSDP::post_forward{unit.suffix}")
        before = self._order[-1] if self._order else None
        self._order.append(unit)
        self._tape.before_node_of(y, lambda: self._begin(unit, before))
        return y

    def _gather_for_forward(self, unit: _Unit) -> None:
        if self._parallel.gathers_once and not self.first:
            return
        for each in unit.both:
            self._gather(each)
        for each in unit.both:
            self._copy_out(each)

    def finished(self, y: Tensor) -> None:
        """Asks for the last layer's parameters as soon as the backward pass begins."""
        self._emit.write("FSDP::post_forward")
        root, last = self._units[""], self._order[-1] if self._order else None  # a last stage may be the head alone
        self._tape.before_node_of(y, lambda: self._begin(root, last))

    def _registered(self, unit: _Unit, x: Tensor) -> Tensor:
        """The function whose backward comes when the unit's gradients are there."""
        emit = self._emit
        y = emit.view(x)
        with emit.write("RegisterPostBackwardFunction", (x,), sequence=emit.sequence), emit.op("view_as", (x, x), (y,)):
            emit.op("view", (x, x.shape), (y,))

        def backward(gradient: Tensor) -> Tensor:
            for each in unit.both:
                self._reduce(each)
            return gradient

        return self._tape.node("RegisterPostBackwardFunctionBackward", (x,), y, backward)

    # Backward

    def _begin(self, unit: _Unit, before: _Unit | None) -> None:
        if not unit.name and unit.parameters:
            self._tape.at_end(self._finish)
        with self._emit.write(f"FSDP::pre_backward{unit.suffix}"):
            if not self._parallel.gathers_again:
                return
            for each in unit.both if unit.name else ():
                self._copy_out(each)
            for each in before.both if before is not None else ():
                with self._emit.write(f"FSDP::backward_prefetch for {each.name}"):
                    self._gather(each)

    def _finish(self) -> None:
        with self._emit.write("FSDP::root_post_backward_callback"):
            self._reduce(self._units[""])
            self.settle(at_end=True)

    def settle(self, *, at_end: bool = False) -> None:
        """Compute waits for the unit before to be reduced: its buffer is used again, and what it gave is added to what was."""
        if self._pending is None:
            return
        (unit, new, numbers), self._pending = self._pending, None
        for number, group in numbers if at_end or unit.gradients else numbers[:1]:
            self._emit.wait(number, group)
        if self._reduced != self._kept:
            wide = tuple(self._emit.tensor(each.shape, self._kept, strides=each.strides) for each in new)
            self._emit.op("_foreach_copy_", (wide, new, False))
            new = wide
        for held, gradient in zip(unit.gradients, new, strict=True) if unit.gradients else ():
            self._emit.op("add_", (held, gradient, 1), (held,))
        unit.gradients = unit.gradients or new

    def _reduce(self, unit: _Unit) -> None:
        emit, numbers = self._emit, list[tuple[int, str]]()
        gradients = self._accumulated(unit)
        if not gradients:
            return
        self.settle()
        learnt = [unit.parameters[place] for place in unit.learnt]
        for parameter, gradient in zip(learnt, gradients, strict=True):
            if parameter.id in unit.summed:  # a DTensor's partial gradient is summed before FSDP takes it
                emit.wait(emit.all_reduce((gradient,), TENSOR, asynchronous=False), TENSOR)
        with emit.write(f"FSDP::post_backward_reduce{unit.suffix}"):
            part = sum(unit.sizes[place] for place in unit.learnt)
            whole = emit.empty_from_python((unit.ways * part,), self._reduced)
            self._copy_in(unit, whole, gradients)
            reduced = whole
            if unit.ways > 1:
                reduced = emit.empty_from_python((part,), self._reduced)
                numbers.append((emit.reduce_scatter(reduced, whole, unit.group), unit.group))
            if emit.group_size(DATA) > 1 and unit.group == FSDP:
                numbers.append((emit.all_reduce((reduced,), DATA), DATA))
            self._pending = unit, self._parts(unit, reduced), tuple(numbers)

    def _accumulated(self, unit: _Unit) -> tuple[Tensor, ...]:
        """The gradients to reduce, with those of micro-batches before that stayed whole; none where these stay so, too."""
        emit, gradients = self._emit, self._tape.gradients
        now = self._over if self._parallel.reduces_at_end else self.last
        stays = self._parallel.keeps_whole_gradients and not now
        if stays and self._dtype == self._reduced:  # they add up where they are
            emit.write(f"FSDP::post_backward_accumulate{unit.suffix}")
            emit.write(f"FSDP::post_backward_reshard{unit.suffix}")
            return ()
        learnt = [unit.parameters[place] for place in unit.learnt]
        new = tuple(gradients.pop(each.id or 0) for each in learnt if each.id in gradients)
        with emit.write(f"FSDP::post_backward_accumulate{unit.suffix}"):
            for held, gradient in zip(unit.whole, new, strict=True) if unit.whole and new else ():
                emit.op("add_", (held, gradient, 1), (held,))
        with emit.write(f"FSDP::post_backward_reshard{unit.suffix}"):
            if stays and not unit.whole:
                unit.whole = tuple(emit.cast(each, self._reduced) for each in new)
        return () if stays else unit.whole or new

    def _copy_in(self, unit: _Unit, whole: Tensor, gradients: tuple[Tensor, ...]) -> None:
        emit, rows = self._emit, self._rows(unit, whole)
        with (
            emit.write("fsdp::chunk_cat", (gradients, 0, unit.ways, rows)),
            emit.op("_chunk_cat", (gradients, 0, unit.ways, rows)),
        ):
            places = _places(emit, whole, [each.shape for each in gradients])
            emit.op("_foreach_copy_", (places, gradients, False))

    def _parts(self, unit: _Unit, reduced: Tensor) -> tuple[Tensor, ...]:
        """The shards' gradients: views of what was reduced."""
        emit, at, result = self._emit, 0, []
        for shard in (unit.shards[place] for place in unit.learnt):
            result.append(emit.strided(reduced, shard.shape, strides_of(shard), offset=at))
            at += shard.numel
        return tuple(result)

    # Gathering

    def _rows(self, unit: _Unit, whole: Tensor) -> Tensor:
        """A buffer with a row per rank."""
        return self._emit.viewed(whole, (unit.ways, whole.numel // unit.ways), (unit.ways, -1))

    def _gather(self, unit: _Unit) -> None:
        emit, part = self._emit, sum(unit.sizes)
        with emit.write(f"FSDP::all_gather{unit.suffix}"):
            shards = unit.shards
            if shards[0].dtype != self._dtype:
                low = emit.empty_from_python((part,), self._dtype)
                shards = _split(emit, low, unit.sizes)
                emit.op("_foreach_copy_", (shards, _flat(emit, unit.shards), False))
            whole = emit.empty_from_python((unit.ways * part,), self._dtype)
            shard = emit.view(whole, (part,))
            with emit.write("fsdp::all_gather_copy_in", (shards, whole, unit.sizes, part, 0), (shard, whole)):
                emit.op("narrow", (whole, 0, 0, part), (shard,))
                emit.op("_foreach_copy_", (_split(emit, shard, unit.sizes), _flat(emit, shards), False))
            if unit.ways > 1:
                emit.all_gather(whole, shard, unit.group)
            unit.gathered = whole

    def _copy_out(self, unit: _Unit) -> None:
        emit, whole = self._emit, unit.gathered
        assert whole is not None
        with emit.write(f"FSDP::all_gather_copy_out{unit.suffix}"):
            rows = self._rows(unit, whole)
            result = tuple(
                emit.view(parameter, (unit.ways, size)) for parameter, size in zip(unit.parameters, unit.sizes, strict=True)
            )
            with emit.write("fsdp::split_with_sizes_copy", (rows, unit.sizes, 1), (result,)):
                emit.op("split_with_sizes_copy", (rows, unit.sizes, 1), (result,))
        unit.gathered = None


def _shard_of(shape: tuple[int, ...], ways: int) -> tuple[int, ...]:
    """The part of the first of so many ranks: rows, or what is in the rows of a matrix for each of a few experts."""
    if len(shape) > 2 and shape[0] < ways:
        return (shape[0], -(-shape[1] // ways), *shape[2:])
    return (-(-shape[0] // ways), *shape[1:])


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
