"""RMS norm as one op: on CUDA it is one, elsewhere PyTorch makes it of several before any mode sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.library import Library


def fused_rms_norm(
    source: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed tensor, and one over the root of the mean square of every row, in float32 where the input is narrower."""
    del weight, eps
    accurate = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    rows = [*source.shape[: source.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(source, memory_format=torch.contiguous_format), source.new_empty(rows, dtype=accurate)


def _registered() -> Library | None:
    """The registrations, which hold as long as this object does."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA"):
        return None  # a build with CUDA
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("CUDA", "Meta"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", key):
            # Past `Library.impl`, which wants such ops to decompose.
            library.m.impl("_fused_rms_norm", key, fused_rms_norm, False)
    kept: Library = library
    return kept


REGISTERED = _registered()
