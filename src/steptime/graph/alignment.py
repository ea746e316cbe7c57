"""Which elements of two sequences correspond: the longest common subsequence, found in time that grows with the difference.

The method is Myers' greedy one (E. W. Myers, "An O(ND) difference algorithm and its variations", Algorithmica 1, 1986).
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
    best = (0, 0)
    for differences in range(min(limit, len(a) + len(b)) + 1):
        history.append(dict(reach))
        for diagonal in range(-differences, differences + 1, 2):
            x = _step(reach, diagonal, differences)
            while x < len(a) and x - diagonal < len(b) and a[x] == b[x - diagonal]:
                x += 1
            reach[diagonal] = x
            if x <= len(a) and x - diagonal <= len(b) and 2 * x - diagonal > sum(best):
                best = (x, x - diagonal)
        if best == (len(a), len(b)):
            break
    return _walk_back(history, best)


def _step(reach: dict[int, int], diagonal: int, differences: int) -> int:
    down = diagonal == -differences or (diagonal != differences and reach[diagonal - 1] < reach[diagonal + 1])
    return reach[diagonal + 1] if down else reach[diagonal - 1] + 1


def _walk_back(history: Sequence[dict[int, int]], end: tuple[int, int]) -> Pairs:
    pairs: Pairs = []
    x, y = end
    started = False
    for differences in range(len(history) - 1, -1, -1):
        reach, diagonal = history[differences], x - y
        # The best end of a search that gave up may lie on a path with fewer differences than the last.
        if not started and (abs(diagonal) > differences or (diagonal - differences) % 2):
            continue
        start = _step(reach, diagonal, differences) if differences else 0
        if start > x or (not started and differences and start - diagonal < 0):
            continue
        started = True
        while x > start:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if differences == 0:
            break
        down = diagonal == -differences or (diagonal != differences and reach[diagonal - 1] < reach[diagonal + 1])
        x, y = (start, start - diagonal - 1) if down else (start - 1, start - diagonal)
    return pairs[::-1]
