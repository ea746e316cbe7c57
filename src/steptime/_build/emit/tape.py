"""`Tape`: autograd's graph of a forward pass, and the engine that writes its backward pass as PyTorch records it.

Every layer writes its ops and records one node per differentiable op, with what the backward pass of that op writes:

    tape = Tape(emit)
    weight = tape.parameter(emit.tensor((16, 64)))
    y = emit.new("mm", (x, weight), (512, 64), node=True)
    tape.node("MmBackward0", (x, weight), y, backward)  # backward(gradient of y): writes ops, gives those of x and weight
    ...
    tape.backward(loss)
    tape.gradients[weight.id]

The engine runs the ready node that was recorded last, and a node of a parameter as soon as its gradient is there
(torch/csrc/autograd/engine.cpp: a heap by sequence number, `AccumulateGrad` has the highest). A gradient of more dimensions
than what it is of is summed down, one of another dtype is cast, and gradients of one tensor are added as they come, all around
the node that made them. Gradients of a parameter add up over several backward passes. What a checkpointed layer saves is
computed again when the first of its nodes asks for it, but for results of ops that it was told to keep.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.writer import MAIN_THREAD
from steptime._program.program import Tensor, Value

Gradients = tuple[Tensor | None, ...]
Backward = Callable[[Gradients], Gradients]
Hook = Callable[[Tensor], None]
Saved = Callable[[], Tensor]
"""What gives a saved tensor back in the backward pass."""

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
    dtypes: tuple[str, ...]  # of its outputs
    hooks: list[Hook] = field(default_factory=list)
    section: str = ""  # of the program: what begins with it
    parameter: Tensor | None = None
    arrived: list[Tensor | None] = field(default_factory=list)
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Keeps:
    """Ops whose results a checkpointed layer keeps, by whole name; of some, each n-th is computed again all the same.

    As the contexts of selective checkpointing do (torch/utils/checkpoint.py, create_selective_checkpoint_contexts).
    """

    ops: Mapping[str, int]  # 0: all are kept

    def chooser(self) -> Callable[[str], bool]:
        """Says of the ops of one pass, as they come, whether their results are kept."""
        counts: Counter[str] = Counter()

        def kept(name: str) -> bool:
            if name not in self.ops:
                return False
            counts[name] += 1
            return not self.ops[name] or counts[name] % self.ops[name] != 0

        return kept


class _Region:
    """A checkpointed layer: how many tensors it saved, how to compute them again, and those that were."""

    def __init__(self, again: Callable[[], Tensor], keeps: Keeps | None) -> None:
        self.again = again
        self.keeps = keeps
        self.results: list[tuple[Value, ...]] = []  # of the ops whose results are kept
        self.count = 0
        self.tensors: list[Tensor] | None = None
        self.drops_output = False


class Tape:
    """What autograd knows of the forward passes of a step."""

    def __init__(self, emit: Emitter, autocast: str = "") -> None:
        self.emit = emit
        self.autocast = autocast  # the dtype that products are cast to; empty without autocast
        self.casts: dict[int, Tensor] = {}  # id of a parameter -> what autocast made of it in this forward pass
        self.parameters: list[Tensor] = []
        self.mains: dict[int, Tensor] = {}  # id of a parameter -> the sum of its gradients in fp32, where one is kept
        self.gradients: dict[int, Tensor] = {}  # id of a parameter -> its gradient, once the backward pass is written
        self._made_by: dict[int, tuple[_Node, int]] = {}  # id of a tensor -> the node behind it
        self._before: list[Callable[[tuple[Tensor, ...]], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._held: Counter[int] = Counter()  # storage -> gradients that wait in it
        self._region: _Region | None = None  # the layer that runs for the first time
        self._recomputed: _Region | None = None  # the layer that runs for the second time
        self._dropped: dict[int, tuple[_Region, int, Tensor]] = {}  # storage of an output that its layer computes again

    # The graph

    def parameter(self, tensor: Tensor, keep: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Says that a tensor wants a gradient; gives it back. `keep` writes how a gradient is kept.

        Without it the first of a step is, and later ones are added to it.
        """

        def accumulate(gradients: Gradients) -> Gradients:
            (gradient,), held = gradients, self.gradients.get(_id(tensor))
            if gradient is not None and keep is not None:
                self.gradients[_id(tensor)] = keep(gradient)
            elif gradient is not None:
                self.gradients[_id(tensor)] = self.emit.detached(gradient) if held is None else self._add(held, gradient)
            return ()

        self.parameters.append(tensor)
        self._made_by[_id(tensor)] = _Node(_ACCUMULATE, _FIRST, accumulate, (), (), (tensor.dtype,), parameter=tensor), 0
        return tensor

    def leaf(self, tensor: Tensor) -> Tensor:
        """Says that a tensor wants a gradient and is no parameter: what a stage of a pipeline was given."""
        self.parameter(tensor)
        self.parameters.pop()
        return tensor

    def _add(self, held: Tensor, gradient: Tensor) -> Tensor:
        self.emit.op("add_", (held, gradient, 1), (held,))
        return held

    def needs(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or made of one."""
        return _id(tensor) in self._made_by

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is one itself."""
        return self.needs(tensor) and self._made_by[_id(tensor)][0].parameter is not None

    def record(self, name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], backward: Backward) -> None:
        """Records the node of one op where an input wants a gradient; nothing ever runs a node of recomputation.

        `backward` gives one gradient per input, None where the input needs none.
        """
        if self._recomputed is not None:
            self.emit.next_sequence()
            return
        edges = tuple(None if each is None else self._made_by.get(_id(each)) for each in inputs)
        if not any(edges):
            return
        shapes = tuple(() if each is None else each.shape for each in inputs)
        node = _Node(name, self.emit.next_sequence(), backward, shapes, edges, tuple(each.dtype for each in outputs))
        for index, tensor in enumerate(outputs):
            self._made_by[_id(tensor)] = node, index

    def node(
        self,
        name: str,
        inputs: Sequence[Tensor | None],
        output: Tensor,
        backward: Callable[[Tensor], Tensor | Gradients | None],
    ) -> Tensor:
        """The same for an op with one output, which it gives back; a `backward` of one input gives its gradient alone."""

        def of_output(gradients: Gradients) -> Gradients:
            (gradient,) = gradients
            assert gradient is not None
            result = backward(gradient)
            return result if isinstance(result, tuple) else (result,)

        self.record(name, inputs, (output,), of_output)
        return output

    def hook(self, parameter: Tensor, hook: Hook) -> None:
        """Calls with the gradient of a parameter right after it is there."""
        self._made_by[_id(parameter)][0].hooks.append(hook)

    def before_node_of(self, tensor: Tensor, callback: Callable[[], None]) -> None:
        """Calls when the node that made a tensor begins in the backward pass."""
        node = self._made_by[_id(tensor)][0]
        run = node.backward

        def backward(gradients: Gradients) -> Gradients:
            callback()
            return run(gradients)

        node.backward = backward

    def section_before_node_of(self, tensor: Tensor, section: str) -> None:
        """A section of the program begins with the node that made a tensor."""
        self._made_by[_id(tensor)][0].section = section

    def before_backward(self, callback: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Calls with all parameters in the order in which their gradients will come, before the next backward pass."""
        self._before.append(callback)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls on autograd's thread after the last node of the backward pass that is next or under way."""
        self._at_end.append(callback)

    def casting(
        self, name: str, inputs: tuple[Value, ...], output: Tensor, *, node: bool = False
    ) -> AbstractContextManager[None]:
        """Under autocast, the op as it is called: around the casts of its arguments and the op as it runs."""
        return self.emit.op(name, inputs, (output,), node=node) if self.autocast else nullcontext()

    # What autograd saves

    def save(self, tensor: Tensor) -> Saved:
        """Keeps a tensor for the backward pass; what this gives has it there, computed again where need be."""
        if self._recomputed is not None:
            return self._saved_again(self._recomputed, tensor)
        region = self._region
        if region is not None:
            region.count += 1
            return self._unpacked(region, region.count - 1)
        if (tensor.storage or 0) not in self._dropped:
            return lambda: tensor
        region, index, output = self._dropped[tensor.storage or 0]
        whole = self._unpacked(region, index)
        if tensor.id == output.id:
            return whole
        return lambda: self.emit.view(whole(), tensor.shape, tensor.strides, tensor.offset)

    def _unpacked(self, region: _Region, index: int) -> Saved:
        def unpacked() -> Tensor:
            if region.tensors is None:
                self._recompute(region)
            assert region.tensors is not None
            return region.tensors[index]

        return unpacked

    def checkpointed(self, layer: Callable[[], Tensor], keeps: Keeps | None = None, *, drops_output: bool = False) -> Tensor:
        """Runs a layer whose saved tensors are dropped, and computed again in backward; inside another one, it is part of that.

        `drops_output`: what it gives is not kept either, however many nodes save it.
        """
        if self._region is not None or self._recomputed is not None:
            return layer()
        self._region = region = _Region(layer, keeps)
        with self._watched(region):
            result = layer()
        self._region = None
        if drops_output:
            region.drops_output = True
            self._dropped[result.storage or 0] = region, region.count, result
            region.count += 1
        return result

    def _saved_again(self, region: _Region, tensor: Tensor) -> Saved:
        assert region.tensors is not None
        self.emit.detached(tensor)
        tensor = self.emit.there(tensor)
        region.tensors.append(tensor)
        # Recomputation stops as soon as the last saved tensor is there (torch/utils/checkpoint.py, early_stop).
        self.emit.muted = len(region.tensors) >= region.count
        return lambda: tensor

    def _recompute(self, region: _Region) -> None:
        region.tensors, self._recomputed = [], region
        before, self.casts = self.casts, {}
        with self._watched(region):
            result = region.again()
        if region.drops_output:
            region.tensors.append(result)
        self._recomputed, self.emit.muted, self.casts = None, False, before

    @contextmanager
    def _watched(self, region: _Region) -> Iterator[None]:
        """What is written inside keeps the results that a layer was told to keep, or, the second time, finds them there."""
        if region.keeps is None:
            yield
            return
        emit, kept, results = self.emit, region.keeps.chooser(), iter(tuple(region.results))

        def watch(name: str, outputs: tuple[Value, ...]) -> bool:
            if not kept(name):
                return False
            if self._recomputed is None:
                region.results.append(outputs)
                return False
            emit.stands_for |= {
                new.storage or 0: old.storage or 0
                for new, old in zip(outputs, next(results), strict=True)
                if isinstance(new, Tensor) and isinstance(old, Tensor)
            }
            return True

        emit.watch = watch
        yield
        emit.watch, emit.stands_for = None, {}

    # The engine

    def backward(self, y: Tensor, gradient: Tensor | None = None, end: str = "") -> None:
        """Writes the backward pass of `y`: the nodes, then what waits for the end, in a section of its own if it is named.

        Without a gradient `y` is a loss without dimensions, whose gradient is made of ones.
        """
        root, _ = self._made_by[_id(y)]
        _prepare(root)
        order = tuple(node.parameter for node in _run(root) if node.parameter is not None)
        before, self._before = self._before, []
        for callback in before:
            callback(order)
        first = self._ones_like(y) if gradient is None else gradient
        with self.emit.backward_thread():
            _prepare(root)
            root.arrived = [first]
            for node in _run(root):
                self._evaluate(node)
            self.emit.land()
            self.emit.section(end)
            while self._at_end:
                self._at_end.pop(0)()

    def _ones_like(self, loss: Tensor) -> Tensor:
        emit = self.emit
        ones = emit.tensor(loss.shape, loss.dtype)
        call = (loss, None, None, None, False, 1)
        with emit.op("ones_like", call, (ones,)):
            with emit.op("empty_like", call, (ones,)):
                emit.empty_strided(ones, pinned=False)
            emit.op("fill_", (ones, 1.0), (ones,))
        return ones

    def _evaluate(self, node: _Node) -> None:
        """Writes one node, and around it what the engine does with the gradients that it gives."""
        emit, gradients, parameter = self.emit, tuple(node.arrived), node.parameter
        for each in gradients:
            self._release(each)
        if node.section:
            self.emit.land()
        self.emit.section(node.section)
        sequence = node.sequence if parameter is None else -1
        with emit.write(_ENGINE + node.name):
            with emit.write(node.name, gradients, sequence=sequence, forward_thread=MAIN_THREAD):
                results = node.backward(gradients)
            if parameter is not None:
                for hook in node.hooks:
                    hook(self.gradients[_id(parameter)])
            fitting = [
                gradient if gradient is None else self._fitted(gradient, shape, edge)
                for gradient, shape, edge in zip(results, node.shapes, node.next, strict=True)
            ]
            for edge, gradient in zip(node.next, fitting, strict=True):
                if edge is not None:
                    self._arrive(*edge, gradient)

    def _fitted(self, gradient: Tensor, shape: tuple[int, ...], edge: tuple[_Node, int] | None) -> Tensor:
        """A gradient in the shape and dtype of what it is of (engine.cpp, validate_outputs: one after the other)."""
        gradient = self._summed(gradient, shape)
        if edge is None or gradient.dtype == edge[0].dtypes[edge[1]]:
            return gradient
        return self.emit.cast(gradient, edge[0].dtypes[edge[1]])

    def _summed(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The gradient of what was broadcast: summed to the shape it had."""
        if gradient.shape == shape:
            return gradient
        leading = len(gradient.shape) - len(shape)
        reduced = tuple(
            index for index, size in enumerate(gradient.shape) if index < leading or (shape[index - leading] == 1 and size != 1)
        )
        sizes = tuple(1 if index in reduced else size for index, size in enumerate(gradient.shape))
        small = self.emit.new("sum", (gradient, reduced, True, None), sizes)
        return self.emit.viewed(small, shape) if leading else small

    def _arrive(self, node: _Node, output: int, gradient: Tensor | None) -> None:
        """Puts a gradient where its node will find it; a second one is added to the first."""
        held = node.arrived[output]
        if held is not None and gradient is not None:
            self._release(held)
            gradient = self._sum_of(held, gradient)
        node.arrived[output] = held if gradient is None else gradient
        if gradient is not None and gradient.storage is not None:
            self._held[gradient.storage] += 1

    def _sum_of(self, held: Tensor, gradient: Tensor) -> Tensor:
        # In place where nobody else looks at that memory (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace).
        if not self.emit.is_view(held) and not self._held[held.storage or 0]:
            return self._add(held, gradient)
        return self.emit.new("add", (held, gradient, 1))

    def _release(self, gradient: Tensor | None) -> None:
        if gradient is not None and gradient.storage is not None and self._held[gradient.storage]:
            self._held[gradient.storage] -= 1


def _id(tensor: Tensor) -> int:
    assert tensor.id is not None
    return tensor.id


def _prepare(root: _Node) -> None:
    """Empties what nodes wait for, and counts how much that is."""
    nodes, waiting = {id(root): root}, [root]
    while waiting:
        for edge in waiting.pop().next:
            if edge is not None and id(edge[0]) not in nodes:
                nodes[id(edge[0])] = edge[0]
                waiting.append(edge[0])
    for node in nodes.values():
        node.waiting, node.arrived = 0, [None] * len(node.dtypes)
    for node in nodes.values():
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
