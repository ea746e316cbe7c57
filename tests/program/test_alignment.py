"""Laws of the alignment of two sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from steptime._program.link import align

tokens = st.lists(st.integers(0, 3), max_size=14)


def longest(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common subsequence, by the textbook's table."""
    above = [0] * (len(b) + 1)
    for x in a:
        row = [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
        above = row
    return above[-1]


@given(tokens, tokens)
def test_as_many_pairs_as_the_longest_common_subsequence(a: list[int], b: list[int]) -> None:
    assert len(align(a, b)) == longest(a, b)


@given(tokens, tokens, st.integers(0, 20))
def test_pairs_are_equal_and_in_order_however_early_the_search_gives_up(a: list[int], b: list[int], limit: int) -> None:
    pairs = align(a, b, limit)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))


@given(tokens)
def test_a_sequence_corresponds_to_itself_without_searching(a: list[int]) -> None:
    assert align(a, a, limit=0) == [(i, i) for i in range(len(a))]
