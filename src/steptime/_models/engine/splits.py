"""Which measured rows a fit may see: by the text of a question alone, so that the same question is always on one side."""

from __future__ import annotations

import hashlib
from functools import cache

FIT, VALIDATION, TEST = "fit", "validation", "test"
# Shares of the questions: what is left is test.
_FIT, _VALIDATION = 0.70, 0.15


@cache
def split_of(text: str) -> str:
    """On which side of the split a question lies: its cache states, settings and shares of a GPU stay together."""
    point = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32
    return FIT if point < _FIT else VALIDATION if point < _FIT + _VALIDATION else TEST
