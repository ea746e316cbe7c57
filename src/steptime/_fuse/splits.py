"""Into how many parts Inductor divides a reduction that has few results, and when it holds a whole row at once.

Rules are those of torch/_inductor/choices.py and ir.py of PyTorch 2.11 to 2.13; block sizes there are of its own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

_THREADS = 8 * 32  # of a block: eight warps
_LEAST, _MOST = 32, 512  # elements that a thread reduces
_FEW = 8_192  # elements that one block reduces alone
_BLOCK_RESULTS = 128  # of a block that reduces down columns
_EACH = 4  # elements that a thread of it reduces at once
_PERSISTENT_ROW, _PERSISTENT_COLUMN = 1_024, 64
# Row sums and column sums of the same data in one kernel (scheduler.py, MixOrderReduction).
_MIXED_ELEMENTS, _MIXED_ROWS, _MIXED_COLUMNS = 5 << 20, 4_096, 1 << 14
_NEAR_INNER, _NEAR_LONG, _NEAR_OUTER = 30, 50, 20


@dataclass(frozen=True, slots=True)
class Processors:
    """What the compiler asks about a device."""

    count: int
    threads: int  # that one of them runs at a time


def parts(size: int, reduced: int, processors: Processors, *, inner: bool) -> int:
    """Into how many parts a reduction of `reduced` elements to each of `size` results is divided."""
    if size > 1 and (reduced <= _LEAST or size >= processors.count * 2 * 32):
        return 1
    least = _LEAST * processors.count * processors.threads
    most = _MOST * processors.count * processors.threads
    if inner or size == 1:
        if size >= 2 * processors.count or reduced <= _FEW:
            return 1
        each = _inner(size, reduced, processors, least, most)
        return -(-reduced // (each * _THREADS))
    each = _outer(size, reduced, processors, least, most)
    return max(1, -(-reduced // (_EACH * each)))


def _inner(size: int, reduced: int, processors: Processors, least: int, most: int) -> int:
    if reduced * size <= least:
        return _LEAST
    if reduced * size >= most:
        return _even(reduced, _MOST, _NEAR_LONG)
    blocks = processors.count * processors.threads // (2 * _THREADS)
    each = -(-reduced // (_THREADS * -(-blocks // size)))
    return max(_even(reduced, each, _NEAR_INNER), _LEAST)


def _outer(size: int, reduced: int, processors: Processors, least: int, most: int) -> int:
    across = -(-size // _BLOCK_RESULTS)
    if reduced * size < least:
        return _LEAST
    if reduced * size >= most:
        return _even(reduced, _MOST, _NEAR_LONG)
    blocks = -(-(processors.count * processors.threads // _THREADS) // across)
    return max(_even(reduced, -(-reduced // (_EACH * blocks)), _NEAR_OUTER), _LEAST)


def _even(number: int, near: int, within: int) -> int:
    """The divisor next to a number, if it is near."""
    low = next((each for each in range(near, max(0, near - within), -1) if each and number % each == 0), 0)
    high = next((each for each in range(near, near + within) if each and number % each == 0), 0)
    found = [each for each in (low, high) if each]
    return min(found, key=lambda each: abs(each - near)) if found else max(near, 1)


def persistent(reduced: int, *, inner: bool) -> bool:
    """Whether a block holds everything that it reduces."""
    return reduced <= (_PERSISTENT_ROW if inner else _PERSISTENT_COLUMN)


def mixed(rows: int, columns: int) -> bool:
    """Whether sums along rows and sums down columns of the same data become one kernel."""
    many = rows * columns >= _MIXED_ELEMENTS and rows >= max(2 * columns, _MIXED_ROWS)
    return many and columns <= _MIXED_COLUMNS
