"""Nested tensors of the jagged layout: rows of all samples one after the other, and where each begins.

PyTorch's own class for them is Python, and calls ops on what it wraps. Which kernel its attention takes it asks C++, which has
no CUDA here, and it asks a tensor's own device, which C++ calls by another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.nested._internal import sdpa
from torch.nested._internal.nested_tensor import NestedTensor

from steptime._capture.tensors import is_pretended, tensors_in
from steptime.errors import InputError

_HALVES = (torch.float16, torch.bfloat16)
_WIDEST = 256  # head of flash attention


_plain_new: Any = NestedTensor.__new__


def _new(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """On the device that C++ knows: its parts are, and it is told of no other."""
    with torch._C.DisableTorchFunction():
        return _plain_new(kind, *args, **kwargs)


def _only_jagged(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes nested tensors, which refuses those of the other layout on the device."""

    @wraps(make)
    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        here = str(kwargs.get("device")).startswith("cuda") or any(map(is_pretended, tensors_in(tensors)))
        if here and torch.jagged not in (*args, kwargs.get("layout")):
            raise InputError("nested tensors of the strided layout cannot be captured; give layout=torch.jagged")
        return make(tensors, *args, **kwargs)

    return run


def _flash(params: Any, debug: bool = False) -> bool:
    """Flash attention takes half precision, and no mask (native/transformers/cuda/sdp_utils.cpp)."""
    del debug
    query = params.query
    fits = query.dtype in _HALVES and params.attn_mask is None and query.shape[-1] <= _WIDEST
    return fits and bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]


def _efficient(params: Any, debug: bool = False) -> bool:
    """The memory-efficient kernel takes single precision as well."""
    del debug
    fits = params.query.dtype in (*_HALVES, torch.float32) and params.attn_mask is None
    return fits and bool(torch.backends.cuda.mem_efficient_sdp_enabled())  # type: ignore[no-untyped-call]


def _cast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Queries, keys, values and a mask as autocast has them for attention."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    kept = (torch.float64, dtype)
    return tuple(
        each if each is None or not each.dtype.is_floating_point or each.dtype in kept else each.to(dtype) for each in tensors
    )


def replaced() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced while a device is pretended: object, attribute, and what stands in for it."""
    # Transformers that are evaluated go another way on CUDA, over nested tensors of the strided layout; a step trains.
    yield torch.backends.mha, "get_fastpath_enabled", lambda: False
    yield NestedTensor, "__new__", _new
    for name in ("nested_tensor", "as_nested_tensor"):
        yield torch.nested, name, _only_jagged(getattr(torch.nested, name))
    yield sdpa, "can_use_flash_attention", _flash
    yield sdpa, "can_use_efficient_attention", _efficient
    yield sdpa, "can_use_cudnn_attention", lambda *_, **__: False  # unless an environment variable says otherwise
    yield sdpa, "_is_computing_meta_flops", lambda _: False
    yield sdpa, "_autocast", _cast
