"""Laws of collectives and kernels that run beside each other on one rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.worlds import Draft, constant_timing, jobs

from steptime._models.collectives.overlap import Overlap
from steptime._program.program import Collective
from steptime._sim import Cohort
from steptime._sim.core.simulate import simulate
from steptime._sim.laws.overlap import Beside, _share
from steptime._sim.laws.settling import simulate_settled, steady_settled

LAW = Overlap("made up", held_sms=33.0, short_ns=1.0, moving=float(np.log(1.1)))


def _two_streams(ranks: int = 2, kernel_ns: int = 1_000_000, collective_ns: int = 400_000) -> Cohort:
    """On every rank one long kernel and, on another stream, a collective."""
    draft = Draft(streams=2)
    draft.launch(stream=0)
    draft.collective(Collective("all_reduce", "g", tuple(range(ranks)), 0, 1024, 1024), stream=1)
    program = draft.program(world_size=ranks)
    durations = np.array([kernel_ns, collective_ns], dtype=np.int64).reshape(2, 1, 1)
    return Cohort(program, tuple(range(ranks)), replace(constant_timing(program), duration_ns=durations))


def test_a_kernel_loses_what_the_collective_holds_while_it_is_there() -> None:
    cohort = _two_streams()
    timeline, settling = simulate_settled([cohort], Beside.of([cohort], LAW).rates)
    kernel_ns, collective_ns = timeline.cohorts[0].work_end_ns[:, 0, 0] - timeline.cohorts[0].work_start_ns[:, 0, 0]
    # A quarter of 132 SMs is held: so much of the time that the collective runs has to be made up for.
    assert settling.settled
    assert collective_ns == pytest.approx(440_000, rel=1e-3)
    assert kernel_ns == pytest.approx(1_000_000 + collective_ns / 4, rel=2e-3)


def test_a_smaller_part_of_a_gpu_loses_more() -> None:
    cohort = _two_streams()
    law = replace(LAW, held_sms=5.0)
    ends = [int(simulate_settled([cohort], Beside.of([cohort], law, share=share).rates)[0].end_ns[0]) for share in (1, 2, 4, 8)]
    assert ends == sorted(set(ends))


@given(jobs())
@settings(max_examples=40)
def test_where_nothing_was_measured_everything_is_played_as_ever(cohorts: list[Cohort]) -> None:
    timeline, settling = simulate_settled(cohorts, Beside.of(cohorts, Overlap()).rates)
    assert settling.rounds == 1
    assert (timeline.end_ns == simulate(cohorts).end_ns).all()


@given(jobs())
@settings(max_examples=40)
def test_nobody_goes_faster_than_alone(cohorts: list[Cohort]) -> None:
    for rates in Beside.of(cohorts, LAW).rates(simulate(cohorts)):
        assert (rates <= 1.0 + 1e-12).all()
        assert (rates > 0.2).all()


def test_a_steady_step_meets_the_collective_of_the_step_before() -> None:
    cohort = _two_streams(kernel_ns=300_000, collective_ns=900_000)
    found, settling = steady_settled([cohort], Beside.of([cohort], LAW).rates)
    assert settling.settled
    assert float(found.period_ns[0]) >= 900_000


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8),
)
def test_the_share_in_common_is_what_counting_moments_gives(
    stretches: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    covered = np.zeros(100, dtype=bool)
    for start, length in spans:
        covered[start : start + length] = True
    begin = np.array([start for start, _ in stretches], dtype=np.int64)
    end = begin + np.array([length for _, length in stretches], dtype=np.int64)
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    ends = starts + np.array([length for _, length in spans], dtype=np.int64)
    expected = [covered[low:high].mean() for low, high in zip(begin.tolist(), end.tolist(), strict=True)]
    np.testing.assert_allclose(_share(begin, end, (starts, ends)), expected)
