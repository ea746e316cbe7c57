"""Tensors of a device that is not there, and the tensors among the arguments of a call.

Such a tensor is one of PyTorch's *meta* tensors (shape, strides and dtype, no memory) with the dispatch keys of CUDA in place
of its own: autograd runs it like any tensor, views share a storage, and no op on it is taken for one on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

META = torch.device("meta")
CUDA = torch.device("cuda", 0)
LISTS = (list, tuple)
_NESTED = (*LISTS, dict)
_keys = torch._C._dispatch_keys


_DENSE, _SPARSE = DispatchKey.CUDA, DispatchKey.SparseCUDA


address: Any = torch._C._storage_address  # type: ignore[attr-defined]
"""Of a tensor's storage, without memory of its own too."""


def is_pretended(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the device that is not there."""
    keys = _keys(tensor)
    return bool(keys.has(_DENSE) or keys.has(_SPARSE))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is, and not sparse."""
    return _keys(tensor).has(_DENSE)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor as one of the device; both share their storage."""
    result: torch.Tensor = torch.Tensor._make_subclass(torch.Tensor, tensor, False, device_for_backend_keys=CUDA)
    return result


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device as the meta tensor it is made of; both share their storage."""
    result: torch.Tensor = torch.Tensor._make_subclass(torch.Tensor, tensor, False, device_for_backend_keys=META)
    return result


class Use:
    """What a script does with the device."""

    named = False  # it has put something there


use = Use()


_PLAIN = torch._C._disabled_torch_dispatch_impl
_INSIDE = ("_local_tensor", "elem", "_values")  # of a DTensor, of the result of a collective, of a nested tensor


def is_wrapper(kind: type[Any]) -> bool:
    """Whether tensors of a class call ops on tensors inside them."""
    return kind.__torch_dispatch__ is not _PLAIN


def wrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside."""
    while is_wrapper(type(tensor)):
        inside = next((each for name in _INSIDE if isinstance(each := getattr(tensor, name, None), torch.Tensor)), None)
        if inside is None:
            return tensor
        tensor = inside
    return tensor


@contextmanager
def unseen() -> Iterator[None]:
    """While it lasts, the observer sees nothing of what is called."""
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call, in order."""
    result: list[torch.Tensor] = []
    for each in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(each, torch.Tensor):
            result.append(each)
        elif isinstance(each, _NESTED):
            result += tensors_in(each)
    return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor of an argument, those in lists included."""
    if isinstance(value, torch.Tensor):
        return [value]
    result: list[torch.Tensor] = []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, LISTS):
        return result
    for each in value:
        if isinstance(each, torch.Tensor):
            result.append(each)
        elif isinstance(each, _NESTED):
            result += tensors_in(each)
    return result
