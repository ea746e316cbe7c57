"""Results that are cleared before another kernel adds to them."""

from __future__ import annotations

from dataclasses import replace

from steptime._models.kernels.launches import Launch, Operand
from steptime._models.kernels.launches.pointwise import fill


def cleared(result: Operand) -> Launch:
    """A result set to zero: the same kernel as any element-wise op's, with code of its own since it reads nothing."""
    return replace(fill(result), path="fill")
