"""What scripts ask of PyTorch beside ops, answered for a device that is not there: `torch.accelerator`, devices by number, how
much memory is free, what a tensor looks like in print, ranges for a profiler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.cuda.nvtx

from steptime._capture import pinned
from steptime._capture.log import Streams
from steptime._capture.tensors import CUDA, is_pretended

_device = torch.device
_parse_to = torch._C._nn._parse_to
_repr: Any = torch.Tensor.__repr__
_load = torch.load


class _DeviceKind(type):
    """Devices stay what they are: PyTorch's own."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _device)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """A device; a number alone is one of CUDA's, where PyTorch would look for an accelerator."""
        if len(args) == 1 and not kwargs and isinstance(args[0], int):
            return _device("cuda", args[0])
        return _device(*args, **kwargs)


class _Device(metaclass=_DeviceKind):
    """`torch.device`."""


class _TypeKind(type):
    """`torch.cuda.FloatTensor` and the like, from before tensors had devices."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and is_pretended(instance) and instance.dtype is cls.dtype

    def __call__(cls, *args: Any) -> Any:
        """A tensor of these sizes, or of this data."""
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=cls.dtype).to(CUDA)
        return torch.empty(*args or (0,), dtype=cls.dtype, device=CUDA)


_TYPES: dict[str, Any] = {
    f"{name}Tensor": _TypeKind(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda"})
    for name, dtype in (
        ("Float", torch.float32), ("Double", torch.float64), ("Half", torch.float16), ("BFloat16", torch.bfloat16),
        ("Long", torch.int64), ("Int", torch.int32), ("Short", torch.int16), ("Char", torch.int8), ("Byte", torch.uint8),
        ("Bool", torch.bool),
    )
}  # fmt: skip


def type_asked(tensor: torch.Tensor, kind: Any = None, *_: Any, **__: Any) -> Any:
    """`Tensor.type` where the device is concerned: the tensor as another type of CUDA's, or the name of its own; else None."""
    if kind is None:
        names = (name for name, each in _TYPES.items() if each.dtype is tensor.dtype)
        return f"torch.cuda.{next(names)}" if is_pretended(tensor) else None
    known = _TYPES.get(kind.removeprefix("torch.cuda.")) if isinstance(kind, str) and kind.startswith("torch.cuda.") else kind
    return tensor.to(CUDA, known.dtype) if isinstance(known, _TypeKind) else None


def replaced(streams: Streams, memory_bytes: int, devices: int) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced while a device is pretended: object, attribute, and what stands in for it."""
    yield torch, "device", _Device
    yield torch.cuda, "device_count", lambda: devices
    yield torch._C._nn, "_parse_to", _parsed
    yield from ((torch.cuda, name, kind) for name, kind in _TYPES.items())
    yield torch.Tensor, "__repr__", _shown
    yield from pinned.replaced()
    yield torch, "load", _loaded
    yield torch.cuda, "mem_get_info", lambda *_, **__: (memory_bytes, memory_bytes)
    yield from ((torch.cuda, name, lambda *_, **__: OrderedDict()) for name in ("memory_stats", "host_memory_stats"))
    yield torch.cuda, "memory_summary", lambda *_, **__: ""
    yield torch.cuda, "can_device_access_peer", lambda *_, **__: True
    yield torch.cuda, "get_arch_list", list
    yield torch.cuda, "utilization", lambda *_, **__: 0
    for name in ("set_per_process_memory_fraction", "reset_accumulated_memory_stats", "ipc_collect"):
        yield torch.cuda, name, _nothing
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        yield torch.cuda.nvtx, name, lambda *_, **__: 0
    yield from _of_accelerator(streams, memory_bytes, devices)


def _of_accelerator(streams: Streams, memory_bytes: int, devices: int) -> Iterator[tuple[Any, str, Any]]:
    constants: dict[str, Any] = {
        "device_count": devices,
        "is_available": True,
        "current_accelerator": _device("cuda"),
        "current_device_index": 0,
        "current_device_idx": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "get_memory_info": (memory_bytes, memory_bytes),
    }
    for name, value in constants.items():
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, lambda *_, value=value, **__: value
    for name in ("set_device_index", "set_device_idx", "empty_cache", "reset_peak_memory_stats"):
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, _nothing
    yield torch.accelerator, "synchronize", torch.cuda.synchronize  # as it is by now
    yield torch.accelerator, "current_stream", lambda *_, **__: streams.current
    yield torch.accelerator, "set_stream", streams.switch


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _parsed(*args: Any, **kwargs: Any) -> Any:
    """What `Module.to` was given."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (_device("cuda", args[0]), *args[1:])
    return _parse_to(*args, **kwargs)


def _shown(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
    """A tensor in print: its values are copied to the host."""
    if not is_pretended(tensor):
        return str(_repr(tensor, *args, **kwargs))
    return f"{_repr(tensor.detach().cpu())[:-1]}, device='{CUDA}')"


def _loaded(*args: Any, **kwargs: Any) -> Any:
    """A file is loaded to the CPU, from where a model takes it."""
    names = ("f", "map_location")
    given = dict(zip(names, args, strict=False)) | kwargs
    return _load(**{**given, "map_location": "cpu"})
