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
_EXCHANGE = "all_to_all"  # of what is looked up, or of tokens
# Products of two matrices, and where their factors are among the arguments.
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}


@dataclass(frozen=True)
class SampleDimensions:
    """How the shapes of a program depend on its batch."""

    size: int
    parameters: frozenset[Shape]

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
        return cls(size, parameters)

    def factor(self, change: Change, known: int | None) -> float:
        """How many times as many samples are asked for; `known` is the batch of all ranks, else that of one is meant."""
        return change.amount if change.choice == SCALE else change.amount / (known or self.size)

    def rewrite(self, factor: float) -> Callable[[Program, int, Signature], Signature]:
        """What makes an op's signature one of so many times as many samples."""

        def rewritten(program: Program, row: int, signature: Signature) -> Signature:
            name = op_kind(program.names[int(program.ops.name[row])]).plain
            summed = self._summed(name, signature)
            inputs = tuple(self._value(each, factor, summed.get(at, 0)) for at, each in enumerate(signature.inputs))
            outputs = signature.outputs if summed else tuple(self._value(each, factor, 0) for each in signature.outputs)
            return (
                signature
                if (inputs, outputs) == (signature.inputs, signature.outputs)
                else replace(signature, inputs=inputs, outputs=outputs)
            )

        return rewritten

    def _summed(self, name: str, signature: Signature) -> dict[int, int]:
        """Per argument of a product that makes a weight's gradient: the dimension that is summed over."""
        if name not in _PRODUCTS:
            return {}
        left, right = (signature.inputs[at] if at < len(signature.inputs) else None for at in _PRODUCTS[name])
        if not isinstance(left, Tensor) or not isinstance(right, Tensor) or len(left.shape) < 2 or len(right.shape) < 2:
            return {}
        result = (left.shape[-2], right.shape[-1])
        one_of_weights = left.shape in self.parameters or right.shape in self.parameters
        if len(left.shape) > 2 or result not in self.parameters or left.shape[-1] % self.size or one_of_weights:
            return {}
        return {_PRODUCTS[name][0]: len(left.shape) - 1, _PRODUCTS[name][1]: len(right.shape) - 2}

    def _value(self, value: Value, factor: float, dimension: int) -> Value:
        if isinstance(value, tuple):
            return tuple(self._value(each, factor, dimension) for each in value)
        if not isinstance(value, Tensor) or len(value.shape) <= dimension or value.shape in self.parameters:
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
    for signature, phase in zip(ops.signature.tolist(), ops.phase.tolist(), strict=True):
        if signature < 0 or phase != Phase.FORWARD:
            continue
        for tensor in arguments_of(program.signatures[signature]).inputs:
            if len(tensor.shape) > 1 and tensor.shape not in parameters and tensor.shape[0] > 1:
                counts[tensor.shape] += 1
    return counts


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
