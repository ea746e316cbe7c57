"""Laws of hardware queues: streams share one only where the recording speaks for it and never against it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.program.traces import Trace, Work

from steptime._program.program import Program
from steptime._program.queues import shared_queues


def run(works: Sequence[tuple[int, int, int]]) -> Program:
    """Works as (stream, start, end), launched every 10 us in the order given."""
    trace = Trace()
    for index, (stream, start, end) in enumerate(works):
        trace.launch(10_000 * index, 10_000 * index + 4_000, Work(stream, start, end, f"work{index}"))
    return trace.read()


def together(program: Program) -> set[frozenset[int]]:
    """The streams that share a queue, by number."""
    queues = {s.queue for s in program.streams if s.queue is not None}
    return {frozenset(s.id for s in program.streams if s.queue == queue) for queue in queues}


def held_up(count: int, *, broken: bool = False) -> list[tuple[int, int, int]]:
    """Every work of stream 24 was ready long before, but started only when the work of stream 20 before it did."""
    works = [(7, 5_000, 9_000)]
    for index in range(count):
        at = 400_000 * (index + 1)
        works += [(20, at, at + 300_000), (24, at + 1_000, at + 50_000)]
    if broken:
        # Launched after work of stream 20 that has not started yet, and started all the same.
        works += [(20, 5_000_000, 5_100_000), (24, 4_000_000, 4_100_000)]
    return works


def test_streams_held_up_by_each_others_starts_share_a_queue() -> None:
    assert together(run(held_up(4))) == {frozenset({20, 24})}


def test_a_few_late_starts_are_no_evidence() -> None:
    assert together(run(held_up(2))) == set()


def test_one_start_out_of_order_speaks_against_sharing() -> None:
    assert together(run(held_up(4, broken=True))) == set()


def test_streams_that_run_side_by_side_keep_queues_of_their_own() -> None:
    works = []
    for index in range(20):
        at = 30_000 * index
        works.append(((7, 20, 24)[index % 3], 10_000 * index + 6_000 + at, 10_000 * index + 20_000 + at))
    assert together(run(works)) == set()


@given(st.lists(st.tuples(st.sampled_from([7, 20, 24, 28]), st.integers(0, 40), st.integers(1, 40)), min_size=3, max_size=30))
def test_streams_found_to_share_a_queue_never_start_out_of_order(drawn: list[tuple[int, int, int]]) -> None:
    ends: dict[int, int] = {}
    works = []
    for index, (stream, late, length) in enumerate(drawn):
        start = max(10_000 * index + 6_000 + 10_000 * late, ends.get(stream, 0) + 1_000)
        ends[stream] = start + 10_000 * length
        works.append((stream, start, ends[stream]))
    program = run(works)
    queues = shared_queues(program)
    for queue in set(queues):
        rows = [r for r in range(len(program.works)) if queues[program.works.stream[r]] == queue]
        rows.sort(key=lambda r: program.calls.start_ns[program.works.call[r]])
        if len({int(program.works.stream[r]) for r in rows}) > 1:
            starts = [int(program.works.start_ns[r]) for r in rows]
            assert all(b >= a - 2_000 for a, b in itertools.pairwise(starts))
