"""The embedding tables of one rank of a DLRM, looked up for the samples of all ranks and updated with their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import nn

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.generators import Bags
from steptime.errors import InputError
from steptime_lab.workloads.shared_buffers import SharedBuffers, nbytes_of
from steptime_lab.workloads.table_batched.layout import ALIGNMENT
from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup
from steptime_lab.workloads.table_batched.rowwise_adagrad import RowwiseAdagrad
from steptime_lab.workloads.torch_arrays import side_by_side

WEIGHTS = "weights"
"""The shared buffer of tables and slices of them that one rank owns: large enough for any plan of these."""

MOST_AT_BEST = 2 << 30
"""Elements beyond which the shared buffer is not made larger than a plan needs: 8 GiB on each of several ranks of one GPU."""


class Tables(Protocol):
    """One rank's tables."""

    shared_bytes: int  # how much of the shared buffers they use

    def __call__(self, iteration: int) -> torch.Tensor:
        """Sums of looked-up rows, [global batch, summed dims]."""

    def update(self) -> None:
        """Applies what the backward pass left, where it has not been applied already."""

    def renew_inputs(self) -> None:
        """Index batches in memory of their own, as if they had come from the host: making them leaves holes."""

    def weights(self) -> list[torch.Tensor]:
        """The tables' rows, [rows, dim] each."""


def tables_of(
    model: Dlrm,
    tables: Sequence[Table],
    bags: Sequence[Sequence[Bags]],
    buffers: SharedBuffers,
    learning_rate: float,
    purpose: str = WEIGHTS,
) -> Tables:
    """The given tables of a model; `bags` are their lookups, by iteration and table, `purpose` names their shared buffer."""
    if not tables:
        return NoTables(model.batch, buffers.device)
    kinds: dict[str, Callable[..., Tables]] = {"embedding_bag": PerTable, "table_batched": TableBatched}
    if model.lookup not in kinds:
        raise InputError(f"model {model.name}: lookup is {model.lookup!r}; expected one of {', '.join(kinds)}")
    return kinds[model.lookup](model, tables, bags, buffers, learning_rate, purpose)


class NoTables:
    """A rank that owns no table: it sends nothing, and still meets the others."""

    shared_bytes = 0

    def __init__(self, batch: int, device: torch.device) -> None:
        self._nothing = torch.empty(batch, 0, device=device, requires_grad=True)

    def __call__(self, iteration: int) -> torch.Tensor:
        """No columns; part of the graph all the same, so that the backward exchange happens on every rank."""
        del iteration
        return self._nothing

    def update(self) -> None:
        """Nothing to update."""

    def renew_inputs(self) -> None:
        """None."""

    def weights(self) -> list[torch.Tensor]:
        """None."""
        return []


class PerTable:
    """One `nn.EmbeddingBag` per table, as the published DLRM: sparse gradients, then an optimiser over them."""

    def __init__(
        self,
        model: Dlrm,
        tables: Sequence[Table],
        bags: Sequence[Sequence[Bags]],
        buffers: SharedBuffers,
        learning_rate: float,
        purpose: str,
    ) -> None:
        sizes = sizes_of(tables)
        buffer = _weights(model, tables, buffers, purpose)
        self.lookups = nn.ModuleList(
            nn.EmbeddingBag(
                table.rows,
                table.dim,
                mode="sum",
                sparse=True,
                _weight=buffer[start : start + table.rows * table.dim].view(table.rows, table.dim),
            )
            for table, start in zip(tables, accumulate(sizes, initial=0), strict=False)
        )
        optimizer = torch.optim.SGD if model.optimizer == "sgd" else RowwiseAdagrad
        self.optimizer: torch.optim.Optimizer = optimizer(self.lookups.parameters(), lr=learning_rate)
        self._bags = [[(table.indices, table.offsets[:-1]) for table in iteration] for iteration in bags]
        self.shared_bytes = buffer.nbytes + sum(nbytes_of(table) for iteration in bags for table in iteration)

    def __call__(self, iteration: int) -> torch.Tensor:
        """Sums of looked-up rows, [global batch, summed dims]."""
        self.optimizer.zero_grad()
        return torch.cat([lookup(*bags) for lookup, bags in zip(self.lookups, self._bags[iteration], strict=True)], dim=1)

    def update(self) -> None:
        """The optimiser's step over the sparse gradients."""
        self.optimizer.step()

    def renew_inputs(self) -> None:
        """Index batches in memory of their own."""
        device = self._bags[0][0][0].device
        held = [[(indices.cpu(), offsets.cpu()) for indices, offsets in iteration] for iteration in self._bags]
        self._bags.clear()
        _give_back(device)
        self._bags += [[(indices.to(device), offsets.to(device)) for indices, offsets in iteration] for iteration in held]

    def weights(self) -> list[torch.Tensor]:
        """The tables' rows, [rows, dim] each."""
        return [weight.detach() for weight in self.lookups.parameters()]


class TableBatched:
    """All tables in one launch forward and one backward, which updates the rows itself."""

    def __init__(
        self,
        model: Dlrm,
        tables: Sequence[Table],
        bags: Sequence[Sequence[Bags]],
        buffers: SharedBuffers,
        learning_rate: float,
        purpose: str,
    ) -> None:
        rows, dims = [table.rows for table in tables], [table.dim for table in tables]
        buffer = _weights(model, tables, buffers, purpose)
        self.lookup = TableBatchedLookup(
            rows, dims, optimizer=model.optimizer, learning_rate=learning_rate, weights=buffer, device=buffers.device
        )
        self._bags = [side_by_side(iteration) for iteration in bags]
        self.shared_bytes = buffer.nbytes

    def __call__(self, iteration: int) -> torch.Tensor:
        """Sums of looked-up rows, [global batch, summed dims]."""
        pooled: torch.Tensor = self.lookup(*self._bags[iteration])
        return pooled

    def update(self) -> None:
        """The backward pass has done it."""

    def renew_inputs(self) -> None:
        """Index batches in memory of their own."""
        device = self._bags[0][0].device
        held = [(indices.cpu(), offsets.cpu()) for indices, offsets in self._bags]
        self._bags.clear()
        _give_back(device)
        self._bags += [(indices.to(device), offsets.to(device)) for indices, offsets in held]

    def weights(self) -> list[torch.Tensor]:
        """The tables' rows, [rows, dim] each."""
        return [self.lookup.table(number) for number in range(self.lookup.layout.tables)]


def _give_back(device: torch.device) -> None:
    """Segments that nothing uses go back to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _weights(model: Dlrm, tables: Sequence[Table], buffers: SharedBuffers, purpose: str) -> torch.Tensor:
    """The given tables' part of a shared buffer, which is made large enough for any other plan of the model."""
    at_best = min(sum(sizes_of(model.tables)), MOST_AT_BEST) if purpose == WEIGHTS else 0
    return buffers.floats(purpose, sum(sizes_of(tables)), at_best=at_best)


def sizes_of(tables: Sequence[Table]) -> list[int]:
    """Elements of a shared buffer from each table's start to the next one's."""
    return [-(table.rows * table.dim // -ALIGNMENT) * ALIGNMENT for table in tables]
