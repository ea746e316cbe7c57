"""`Call`: one op with its arguments, as the dispatcher sees it: what a sweep asks for, a trace records, a model answers.

It is plain data: a JSON text gives the same call again on any machine, and nothing in it is ever executed but a named op.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from steptime._ops.generated import NAMES as GENERATED_NAMES
from steptime._ops.operations import PRODUCTS, TF32_BY_DEFAULT, operations_of
from steptime._units import dtype_bytes, dtype_name
from steptime.errors import InputError

_SHAPES = 50_000


@lru_cache(maxsize=_SHAPES)
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major tensor, as PyTorch gives them: an axis of size 0 counts as one of size 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A tensor argument. Contiguous unless strides are given; integers are drawn from 0 to `high` - 1 unless `values` says."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None
    high: int = 0
    device: str = "device"  # device | pinned | pageable
    # normal | positive | unit (0..1) | zeros | half_zeros (as after ReLU) | activations, gradients (captured in training) |
    # mask (bool, half of it set) | offsets (0, k, 2k, ...: bags of k, `high` in all) |
    # lower_row, lower_column (where the elements below the diagonal of a `high` x `high` square are, in order) |
    # ends (k, 2k, ...: where groups of k end, `high` in all) |
    # ordered (0, 1, 2, ...: as `arange` makes them, beginning again at `high`) |
    # reserve (what a forward pass keeps for this call; its true size may be another)
    values: str = "normal"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes the elements take."""
        return self.numel * dtype_bytes(self.dtype)

    @property
    def extent(self) -> int:
        """Elements of storage from the first to the last one addressed."""
        if self.numel == 0:
            return 0
        if self.strides is None:
            return self.numel
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def permuted(self, *order: int) -> TensorArg:
        """The view that `Tensor.permute` gives."""
        strides = self.strides or contiguous(self.shape)
        shape, strides = tuple(self.shape[axis] for axis in order), tuple(strides[axis] for axis in order)
        return replace(self, shape=shape, strides=strides)

    def transposed(self) -> TensorArg:
        """The view with the last two axes exchanged."""
        *front, last, final = range(len(self.shape))
        return self.permuted(*front, final, last)

    def channels_last(self) -> TensorArg:
        """This shape with channels, its second axis, next to each other in memory: N, C, H, W in the order N, H, W, C."""
        batch, channels, *image = self.shape
        last = len(image) + 1
        return replace(self, shape=(batch, *image, channels), strides=None).permuted(0, last, *range(1, last))


@dataclass(frozen=True, slots=True)
class DtypeArg:
    """A dtype given as an argument."""

    name: str


# What an argument can be; a list of tensors is a tuple.
Argument = TensorArg | DtypeArg | bool | int | float | str | None | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class Call:
    """`op` is namespace::name.overload. Keyword arguments are sorted by name.

    `written` says which positional arguments a step has just written when it makes this call (the activation or its gradient,
    never a parameter): in producer-warm measurements they are in cache.
    """

    op: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    written: tuple[int, ...] = (0,)

    def tensors(self) -> Iterator[TensorArg]:
        """Every tensor argument, in order, those in lists included."""
        for argument in (*self.args, *(value for _, value in self.kwargs)):
            yield from _tensors_in(argument)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor arguments on the device."""
        return sum(tensor.nbytes for tensor in self.tensors() if tensor.device == "device")

    @property
    def dtype(self) -> str:
        """The dtype of the first floating tensor, else of the first tensor, else empty; one name whatever its spelling."""
        every = [dtype_name(tensor.dtype) for tensor in self.tensors()]
        return next((name for name in every if "float" in name), every[0] if every else "")

    def to_json(self) -> str:
        """Compact text; the same call always gives the same text."""
        content: dict[str, Any] = {"op": self.op, "args": [_plain(value) for value in self.args]}
        if self.kwargs:
            content["kwargs"] = {name: _plain(value) for name, value in sorted(self.kwargs)}
        if self.written != (0,):
            content["written"] = list(self.written)
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Call:
        """The call that `to_json` gave."""
        try:
            content = json.loads(text)
            return cls(
                op=str(content["op"]),
                args=tuple(_argument(value) for value in content["args"]),
                kwargs=tuple(sorted((name, _argument(value)) for name, value in content.get("kwargs", {}).items())),
                written=tuple(content.get("written", (0,))),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"not a call: {text[:80]!r} ({error})") from error


def _tensors_in(argument: Argument) -> Iterator[TensorArg]:
    if isinstance(argument, TensorArg):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _tensors_in(item)


def _plain(value: Argument) -> Any:
    if isinstance(value, TensorArg):
        plain: dict[str, Any] = {"t": list(value.shape), "d": value.dtype}
        if value.strides is not None:
            plain["s"] = list(value.strides)
        if value.high:
            plain["high"] = value.high
        if value.device != "device":
            plain["on"] = value.device
        if value.values != "normal":
            plain["v"] = value.values
        return plain
    if isinstance(value, DtypeArg):
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _argument(value: Any) -> Argument:
    if isinstance(value, list):
        return tuple(_argument(item) for item in value)
    if not isinstance(value, dict):
        plain: bool | int | float | str | None = value
        return plain
    if "dtype" in value:
        return DtypeArg(str(value["dtype"]))
    strides = value.get("s")
    return TensorArg(
        shape=tuple(value["t"]),
        dtype=str(value["d"]),
        strides=None if strides is None else tuple(strides),
        high=int(value.get("high", 0)),
        device=str(value.get("on", "device")),
        values=str(value.get("v", "normal")),
    )


# What any call has to do at least, from its arguments alone: operations and bytes. For rooflines; models know better.


def base_of(op: str) -> str:
    """An op without its overload."""
    return op.partition(".")[0]


def precision_of(call: Call, tf32: bool) -> str:
    """What a product of this call computes in."""
    return "tf32" if tf32 and call.dtype == "float32" else call.dtype


def computed_in(op: str, dtype: str, tf32: bool | None) -> str:
    """What a product of this type is computed in, where its user allows or forbids TF32, or says nothing (None)."""
    allowed = base_of(op) in TF32_BY_DEFAULT if tf32 is None else tf32
    return "tf32" if dtype == "float32" and allowed else dtype


def moved_bytes(call: Call) -> float:
    """Every argument on the device read once, and an output of the size of the largest result written."""
    return float(call.nbytes + _output_bytes(call))


def flop_of(call: Call) -> float:
    """Operations of a call (`operations_of`)."""
    return operations_of(base_of(call.op), call.args, tuple(call.tensors()))


def _output_bytes(call: Call) -> int:
    tensors = [tensor for tensor in call.tensors() if tensor.device == "device"]
    base = base_of(call.op)
    if GENERATED_NAMES.fullmatch(call.op):
        return 0  # what is written is among its arguments
    if not tensors or base.endswith("_"):
        # In place: the first argument (of a list, all its tensors) is written.
        first = call.args[0] if call.args else None
        every = first if isinstance(first, tuple) else (first,)
        return sum(tensor.nbytes for tensor in every if isinstance(tensor, TensorArg))
    shape = PRODUCTS.get(base)
    if shape is not None:
        operands = [each for each in call.args if isinstance(each, TensorArg) and len(each.shape) == shape]
        if len(operands) >= 2:
            left, right = operands[-2:]
            return left.nbytes // max(1, left.shape[-1]) * right.shape[-1]
    return max(tensor.nbytes for tensor in tensors)
