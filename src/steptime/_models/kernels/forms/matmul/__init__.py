"""Matrix products: a mixture over the kernels cuBLAS may choose, each timed by its tiles, waves and bytes."""

from __future__ import annotations

from steptime._models.kernels.forms.matmul.model import Matmul

__all__ = ["FORM", "Matmul"]

FORM = Matmul
