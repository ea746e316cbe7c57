"""Which elements of two sequences correspond: the longest common subsequence, found in time that grows with the difference.

The method is the greedy one of E. W. Myers, Algorithmica 1 (1986), 251-266.
"""

from __future__ import annotations

from collections.abc import Sequence

Pairs = list[tuple[int, int]]


def align(a: Sequence[int], b: Sequence[int], limit: int = 1000) -> Pairs:
    """Pairs of equal elements in order. After `limit` differences the rest is left unpaired."""
    begin = 0
    shorter = min(len(a), len(b))
    while begin < shorter and a[begin] == b[begin]:
        begin += 1
    end = 0
    while end < shorter - begin and a[len(a) - 1 - end] == b[len(b) - 1 - end]:
        end += 1
    middle = _differing(a[begin : len(a) - end], b[begin : len(b) - end], limit)
    head = [(i, i) for i in range(begin)]
    tail = [(len(a) - i, len(b) - i) for i in range(end, 0, -1)]
    return [*head, *((begin + i, begin + j) for i, j in middle), *tail]


def _differing(a: Sequence[int], b: Sequence[int], limit: int) -> Pairs:
    if not a or not b:
        return []
    reach = {1: 0}  # diagonal (place in a minus place in b) -> furthest place in a
    history: list[dict[int, int]] = []
    best, best_length = (0, 0), 1
    for differences in range(min(limit, len(a) + len(b)) + 1):
        history.append(dict(reach))
        for diagonal in range(-differences, differences + 1, 2):
            down = _down(reach, diagonal, differences)
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            while x < len(a) and x - diagonal < len(b) and a[x] == b[x - diagonal]:
                x += 1
            reach[diagonal] = x
            if x <= len(a) and x - diagonal <= len(b) and 2 * x - diagonal > sum(best):
                best, best_length = (x, x - diagonal), len(history)
        if best == (len(a), len(b)):
            break
    return _walk_back(history[:best_length], best)


def _down(reach: dict[int, int], diagonal: int, differences: int) -> bool:
    return diagonal == -differences or (diagonal != differences and reach[diagonal - 1] < reach[diagonal + 1])


def _walk_back(history: Sequence[dict[int, int]], end: tuple[int, int]) -> Pairs:
    pairs: Pairs = []
    x, y = end
    for differences in range(len(history) - 1, -1, -1):
        reach, diagonal = history[differences], x - y
        down = _down(reach, diagonal, differences)
        start = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
        while x > start:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = (x, y - 1) if down else (x - 1, y)
    return pairs[::-1]
