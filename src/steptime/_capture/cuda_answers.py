"""What `torch.cuda` says while a device is pretended: one GPU that is idle, of compute capability 9.0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from steptime._hardware.device import reference_device

CAPABILITY = (9, 0)
"""Of the pretended GPU: an H100 or H200. What PyTorch chooses by it is chosen as there."""

_PROPERTIES = SimpleNamespace(
    name="pretended GPU",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=int(reference_device().memory_bytes.value),
    multi_processor_count=int(reference_device().sms.value),
)


class _Device:
    """`torch.cuda.device` and the like: a context, a stream or an event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx = 0

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    synchronize = wait_stream = wait_event = record = wait = _nothing

    def record_event(self, *_: Any, **__: Any) -> _Device:
        """An event that has happened."""
        return self

    def query(self) -> bool:
        """Nothing is under way."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """No time passes on a device that is not there."""
        return 0.0


class _Generator(torch.Generator):
    """A source of random numbers: those of the device are never drawn, so that any serves."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        del device
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)  # seed and offset of Philox, 8 bytes each


def _nothing(*_: Any, **__: Any) -> None:
    return None


_CONSTANTS: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "is_bf16_supported": True,
    "is_initialized": True,
    "get_device_capability": CAPABILITY,
    "get_device_name": _PROPERTIES.name,
    "get_device_properties": _PROPERTIES,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "is_current_stream_capturing": False,
}
_SILENT = (
    "_lazy_init", "init", "synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "seed", "seed_all",
    "reset_peak_memory_stats", "reset_max_memory_allocated", "set_rng_state", "set_rng_state_all", "set_stream",
)  # fmt: skip
_OBJECTS = ("device", "device_of", "Stream", "Event", "stream", "current_stream", "default_stream")


@contextmanager
def in_force() -> Iterator[None]:
    """Answers so while it lasts."""
    with ExitStack() as stack:
        for name, value in _CONSTANTS.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, value=value, **__: value))
        for name in _SILENT:
            stack.enter_context(patch.object(torch.cuda, name, _nothing))
        for name in _OBJECTS:
            stack.enter_context(patch.object(torch.cuda, name, _Device))
        stack.enter_context(patch.object(torch.cuda, "get_rng_state", _state))
        stack.enter_context(patch.object(torch.cuda, "get_rng_state_all", lambda: [_state()]))
        stack.enter_context(patch.object(torch.cuda, "_initialized", True))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        # Recurrent layers ask whether to lay out their weights for cuDNN; they are refused when they run.
        stack.enter_context(patch.object(torch.backends.cudnn, "is_acceptable", lambda *_: False))
        if find_spec("triton") is not None:
            # A kernel launched from Python is no op: execution traces do not show it.
            from triton.runtime.jit import JITFunction  # noqa: PLC0415 (where it is there)

            stack.enter_context(patch.object(JITFunction, "run", _nothing))
        yield
