"""Matrix products: a mixture over the kernels cuBLAS may choose, each timed by its tiles, waves and bytes."""

from __future__ import annotations

from steptime._models.kernels.forms.matmul.model import MatmulForm

__all__ = ["FORM", "MatmulForm"]

FORM = MatmulForm
