"""What is said of every measured row: its recipe (on what, with what, when, by which command), and how far its times spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Recipe:
    """Stored with every row. Empty or zero where the machine would not say."""

    run: str  # one invocation of a measuring command; rows of one run share machine state
    machine: str  # a short digest of what identifies the box, so that repeats on another one can be told apart
    device: str
    gpus: int
    driver: str
    cuda_of_driver: str
    power_limit_w: float
    cpu: str
    cpu_cores: int
    os_kernel: str
    python: str
    torch: str
    cuda: str
    cudnn: str
    nccl: str
    triton: str
    date: str
    command: str
    steptime: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """The recipe that `to_dict` gave."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for columns."""
        return asdict(self)


def spread_of(times_ns: Sequence[float]) -> float:
    """(90th - 10th percentile) / median; 0 for a single repeat."""
    low, middle, high = np.quantile(np.asarray(times_ns, dtype=np.float64), (0.1, 0.5, 0.9))
    return float((high - low) / middle) if middle else 0.0
