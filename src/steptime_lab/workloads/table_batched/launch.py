"""Launches the Triton kernels of the table-batched lookup. Nothing here waits for the device."""

from __future__ import annotations

from typing import Any

import torch

from steptime_lab.workloads.table_batched import kernels
from steptime_lab.workloads.table_batched.layout import Layout

FORWARD_QUADS = 128
"""Quads of a forward program: two warps, two quads a lane."""

UPDATE_QUADS = 64
"""Quads of an update program: one warp, so that what its lanes tell each other stays in registers. Wider rows take more."""

CHUNK = 32
"""Positions that are walked in a row; a run of equal rows that is longer goes up one level per factor of 16."""

_BAGS, _LANES = 32, 16
_INT32 = 1 << 31


def forward(
    weights: torch.Tensor, layout: Layout, indices: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """Sums of looked-up rows, fp32 [batch, summed dims], in one launch."""
    batch = layout.batch_of(offsets)
    out = torch.empty(batch, layout.columns, dtype=torch.float32, device=weights.device)
    table_of, first = layout.programs(batch, FORWARD_QUADS)
    if table_of.numel():
        kernel: Any = kernels.table_batched_forward[(table_of.numel(),)]
        kernel(
            weights, indices, offsets, out if scales is None else scales, out, table_of, first, layout.meta,
            batch, layout.columns // 4, int(scales is not None), QUADS=FORWARD_QUADS, num_warps=2,
        )  # fmt: skip
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
    indices, offsets, scales = lookups
    if indices.numel() == 0:
        return
    keys, infos = _linearized(weights, layout, indices, offsets)
    keys, order = torch.sort(keys, stable=True)
    infos = infos.index_select(0, order)
    scales = None if scales is None else scales.index_select(0, order)
    source, count, first = gradient, indices.numel(), True
    while True:
        chunks = -(-count // CHUNK)
        up = _walk(weights, state, layout, (keys, infos, source, scales), count, rates, first)
        if chunks == 1:
            return
        keys, infos, source = up
        scales, count, first = None, 2 * chunks, False


def _linearized(
    weights: torch.Tensor, layout: Layout, indices: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    device, bags = weights.device, offsets.numel() - 1
    # Half the bytes to sort where the quads of all tables can be counted in int32.
    keys = torch.empty(indices.numel(), dtype=torch.int32 if weights.numel() // 4 < _INT32 else torch.int64, device=device)
    infos = torch.empty(indices.numel(), dtype=torch.int64, device=device)
    kernel: Any = kernels.table_batched_linearize[(-(-bags // _BAGS),)]
    kernel(
        indices, offsets, keys, infos, layout.meta, layout.batch_of(offsets), bags, layout.columns // 4,
        BAGS=_BAGS, LANES=_LANES, SHIFT=kernels.TABLE_BITS, num_warps=4,
    )  # fmt: skip
    return keys, infos


def _walk(
    weights: torch.Tensor,
    state: torch.Tensor | None,
    layout: Layout,
    sequence: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    count: int,
    rates: tuple[float, float],
    first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One level: updates the rows whose runs lie in one chunk; keys, infos and sums of the others, two entries a chunk."""
    keys, infos, source, scales = sequence
    device, stride = weights.device, layout.widest // 4
    if state is not None:
        # Sums over a row want a power of two; without them one compiled kernel serves every stride.
        stride = 1 << (stride - 1).bit_length()
    quads = max(UPDATE_QUADS, 1 << (stride - 1).bit_length())
    at_once = quads // stride
    chunks = -(-count // CHUNK)
    up = (
        torch.empty(2 * chunks, dtype=keys.dtype, device=device),
        torch.empty(2 * chunks, dtype=torch.int64, device=device),
        torch.empty(8 * chunks * stride, dtype=torch.float32, device=device),
    )
    kernel: Any = kernels.table_batched_update[(-(-chunks // at_once),)]
    kernel(
        keys, infos, source, source if scales is None else scales, weights, source if state is None else state, layout.meta,
        *up, count, stride, at_once, rates[0], rates[1], int(scales is not None),
        QUADS=quads, CHUNK=CHUNK, FIRST=first, ADAGRAD=state is not None,
        STRIDE=0 if state is None else stride, SHIFT=kernels.TABLE_BITS, num_warps=quads // 64,
    )  # fmt: skip
    return up
