"""What the host reads from a device that is not there: a placeholder, and a list of the lines that read one.

Every number of a floating-point tensor is taken to be 1.0 and every whole number to be 1, so that losses and norms are finite,
counts can be divided by and comparisons follow from that. On a GPU such a read is a copy that the host waits for, and so it is
in the captured step.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from steptime._capture import refusals
from steptime._capture.tensors import is_pretended, tensors_in

_FLOAT, _WHOLE = 1.0, 1
_VALUE_OF_SCALER = 0.0  # no gradient is infinite, as in nearly every step
_MOST_SAID = 6
_aten: Any = torch.ops.aten
_WEAK_STORAGE: Any = StorageWeakRef
# What decides: truth values follow from the placeholders of what is compared.
_COMPARED: dict[str, Callable[..., bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "isnan": math.isnan, "isinf": math.isinf, "logical_not": operator.not_, "bitwise_not": operator.not_,
    "logical_and": lambda one, other: bool(one and other), "logical_or": lambda one, other: bool(one or other),
    "bitwise_and": lambda one, other: bool(one and other), "bitwise_or": lambda one, other: bool(one or other),
    "mul": lambda one, other: bool(one and other), "any": lambda one, *_: bool(one), "all": lambda one, *_: bool(one),
}  # fmt: skip


@dataclass
class Reads:
    """The reads of one captured step, by line, and the truth values that are known."""

    lines: Counter[tuple[str, str]] = field(default_factory=Counter)  # (line, what it was told) -> times
    picked: Counter[str] = field(default_factory=Counter)  # line of the code that picks by values of the device -> times
    _truths: dict[int, tuple[Any, bool]] = field(default_factory=dict)  # by storage, which the weak reference keeps apart

    def learn(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Remembers what a comparison gives."""
        compare = _COMPARED.get(_plain_name(name))
        if compare is None or not isinstance(result, torch.Tensor) or result.dtype is not torch.bool:
            return
        storage = result.untyped_storage()
        try:
            truth = compare(*(self._plain(each) for each in args[:2]))
        except (TypeError, ValueError, OverflowError):
            return
        self._truths[storage._cdata] = (_WEAK_STORAGE(storage), truth)

    def value(self, tensor: torch.Tensor) -> float | int | bool | complex:
        """What one number of a tensor of the device is taken to be."""
        if tensor.dtype is torch.bool:
            _, truth = self._truths.get(tensor.untyped_storage()._cdata, (None, True))
            return truth
        if tensor.dtype.is_complex:
            return complex(_FLOAT)
        return _FLOAT if tensor.dtype.is_floating_point else _WHOLE

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What an op tells the host, which is said to have been told so, at the line of the user's code that asks."""
        if refusals.is_scaler():
            return _VALUE_OF_SCALER
        source = next(each for each in tensors_in(args) if is_pretended(each))
        decides = func._schema.returns[0].type.kind() == "BoolType"
        checked = source.dtype is torch.bool and refusals.is_validation()  # whether all is as it should be
        value = True if decides or checked else self.value(source)
        self.lines[refusals.user_line(), str(value)] += 1
        if func is _aten.copy_.default:
            torch._C._autograd._enable_record_function(False)
            try:
                return args[0].fill_(value)
            finally:
                torch._C._autograd._enable_record_function(True)
        return value

    def messages(self) -> tuple[str, ...]:
        """What is said of the reads, a line each."""
        said = [_message(line, value) for line, value in self.lines]
        said += [f"{line or 'PyTorch'} selects by values on the GPU; assumed to select everything" for line in self.picked]
        if len(said) > _MOST_SAID:
            said = [*said[:_MOST_SAID], f"the host reads values of the device in {len(said) - _MOST_SAID} more lines"]
        return tuple(said)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.value(value) if is_pretended(value) or value.numel() != 1 else value.item()
        return value


def _message(line: str, value: str) -> str:
    where = line or "PyTorch's own code"
    if value in ("True", "False"):
        return f"{where} decides by a value of the device, taken as {value}; what it does otherwise is not in the step"
    return f"{where} reads a value of the device, taken as {value}; the host waits for it there"


def compares(name: str) -> bool:
    """Whether an op may give truth values that `learn` can tell."""
    return _plain_name(name) in _COMPARED


def _plain_name(name: str) -> str:
    return name.removeprefix("aten::").rstrip("_")
