"""What an op on the pretended device returns: the shapes that PyTorch's meta functions say, on tensors of the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey

from steptime._capture.fused_norm import REGISTERED
from steptime._capture.tensors import as_meta, is_pretended, on_device

# Held for what it registers.
_NORM = REGISTERED

# Ops that PyTorch makes of others on devices without a kernel of theirs, and CUDA has one: both CompositeExplicitAutograd and
# CUDA are dispatch keys of theirs in native_functions.yaml (so are all of `_foreach_`). A copy calls a kernel where its entry
# does not say so, `detach` calls itself, `alias` nothing, and the device decides which convolution (native/Convolution.cpp).
_KERNELS = frozenset(
    f"aten::{name}"
    for name in (
        "_chunk_cat", "split_with_sizes_copy", "_grouped_mm", "addr", "all", "any", "convolution_backward", "linalg__powsum",
        "native_group_norm", "native_layer_norm", "copy_", "detach", "alias", "convolution", "_convolution", "_fused_rms_norm",
    )
)  # fmt: skip
# States of the random generator that attention drew from: on the CPU unless a graph is recorded (native/transformers/cuda/
# attention.cu, _efficient_attention_forward).
_ON_CPU: dict[str, tuple[int, ...]] = {"aten::_scaled_dot_product_efficient_attention": (2, 3)}

_FACTORIES = frozenset(f"aten::{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn"))
_LARGE_BYTES = 256 << 20


def has_kernel(func: Any) -> bool:
    """Whether CUDA runs an op as one, though PyTorch could make it of others."""
    name: str = func._schema.name
    return name in _KERNELS or "::_foreach_" in name or _made_of_others_elsewhere(func)


@cache
def _made_of_others_elsewhere(func: Any) -> bool:
    """Whether PyTorch makes an op of others before autograd sees it, but not on the CPU, nor on CUDA (`silu_backward`)."""
    return all(map(func.has_kernel_for_dispatch_key, (DispatchKey.CompositeImplicitAutograd, DispatchKey.CPU)))


def is_large(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op makes a tensor of floats that is too large to be data of a batch."""
    if func._schema.name not in _FACTORIES or not isinstance(args[0], list | tuple):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point and math.prod(args[0]) * dtype.itemsize >= _LARGE_BYTES


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on meta tensors; what it writes to and returns is the tensor it was given. The observer sees nothing of it."""
    torch._C._autograd._enable_record_function(False)
    try:
        return _answered(func, args, kwargs)
    finally:
        torch._C._autograd._enable_record_function(True)


def _answered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inner: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def down(tensor: torch.Tensor) -> torch.Tensor:
        if not is_pretended(tensor):
            return tensor
        if id(tensor) not in inner:
            inner[id(tensor)] = (tensor, as_meta(tensor))
        return inner[id(tensor)][1]

    args = tuple(map(_wrapped, args, func._schema.arguments))
    result = func(*_mapped(args, down), **{name: _mapped(value, down) for name, value in kwargs.items()})
    given = {id(meta): tensor for tensor, meta in inner.values()}
    for tensor, meta in inner.values():
        _follow(tensor, meta)

    def up(tensor: torch.Tensor) -> torch.Tensor:
        known = given.get(id(tensor))
        if known is not None:
            return known
        return on_device(tensor) if tensor.device.type == "meta" else tensor

    built = _mapped(result, up)
    places = _ON_CPU.get(func._schema.name)
    return built if places is None else tuple(_host(each) if index in places else each for index, each in enumerate(built))


def _wrapped(value: Any, argument: Any) -> Any:
    """A number in place of a tensor, which a mode is shown for a tensor that stands for a number, as a tensor again."""
    if isinstance(value, int | float | bool) and str(argument.type) == "Tensor":
        dtype = torch.get_default_dtype() if isinstance(value, float) else None
        return torch.tensor(value, dtype=dtype)
    return value


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _follow(tensor: torch.Tensor, meta: torch.Tensor) -> None:
    """Gives a tensor the shape that an op has given it, as a resize does."""
    if tensor.shape != meta.shape or tensor.stride() != meta.stride():
        tensor.data = on_device(meta)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same value with its tensors changed; no source of random numbers, which the device that is not there has none of."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, change) for each in value)
    return None if isinstance(value, torch.Generator) else value
