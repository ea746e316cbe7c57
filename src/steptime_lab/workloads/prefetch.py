"""`AheadTables`: lookups and exchange of the next batch on a stream of their own, beside the dense part of this one.

Tables are updated after the next batch was looked up, so that lookups see rows one step late, as with TorchRec's
`TrainPipelineSemiSync`. Copies of tables are looked up with their own batch: their gradients are reduced like those of layers.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from steptime_lab.workloads.divided_tables import RankTables


class AheadTables:
    """One rank's tables, a batch ahead."""

    def __init__(self, tables: RankTables, device: torch.device) -> None:
        self._tables = tables
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.started: list[torch.Tensor] | None = None

    def __call__(self, number: int, following: int) -> tuple[torch.Tensor, ...]:
        """What was looked up for a batch while the one before trained; starts with the following one."""
        if self.started is None:
            self.started = self._tables.start_shared(number)
        current = None if self._stream is None else torch.cuda.current_stream()
        if self._stream is not None and current is not None:
            current.wait_stream(self._stream)
        blocks = self._tables.finish([*self.started])
        # What was freed since is used again from here on, and tables are what the step before made of them.
        if self._stream is not None and current is not None:
            self._stream.wait_stream(current)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self.started = self._tables.start_shared(following)
        return (*blocks, *self._tables.look_up_copies(number))
