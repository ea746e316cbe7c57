"""`LoopNode`: what one op computes, as a loop over elements (perhaps with a reduction) or as a call of a library.

Values are tensors at a time: an op in place makes a new value in the memory of the old one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from steptime._program.program import Signature, Tensor
from steptime._units import dtype_bytes


class LoopKind(IntEnum):
    """What a node is to the scheduler."""

    POINTWISE = 0
    REDUCTION = 1
    CALL = 2  # a library's, or an op that the compiler leaves as it is: a border between kernels


@dataclass(frozen=True, slots=True)
class Read:
    """A value that is read: as a tensor of this shape and these strides. `indirect`: at places that another value says."""

    value: int
    tensor: Tensor
    indirect: bool = False

    @property
    def numel(self) -> int:
        """Elements that are read at most."""
        return self.tensor.numel


@dataclass(frozen=True, slots=True)
class Loop:
    """What a node iterates over: so many results, each of `reduced` elements, and what an element costs."""

    size: int = 1
    reduced: int = 1
    inner: bool = True  # whether a reduction goes along what lies side by side
    sums: bool = True  # whether it only adds up
    functions: Counter[str] = field(default_factory=Counter)
    reductions: int = 0
    atomic: bool = False  # adds to what is there, wherever indices say
    random: bool = False


@dataclass(slots=True)
class LoopNode:
    """One loop or call."""

    kind: LoopKind
    row: int  # of the op
    label: str  # the op's name, as kernels are named after it
    segment: int  # nodes of one segment are compiled together
    backward: bool
    reads: list[Read]
    writes: list[int]  # values
    loop: Loop
    after: tuple[int, ...] = ()  # values that must be there though they are not read: memory that is written in part
    signature: Signature | None = None  # of a call that takes other arguments than the eager op


@dataclass(slots=True)
class Value:
    """A tensor at a time: who makes it (-1: it was there before) and who reads it."""

    tensor: Tensor
    made_by: int = -1
    read_by: list[int] = field(default_factory=list)  # nodes
    kept: bool = False  # something that is not compiled reads it
    overwritten: bool = False  # something else is in its memory at the end

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.tensor.shape) * dtype_bytes(self.tensor.dtype)


# Operations of one element by op, as PyTorch decomposes it (torch/_decomp/decompositions.py, torch/_inductor/lowering.py):
# plain ones and functions that cost more.
_ONE: Mapping[str, int] = {"plain": 1}
FUNCTIONS: Mapping[str, Mapping[str, int]] = {
    "gelu": {"plain": 4, "erf": 1},
    "gelu_backward": {"plain": 8, "erf": 1, "exp": 1},
    "gelu_tanh": {"plain": 7, "tanh": 1},
    "gelu_tanh_backward": {"plain": 14, "tanh": 1},
    "silu": {"plain": 2, "exp": 1, "div": 1},
    "silu_backward": {"plain": 6, "exp": 1, "div": 1},
    "sigmoid": {"plain": 1, "exp": 1, "div": 1},
    "sigmoid_backward": {"plain": 3},
    "tanh": {"tanh": 1},
    "tanh_backward": {"plain": 3},
    "exp": {"exp": 1},
    "log": {"log": 1},
    "rsqrt": {"rsqrt": 1},
    "sqrt": {"sqrt": 1},
    "sin": {"sin": 1},
    "cos": {"cos": 1},
    "pow": {"plain": 1},
    "div": {"div": 1},
    "div_": {"div": 1},
    "reciprocal": {"div": 1},
    "softplus": {"plain": 3, "exp": 1, "log": 1},
    "softplus_backward": {"plain": 3, "exp": 1, "div": 1},
    "mish": {"plain": 4, "exp": 1, "tanh": 1},
    "erf": {"erf": 1},
}


def functions_of(label: str) -> Counter[str]:
    """What one element of an op costs."""
    return Counter(FUNCTIONS.get(label, FUNCTIONS.get(label.rstrip("_"), _ONE)))
