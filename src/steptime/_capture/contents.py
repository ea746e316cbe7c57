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


def _grouped_products(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """Products of groups one after the other, where they are not in bfloat16: the host reads where groups end.

    (native/cuda/GroupedBlas.cpp, the slow path of `_grouped_mm`.) Groups are rows on the left, or what is summed over.
    """
    if ends is None:
        return torch.bmm(left, right)
    summed = right.dim() == 2
    rows, groups = left.shape[1 if summed else 0], ends.shape[0]
    stops = [min(max(0, int(stop)), rows) for stop in ends.cpu().tolist()]
    if stops != sorted(stops) or stops[-1] != rows:  # not known
        stops = [rows * (number + 1) // groups for number in range(groups)]
    shape = [groups, left.shape[0], right.shape[1]] if summed else [rows, right.shape[-1]]
    out = torch.empty(shape, dtype=left.dtype, device=left.device)
    for number, (start, stop) in enumerate(zip((0, *stops), stops, strict=False)):
        if summed:
            torch.mm(left[:, start:stop], right[start:stop], out=out[number])
        else:
            torch.mm(left[start:stop], right[number], out=out[start:stop])
    return out


def _drawn_classes(weights: torch.Tensor, count: int, *_: Any, **__: Any) -> torch.Tensor:
    """Weights are checked on the device, then the largest are taken of them over random numbers (native/Distributions.cpp)."""
    result = torch.empty([0], dtype=torch.int64, device=weights.device).resize_([*weights.shape[:-1], count])
    least, most = aten.aminmax(weights)
    aten._assert_async(torch.bitwise_and(least >= 0, most < float("inf")))
    empty = weights.sum(-1) == 0
    aten._assert_async((empty.any() if weights.dim() > 1 else empty).bitwise_not())
    scores = torch.empty_like(weights).exponential_(1.0)
    aten.div.out(weights, scores, out=scores)
    if count == 1:
        aten.argmax(scores, -1, True)
    else:
        aten.topk(scores, count)
    return result


_GROUPED, _DRAWN = "aten::_grouped_mm", "aten::multinomial"


def contents_of(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What an op calls on CUDA; None where it is kernels alone."""
    name: str = func._schema.name
    if name == _GROUPED and (args[0].dtype is torch.bfloat16 or args[0].dim() != 2):
        return None
    if name == _DRAWN and len(args) > 2 and args[2] and args[1] > 1:
        return None  # with replacement, which has kernels of its own
    return CONTENTS.get(name)


CONTENTS: dict[str, Callable[..., Any]] = {
    _GROUPED: _grouped_products,
    _DRAWN: _drawn_classes,
    # The CPU alone keeps a buffer for the backward pass (native/Activation.cpp).
    "aten::log_sigmoid_forward": lambda x: (torch.empty_like(x), torch.empty([0], dtype=x.dtype, device=x.device)),
    "aten::_embedding_bag_backward": _bag_backward,
    "aten::_embedding_bag_dense_backward": _bag_dense_backward,
    **recurrent.CONTENTS,
    **{f"aten::{name}": made for name, made in _SYNCHRONIZED.items()},
}
"""By op, what it calls and gives."""
