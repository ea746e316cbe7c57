"""`Tape`: autograd's graph of a forward pass, and the engine that writes its backward pass as PyTorch records it.

Every layer writes its ops and records one node per differentiable op:

    tape = Tape(emit)
    weight = tape.parameter(emit.tensor((16, 64)))
    y = emit.tensor((512, 16))
    emit.op("aten::mm", (x, weight), (y,), sequence=emit.sequence)
    tape.record("MmBackward0", (x, weight), (y,), backward)  # backward(gradients of y): writes ops, gives those of x and weight
    ...
    tape.backward(loss)
    tape.gradients[weight.id]

The engine runs the ready node that was recorded last, and a node of a parameter as soon as its gradient is there
(torch/csrc/autograd/engine.cpp: a heap by sequence number, `AccumulateGrad` has the highest). A gradient of more dimensions
than what it is of is summed down, and gradients of one tensor are added as they come, both around the node that made them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from steptime._build.emit.ops import MAIN_THREAD, Emitter
from steptime._program.program import Tensor

Gradients = tuple[Tensor | None, ...]
Backward = Callable[[Gradients], Gradients]
Hook = Callable[[Tensor], None]

_ENGINE = "autograd::engine::evaluate_function: "
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_FIRST = 1 << 62  # sequence number of parameters' nodes: before all others


@dataclass(slots=True, eq=False)
class _Node:
    """One function of the backward pass."""

    name: str
    sequence: int
    backward: Backward
    shapes: tuple[tuple[int, ...], ...]  # of what it gives gradients of
    next: tuple[tuple[_Node, int] | None, ...]  # per gradient it gives: whose it is, as which of its outputs
    outputs: int
    hooks: list[Hook] = field(default_factory=list)
    parameter: Tensor | None = None
    arrived: list[Tensor | None] = field(default_factory=list)
    waiting: int = 0


class Tape:
    """What autograd knows of one forward pass; `needs` says whether a tensor gets a gradient."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.gradients: dict[int, Tensor] = {}  # id of a parameter -> its gradient, once the backward pass is written
        self._made_by: dict[int, tuple[_Node, int]] = {}  # id of a tensor -> the node behind it
        self._before: list[Callable[[tuple[Tensor, ...]], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._held: Counter[int] = Counter()  # storage -> gradients that wait in it

    def parameter(self, tensor: Tensor, keep: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Says that a tensor wants a gradient; gives it back. `keep` writes how a gradient is kept: detached, if not told."""
        node = _Node(_ACCUMULATE, _FIRST, self._accumulated(tensor, keep or self.emit.detached), (), (), 1, parameter=tensor)
        self._made_by[_id(tensor)] = node, 0
        return tensor

    def needs(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or made of one."""
        return _id(tensor) in self._made_by

    def hook(self, parameter: Tensor, hook: Hook) -> None:
        """Calls with the gradient of a parameter right after it is there."""
        self._made_by[_id(parameter)][0].hooks.append(hook)

    def before_backward(self, callback: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Calls with all parameters in the order in which their gradients will come, before the backward pass."""
        self._before.append(callback)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls on autograd's thread after the last node."""
        self._at_end.append(callback)

    def record(self, name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], backward: Backward) -> None:
        """Records the node of one op; `backward` gives one gradient per input, None where the input needs none."""
        edges = tuple(None if each is None else self._made_by.get(_id(each)) for each in inputs)
        shapes = tuple(() if each is None else each.shape for each in inputs)
        node = _Node(name, self.emit.next_sequence(), backward, shapes, edges, len(outputs))
        for index, tensor in enumerate(outputs):
            self._made_by[_id(tensor)] = node, index

    def backward(self, loss: Tensor) -> None:
        """Writes the backward pass of a loss without dimensions: its gradient of ones, the nodes, what waits for the end."""
        root, _ = self._made_by[_id(loss)]
        order = tuple(node.parameter for node in _order(root) if node.parameter is not None)
        for callback in self._before:
            callback(order)
        first = self._ones_like(loss)
        with self.emit.backward_thread():
            _prepare(root)
            root.arrived = [first]
            for node in _run(root):
                self._evaluate(node)
            for finish in self._at_end:
                finish()

    def _ones_like(self, loss: Tensor) -> Tensor:
        emit = self.emit
        ones = emit.tensor(loss.shape, loss.dtype)
        text = (loss, None, None, None, False, 1)
        with emit.around("aten::ones_like", text, (ones,)):
            with emit.around("aten::empty_like", text, (ones,)):
                emit.op("aten::empty_strided", (ones.shape, ones.strides, 6, 0, emit.device, False), (ones,))
            emit.op("aten::fill_", (ones, 1.0), (ones,))
        return ones

    def _evaluate(self, node: _Node) -> None:
        """Writes one node, and around it what the engine does with the gradients that it gives."""
        emit, gradients = self.emit, tuple(node.arrived)
        for each in gradients:
            self._release(each)
        sequence = -1 if node.parameter is not None else node.sequence
        with emit.around(_ENGINE + node.name):
            with emit.around(node.name, gradients, sequence=sequence, forward_thread=MAIN_THREAD):
                given = node.backward(gradients)
            for hook in node.hooks:
                hook(self.gradients[_id(_parameter(node))])
            summed = [
                gradient if gradient is None else self._summed(gradient, shape)
                for gradient, shape in zip(given, node.shapes, strict=True)
            ]
            for edge, gradient in zip(node.next, summed, strict=True):
                if edge is not None:
                    self._arrive(*edge, gradient)

    def _summed(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The gradient of what was broadcast: summed to the shape it had."""
        if gradient.shape == shape:
            return gradient
        emit, leading = self.emit, len(gradient.shape) - len(shape)
        kept = tuple(
            index for index, size in enumerate(gradient.shape) if index < leading or (shape[index - leading] == 1 and size != 1)
        )
        small = emit.tensor(tuple(1 if index in kept else size for index, size in enumerate(gradient.shape)), gradient.dtype)
        emit.op("aten::sum", (gradient, kept, True, None), (small,))
        return emit.reshaped(small, shape) if leading else small

    def _arrive(self, node: _Node, place: int, gradient: Tensor | None) -> None:
        """Puts a gradient where its node will find it; a second one is added to the first."""
        held = node.arrived[place]
        if held is not None and gradient is not None:
            self._release(held)
            gradient = self._added(held, gradient)
        node.arrived[place] = held if gradient is None else gradient
        if gradient is not None and gradient.storage is not None:
            self._held[gradient.storage] += 1

    def _added(self, held: Tensor, gradient: Tensor) -> Tensor:
        # In place where nobody else looks at that memory (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace).
        if not self.emit.is_view(held) and not self._held[held.storage or 0]:
            self.emit.op("aten::add_", (held, gradient, 1), (held,))
            return held
        result = self.emit.tensor(held.shape, held.dtype)
        self.emit.op("aten::add", (held, gradient, 1), (result,))
        return result

    def _release(self, gradient: Tensor | None) -> None:
        if gradient is not None and gradient.storage is not None and self._held[gradient.storage]:
            self._held[gradient.storage] -= 1

    def _accumulated(self, parameter: Tensor, keep: Callable[[Tensor], Tensor]) -> Backward:
        def accumulate(gradients: Gradients) -> Gradients:
            if gradients[0] is not None:
                self.gradients[_id(parameter)] = keep(gradients[0])
            return ()

        return accumulate


def _id(tensor: Tensor) -> int:
    assert tensor.id is not None
    return tensor.id


def _parameter(node: _Node) -> Tensor:
    assert node.parameter is not None
    return node.parameter


def _all(root: _Node) -> list[_Node]:
    result, waiting = {id(root): root}, [root]
    while waiting:
        for edge in waiting.pop().next:
            if edge is not None and id(edge[0]) not in result:
                result[id(edge[0])] = edge[0]
                waiting.append(edge[0])
    return list(result.values())


def _prepare(root: _Node) -> None:
    """Empties what nodes wait for, and counts how much that is."""
    nodes = _all(root)
    for node in nodes:
        node.waiting, node.arrived = 0, [None] * node.outputs
    for node in nodes:
        for edge in node.next:
            if edge is not None:
                edge[0].waiting += 1


def _run(root: _Node) -> Iterator[_Node]:
    """The nodes in the order in which the engine runs them; a node's gradients are handed on once it is done with."""
    ready: list[tuple[int, int, _Node]] = [(-root.sequence, 0, root)]
    pushed = 0
    while ready:
        node = heapq.heappop(ready)[2]
        yield node
        for edge in node.next:
            if edge is not None:
                edge[0].waiting -= 1
                if not edge[0].waiting:
                    pushed += 1
                    heapq.heappush(ready, (-edge[0].sequence, pushed, edge[0]))


def _order(root: _Node) -> list[_Node]:
    _prepare(root)
    return list(_run(root))
