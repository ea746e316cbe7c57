"""What CUDA's own code calls inside an op that PyTorch's meta functions answer as a whole: what it allocates, fills and counts.

Read from traces of steps on an H200 (examples/dlrm_overlap4, examples/h200_mps4_dlrm). The host pays for each of these calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from steptime._capture import recurrent

aten = torch.ops.aten
# Rows that one thread sums up (native/cuda/EmbeddingBackwardKernel.cu, NROWS_PER_THREAD).
_PART_ROWS = 10
_WARP = 32


def _bag_backward(  # noqa: PLR0913, PLR0917 (as PyTorch calls it)
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_of_each: torch.Tensor,
    bag_sizes: torch.Tensor,
    maxima: torch.Tensor,
    rows: int,
    by_frequency: bool,
    mode: int,
    sparse: bool,
    weights: torch.Tensor | None,
    padding: int = -1,
) -> torch.Tensor:
    """Either of two (native/EmbeddingBag.cpp, _embedding_bag_backward)."""
    result: torch.Tensor
    if sparse:
        result = aten._embedding_bag_sparse_backward(
            gradient, indices, offsets, bag_of_each, bag_sizes, rows, by_frequency, mode, weights, padding
        )
    else:
        result = aten._embedding_bag_dense_backward(
            gradient, indices, bag_of_each, bag_sizes, maxima, rows, by_frequency, mode, weights, padding
        )
    return result


_MAX = 2  # value of `mode`


def _bag_dense_backward(  # noqa: PLR0913, PLR0917 (as PyTorch calls it)
    gradient: torch.Tensor,
    indices: torch.Tensor,
    bag_of_each: torch.Tensor,
    bag_sizes: torch.Tensor,
    maxima: torch.Tensor,
    rows: int,
    by_frequency: bool,
    mode: int,
    weights: torch.Tensor | None,
    padding: int = -1,
) -> torch.Tensor:
    """Indices are sorted, and gradients of equal ones summed; nothing is read back (native/cuda/EmbeddingBag.cu)."""
    del bag_of_each, bag_sizes, maxima, by_frequency, weights, padding
    gradient = gradient.contiguous()
    table = (rows, gradient.shape[1])
    if mode == _MAX:
        return torch.zeros(table, dtype=gradient.dtype, device=gradient.device)
    for _ in range(2):  # sorted ones, and where they were
        torch.empty_like(indices, memory_format=torch.contiguous_format)
    torch.arange(indices.numel(), dtype=indices.dtype, device=indices.device)
    result = torch.zeros(table, dtype=gradient.dtype, device=gradient.device)
    lookups, segments = indices.numel(), min(indices.numel(), rows)
    parts = lookups // _PART_ROWS + segments
    for size in ([lookups], [], [segments], [segments], [], [parts]):
        torch.empty(size, dtype=indices.dtype, device=indices.device)
    wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
    torch.empty([parts, -(gradient.shape[1] // -_WARP) * _WARP], dtype=wide, device=gradient.device)
    return result


def _per_channel(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Numbers of each channel, in single precision at least (native/cuda/Normalization.cuh)."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return tuple(torch.empty([x.shape[1]], dtype=wide, device=x.device) for _ in range(count))


# `nn.SyncBatchNorm`: statistics of a rank, of all ranks, what is normed with them, and the same backward.
_SYNCHRONIZED: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": lambda x, *_: _per_channel(x, 2),
    "batch_norm_gather_stats_with_counts": lambda x, *_: _per_channel(x, 2),
    "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
    "batch_norm_backward_reduce": lambda gradient, *_: _per_channel(gradient, 4),
    "batch_norm_backward_elemt": lambda _, x, *__: torch.empty_like(x),
}

CONTENTS: dict[str, Callable[..., Any]] = {
    "aten::_embedding_bag_backward": _bag_backward,
    "aten::_embedding_bag_dense_backward": _bag_dense_backward,
    **recurrent.CONTENTS,
    **{f"aten::{name}": made for name, made in _SYNCHRONIZED.items()},
}
"""By op, what it calls and gives."""
