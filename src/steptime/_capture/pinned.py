"""Memory of the host that a device can copy from and to by itself: what a script pins.

A copy that is not to block the host (`non_blocking`) does so all the same where the host's memory is not pinned: the driver
takes it through memory of its own, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from steptime._capture.tensors import is_pretended

_WEAK_STORAGE: Any = StorageWeakRef
# Copies to the device of no more are staged at once, and the host goes on (CUDA Runtime API, "API synchronization behavior").
_STAGED_BYTES = 64 * 1024
_pinned: dict[int, Any] = {}  # by storage, which the weak reference keeps apart


def pin(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """`Tensor.pin_memory`: the memory it has counts as pinned from here on."""
    storage = tensor.untyped_storage()
    _pinned[storage._cdata] = _WEAK_STORAGE(storage)
    return tensor


def is_pinned(tensor: torch.Tensor, *_: Any, **__: Any) -> bool:
    """`Tensor.is_pinned`."""
    known = _pinned.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
    return known is not None and not known.expired()


def replaced() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced while a device is pretended: object, attribute, and what stands in for it."""
    _pinned.clear()
    yield torch.Tensor, "pin_memory", pin
    yield torch.Tensor, "is_pinned", is_pinned


def waits_for_pageable(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host waits for a copy because its memory is not pinned, whatever the copy says."""
    if func is not torch.ops.aten.copy_.default:
        return False
    host = [each for each in args[:2] if not is_pretended(each)]
    if len(host) != 1 or is_pinned(host[0]):
        return False
    return host[0] is args[0] or host[0].nbytes > _STAGED_BYTES
