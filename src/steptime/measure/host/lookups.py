"""The table-batched lookup: what launching it costs, forward and backward with update."""

from __future__ import annotations

from functools import partial

import torch

from steptime.measure.host.bench import Bench
from steptime.measure.host.probe import Probe, Times
from steptime.workloads.table_batched import OPTIMIZERS, TableBatchedLookup

TABLES, ROWS, DIM, BATCH = 4, 64, 16, 8


def lookup_probes() -> list[Probe]:
    """Both directions, with each optimiser."""
    return [
        Probe(("table_batched",), f"{way}_{optimizer}", partial(_measure, way, optimizer), phase=way)
        for optimizer in OPTIMIZERS for way in ("forward", "backward")
    ]  # fmt: skip


def _measure(way: str, optimizer: str, bench: Bench) -> Times:
    device = bench.group.device
    lookup = TableBatchedLookup([ROWS] * TABLES, [DIM] * TABLES, optimizer=optimizer, device=device)
    indices = torch.randint(0, ROWS, (2 * BATCH * TABLES,), device=device)
    offsets = torch.arange(0, 2 * BATCH * TABLES + 1, 2, device=device)
    if way == "forward":
        return (bench.per_op(lookup.look_up, indices, offsets),)
    gradient = torch.randn(BATCH, DIM * TABLES, device=device)
    return (bench.per_op(lookup.update, gradient, indices, offsets),)
