"""Laws of one pass over the window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.walk import walk
from tests.sim.worlds import Draft, constant_timing, jobs, picked, single_ranks

from steptime._program.program import CallKind, Collective, WorkKind
from steptime._sim import Cohort, CohortTimeline, Timeline
from steptime._sim.core import lanes
from steptime._sim.core.simulate import simulate

DEPTHS = st.sampled_from([None, 1, 2, 3, 5])
ARRAYS = ("call_start_ns", "call_end_ns", "work_start_ns", "work_end_ns", "moving_ns")


def by_rank(timeline: Timeline) -> dict[int, list[list[int]]]:
    """All times per rank, as plain numbers."""
    return {
        rank: [getattr(t, name)[:, place].tolist() for name in ARRAYS]
        for t in timeline.cohorts
        for place, rank in enumerate(t.cohort.ranks)
    }


def lane_rows(t: CohortTimeline) -> list[tuple[str, np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    program = t.cohort.program
    threads = [("call", np.flatnonzero(program.calls.thread == thread)) for thread in range(len(program.threads))]
    return threads + [("work", np.flatnonzero(program.works.stream == stream)) for stream in range(len(program.streams))]


@given(jobs(), DEPTHS)
def test_vectorised_simulation_agrees_with_a_plain_event_walk(cohorts: list[Cohort], depth: int | None) -> None:
    timeline = simulate(cohorts, queue_depth=depth)
    for scenario in range(timeline.end_ns.shape[0]):
        ranks = walk(cohorts, scenario=scenario, depth=depth)
        for t in timeline.cohorts:
            for place, number in enumerate(t.cohort.ranks):
                calls, works = range(len(t.cohort.program.calls)), range(len(t.cohort.program.works))
                rank = ranks[number]
                assert t.call_start_ns[:, place, scenario].tolist() == [rank.call_start[c] for c in calls]
                assert t.call_end_ns[:, place, scenario].tolist() == [rank.call_end[c] for c in calls]
                assert t.work_start_ns[:, place, scenario].tolist() == [rank.work_start[w] for w in works]
                assert t.work_end_ns[:, place, scenario].tolist() == [rank.work_end[w] for w in works]


@given(jobs(), DEPTHS)
def test_wide_and_narrow_play_agree(cohorts: list[Cohort], depth: int | None) -> None:
    narrow = by_rank(simulate(cohorts, queue_depth=depth))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "WIDE", 0)
        assert by_rank(simulate(cohorts, queue_depth=depth)) == narrow


@given(jobs(), DEPTHS)
def test_spans_of_a_lane_never_overlap(cohorts: list[Cohort], depth: int | None) -> None:
    for t in simulate(cohorts, queue_depth=depth).cohorts:
        for kind, rows in lane_rows(t):
            start, end = getattr(t, f"{kind}_start_ns")[rows], getattr(t, f"{kind}_end_ns")[rows]
            assert (start <= end).all()
            assert (start[1:] >= end[:-1]).all()


@given(jobs(), DEPTHS)
def test_nothing_starts_before_what_it_waits_for(cohorts: list[Cohort], depth: int | None) -> None:
    for t in simulate(cohorts, queue_depth=depth).cohorts:
        calls, works = t.cohort.program.calls, t.cohort.program.works
        for work in np.flatnonzero(works.call >= 0):
            entered = t.call_start_ns if calls.kind[works.call[work]] == CallKind.BLOCKING_COPY else t.call_end_ns
            assert (t.work_start_ns[work] >= entered[works.call[work]]).all()
        for call in np.flatnonzero(calls.after >= 0):
            assert (t.call_start_ns[call] >= t.call_end_ns[calls.after[call]]).all()
        for call in np.flatnonzero((calls.kind == CallKind.EVENT_SYNC) & (calls.awaits >= 0)):
            assert (t.call_end_ns[call] >= t.work_end_ns[calls.awaits[call]]).all()
        assert (t.moving_ns >= t.work_start_ns).all()
        assert (t.work_end_ns >= t.moving_ns).all()


@given(jobs(), DEPTHS)
def test_step_is_at_least_every_lanes_busy_time(cohorts: list[Cohort], depth: int | None) -> None:
    timeline = simulate(cohorts, queue_depth=depth)
    for t in timeline.cohorts:
        timing = t.cohort.timing
        for kind, rows in lane_rows(t):
            busy = timing.gap_ns[rows] + timing.call_ns[rows] if kind == "call" else timing.duration_ns[rows]
            assert (busy.sum(axis=0) <= timeline.end_ns).all()


@given(jobs(), DEPTHS, st.integers(0, 10**6), st.integers(1, 50))
def test_a_longer_cost_never_makes_anything_earlier(cohorts: list[Cohort], depth: int | None, pick: int, more: int) -> None:
    before = simulate(cohorts, queue_depth=depth)
    at = pick % len(cohorts)
    name = ("gap_ns", "call_ns", "duration_ns", "latency_ns", "return_ns", "spacing_ns", "release_ns")[pick % 7]
    values = getattr(cohorts[at].timing, name).copy()
    if not values.size:
        return
    values.flat[pick % values.size] += more
    slower = [replace(c, timing=replace(c.timing, **{name: values})) if i == at else c for i, c in enumerate(cohorts)]
    after = simulate(slower, queue_depth=depth)
    assert (after.end_ns >= before.end_ns).all()
    for early, late in zip(before.cohorts, after.cohorts, strict=True):
        assert (late.work_end_ns >= early.work_end_ns).all()
        assert (late.call_end_ns >= early.call_end_ns).all()


@given(jobs(), DEPTHS, st.randoms(use_true_random=False))
def test_renaming_ranks_permutes_the_result(cohorts: list[Cohort], depth: int | None, random: object) -> None:
    numbers = list(range(20, 30))
    random.shuffle(numbers)  # type: ignore[attr-defined]
    renamed = {old: numbers[i] for i, old in enumerate(sorted(r for c in cohorts for r in c.ranks))}

    def rename(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(renamed[r] for r in ranks))

    other = []
    for cohort in reversed(cohorts):
        collectives = tuple(replace(c, ranks=rename(c.ranks)) for c in cohort.program.collectives)
        members = None if cohort.members is None else tuple(tuple(map(rename, each)) for each in cohort.members)
        program = replace(cohort.program, collectives=collectives)
        other.append(replace(cohort, program=program, ranks=tuple(renamed[r] for r in cohort.ranks), members=members))
    was = by_rank(simulate(cohorts, queue_depth=depth))
    assert by_rank(simulate(other, queue_depth=depth)) == {renamed[rank]: times for rank, times in was.items()}


@given(jobs(), DEPTHS)
def test_ranks_as_one_cohort_play_as_they_do_alone(cohorts: list[Cohort], depth: int | None) -> None:
    assert by_rank(simulate(cohorts, queue_depth=depth)) == by_rank(simulate(single_ranks(cohorts), queue_depth=depth))


@given(jobs(scenarios=3), DEPTHS)
def test_scenarios_play_as_they_do_alone(cohorts: list[Cohort], depth: int | None) -> None:
    together = simulate(cohorts, queue_depth=depth)
    for scenario in range(together.end_ns.shape[0]):
        alone = simulate([replace(c, timing=picked(c.timing, scenario=scenario)) for c in cohorts], queue_depth=depth)
        assert alone.end_ns[0] == together.end_ns[scenario]
        for a, b in zip(together.cohorts, alone.cohorts, strict=True):
            assert (a.work_end_ns[:, :, scenario] == b.work_end_ns[:, :, 0]).all()


@given(jobs(), DEPTHS)
def test_same_input_gives_same_bytes(cohorts: list[Cohort], depth: int | None) -> None:
    first, second = simulate(cohorts, queue_depth=depth), simulate(cohorts, queue_depth=depth)
    for a, b in zip(first.cohorts, second.cohorts, strict=True):
        assert all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in ARRAYS)


@given(jobs())
def test_keeping_ends_only_leaves_the_ends_as_they_are(cohorts: list[Cohort]) -> None:
    whole, ends = simulate(cohorts), simulate(cohorts, keep="ends")
    assert (whole.end_ns == ends.end_ns).all()
    for a, b in zip(whole.cohorts, ends.cohorts, strict=True):
        assert (a.work_end_ns == b.work_end_ns).all()
        assert (a.call_end_ns == b.call_end_ns).all()
        assert len(b.call_start_ns) == len(b.work_start_ns) == len(b.moving_ns) == 0


@given(jobs(), st.integers(1, 5))
def test_host_is_never_more_than_the_queue_depth_ahead(cohorts: list[Cohort], depth: int) -> None:
    for t in simulate(cohorts, queue_depth=depth).cohorts:
        works = t.cohort.program.works
        if len(set(works.stream.tolist())) > 1 or len(set(works.call.tolist())) < len(works):
            continue  # each hardware queue has places of its own, and a launch of several works takes one
        for call in sorted({c for c in works.call.tolist() if c >= 0}):
            launched = np.flatnonzero((works.call < call) | (works.call < 0))
            begins = t.call_end_ns[call] - t.cohort.timing.call_ns[call]
            assert ((t.work_start_ns[launched] > begins).sum(axis=0) < depth).all()


@given(st.integers(1, 6), st.integers(2, 30))
def test_full_queue_holds_the_host_to_the_pace_of_the_device(depth: int, launches: int) -> None:
    draft = Draft()
    for _ in range(launches):
        draft.launch()
    program = draft.program()
    timeline = simulate([Cohort(program, (0,), constant_timing(program, call_ns=1, duration_ns=100))], queue_depth=depth)
    (t,) = timeline.cohorts
    for launch in range(depth + 1, launches):
        assert t.call_end_ns[launch, 0, 0] == t.work_start_ns[launch - depth, 0, 0] + 1


def test_graph_launch_takes_one_place_in_the_queue() -> None:
    draft = Draft()
    graph = draft.call(CallKind.LAUNCH)
    for _ in range(50):
        draft.work(call=graph)
    draft.launch()
    program = draft.program()
    (t,) = simulate([Cohort(program, (0,), constant_timing(program, call_ns=1, duration_ns=100))], queue_depth=2).cohorts
    assert t.call_end_ns[:, 0, 0].tolist() == [1, 2]


def test_full_stream_does_not_block_launches_to_another_hardware_queue() -> None:
    draft = Draft(streams=2)
    for _ in range(4):
        draft.launch(stream=0)
    draft.launch(stream=1)
    program = draft.program()
    timing = constant_timing(program, call_ns=1, duration_ns=100)
    (own,) = simulate([Cohort(program, (0,), timing)], queue_depth=4).cohorts
    assert own.call_end_ns[-1, 0, 0] == 5
    shared = replace(program, streams=tuple(replace(s, queue=0) for s in program.streams))
    (together,) = simulate([Cohort(shared, (0,), timing)], queue_depth=2).cohorts
    assert together.call_end_ns[-1, 0, 0] == together.work_start_ns[2, 0, 0] + 1


def test_all_reduce_of_one_rank_waits_for_nothing() -> None:
    draft = Draft()
    draft.collective(Collective("all_reduce", "alone", (0,), 0))
    program = draft.program()
    (t,) = simulate([Cohort(program, (0,), constant_timing(program, call_ns=3, latency_ns=4, duration_ns=5))]).cohorts
    assert t.work_start_ns[0, 0, 0] == t.moving_ns[0, 0, 0] == 7
    assert t.work_end_ns[0, 0, 0] == 12


def test_absent_peers_arrive_when_they_are_said_to() -> None:
    draft = Draft()
    draft.collective(Collective("all_reduce", "world", (0, 1), 0))
    program = draft.program(world_size=2)
    (t,) = simulate([Cohort(program, (0,), constant_timing(program, duration_ns=5, absent_ns=90))]).cohorts
    assert (t.work_start_ns[0, 0, 0], t.moving_ns[0, 0, 0], t.work_end_ns[0, 0, 0]) == (0, 90, 95)


def test_root_of_a_broadcast_does_not_wait_for_its_peers() -> None:
    root, leaf = Draft(), Draft()
    leaf.launch()
    for draft in (root, leaf):
        draft.collective(Collective("broadcast", "world", (0, 1), 0, root=0))
    programs = root.program(world_size=2), leaf.program(rank=1, world_size=2)
    timings = [constant_timing(p, duration_ns=50) for p in programs]
    timings[0] = replace(timings[0], waits=np.zeros(1, dtype=np.bool_))
    done = simulate([Cohort(p, (p.rank,), t) for p, t in zip(programs, timings, strict=True)])
    assert done.cohorts[0].work_end_ns[0, 0, 0] == 50
    assert done.cohorts[1].work_end_ns[1, 0, 0] == 100


def test_blocking_copy_returns_after_its_copy() -> None:
    draft = Draft()
    draft.launch()
    draft.work(kind=WorkKind.COPY, call=draft.call(CallKind.BLOCKING_COPY))
    program = draft.program()
    timing = constant_timing(program, call_ns=2, latency_ns=1, duration_ns=30, return_ns=7)
    (t,) = simulate([Cohort(program, (0,), timing)]).cohorts
    assert t.work_start_ns[:, 0, 0].tolist() == [3, 33]
    assert t.call_end_ns[:, 0, 0].tolist() == [2, 70]


def test_late_collective_on_another_stream_does_not_fill_the_queue() -> None:
    early, late = Draft(streams=2), Draft(streams=2)
    late.call(CallKind.HOST)
    for draft in (early, late):
        draft.collective(Collective("all_reduce", "world", (0, 1), 0), stream=1)
        for _ in range(8):
            draft.launch()
    programs = early.program(world_size=2), late.program(rank=1, world_size=2)
    timings = [constant_timing(p, call_ns=1, duration_ns=1) for p in programs]
    late_calls = timings[1].call_ns.copy()
    late_calls[0] = 10_000
    timings[1] = replace(timings[1], call_ns=late_calls)
    done = simulate([Cohort(p, (p.rank,), t) for p, t in zip(programs, timings, strict=True)], queue_depth=4)
    assert done.cohorts[0].call_end_ns[-1, 0, 0] < 100
