"""Laws of nesting: spans on one thread enclose each other, and calls find the innermost op around them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._program.nesting import innermost, nest, phases
from steptime._program.program import Phase

Column = npt.NDArray[np.int64]
# Trees of spans: thread, and for each span where in its parent it begins and ends.
SPANS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 30)), max_size=25)


def column(values: list[int]) -> Column:
    return np.array(values, dtype=np.int64)


def nested_spans(drawn: list[tuple[int, int, int]]) -> tuple[Column, Column, Column]:
    """Those of the drawn spans that nest with all before them on their thread, sorted as `nest` wants them."""
    kept: list[tuple[int, int, int]] = []
    for thread, start, length in drawn:
        span = (thread, start, start + length)
        crossing = any(t == thread and (s < start < e < span[2] or start < s < span[2] < e) for t, s, e in kept)
        same = any((t, s, e) == span for t, s, e in kept)
        if not crossing and not same:
            kept.append(span)
    kept.sort(key=lambda each: (each[1], -each[2]))
    return column([t for t, _, _ in kept]), column([s for _, s, _ in kept]), column([e for _, _, e in kept])


def encloses(outer: int, inner: int, thread: Column, start: Column, end: Column) -> bool:
    return bool(thread[outer] == thread[inner] and start[outer] <= start[inner] and end[inner] <= end[outer])


@given(SPANS)
def test_the_parent_is_the_shortest_span_around(drawn: list[tuple[int, int, int]]) -> None:
    thread, start, end = nested_spans(drawn)
    parents = nest(thread, start, end).tolist()
    for row, parent in enumerate(parents):
        around = [o for o in range(len(start)) if o != row and encloses(o, row, thread, start, end)]
        shortest = min(around, key=lambda o: end[o] - start[o], default=-1)
        assert parent == shortest


@given(SPANS, SPANS)
def test_the_innermost_op_is_the_shortest_around_a_call(
    drawn: list[tuple[int, int, int]], calls: list[tuple[int, int, int]]
) -> None:
    thread, start, end = nested_spans(drawn)
    call_thread, call_start = column([c[0] for c in calls]), column([c[1] for c in calls])
    call_end = call_start + column([c[2] for c in calls])
    found = innermost(thread, start, end, nest(thread, start, end), call_thread, call_start, call_end).tolist()
    for row, op in enumerate(found):
        around = [
            o
            for o in range(len(start))
            if thread[o] == call_thread[row] and start[o] <= call_start[row] and call_end[row] <= end[o]
        ]
        assert op in around if around else op == -1
        assert not around or end[op] - start[op] == min(end[o] - start[o] for o in around)


def test_spans_that_only_touch_are_siblings() -> None:
    parents = nest(column([0, 0, 0]), column([0, 0, 10]), column([30, 10, 20]))
    assert parents.tolist() == [-1, 0, 0]


def test_spans_that_cross_are_siblings() -> None:
    assert nest(column([0, 0]), column([0, 5]), column([10, 11])).tolist() == [-1, -1]


def test_spans_of_other_threads_enclose_nothing() -> None:
    assert nest(column([0, 1]), column([0, 5]), column([100, 10])).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("name", "above", "on_backward_thread", "phase"),
    [
        ("aten::mm", None, False, Phase.FORWARD),
        ("aten::mm", None, True, Phase.BACKWARD),
        ("aten::mm", "Optimizer.step#SGD.step", False, Phase.OPTIMIZER),
        ("aten::zero_", "Optimizer.zero_grad#SGD.zero_grad", False, Phase.OPTIMIZER),
        ("aten::mm", "autograd::engine::evaluate_function: AddmmBackward0", False, Phase.BACKWARD),
    ],
)
def test_the_phase_comes_from_the_thread_or_from_an_op_around(
    name: str, above: str | None, on_backward_thread: bool, phase: Phase
) -> None:
    names = [above or "nothing", "between", name]
    parents = np.array([-1, 0, 1], dtype=np.int32)
    found = phases(names, np.arange(3, dtype=np.int32), parents, np.array([on_backward_thread] * 3), np.arange(3))
    assert found[2] == phase
