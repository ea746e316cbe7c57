"""`Arrays` of torch for generators: the same index streams as numpy's, made where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from steptime._lookups.generators import Bags


@dataclass(frozen=True, slots=True)
class TorchArrays:
    """Int64 vectors on one device."""

    device: torch.device

    def arange(self, stop: int) -> torch.Tensor:
        """0, 1, ..., stop - 1."""
        return torch.arange(stop, dtype=torch.int64, device=self.device)

    def from_numpy(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        """The same values on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def segment_of(self, edges: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """For each value the number of `edges` (ascending) that are not above it, less one."""
        return torch.searchsorted(edges, values, right=True) - 1


def side_by_side(tables: Sequence[Bags]) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of all tables one after the other, and where each bag begins, table by table, and the end."""
    starts = list(accumulate((len(table.indices) for table in tables), initial=0))
    indices = torch.cat([table.indices for table in tables])
    begins = [table.offsets[:-1] + start for table, start in zip(tables, starts, strict=False)]
    return indices, torch.cat([*begins, tables[-1].offsets[-1:] + starts[-2]])
