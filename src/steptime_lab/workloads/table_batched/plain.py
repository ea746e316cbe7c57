"""The table-batched lookup in plain PyTorch: what the Triton kernels compute, on any device, without their speed."""

from __future__ import annotations

import torch

from steptime_lab.workloads.table_batched.layout import Layout


def forward(
    weights: torch.Tensor, layout: Layout, indices: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """Sums of looked-up rows, fp32 [batch, summed dims]."""
    batch = layout.batch_of(offsets)
    out = torch.zeros(batch, layout.columns, dtype=torch.float32, device=weights.device)
    for table, (rows, sample, scale) in enumerate(_by_table(layout, indices, offsets, scales)):
        values = layout.view(weights, table).index_select(0, rows).float()
        columns = slice(layout.column_starts[table], layout.column_starts[table] + layout.dims[table])
        out[:, columns].index_add_(0, sample, values if scale is None else values * scale[:, None])
    return out


def backward(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    layout: Layout,
    lookups: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    gradient: torch.Tensor,
    rates: tuple[float, float],
) -> None:
    """Sums the gradient of every looked-up row and updates it once; row-wise Adagrad where there is a state, else SGD."""
    rate, eps = rates
    for table, (rows, sample, scale) in enumerate(_by_table(layout, *lookups)):
        columns = slice(layout.column_starts[table], layout.column_starts[table] + layout.dims[table])
        each = gradient[:, columns].index_select(0, sample)
        distinct, run = torch.unique(rows, return_inverse=True)
        # One after the other in fp32, ten thousand gradients of a hot row lose a digit that the kernels' tree of sums keeps.
        exact = torch.zeros(distinct.numel(), layout.dims[table], dtype=torch.float64, device=weights.device)
        exact.index_add_(0, run, (each if scale is None else each * scale[:, None]).double())
        summed = exact.float()
        if state is not None:
            places = distinct + layout.state_starts[table]
            state[places] += summed.square().mean(1)
            summed /= (state[places].sqrt() + eps)[:, None]
        view = layout.view(weights, table)
        view[distinct] = (view[distinct].float() - rate * summed).to(weights.dtype)


def _by_table(
    layout: Layout, indices: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Rows, their samples and their per-sample weights, for each table."""
    batch = layout.batch_of(offsets)
    samples = torch.arange(batch, device=indices.device)
    results = []
    for table in range(layout.tables):
        own = offsets[table * batch : (table + 1) * batch + 1].to(torch.int64)
        part = slice(int(own[0]), int(own[-1]))
        sample = torch.repeat_interleave(samples, torch.diff(own))
        results.append((indices[part].to(torch.int64), sample, None if scales is None else scales[part]))
    return results
