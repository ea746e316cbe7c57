"""`MarkedBench`: a bench whose loops a recording can tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from steptime._calibrate.host.bench import MOST_LAUNCHES, Action, HostBench

# Streams, events and the spinning kernel; torch gives them no types.
CUDA: Any = torch.cuda


@dataclass
class MarkedBench(HostBench):
    """Where `marking`, a marking kernel goes before and after the calls of a loop; `loops` counts loops."""

    marking: bool = False
    loops: int = 0

    def per_call(self, action: Action, most_calls: int = MOST_LAUNCHES) -> list[float]:
        """As every bench, between two marks."""
        self._mark()
        self.loops += 1
        try:
            return super().per_call(action, most_calls)
        finally:
            self._mark()

    def _mark(self) -> None:
        if self.marking:
            CUDA._sleep(1)
