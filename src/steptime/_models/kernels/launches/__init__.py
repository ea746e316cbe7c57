"""What rules say of a call: which kernels it launches, in which order, and what each one reads and writes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg, contiguous
from steptime._units import dtype_bytes
from steptime.errors import InputError

# Kernels that many families launch, by their short names.
VECTORIZED = "vectorized_elementwise_kernel"
UNROLLED = "unrolled_elementwise_kernel"
STRIDED = "elementwise_kernel"
WITH_INDEX = "elementwise_kernel_with_index"
REDUCE = "reduce_kernel"
OVER_LISTS = "multi_tensor_apply_kernel"
GATHER = "vectorized_gather_kernel"
SCATTER_GATHER = "_scatter_gather_elementwise_kernel"
INDEXED = "index_elementwise_kernel"
SMALL_INDEX = "indexSelectSmallIndex"
MEMCPY = "Memcpy"
MEMSET = "Memset"
FFT = "fft"

# The facts of a launch that have a term of their own in its time, and what each says; any other fact is only a feature of the
# residual. A launch that does not have it stands at the value in DEFAULTS, else at zero.
FACTS = {
    "sector_bytes": "bytes of all sectors that warps ask for, where operands are walked with strides",
    "casts": "1 where elements are converted",
    "tail": "1 where the elements are no multiple of the vector",
    "rows": "rows that are worked on one by one",
    "gathered_bytes": "bytes of all rows looked up, repeated ones included",
    "reuse": "how often an element looked up or written is met",
    "items": "indices looked up, or parts joined",
    "host_bytes": "bytes that cross to or from the host",
    "pageable_bytes": "those of them in pageable memory",
    "split": "blocks that share one output, where several do",
    "block_height": "rows of threads in a block of a reduction",
    "footprint_bytes": "bytes of the table that is looked up or scattered into",
    "tensors": "tensors of a list in this launch",
    "odd_share": "share of a list's tensors that are no multiple of the vector",
    "chain_ns": "a nanosecond or so for every step of the longest chain of dependent loads",
}
# 500 ns is about one load from memory (seen as the least cold kernel of every kind less the least warm one).
DEFAULTS = {"split": 1.0, "chain_ns": 500.0}

# Pairs of how many blocks run and of how much one block does after the other.
Grids = tuple[tuple[float, float], ...]

ARGUMENT, HOT, FRESH = "argument", "hot", "fresh"
_FUNCTION = re.compile(r"(?:void )?([\w:]+)")
_TRANSFORM = re.compile(r"(?:^|_)fft(?:_|$)")
# Asked for every operand of every launch.
_item_bytes = cache(dtype_bytes)


@cache
def short_name(kernel: str) -> str:
    """The name of a profiled kernel without its namespaces, template arguments and parameters; cuFFT's kernels are one."""
    result = _FUNCTION.match(kernel.replace("(anonymous namespace)::", ""))
    name = result.group(1).split("::")[-1] if result else kernel
    return FFT if _TRANSFORM.search(name) else name


def floor_power(number: int) -> int:
    """The largest power of two that is not above a number, at least 1."""
    return 1 << (max(1, number).bit_length() - 1)


@cache
def base_name(op: str) -> str:
    """The name of an op without namespace and overload: `add_` of an in-place sum."""
    return op.rsplit("::", maxsplit=1)[-1].split(".", maxsplit=1)[0]


@dataclass(frozen=True, slots=True)
class Gpu:
    """What libraries look at when they choose kernels and grids; they see the whole GPU on shares of one as well."""

    sms: int
    threads_per_sm: int
    l1_bytes: int  # of each SM


@dataclass(frozen=True, slots=True)
class GpuCall(Call):
    """A call on a GPU. What it gives of its arguments is what the rules of its op expect, or one clear error."""

    gpu: Gpu = field(kw_only=True)

    @property
    def name(self) -> str:
        """The op without namespace and overload."""
        return base_name(self.op)

    @property
    def overload(self) -> str:
        """The overload of the op: `Tensor` of a sum of two tensors."""
        return self.op.rsplit(".", maxsplit=1)[-1]

    def value(self, index: int, default: Argument = None) -> Argument:
        """A positional argument, or what it is when not given."""
        return self.args[index] if index < len(self.args) else default

    def keyword(self, name: str, default: Argument = None) -> Argument:
        """A keyword argument, or what it is when not given."""
        return next((value for entry, value in self.kwargs if entry == name), default)

    def tensor(self, index: int) -> Operand:
        """The tensor at a position."""
        value = self.value(index)
        if not isinstance(value, TensorArg):
            raise InputError(f"{self.op}: argument {index} is {value!r}, expected a tensor")
        return operand(value, index)

    def optional_tensor(self, index: int) -> Operand | None:
        """The tensor at a position; None where another thing or nothing is given."""
        value = self.value(index)
        return operand(value, index) if isinstance(value, TensorArg) else None

    def operands(self) -> list[Operand]:
        """The tensors among the positional arguments, without those in lists."""
        return [operand(value, index) for index, value in enumerate(self.args) if isinstance(value, TensorArg)]

    def tensor_list(self, index: int) -> list[Operand]:
        """The list of tensors at a position."""
        value = self.value(index)
        if not isinstance(value, tuple) or not all(isinstance(item, TensorArg) for item in value):
            raise InputError(f"{self.op}: argument {index} is {value!r}, expected a list of tensors")
        return [operand(item, index) for item in value if isinstance(item, TensorArg)]

    def integer(self, index: int, default: int | None = None) -> int:
        """The whole number at a position."""
        value = self.value(index, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.op}: argument {index} is {value!r}, expected a number")
        return int(value)

    def integers(self, index: int) -> tuple[int, ...]:
        """The whole numbers at a position: a list, a single number, or none."""
        value = self.value(index)
        if value is None:
            return ()
        many = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(item, int) for item in many):
            raise InputError(f"{self.op}: argument {index} is {value!r}, expected whole numbers")
        return tuple(int(item) for item in many if isinstance(item, int))

    def flag(self, index: int) -> bool:
        """The truth value at a position."""
        return bool(self.value(index, False))

    def dtype_at(self, index: int, default: str) -> str:
        """The dtype given at a position, or the default."""
        value = self.value(index)
        return value.name if isinstance(value, DtypeArg) else default

    def dtype_keyword(self, default: str) -> str:
        """The dtype given by keyword, or the default."""
        value = self.keyword("dtype")
        return value.name if isinstance(value, DtypeArg) else default


# From a call to its launches.
Rule = Callable[[GpuCall], "list[Launch]"]


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
    grids: Grids = ()
    path: str = ""
    tag: str = ""  # tells apart what one kernel name computes, beyond the op
    timed_as: str = ""  # a measured kernel of the same code, where this one was not measured


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
