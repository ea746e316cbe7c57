"""A call as data becomes real arguments of a real op."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from steptime.errors import InputError
from steptime.models.kernels.call import Argument, Call, DtypeArg, TensorArg

_NAME = re.compile(r"aten::([A-Za-z_]\w*)(?:\.(\w+))?")


def op_of(name: str) -> Callable[..., Any]:
    """The op of that name; only those of `torch.ops.aten`."""
    match = _NAME.fullmatch(name)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    found = getattr(packet, match[2] or "default", None) if match and packet is not None else None
    if not isinstance(found, torch._ops.OpOverload):
        raise InputError(f"{name!r} is no op of torch.ops.aten; expected a name such as aten::mm.default")
    return found


def binding_of(name: str) -> Callable[..., Any] | None:
    """The Python function that people call for this op; None where they cannot."""
    match = _NAME.fullmatch(name)
    if not match or match[2] in ("out", "grad_input"):
        return None
    inplace = match[1].endswith("_") and not match[1].startswith("_")
    places = (torch.Tensor,) if inplace else (torch, torch._C._nn, torch.Tensor)
    for place in places:
        found = getattr(place, match[1], None)
        if callable(found):
            function: Callable[..., Any] = found
            return function
    return None


def arguments(call: Call, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments."""
    return (
        [_value(one, device) for one in call.args],
        {name: device if name == "device" else _value(one, device) for name, one in call.kwargs},
    )


def _value(argument: Argument, device: torch.device) -> Any:
    if isinstance(argument, TensorArg):
        return tensor(argument, device)
    if isinstance(argument, DtypeArg):
        return _dtype(argument.name)
    if isinstance(argument, tuple):
        return [_value(one, device) for one in argument]
    return argument


def tensor(given: TensorArg, device: torch.device) -> torch.Tensor:
    """A tensor of that shape, dtype and layout. Integers are 0: valid as an index, an offset and a class of anything."""
    dtype = _dtype(given.dtype)
    place = device if given.device == "device" else torch.device("cpu")
    storage = torch.zeros(max(1, given.extent), dtype=dtype, device=place)
    if given.device == "pinned" and device.type == "cuda":
        storage = storage.pin_memory()
    if dtype is torch.bool:
        storage.bernoulli_(0.5)
    elif dtype.is_floating_point:
        storage.copy_(_floats(given.values, storage))
    if given.strides is None:
        return storage[: given.numel].view(given.shape)
    return storage.as_strided(given.shape, given.strides)


def _floats(values: str, like: torch.Tensor) -> torch.Tensor:
    if values == "unit":
        return torch.rand(like.shape, device=like.device)
    normal = torch.randn(like.shape, device=like.device)
    return normal.abs() + 0.1 if values == "positive" else normal


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"{name!r} is no dtype of torch")
    return found
