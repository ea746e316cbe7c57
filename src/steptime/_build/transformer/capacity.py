"""Experts of a fixed capacity: every one gets as many rows, padded where it has fewer and the rest dropped (GShard, Switch).

Sizes are known before a step, so that ranks exchange equal pieces without asking, no host waits, and products are a batch.
"""

from __future__ import annotations

import math

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.indexed import group_ends
from steptime._build.emit.layers import activation, bmm, curved, mul
from steptime._build.emit.tape import Tape
from steptime._build.emit.views import reshape, transpose
from steptime._program.program import Tensor


def capacity_of(copies: int, count: int, factor: float) -> int:
    """Rows of every expert, of so many copies of tokens on this rank."""
    return max(1, math.ceil(copies * factor / count))


def places(emit: Emitter, order: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Which of the sorted copies stand in each row of each expert."""
    starts = emit.new("sub", (group_ends(emit, counts), counts, 1), dtype="int64")
    column = emit.unsqueezed(starts, 1)
    slots = emit.new("add", (column, emit.arange(rows, from_python=True), 1), (counts.numel, rows))
    slots = emit.new("clamp", (slots, None, order.numel - 1))
    return emit.new("index_select", (order, 0, emit.viewed(slots, (slots.numel,), (-1,))), (slots.numel,))


def batched(tape: Tape, x: Tensor, weights: tuple[Tensor | None, Tensor, Tensor], ways: int, curve: str) -> Tensor:
    """The experts' two layers over the rows that every rank sent for each of them; gate, up and down are of this rank."""
    gate, up, down = weights
    count, width = up.shape[0], x.shape[-1]
    each = x.shape[0] // (ways * count)
    if ways > 1:  # pieces come by rank
        x = transpose(tape, reshape(tape, x, (ways, count, each, width)), 0, 1)
    x = reshape(tape, x, (count, ways * each, width))

    def applied(rows: Tensor, weight: Tensor) -> Tensor:
        return bmm(tape, rows, transpose(tape, weight, 1, 2))

    if gate is None:
        inner = curved(tape, curve, applied(x, up))
    else:
        inner = mul(tape, activation(tape, "silu", applied(x, gate)), applied(x, up))
    y = applied(inner, down)
    if ways > 1:
        y = transpose(tape, reshape(tape, y, (count, ways, each, width)), 0, 1)
    return reshape(tape, y, (ways * count * each, width))
