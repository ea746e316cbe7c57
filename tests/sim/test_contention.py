"""Laws of ranks that share one GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.worlds import Draft, constant_timing, jobs, picked, single_ranks

from steptime.graph.program import Collective
from steptime.models.contention import Contention
from steptime.sim import Cohort, simulate, steady
from steptime.sim.contention import Demand, Shared, progress_rates, simulate_shared, steady_shared
from steptime.sim.settling import SETTLED

LAW = Contention()


def demand_of(cohort: Cohort, used: float, sensitivity: float) -> Demand:
    shape = (len(cohort.program.works), 1, 1)
    return Demand(np.full(shape, used), np.full(shape, sensitivity))


def random_demands(cohorts: list[Cohort], seed: int) -> list[Demand]:
    random = np.random.default_rng(seed)
    found = []
    for cohort in cohorts:
        shape = (len(cohort.program.works), 1, 1)
        used = random.uniform(0, 0.9, shape) * (random.random(shape) < 0.7)
        found.append(Demand(used, random.uniform(0.1, 1, shape)))
    return found


def busy_ranks(ranks: int, *, works: int = 3, duration_ns: int = 1000, starts_ns: tuple[int, ...] = ()) -> Cohort:
    """One cohort whose ranks each run works one after the other, launched long before."""
    draft = Draft()
    for _ in range(works):
        draft.launch()
    program = draft.program(world_size=ranks)
    timing = constant_timing(program, duration_ns=duration_ns)
    starts = np.array(starts_ns or (0,) * ranks, dtype=np.int64).reshape(1, ranks, 1)
    return Cohort(program, tuple(range(ranks)), replace(timing, stream_start_ns=starts))


@given(jobs(), st.integers(0, 99))
@settings(max_examples=40)
def test_ranks_with_a_gpu_each_are_played_as_ever(cohorts: list[Cohort], seed: int) -> None:
    separate = {rank: rank for cohort in cohorts for rank in cohort.ranks}
    timeline, settling = simulate_shared(cohorts, Shared(LAW, random_demands(cohorts, seed), separate))
    plain = simulate(cohorts)
    assert settling.rounds == 1
    for found, expected in zip(timeline.cohorts, plain.cohorts, strict=True):
        assert (found.work_end_ns == expected.work_end_ns).all()
        assert (found.call_end_ns == expected.call_end_ns).all()


@given(jobs())
@settings(max_examples=40)
def test_works_that_use_no_bandwidth_slow_nobody(cohorts: list[Cohort]) -> None:
    shared = Shared(LAW, [demand_of(cohort, 0.0, 1.0) for cohort in cohorts])
    timeline, _ = simulate_shared(cohorts, shared)
    assert (timeline.end_ns == simulate(cohorts).end_ns).all()


@given(jobs(), st.integers(0, 99))
@settings(max_examples=40)
def test_nobody_goes_faster_than_alone(cohorts: list[Cohort], seed: int) -> None:
    shared = Shared(LAW, random_demands(cohorts, seed))
    for rate in progress_rates(simulate(cohorts), shared):
        assert (rate <= 1.0 + 1e-12).all()
        assert (rate > 0.0).all()


@given(jobs(), st.integers(0, 99))
@settings(max_examples=25)
def test_cohorts_of_many_ranks_and_of_one_rank_agree(cohorts: list[Cohort], seed: int) -> None:
    demands = random_demands(cohorts, seed)
    apart = [demand for cohort, demand in zip(cohorts, demands, strict=True) for _ in cohort.ranks]
    together, _ = simulate_shared(cohorts, Shared(LAW, demands))
    single, _ = simulate_shared(single_ranks(cohorts), Shared(LAW, apart))
    assert (together.end_ns == single.end_ns).all()


@given(jobs(), st.integers(0, 99))
@settings(max_examples=25)
def test_scenarios_do_not_touch_each_other(cohorts: list[Cohort], seed: int) -> None:
    shared = Shared(LAW, random_demands(cohorts, seed))
    rates = progress_rates(simulate(cohorts), shared)
    for scenario in range(2):
        one = [replace(cohort, timing=picked(cohort.timing, scenario=scenario)) for cohort in cohorts]
        for alone, both in zip(progress_rates(simulate(one), shared), rates, strict=True):
            assert (alone[:, :, 0] == both[:, :, min(scenario, both.shape[2] - 1)]).all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_identical_ranks_in_lock_step_get_the_slowdown_of_the_law(ranks: int) -> None:
    cohort = busy_ranks(ranks, duration_ns=100_000)
    timeline, settling = simulate_shared([cohort], Shared(LAW, [demand_of(cohort, 0.5, 0.7)]))
    slowdown = LAW.slowdown(np.full(ranks, 0.5), np.full(ranks, 0.7))[0]
    assert settling.settled
    assert timeline.end_ns[0] == pytest.approx(300_000 * slowdown, rel=1e-3)


def crowded() -> tuple[list[Cohort], Shared]:
    """Four ranks whose works differ a little in length, so that everybody's company changes all the time."""
    random = np.random.default_rng(4)
    cohort = busy_ranks(4, works=60)
    lengths = (np.exp(random.normal(9, 1, (60, 1, 1))) * random.uniform(0.9, 1.1, (60, 4, 2))).astype(np.int64)
    cohort = replace(cohort, timing=replace(cohort.timing, duration_ns=lengths))
    used = random.uniform(0, 0.5, (60, 1, 1))
    return [cohort], Shared(LAW, [Demand(used, np.full_like(used, 0.5))])


def test_crowded_ranks_settle_and_the_same_comes_out_again() -> None:
    cohorts, shared = crowded()
    timeline, settling = simulate_shared(cohorts, shared, rounds_at_most=20)
    again, _ = simulate_shared(cohorts, shared, rounds_at_most=20)
    assert settling.settled
    assert settling.rounds > 2
    assert (timeline.end_ns == again.end_ns).all()
    assert (timeline.end_ns > simulate(cohorts).end_ns).all()


def test_rounds_are_bounded_and_what_is_left_is_said() -> None:
    cohorts, shared = crowded()
    timeline, settling = simulate_shared(cohorts, shared, rounds_at_most=1)
    assert settling.rounds == 1
    assert not settling.settled
    assert settling.change > SETTLED
    assert (timeline.end_ns == simulate(cohorts).end_ns).all()


def test_a_work_is_slowed_only_while_the_other_runs() -> None:
    """Rank 1 comes when rank 0 is half done; both then share, until one is alone again."""
    cohort = busy_ranks(2, works=1, duration_ns=100_000, starts_ns=(0, 50_000))
    timeline, settling = simulate_shared([cohort], Shared(LAW, [demand_of(cohort, 0.6, 1.0)]))
    slowdown = LAW.slowdown(np.full(2, 0.6), np.ones(2))[0]
    first, second = timeline.cohorts[0].work_end_ns[0, :, 0].tolist()
    assert settling.settled
    assert first == pytest.approx(50_000 + 50_000 * slowdown, rel=5e-3)
    assert second == pytest.approx(150_000 + 50_000 * (slowdown - 1), rel=5e-3)


@given(st.lists(st.integers(0, 400), min_size=4, max_size=4), st.floats(0.05, 0.9), st.floats(0.1, 1.0))
@settings(max_examples=40)
def test_bytes_moved_stay_within_the_limit_at_any_time(starts: list[int], used: float, waits: float) -> None:
    """A rank that runs throughout moves `used` x its alone time; no window of the timeline holds more bytes than the limit."""
    cohort = busy_ranks(4, works=4, duration_ns=10_000, starts_ns=tuple(s * 100 for s in starts))
    timeline, settling = simulate_shared([cohort], Shared(LAW, [demand_of(cohort, used, waits)]), rounds_at_most=40)
    ends = timeline.cohorts[0].work_end_ns[:, :, 0]
    begins = timeline.cohorts[0].moving_ns[:, :, 0]
    moved = used * 10_000 * ends.size
    assert settling.settled
    assert moved <= (ends.max() - begins.min()) * (1 + 50 * SETTLED)


def test_waiting_inside_a_collective_asks_for_nothing() -> None:
    """Rank 0 waits for rank 1, which computes meanwhile as if alone."""
    drafts = [Draft(), Draft()]
    compute = drafts[1].launch()
    for draft in drafts:
        draft.collective(Collective("all_reduce", "all", (0, 1), 0))
    programs = [draft.program(rank=rank, world_size=2) for rank, draft in enumerate(drafts)]
    cohorts = [Cohort(p, (p.rank,), constant_timing(p, duration_ns=1_000)) for p in programs]
    shared = Shared(LAW, [demand_of(cohort, 0.5, 0.5) for cohort in cohorts])
    timeline, _ = simulate_shared(cohorts, shared)
    computed = timeline.cohorts[1]
    assert computed.work_end_ns[compute, 0, 0] - computed.work_start_ns[compute, 0, 0] == 1_000
    assert timeline.end_ns[0] > simulate(cohorts).end_ns[0]


def test_steady_ranks_meet_across_the_ends_of_the_window() -> None:
    cohort = busy_ranks(2, works=3, duration_ns=50_000)
    plain = steady([cohort])
    found, settling = steady_shared([cohort], Shared(LAW, [demand_of(cohort, 0.6, 1.0)]))
    slowdown = LAW.slowdown(np.full(2, 0.6), np.ones(2))[0]
    assert settling.settled
    assert found.period_ns[0] == pytest.approx(plain.period_ns[0] * slowdown, rel=1e-3)


def test_demand_of_works_follows_from_bytes_and_times() -> None:
    nbytes, alone_ns = np.array([0.0, 1e6, 1e9, 1e6]), np.array([1_000, 1_000, 1_000_000, 0])
    factor = np.array([1.0, 1.0, 1.0, 1.0]).reshape(-1, 1, 1)
    found = Demand.of(LAW, nbytes.reshape(-1, 1, 1), alone_ns.reshape(-1, 1, 1), 4, factor)
    used, waits = found.used[:, 0, 0], found.sensitivity[:, 0, 0]
    assert used[0] == used[3] == waits[3] == 0.0
    assert 0.0 < used[1] <= used[2] <= LAW.part_bandwidth(4)
    assert waits[0] > 0.5
    left_out = Demand.of(LAW, nbytes.reshape(-1, 1, 1), alone_ns.reshape(-1, 1, 1), 4, 0.0)
    assert not left_out.used.any()
    assert not left_out.sensitivity.any()


def test_demands_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match="used"):
        Demand(np.full((2, 1, 1), 1.5), np.ones((2, 1, 1)))
    with pytest.raises(ValueError, match="sensitivity"):
        Demand(np.full((2, 1, 1), 0.5), np.zeros((2, 1, 1)))
