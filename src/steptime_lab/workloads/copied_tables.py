"""`Copies`: tables that every rank has, looked up for its own samples; DistributedDataParallel adds their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.generators import Bags
from steptime._lookups.workload import DENSE
from steptime_lab.workloads.dlrm_tables import sizes_of
from steptime_lab.workloads.shared_buffers import SharedBuffers, nbytes_of
from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup
from steptime_lab.workloads.table_batched.rowwise_adagrad import RowwiseAdagrad
from steptime_lab.workloads.torch_arrays import side_by_side


class Copies(nn.Module):
    """The copied tables of one rank: gradients of all rows, and an optimiser that goes over all of them."""

    def __init__(
        self, model: Dlrm, tables: Sequence[Table], bags: Sequence[Sequence[Bags]], buffers: SharedBuffers, learning_rate: float
    ) -> None:
        super().__init__()
        buffer = buffers.floats("copies", sum(sizes_of(tables)))
        self.lookups = nn.ModuleList()
        self._together = model.lookup == "table_batched"
        if self._together:
            rows, dims = [table.rows for table in tables], [table.dim for table in tables]
            self.lookups.append(TableBatchedLookup(rows, dims, weights=buffer, device=buffers.device, optimizer=DENSE))
            self._bags = [[side_by_side(iteration)] for iteration in bags]
        else:
            starts = accumulate(sizes_of(tables), initial=0)
            self.lookups.extend(_bag(table, buffer, start) for table, start in zip(tables, starts, strict=False))
            self._bags = [[(table.indices, table.offsets[:-1]) for table in iteration] for iteration in bags]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.parameters(), lr=learning_rate)
            if model.optimizer == "sgd"
            else RowwiseAdagrad(self.parameters(), lr=learning_rate, tables_of=self._tables_of)
        )
        self.shared_bytes = buffer.nbytes + sum(nbytes_of(table) for iteration in bags for table in iteration)

    def clear(self) -> None:
        """Drops the gradients of the step before."""
        self.optimizer.zero_grad()

    def forward(self, iteration: int) -> torch.Tensor:
        """Sums of looked-up rows, [local batch, summed dims]."""
        pooled = [lookup(*bags) for lookup, bags in zip(self.lookups, self._bags[iteration], strict=True)]
        return pooled[0] if self._together else torch.cat(pooled, dim=1)

    def update(self) -> None:
        """The optimiser's step over the gradients of all rows."""
        self.optimizer.step()

    def renew_inputs(self) -> None:
        """They are in memory of their own already."""

    def weights(self) -> list[torch.Tensor]:
        """The tables' rows, [rows, dim] each."""
        return [rows for weight in self.parameters() for rows in self._tables_of(weight.detach())]

    def _tables_of(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """The tables in a parameter, or in something of its shape."""
        lookup = self.lookups[0]
        if not isinstance(lookup, TableBatchedLookup):
            return [weight]
        return [lookup.layout.view(weight, number) for number in range(lookup.layout.tables)]


def _bag(table: Table, buffer: torch.Tensor, start: int) -> nn.EmbeddingBag:
    rows = buffer[start : start + table.rows * table.dim].view(table.rows, table.dim)
    return nn.EmbeddingBag(table.rows, table.dim, mode="sum", _weight=rows)
