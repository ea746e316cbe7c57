"""A call as data becomes real arguments of a real op."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime_lab.measure.ops.arena import torch_dtype

_NAME = re.compile(r"aten::([A-Za-z_]\w*)(?:\.(\w+))?")


def binding_of(name: str) -> Callable[..., Any] | None:
    """The Python function that people call for this op; None where they cannot."""
    match = _NAME.fullmatch(name)
    # Indexing has no function of its own; what is called `index` is another thing.
    if not match or match[1] == "index" or match[2] in ("out", "grad_input"):
        return None
    inplace = match[1].endswith("_") and not match[1].startswith("_")
    places = (torch.Tensor,) if inplace else (torch, torch._C._nn, torch.Tensor)
    for place in places:
        result = getattr(place, match[1], None)
        if callable(result):
            function: Callable[..., Any] = result
            return function
    return None


def arguments(call: Call, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments."""
    return (
        [_value(arg, device) for arg in call.args],
        {name: _keyword(name, arg, device) for name, arg in call.kwargs},
    )


def _keyword(name: str, argument: Argument, device: torch.device) -> Any:
    if not isinstance(argument, str):
        return _value(argument, device)
    if name == "device":
        return device if argument == "device" else torch.device("cpu")
    return getattr(torch, argument) if name in ("memory_format", "layout") else argument


def _value(argument: Argument, device: torch.device) -> Any:
    if isinstance(argument, TensorArg):
        return tensor(argument, device)
    if isinstance(argument, DtypeArg):
        return torch_dtype(argument.name)
    if isinstance(argument, tuple):
        return [_value(item, device) for item in argument]
    return argument


def tensor(given: TensorArg, device: torch.device) -> torch.Tensor:
    """A tensor of that shape, dtype and layout. Integers are 0: valid as an index, an offset and a class of anything."""
    dtype = torch_dtype(given.dtype)
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
