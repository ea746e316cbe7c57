"""`flex_attention`, which `torch.compile` makes one kernel each way of: taken as the attention that PyTorch ships.

Its mask says which blocks of scores are computed. As many keys as those blocks have are left to every query; what a script does
to scores beside that is not counted. Nothing of it was measured, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from steptime._capture.known import Known
from steptime._capture.refusals import user_line
from steptime._capture.tensors import unseen

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


class _Attention(torch.autograd.Function):
    """Flash attention in half precision, else the memory-efficient kernel, over some of the keys."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, keys: int) -> Any:
        ctx.whole, ctx.scale = (key, value), scale
        key, value = key[:, :, :keys], value[:, :, :keys]
        if query.dtype in _HALVES:
            made = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False, scale=scale)
        else:
            made = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, False, scale=scale)
        ctx.kept = (query, key, value, *made)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(made[1])
        return made[0], made[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, out, sums, *state = ctx.kept
        given = (gradients[0], query, key, value)
        if query.dtype in _HALVES:
            starts, ends, longest, most, seed, offset, *_ = state
            parts = (starts, ends, longest, most, 0.0, False, seed, offset)
            made = aten._scaled_dot_product_flash_attention_backward(*given, out, sums, *parts, scale=ctx.scale)
        else:
            wanted = [True, True, True, False]
            made = aten._scaled_dot_product_efficient_attention_backward(
                *given, None, out, sums, *state, 0.0, wanted, False, scale=ctx.scale
            )
        return made[0], *map(torch.empty_like, ctx.whole), None, None


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, mask: tuple[Any, ...], scale: float, *__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In place of the op that a compiler makes a kernel of."""
    known: Known = next(mode.known for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "known"))
    share = _computed(mask, known)
    known.said[
        f"{user_line() or 'PyTorch'} calls flex_attention, taken as compiled: PyTorch's own attention over {share:.0%} of all "
        "scores; it was never measured"
    ] = None
    keys = max(1, round(share * key.shape[2]))
    out, sums = _Attention.apply(query, key, value, scale, keys)  # type: ignore[no-untyped-call]
    return out, sums, query.new_empty(0)


def _computed(mask: tuple[Any, ...], known: Known) -> float:
    """Which part of all scores a mask of blocks leaves; all where its numbers are not known."""
    partial, indices, full = mask[2], mask[3], mask[4]
    with unseen():
        counts = [known.values(each) for each in (partial, full) if each is not None]
        blocks = [int(each.sum()) for each in counts if each is not None]
    return min(1.0, sum(blocks) / max(1, indices.numel())) if counts and len(blocks) == len(counts) else 1.0


def replaced() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced while a device is pretended: object, attribute, and what stands in for it."""
    yield flex_attention, "flex_attention_hop", _attended
    yield flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
    for name in ("setup_compilation_env", "_set_compilation_env"):  # up to torch 2.10 the second
        if hasattr(flex_attention, name):
            yield flex_attention, name, nullcontext
