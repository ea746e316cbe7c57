"""What activations launch: one element-wise kernel, forward and backward."""

from __future__ import annotations

from steptime._models.kernels.launches.elementwise import launches

__all__ = ["launches"]
