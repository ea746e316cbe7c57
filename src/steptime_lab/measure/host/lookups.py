"""Embedding lookups: the table-batched one, and one bag per table with sparse gradients and an optimiser over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from steptime._calibrate.host.bench import Action, HostBench
from steptime._calibrate.host.probe import Probe, Times
from steptime_lab.workloads.table_batched.lookup import OPTIMIZERS, TableBatchedLookup

TABLES, ROWS, DIM, BATCH = 4, 64, 16, 8
# Tables, for what a table more costs; sorting its indices takes a dozen kernels.
FEW, MANY = 4, 24


def lookup_probes() -> list[Probe]:
    """Both implementations, forward where a form does not say it already, backward and update."""
    return [
        *(
            Probe(("table_batched",), f"{way}_{optimizer}", partial(_table_batched, way, optimizer), phase=way)
            for optimizer in OPTIMIZERS
            for way in ("forward", "backward")
        ),
        Probe(("backward_node", "backward_call"), "embedding_bag_sparse", _bags_backward, phase="backward"),
        *(
            Probe(("optimizer_step", "optimizer_step_fixed"), f"{name}_sparse", partial(_bags_update, name), phase="optimizer")
            for name in OPTIMIZERS
        ),
    ]


def _table_batched(way: str, optimizer: str, bench: HostBench) -> Times:
    device = bench.group.device
    lookup = TableBatchedLookup([ROWS] * TABLES, [DIM] * TABLES, optimizer=optimizer, device=device)
    indices = torch.randint(0, ROWS, (2 * BATCH * TABLES,), device=device)
    offsets = torch.arange(0, 2 * BATCH * TABLES + 1, 2, device=device)
    if way == "forward":
        return (bench.per_op(lookup.look_up, indices, offsets),)
    gradient = torch.randn(BATCH, DIM * TABLES, device=device)
    return (bench.per_op(lookup.update, gradient, indices, offsets),)


class _Bags:
    """A bag per table; `backward` sets up a backward pass through so many of them."""

    def __init__(self, device: torch.device) -> None:
        self.tables = [nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, device=device) for _ in range(MANY)]
        self.indices = torch.randint(0, ROWS, (2 * BATCH,), device=device)
        self.offsets = torch.arange(0, 2 * BATCH, 2, device=device)
        self.gradient = torch.randn(BATCH, DIM, device=device)

    def backward(self, count: int) -> Action:
        for table in self.tables:
            table.weight.grad = None
        pooled = [table(self.indices, self.offsets) for table in self.tables[:count]]
        return partial(torch.autograd.backward, pooled, [self.gradient] * count)


def _bags_backward(bench: HostBench) -> Times:
    """Per table, its sparse gradient taken over included."""
    return bench.at_two_sizes(_Bags(bench.group.device).backward, FEW, MANY)


def _bags_update(name: str, bench: HostBench) -> Times:
    """Per table, from sparse gradients that a backward pass has just made."""
    from steptime_lab.workloads.table_batched.rowwise_adagrad import RowwiseAdagrad

    bags = _Bags(bench.group.device)
    kind: Callable[..., Optimizer] = torch.optim.SGD if name == "sgd" else RowwiseAdagrad
    result = {count: kind([table.weight for table in bags.tables[:count]], lr=0.01) for count in (FEW, MANY)}

    def make(count: int) -> Action:
        bags.backward(count)()
        return result[count].step

    return bench.at_two_sizes(make, FEW, MANY)
