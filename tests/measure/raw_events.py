"""Raw events of a profiler, as tests make them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType


@dataclass
class RawEvent:
    """What `kineto_results.events()` gives."""

    label: str
    start: int
    duration: int = 1
    correlation: int = 0
    linked: int = 0
    stream: int = 7
    annotation: bool = False
    on_device: bool = False

    def name(self) -> str:
        return self.label

    def device_type(self) -> Any:
        return DeviceType.CUDA if self.on_device else DeviceType.CPU

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.linked

    def device_resource_id(self) -> int:
        return self.stream

    def is_user_annotation(self) -> bool:
        return self.annotation
