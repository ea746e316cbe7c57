"""Laws of the critical path."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.worlds import Draft, constant_timing, jobs

from steptime._program.program import CallKind, Collective
from steptime._sim import Cohort
from steptime._sim.core.simulate import simulate
from steptime._sim.core.steady import steady
from steptime._sim.explain.critical_path import critical_path

DEPTHS = st.sampled_from([None, 1, 2, 3, 5])


@given(jobs(), DEPTHS, st.integers(0, 1))
def test_path_is_contiguous_and_as_long_as_the_step(cohorts: list[Cohort], depth: int | None, scenario: int) -> None:
    timeline = simulate(cohorts, queue_depth=depth)
    scenario %= len(timeline.end_ns)
    path = critical_path(timeline, scenario=scenario)
    if not path:
        assert timeline.end_ns[scenario] in (0, *(t.cohort.timing.stream_start_ns.max() for t in timeline.cohorts))
        return
    assert path[-1].end_ns == timeline.end_ns[scenario]
    for before, after in pairwise(path):
        assert before.end_ns == after.start_ns
    assert all(segment.end_ns >= segment.start_ns for segment in path)
    opened = {0} | {int(v) for t in timeline.cohorts for v in t.cohort.timing.stream_start_ns.flat}
    assert path[0].start_ns in opened
    assert path[0].start_ns + sum(s.end_ns - s.start_ns for s in path) == timeline.end_ns[scenario]
    assert not any(segment.reason == "earlier window" for segment in path)


@given(jobs(), DEPTHS)
def test_path_of_the_steady_state_ends_where_its_window_ends(cohorts: list[Cohort], depth: int | None) -> None:
    timeline = steady(cohorts, queue_depth=depth, iterations_at_most=4).timeline
    path = critical_path(timeline)
    for before, after in pairwise(path):
        assert before.end_ns == after.start_ns
    assert not path or path[-1].end_ns == timeline.end_ns[0]


def test_path_crosses_to_the_rank_that_arrives_last() -> None:
    drafts = [Draft(), Draft()]
    drafts[1].launch()
    for draft in drafts:
        draft.collective(Collective("all_reduce", "world", (0, 1), 0))
    drafts[0].call(CallKind.DEVICE_SYNC)
    programs = [draft.program(rank=rank, world_size=2) for rank, draft in enumerate(drafts)]
    timings = [constant_timing(p, call_ns=1, latency_ns=2, duration_ns=100, return_ns=5) for p in programs]
    timeline = simulate([Cohort(p, (p.rank,), t) for p, t in zip(programs, timings, strict=True)])
    steps = [(s.rank, s.lane, s.reason, s.end_ns - s.start_ns) for s in critical_path(timeline)]
    assert steps == [
        (1, "host", "host", 1),
        (1, "stream", "launch latency", 2),
        (1, "stream", "device", 100),
        (0, "stream", "collective wait", 0),
        (0, "stream", "collective", 100),
        (0, "host", "sync", 5),
    ]


def test_path_through_a_full_queue_names_it() -> None:
    draft = Draft()
    for _ in range(3):
        draft.launch()
    draft.call(CallKind.HOST)
    program = draft.program()
    timing = constant_timing(program, call_ns=10, duration_ns=100, gap_ns=200)
    timing.gap_ns[:3] = 0
    reasons = [s.reason for s in critical_path(simulate([Cohort(program, (0,), timing)], queue_depth=1))]
    assert reasons.count("queue full") == 1  # the second launch finds the first kernel started
    assert reasons[-1] == "host"


def test_path_to_an_absent_peer_says_so() -> None:
    draft = Draft()
    draft.collective(Collective("all_reduce", "world", (0, 1), 0))
    program = draft.program(world_size=2)
    timeline = simulate([Cohort(program, (0,), constant_timing(program, duration_ns=5, absent_ns=90))])
    assert [(s.reason, s.start_ns, s.end_ns) for s in critical_path(timeline)] == [
        ("absent peer", 0, 90),
        ("collective", 90, 95),
    ]


def test_path_without_starts_is_refused() -> None:
    draft = Draft()
    draft.launch()
    program = draft.program()
    timeline = simulate([Cohort(program, (0,), constant_timing(program))], keep="ends")
    with pytest.raises(ValueError, match="keep"):
        critical_path(timeline)
