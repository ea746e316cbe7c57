"""All tables of one rank of a DLRM, by how a plan divides them: each group with the exchange that belongs to it.

Whole tables and slices of columns send their sums by an all_to_all; shares of rows by a reduce_scatter; a copy sends nothing,
is looked up for its own samples alone, and has its gradient reduced by DistributedDataParallel. As in TorchRec, rank r holds
the r-th block of a table's rows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import DATA_PARALLEL, ROW_WISE, Plan
from steptime._lookups.generators import Bags
from steptime_lab.workloads.case import GroupLike
from steptime_lab.workloads.copied_tables import Copies
from steptime_lab.workloads.dlrm_tables import Tables, tables_of
from steptime_lab.workloads.exchange import DTYPES, ColumnExchange, RowExchange
from steptime_lab.workloads.shared_buffers import SharedBuffers
from steptime_lab.workloads.training import BATCHES, data_parallel


class RankTables:
    """What one rank looks up in a step, and how it gets the sums of its own samples."""

    def __init__(self, model: Dlrm, plan: Plan, group: GroupLike, buffers: SharedBuffers, learning_rate: float) -> None:
        self._model, self._rank, self._buffers, ranks = model, group.rank, buffers, group.ranks
        self._samples, sent = model.batch // ranks, DTYPES[model.exchange_precision]
        # Every rank's loss is a mean over its own samples: their gradients add up to `ranks` times that of the global mean.
        # Adagrad divides by what the gradient was so far, and the factor with it.
        rate = learning_rate / ranks if model.optimizer == "sgd" else learning_rate
        self._groups: list[tuple[Tables, ColumnExchange | RowExchange | None]] = []
        owned = plan.split(model.tables)
        widths = [sum(table.dim for table in tables) for tables in owned]
        if any(widths):
            exchange = ColumnExchange(widths, self._rank, self._samples, sent) if ranks > 1 else None
            held = owned[self._rank]
            self._groups.append((tables_of(model, held, self._drawn(held, lambda bags, _: bags), buffers, rate), exchange))
        if by_rows := plan.of_kind(model.tables, ROW_WISE):
            shares = [_share(table, ranks) for table in by_rows]
            drawn = self._drawn(by_rows, lambda bags, table: rows_of(bags, self._rank, _share(table, ranks).rows))
            row_exchange = RowExchange(ranks, self._samples, sent) if ranks > 1 else None
            self._groups.append((tables_of(model, shares, drawn, buffers, rate, purpose="shares"), row_exchange))
        self._copies: Copies | None = None
        self._copied: nn.Module | None = None
        if copied := plan.of_kind(model.tables, DATA_PARALLEL):
            drawn = self._drawn(copied, lambda bags, _: samples_of(bags, self._rank, self._samples))
            copies = Copies(model, copied, drawn, buffers, learning_rate)
            self._copies, self._copied = copies, data_parallel(copies, group, buffers.device)

    def _drawn(self, tables: Sequence[Table], kept: Callable[[Bags, Table], Bags]) -> list[list[Bags]]:
        """By iteration and table what this rank looks up of a batch."""
        return [
            [kept(self._buffers.bags(table.generator, self._model.batch, iteration), table) for table in tables]
            for iteration in range(BATCHES)
        ]

    def start(self, iteration: int) -> list[torch.Tensor]:
        """Looks everything up, and starts to send what other ranks need; what is returned is only for `finish`."""
        return [*self.start_shared(iteration), *self.look_up_copies(iteration)]

    def start_shared(self, iteration: int) -> list[torch.Tensor]:
        """The same for tables that ranks share, copies left out."""
        started = []
        for tables, exchange in self._groups:
            pooled = tables(iteration)
            started.append(pooled if exchange is None else exchange.start(pooled))
        return started

    def look_up_copies(self, iteration: int) -> list[torch.Tensor]:
        """Sums of this rank's own samples, of tables that it has copies of."""
        if self._copies is None or self._copied is None:
            return []
        self._copies.clear()
        return [self._copied(iteration)]

    def finish(self, started: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Columns of all tables, of this rank's samples."""
        blocks: list[torch.Tensor] = []
        for (_, exchange), tensor in zip(self._groups, started, strict=False):
            blocks += [tensor] if exchange is None else exchange.finish(tensor)
        return (*blocks, *started[len(self._groups) :])

    @property
    def _every(self) -> list[Tables | Copies]:
        return [*([] if self._copies is None else [self._copies]), *(tables for tables, _ in self._groups)]

    @property
    def shared_bytes(self) -> int:
        """How much of the shared buffers they use."""
        return sum(tables.shared_bytes for tables in self._every)

    def update(self) -> None:
        """Applies what the backward pass left, where it has not been applied already."""
        for tables in self._every:
            tables.update()

    def renew_inputs(self) -> None:
        """Index batches in memory of their own, as if they had come from the host."""
        for tables in self._every:
            tables.renew_inputs()

    def weights(self) -> list[torch.Tensor]:
        """Rows of all tables, slices and shares that are here, [rows, dim] each; copies come last."""
        held: list[Tables | Copies] = [tables for tables, _ in self._groups]
        held += [] if self._copies is None else [self._copies]
        return [weight for tables in held for weight in tables.weights()]

    def close(self) -> None:
        """Drops the copies: reducers and their hooks hold each other, so the collector has to run."""
        self._groups.clear()
        if self._copies is not None:
            self._copies = self._copied = None
            gc.collect()


def _share(table: Table, ranks: int) -> Table:
    return replace(table, generator=replace(table.generator, rows=-(-table.rows // ranks)))


def rows_of(bags: Bags, rank: int, count: int) -> Bags:
    """The lookups that go to the `rank`-th block of so many rows, by their places in it."""
    kept = bags.indices.div(count, rounding_mode="floor") == rank
    before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
    return Bags(bags.indices[kept] - rank * count, before[bags.offsets])


def samples_of(bags: Bags, rank: int, count: int) -> Bags:
    """The lookups of the `rank`-th of blocks of so many samples."""
    offsets = bags.offsets[rank * count : (rank + 1) * count + 1]
    return Bags(bags.indices[int(offsets[0]) : int(offsets[-1])].clone(), offsets - offsets[0])
