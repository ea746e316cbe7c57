"""Columns of integers as short text: LEB128 (seven bits a byte, least first), signs folded in, then base64.

A time is written as its distance to the one before, so most take two bytes; `page/data.js` reads them back.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

_BITS = 7
_MORE = 0x80


def packed(values: Integers | Sequence[int]) -> str:
    """A column of whole numbers, signed or not, as text."""
    given = np.asarray(values, dtype=np.int64)
    # 0, -1, 1, -2, ... become 0, 1, 2, 3, ...: small numbers of either sign stay short.
    rest = ((given << 1) ^ (given >> 63)).astype(np.uint64)
    lengths = np.ones(len(rest), dtype=np.int64)
    for index in range(1, 10):
        lengths += rest >= np.uint64(1) << np.uint64(_BITS * index)
    begin = np.cumsum(lengths) - lengths
    out = np.zeros(int(lengths.sum()), dtype=np.uint8)
    for index in range(int(lengths.max(initial=0))):
        here = lengths > index
        low = (rest[here] >> np.uint64(_BITS * index)) & np.uint64(_MORE - 1)
        out[begin[here] + index] = low.astype(np.uint8) | np.where(lengths[here] > index + 1, _MORE, 0).astype(np.uint8)
    return base64.b64encode(out.tobytes()).decode("ascii")


def differences(values: Integers) -> Integers:
    """Each value's distance to the one before, the first from 0."""
    return np.diff(values, prepend=np.int64(0))
