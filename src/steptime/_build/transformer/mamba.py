"""Mamba-2 layers (Dao and Gu, arXiv 2405.21060), as mamba_ssm and Megatron-core run them.

One product makes gates, inputs, the state's two projections and steps; a short causal convolution goes over inputs and
projections; the scan works on chunks of a sequence: products within a chunk, states of chunks, and states handed from chunk to
chunk; a gated norm and a product end it. The convolution, the gate and its norm are each one pass over memory, and the scan's
kernels are written as the batched products that they compute; nobody measured them here. Backward makes the states again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.views import split_last
from steptime._build.transformer.parts import Mamba
from steptime._program.program import Tensor

_STATES = "float32"


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """The parameters of one layer, of this rank's heads."""

    inward: Tensor  # [2 x inner + 2 x groups x state + heads, width]
    convolution: Tensor  # [channels, 1, taps]
    convolution_bias: Tensor
    of_heads: tuple[Tensor, ...]  # steps' bias, decay, and what goes past the scan
    norm: Tensor
    outward: Tensor  # [width, inner]


def mixed(
    tape: Tape,
    x: Tensor,
    weights: MambaWeights,
    config: Mamba,
    by_columns: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What a layer makes of tokens before its last product."""
    heads, inner, channels = weights.of_heads[0].numel, weights.norm.numel, weights.convolution_bias.numel
    gates, mixed_in, steps = split_last(tape, by_columns(x, weights.inward), (inner, channels, heads))
    convolved = _convolved(tape, mixed_in, weights)
    both = (channels - inner) // 2
    values, inputs, outputs = split_last(tape, convolved, (inner, both, both))
    return _gated_norm(tape, _scanned(tape, (values, inputs, outputs, steps), weights.of_heads, config), gates, weights.norm)


def _convolved(tape: Tape, x: Tensor, weights: MambaWeights) -> Tensor:
    """A causal convolution over time with SiLU: a pass over memory, and one with two inputs in backward."""
    emit, name = tape.emit, "CausalConv1dFn"
    parameters = (weights.convolution, weights.convolution_bias)
    saved = tape.save(x)
    with emit.write(name, (x, *parameters), (), sequence=emit.sequence):
        y = emit.new("silu", (x,))

    def backward(gradient: Tensor) -> Gradients:
        others = _like(emit, parameters)
        with emit.write(f"{name}Backward kernel", (gradient,), others):
            return emit.new("silu_backward", (gradient, saved())), *others

    return tape.node(f"{name}Backward", (x, *parameters), y, backward)


def _like(emit: Emitter, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(emit.tensor(each.shape, each.dtype) for each in tensors)


def _gated_norm(tape: Tape, x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    """The RMS norm of `x * silu(gates)` in one kernel each way."""
    emit, name = tape.emit, "LayerNormFn"
    saved = tape.save(x), tape.save(gates)
    with emit.write(name, (x, gates, weight), (), sequence=emit.sequence):
        y = emit.new("mul", (x, gates))

    def backward(gradient: Tensor) -> Gradients:
        others = _like(emit, (weight,))
        with emit.write(f"{name}Backward kernel", (gradient,), others):
            of_x = emit.new("mul", (gradient, saved[1]()))
            return of_x, emit.new("silu_backward", (gradient, saved[0]())), *others

    return tape.node(f"{name}Backward", (x, gates, weight), y, backward)


@dataclass(frozen=True, slots=True)
class _Scan:
    """The products of a scan: of chunks of all samples, by heads and by groups of heads that share projections."""

    emit: Emitter
    heads: int  # times chunks, as the groups
    groups: int
    length: int
    width: int
    state: int

    def times(self, left: Tensor, right: Tensor, m: int, k: int, n: int) -> Tensor:
        """One product for every head, or for every group where both factors are theirs."""
        batch = self.groups if max(left.numel, right.numel) <= self.groups * self.length * max(k, n) else self.heads
        operands = (self._of_batch(left, batch, m, k), self._of_batch(right, batch, k, n))
        return self.emit.new("bmm", operands, (batch, m, n), left.dtype)

    def _of_batch(self, x: Tensor, batch: int, rows: int, columns: int) -> Tensor:
        """A tensor as one matrix for each product; several share one where it has fewer."""
        own = rows * columns if x.numel >= batch * rows * columns else 0
        return self.emit.view(x, (batch, rows, columns), (own, columns, 1))

    def states(self, values: Tensor, inputs: Tensor) -> Tensor:
        """The states that chunks begin with, in fp32, from those that each chunk adds."""
        added = self.times(values, inputs, self.width, self.length, self.state)
        return self.emit.new("mul", (added, self.emit.number()), dtype=_STATES)

    def forward(self, values: Tensor, inputs: Tensor, outputs: Tensor) -> None:
        """Within chunks by their scores, and from the states that they begin with."""
        self.states(values, inputs)
        scores = self.times(outputs, inputs, self.length, self.state, self.length)
        self.times(scores, values, self.length, self.length, self.width)
        self.times(outputs, values, self.length, self.state, self.width)

    def backward(self, gradient: Tensor, values: Tensor, inputs: Tensor, outputs: Tensor) -> None:
        """Gradients of both factors of every product; states are made again."""
        length, width, state = self.length, self.width, self.state
        self.states(values, inputs)
        scores = self.times(gradient, values, length, width, length)
        self.times(scores, gradient, length, length, width)
        for other in (outputs, inputs):  # of the states that chunks begin with, and of those that they end with
            self.times(gradient, other, width, length, state)
            self.times(values, gradient, length, width, state)
            self.times(scores, other, length, length, state)
        self.emit.new("mul", (self.times(gradient, outputs, width, length, state), self.emit.number()), dtype=_STATES)


def _scanned(tape: Tape, given: tuple[Tensor, ...], of_heads: tuple[Tensor, ...], config: Mamba) -> Tensor:
    emit, name, (values, inputs, _, steps) = tape.emit, "MambaChunkScanCombinedFn", given
    chunks = -(-(steps.numel // steps.shape[-1]) // config.chunk)
    groups = chunks * (inputs.shape[-1] // config.state)
    scan = _Scan(emit, chunks * steps.shape[-1], groups, config.chunk, config.head_width, config.state)
    saved = [tape.save(each) for each in given]
    y = emit.tensor(values.shape, values.dtype)
    with emit.write(name, (*given, *of_heads), (y,), sequence=emit.sequence):
        emit.new("cumsum", (steps, 0, None), dtype=_STATES)
        scan.forward(*given[:3])

    def backward(gradient: Tensor) -> Gradients:
        known = [each() for each in saved]
        results = *_like(emit, given), *_like(emit, of_heads)
        with emit.write(f"{name}Backward kernels", (gradient, *known), results):
            scan.backward(gradient, *known[:3])
        return results

    return tape.node(f"{name}Backward", (*given, *of_heads), y, backward)
