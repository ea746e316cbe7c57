"""`StepTape`: the tape of a training step in mixed precision, with accumulated gradients and recomputed layers.

What it adds to `Tape`: a gradient of another dtype than what it is of is cast, gradients of a parameter add up over several
backward passes, something can be called before a node runs (FSDP's hooks), and what a checkpointed layer saves is computed
again when the first of its nodes asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from steptime._build.emit.autograd import Backward, Gradients, Tape
from steptime._build.emit.layers import DTYPE_NUMBERS
from steptime._build.transformer.emit import GroupEmitter, compact_strides
from steptime._program.program import Tensor

Saved = Callable[[], Tensor]
"""What gives a saved tensor back in the backward pass."""


class _Region:
    """A checkpointed layer: how many tensors it saved, how to compute them again, and those that were."""

    def __init__(self, again: Callable[[], Tensor]) -> None:
        self.again = again
        self.count = 0
        self.tensors: list[Tensor] | None = None


class StepTape(Tape):
    """The tape that all layers of a step write to."""

    emit: GroupEmitter

    def __init__(self, emit: GroupEmitter, autocast: str = "") -> None:
        super().__init__(emit)
        self.autocast = autocast  # the dtype that products are cast to; empty without autocast
        self.casts: dict[int, Tensor] = {}  # id of a parameter -> what autocast made of it in this forward pass
        self.parameters: list[Tensor] = []
        self._own: set[int] = set()
        self._dtypes: dict[int, tuple[str, ...]] = {}  # node -> dtypes of the tensors whose gradients it takes
        self._region: _Region | None = None  # the layer that runs for the first time
        self._recomputed: _Region | None = None  # the layer that runs for the second time

    def parameter(self, tensor: Tensor, keep: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Says that a tensor wants a gradient, and that the optimiser updates it; gives it back."""
        self.parameters.append(tensor)
        self._own.add(_id(tensor))
        result = super().parameter(tensor, keep or partial(self._keep, tensor))
        self._remember((tensor,))
        return result

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether the optimiser updates a tensor."""
        return _id(tensor) in self._own

    def _keep(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The gradient as the first of a step, or added to those before."""
        held = self.gradients.get(_id(parameter))
        if held is None:
            return self.emit.detached(gradient)
        self.emit.op("aten::add_", (held, gradient, 1), (held,))
        return held

    def record(self, name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], backward: Backward) -> None:
        """Records the node of one op where an input wants a gradient; nothing ever runs a node of recomputation."""
        if self._recomputed is not None:
            self.emit.sequence += 1
        elif any(each is not None and self.needs(each) for each in inputs):
            super().record(name, inputs, outputs, backward)
            self._remember(outputs)

    def _remember(self, outputs: Sequence[Tensor]) -> None:
        self._dtypes[id(self._made_by[_id(outputs[0])][0])] = tuple(each.dtype for each in outputs)

    def before_node_of(self, tensor: Tensor, callback: Callable[[], None]) -> None:
        """Calls when the node that made a tensor begins in the backward pass."""
        node = self._made_by[_id(tensor)][0]
        run = node.backward

        def backward(gradients: Gradients) -> Gradients:
            callback()
            return run(gradients)

        node.backward = backward

    def _arrive(self, node, place: int, gradient: Tensor | None) -> None:  # type: ignore[no-untyped-def]
        dtype = self._dtypes[id(node)][place]
        if gradient is not None and gradient.dtype != dtype:
            gradient = cast(self.emit, gradient, dtype)
        super()._arrive(node, place, gradient)

    # What autograd saves

    def save(self, tensor: Tensor) -> Saved:
        """Keeps a tensor for the backward pass; what this gives has it there, computed again where need be."""
        if self._recomputed is not None:
            return self._saved_again(self._recomputed, tensor)
        region = self._region
        if region is None:
            return lambda: tensor
        index = region.count
        region.count += 1

        def unpacked() -> Tensor:
            if region.tensors is None:
                self._recompute(region)
            assert region.tensors is not None
            return region.tensors[index]

        return unpacked

    def checkpointed(self, layer: Callable[[], Tensor]) -> Tensor:
        """Runs a layer whose saved tensors are dropped, and computed again in backward."""
        self._region = _Region(layer)
        result = layer()
        self._region = None
        return result

    def _saved_again(self, region: _Region, tensor: Tensor) -> Saved:
        assert region.tensors is not None
        self.emit.detached(tensor)
        region.tensors.append(tensor)
        # Recomputation stops as soon as the last saved tensor is there (torch/utils/checkpoint.py, early_stop).
        self.emit.muted = len(region.tensors) >= region.count
        return lambda: tensor

    def _recompute(self, region: _Region) -> None:
        region.tensors, self._recomputed = [], region
        kept, self.casts = self.casts, {}
        region.again()
        self._recomputed, self.emit.muted, self.casts = None, False, kept


def cast(emit: GroupEmitter, tensor: Tensor, dtype: str, *, placed: bool = False) -> Tensor:
    """`tensor.to(dtype)`; `placed` says the device too, as autograd's own casts do."""
    result = emit.tensor(tensor.shape, dtype, strides=compact_strides(tensor))
    number = DTYPE_NUMBERS[dtype]
    text = (number, 0, emit.device, None, False, False, None) if placed else (number, False, False, None)
    copied = (number, 0, emit.device, None, False, None) if placed else (number, None, None, None, False, None)
    with (
        emit.around("aten::to", (tensor, *text), (result,)),
        emit.around("aten::_to_copy", (tensor, *copied), (result,), sequence=emit.sequence),
    ):
        emit.op("aten::empty_strided", (result.shape, result.strides, number, 0, emit.device, False), (result,))
        emit.op("aten::copy_", (result, tensor, False), (result,))
    return result


def _id(tensor: Tensor) -> int:
    assert tensor.id is not None
    return tensor.id
