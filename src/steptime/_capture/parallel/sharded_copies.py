"""What FSDP2 calls to put parameters and gradients side by side, as it runs on CUDA.

Each such copy is one kernel over blocks of 2 KiB, to which the host first sends a table of addresses and blocks. The lengths of
the tables are those of torch 2.11 in execution traces of four sharded steps on an H200 (3 to 12 parameters, 1 to 4 ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from steptime._hardware.device import reference_device

_BLOCK_BYTES = 2048
_BLOCK_THREADS = 128
META = torch.device("meta")


def _blocks(sizes: Sequence[int]) -> int:
    """Blocks for parts of these many bytes."""
    whole = sum(-(size // -_BLOCK_BYTES) for size in sizes)
    # More blocks than run at once take several turns.
    gpu = reference_device()
    at_once = int(gpu.sms.value * gpu.threads_per_sm.value) // _BLOCK_THREADS
    turns = max(1, -(whole // -at_once))
    return sum(-(size // (-_BLOCK_BYTES * turns)) for size in sizes)


def _send_table(length: int) -> None:
    table = torch.empty(length, dtype=torch.int64, device="cpu")
    torch.ops.aten.to.dtype_layout(table, device=META, non_blocking=True)


def send_table_of_split(source: torch.Tensor, sizes: Sequence[int], *_: Any, **__: Any) -> None:
    """Four numbers per part, one more, and the part of every block (`split_with_sizes_copy`)."""
    _send_table(_blocks([size * source.element_size() for size in sizes]) + 4 * len(sizes) + 1)


def send_table_of_cat(tensors: Sequence[torch.Tensor], dim: int, chunks: int, *, out: torch.Tensor) -> None:
    """Six numbers per tensor, two more, and the tensor of every block (`_chunk_cat`)."""
    del dim
    sizes = [-(tensor.numel() // -chunks) * out.element_size() for tensor in tensors]
    _send_table(_blocks(sizes) + 6 * len(tensors) + 2)


SENDS_TABLE: dict[str, Callable[..., None]] = {
    "aten::split_with_sizes_copy": send_table_of_split,
    "aten::_chunk_cat": send_table_of_cat,
}
"""By op, what the host sends before the kernel starts."""

IN_PYTHON: dict[str, Callable[..., Any]] = {
    "fsdp::all_gather_copy_in": _fsdp_collectives.all_gather_copy_in_cuda,
    "fsdp::split_with_sizes_copy": _fsdp_collectives.split_with_sizes_copy,
    "fsdp::chunk_cat": _fsdp_collectives.chunk_cat,
}
"""FSDP's own ops, which are Python on CUDA."""
