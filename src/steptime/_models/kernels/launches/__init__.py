"""What rules say of a call: which kernels it launches, in which order, and what each one reads and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from steptime._models.kernels.call import Call, TensorArg, contiguous
from steptime._units import dtype_bytes
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Gpu:
    """What libraries look at when they choose kernels and grids; they see the whole GPU on shares of one as well."""

    sms: int
    threads_per_sm: int
    l1_bytes: int  # of each SM


@dataclass(frozen=True, slots=True)
class GpuCall(Call):
    """A call on a GPU."""

    gpu: Gpu = field(kw_only=True)


# Rules of a family: from a call to its launches.
Rules = Callable[[GpuCall], "list[Launch]"]


def by_op(rules: Mapping[str, Rules]) -> Rules:
    """Rules that differ from op to op: by the whole name, or without namespace and overload."""

    def of_call(call: GpuCall) -> list[Launch]:
        rule = rules.get(call.op) or rules.get(call.op.rpartition("::")[2].partition(".")[0])
        if rule is None:
            raise InputError(f"{call.op}: no rule says what it launches")
        return rule(call)

    return of_call


# Both are asked for every operand of every launch: the bytes of a dtype, the strides of a shape.
_item_bytes = cache(dtype_bytes)

ARGUMENT, HOT, FRESH = "argument", "hot", "fresh"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a kernel reads or writes. Where it comes from decides whether it is in a cache."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]  # elements
    origin: str = FRESH  # argument: of the call | hot: written by an earlier launch of the same call | fresh: neither
    argument: int = -1  # which positional argument of the call, where it is one
    since_bytes: int = 0  # of a hot one: bytes touched since it was written
    device: str = "device"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def distinct(self) -> int:
        """Elements of memory behind them: broadcast ones count once."""
        return math.prod(size for size, stride in zip(self.shape, self.strides, strict=True) if stride != 0)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return _item_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind them."""
        return self.distinct * _item_bytes(self.dtype)

    @property
    def dense(self) -> bool:
        """Whether its elements fill their memory without gaps or repeats, in whatever order."""
        step = 1
        for stride, size in sorted((stride, size) for size, stride in zip(self.shape, self.strides, strict=True) if size != 1):
            if stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, copy or fill. `kernel` is its name cut to what tells code apart; `facts` are sizes and flags of its grid.

    `path` is code within one kernel that is fitted apart (vectorised or not, staged or not); `grids` are pairs of how many
    blocks run and how much one block does after the other, as many as it takes to say how the kernel divides its work.
    """

    kernel: str
    elements: float
    reads: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    grids: tuple[tuple[float, float], ...] = ()
    path: str = ""
    tag: str = ""  # tells apart what one kernel name computes, beyond the op


def operand(tensor: TensorArg, argument: int) -> Operand:
    """An argument of a call as an operand."""
    strides = tensor.strides if tensor.strides is not None else contiguous(tensor.shape)
    return Operand(tensor.shape, tensor.dtype, strides, ARGUMENT, argument, device=tensor.device)


def fresh(shape: tuple[int, ...], dtype: str) -> Operand:
    """A contiguous tensor that the launch makes."""
    return Operand(shape, dtype, contiguous(shape))


def hot(shape: tuple[int, ...], dtype: str, since_bytes: int) -> Operand:
    """A contiguous tensor that an earlier launch of the same call wrote, so many bytes ago."""
    return Operand(shape, dtype, contiguous(shape), HOT, since_bytes=since_bytes)
