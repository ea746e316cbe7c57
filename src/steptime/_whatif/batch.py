"""Another batch: the shapes of activations and of what is made from them, with the dimension of the samples longer or shorter.

A recording does not say which dimension counts samples. Tensors that are parameters (or their gradients and states) are known
by the shapes that the optimiser updates and gradients have; all others are activations, whose first dimension is a multiple of
the batch. In the product that makes a weight's gradient, the dimension that is summed over is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from steptime._ops.catalogue import op_kind
from steptime._ops.table import arguments_of
from steptime._program.program import IntColumn, Phase, Program, Signature, Tensor, Value, WorkKind
from steptime._sim.core.timing import Cohort
from steptime._whatif.edits import Floats, Mask, scaled_works
from steptime._whatif.grammar import SCALE, Change, error
from steptime._whatif.optimizers import gradient_shapes, steps_of

Shape = tuple[int, ...]

# The batch divides the first dimension of nearly all activations: not of masks, of what is stacked and of positions.
_NEARLY_ALL = 0.75
_MOST = 0.5
_SHARDING = "fsdp::"  # ops of torch.distributed.fsdp (_fully_shard/_fsdp_collectives.py)
_EXCHANGE = "all_to_all"  # of what is looked up, or of tokens
# Products of two matrices, and where their factors are among the arguments.
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}


@dataclass(frozen=True)
class SampleDimensions:
    """How the shapes of a program depend on its batch."""

    size: int  # of one rank
    parameters: frozenset[Shape]
    shared: frozenset[Shape] = frozenset()  # shapes of activations that are those of parameters, too

    @classmethod
    def of(cls, change: Change, program: Program) -> SampleDimensions:
        """What a program says about it."""
        parameters = frozenset(_parameters(program))
        size = batch_size(_activations(program, parameters))
        if size is None:
            raise error(
                change.text,
                "which dimension of its tensors counts samples is not known: record with record_shapes=True, or give a config",
            )
        found = cls(size, parameters)
        return replace(found, shared=frozenset(found._multiplied(program)) & parameters)

    def factor(self, change: Change, known: int | None) -> float:
        """How many times as many samples are asked for; `known` is the batch of all ranks, else that of one is meant."""
        return change.amount if change.choice == SCALE else change.amount / (known or self.size)

    def rewrite(self, factor: float) -> Callable[[Program, int, Signature], Signature]:
        """What makes an op's signature one of so many times as many samples."""

        def rewritten(program: Program, row: int, signature: Signature) -> Signature:
            name = op_kind(program.names[int(program.ops.name[row])]).plain
            summed, rows = self._summed(name, signature), self._rows(name, signature)
            # Where a factor stands says whether it is a weight; of the shapes in other ops only activations lie like this.
            kept = self.parameters if name in _PRODUCTS else self.parameters - self.shared
            anything: frozenset[Shape] = frozenset()
            inputs = tuple(
                self._value(each, factor, summed.get(at, 0), anything if at in summed or at == rows else kept)
                for at, each in enumerate(signature.inputs)
            )
            made = kept if rows is None else anything
            outputs = signature.outputs if summed else tuple(self._value(each, factor, 0, made) for each in signature.outputs)
            return (
                signature
                if (inputs, outputs) == (signature.inputs, signature.outputs)
                else replace(signature, inputs=inputs, outputs=outputs)
            )

        return rewritten

    def _summed(self, name: str, signature: Signature) -> dict[int, int]:
        """Per argument of a product that makes a weight's gradient: the dimension that is summed over."""
        factors = _factors(name, signature)
        if factors is None or not self._makes_gradient(*factors) or self._by_weight(*factors):
            return {}
        return {_PRODUCTS[name][0]: 1, _PRODUCTS[name][1]: 0}

    def _rows(self, name: str, signature: Signature) -> int | None:
        """The argument of a product with a weight whose rows are samples, whatever else has its shape; None: not sure."""
        factors = _factors(name, signature)
        if factors is None or not self._by_weight(*factors) or self._makes_gradient(*factors):
            return None
        return _PRODUCTS[name][0]

    def _makes_gradient(self, left: Shape, right: Shape) -> bool:
        return (left[0], right[1]) in self.parameters and left[1] % self.size == 0

    def _by_weight(self, left: Shape, right: Shape) -> bool:
        """Whether it is a matrix of samples times a weight; a matrix times itself is a step of an optimiser."""
        return right in self.parameters and left[0] % self.size == 0 and left != right[::-1]

    def _multiplied(self, program: Program) -> Iterator[Shape]:
        """Shapes of matrices of samples that are multiplied by a weight, and of what that makes."""
        for name, at in {*zip(program.ops.name.tolist(), program.ops.signature.tolist(), strict=True)}:
            plain = op_kind(program.names[name]).plain
            if at >= 0 and self._rows(plain, program.signatures[at]) is not None:
                factors = _factors(plain, program.signatures[at])
                assert factors is not None
                yield from (factors[0], (factors[0][0], factors[1][1]))

    def untouched(self, program: Program, changed: Program, time_ns: Floats) -> float:
        """The share of the time of products in those whose shapes are the same with another batch."""
        names = np.array([op_kind(name).plain in _PRODUCTS for name in program.names], dtype=bool)
        products = names[program.ops.name]
        same = products & (program.ops.signature == changed.ops.signature)
        total = float(time_ns[products].sum())
        return float(time_ns[same].sum()) / total if total else 0.0

    def _value(self, value: Value, factor: float, dimension: int, kept: frozenset[Shape]) -> Value:
        if isinstance(value, tuple):
            return tuple(self._value(each, factor, dimension, kept) for each in value)
        if not isinstance(value, Tensor) or len(value.shape) <= dimension or value.shape in kept:
            return value
        if not dimension and value.shape[0] % self.size and self.size in value.shape:
            dimension = value.shape.index(self.size)  # of what is stacked, as queries, keys and values are
        if not value.shape[dimension] or value.shape[dimension] % self.size:
            return value
        shape = tuple(max(1, round(each * factor)) if at == dimension else each for at, each in enumerate(value.shape))
        return replace(value, shape=shape, strides=_strides(value, dimension, factor))

    def beside_kernels(self, cohort: Cohort, factor: float) -> Cohort:
        """Copies between host and device, and collectives of what belongs to samples: so many times the bytes at their rate."""
        program = cohort.program
        works, changed = program.works, np.append(self._changed_ops(program, factor), False)
        names = np.array(["HtoD" in name or "DtoH" in name for name in program.names], dtype=bool)
        copied = (works.kind == WorkKind.COPY) & names[works.name]
        moved = np.array([each.kind == _EXCHANGE for each in program.collectives] + [False])[works.collective]
        moved |= (works.kind == WorkKind.COLLECTIVE) & changed[np.append(program.calls.op, -1)[works.call]]
        copied &= changed[np.append(program.calls.op, -1)[works.call]]
        sent = np.array([*(each.bytes_in for each in program.collectives), 0], dtype=np.int64)[works.collective]
        nbytes = np.where(copied, works.bytes, sent)
        for rows in (copied, moved):
            cohort = scaled_works(cohort, rows, self._slower(cohort, nbytes, rows, factor))
        return cohort

    def _slower(self, cohort: Cohort, nbytes: IntColumn, rows: Mask, factor: float) -> Floats:
        """Per work how many times as long it takes with so many times its bytes: what it takes beyond them stays."""
        time_ns = np.maximum(cohort.timing.duration_ns.mean(axis=(1, 2)), 1.0)
        quickest = (nbytes[rows] / time_ns[rows]).max(
            initial=0.0
        )  # bytes per nanosecond of the largest, nearly all of it moving
        moving = np.minimum(nbytes / quickest, time_ns) if quickest else np.zeros(len(time_ns))
        return np.asarray(1.0 + (factor - 1.0) * moving / time_ns)

    def _changed_ops(self, program: Program, factor: float) -> Mask:
        """Ops that take tensors of samples, of two dimensions or more, or that are inside of one that does."""
        rewrite, result = self.rewrite(factor), np.zeros(len(program.ops), dtype=bool)
        known: dict[int, bool] = {}
        for row, (at, parent) in enumerate(zip(program.ops.signature.tolist(), program.ops.parent.tolist(), strict=True)):
            if at >= 0 and at not in known:
                signature = program.signatures[at]
                wide = any(len(tensor.shape) > 1 for tensor in arguments_of(signature).inputs)
                known[at] = wide and rewrite(program, row, signature) is not signature
            result[row] = known.get(at, False) or (parent >= 0 and result[parent])
        return result


def _factors(name: str, signature: Signature) -> tuple[Shape, Shape] | None:
    """The shapes of two matrices that an op multiplies; None: it does not."""
    if name not in _PRODUCTS:
        return None
    left, right = (signature.inputs[at] if at < len(signature.inputs) else None for at in _PRODUCTS[name])
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or len(left.shape) != 2 or len(right.shape) != 2:
        return None
    return left.shape, right.shape


def _strides(tensor: Tensor, dimension: int, factor: float) -> Shape | None:
    """Strides beyond that of the longer dimension grow with it."""
    if tensor.strides is None or len(tensor.strides) != len(tensor.shape):
        return tensor.strides
    own = tensor.strides[dimension] * tensor.shape[dimension]
    return tuple(
        round(each * factor) if at != dimension and each >= own and own else each for at, each in enumerate(tensor.strides)
    )


def _parameters(program: Program) -> Iterator[Shape]:
    """Shapes of parameters, as they are and transposed."""
    for step in steps_of(program):
        for shape in step.shapes:
            yield from (shape, shape[::-1])
    for shape in gradient_shapes(program):
        yield from (shape, shape[::-1])


def _activations(program: Program, parameters: frozenset[Shape]) -> Counter[Shape]:
    """Shapes of activations in the forward pass, of tensors of two dimensions or more."""
    counts: Counter[Shape] = Counter()
    ops = program.ops
    gathered = _in_gathers(program)
    for row, (signature, phase) in enumerate(zip(ops.signature.tolist(), ops.phase.tolist(), strict=True)):
        if signature < 0 or phase != Phase.FORWARD or gathered[row]:
            continue
        for tensor in arguments_of(program.signatures[signature]).inputs:
            if len(tensor.shape) > 1 and tensor.shape not in parameters and tensor.shape[0] > 1:
                counts[tensor.shape] += 1
    return counts


def _in_gathers(program: Program) -> list[bool]:
    """Per op whether sharded training runs it on buffers of parameters, whose first dimension counts ranks."""
    result: list[bool] = []
    for name, parent in zip(program.ops.name.tolist(), program.ops.parent.tolist(), strict=True):
        result.append(program.names[name].startswith(_SHARDING) or (0 <= parent < len(result) and result[parent]))
    return result


def batch_size(shapes: Counter[Shape]) -> int | None:
    """The largest first dimension that divides most of the others; what it does not divide is stacked, nearly all of it."""
    total, sizes = sum(shapes.values()), []
    for size in {shape[0] for shape in shapes}:
        divided = sum(count for shape, count in shapes.items() if shape[0] % size == 0)
        stacked = sum(count for shape, count in shapes.items() if shape[0] % size and _is_stack(shape, size))
        if divided >= _MOST * total and divided + stacked >= _NEARLY_ALL * total:
            sizes.append(size)
    return max(sizes, default=None)


def _is_stack(shape: Shape, size: int) -> bool:
    """States of layers, queries with keys and values, or steps of time: samples are the second dimension."""
    return len(shape) > 2 and shape[1] == size
