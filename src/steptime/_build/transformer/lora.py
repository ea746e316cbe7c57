"""Adapters beside frozen matrices (LoRA), as Hugging Face's PEFT runs them: two narrow layers, scaled and added."""

from __future__ import annotations

from steptime._build.emit.layers import add, linear, scaled
from steptime._build.emit.tape import Tape
from steptime._program.program import Tensor

Adapter = tuple[Tensor, Tensor]
"""A matrix to the adapter's rank, and one from it."""


def adapted(tape: Tape, x: Tensor, y: Tensor, adapter: Adapter) -> Tensor:
    """What a frozen layer made of `x`, and what its adapter makes of it."""
    down, up = adapter
    return add(tape, y, scaled(tape, linear(tape, linear(tape, x, down), up)))
