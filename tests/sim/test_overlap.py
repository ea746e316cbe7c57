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
from steptime._sim.core.steady import steady
from steptime._sim.laws.slowdowns import CollectivesBesideKernels, _share, steady_settled

LAW = Overlap("made up", sms=132.0, held_sms=33.0, short_ns=1.0, moving=float(np.log(1.1)))


def _two_streams(ranks: int = 2, kernel_ns: int = 1_000_000, collective_ns: int = 400_000) -> Cohort:
    """On every rank one long kernel and, on another stream, a collective."""
    draft = Draft(streams=2)
    draft.launch(stream=0)
    draft.collective(Collective("all_reduce", "g", tuple(range(ranks)), 0, 1024, 1024), stream=1)
    program = draft.program(world_size=ranks)
    durations = np.array([kernel_ns, collective_ns], dtype=np.int64).reshape(2, 1, 1)
    return Cohort(program, tuple(range(ranks)), replace(constant_timing(program), duration_ns=durations))


# A timeline with such a period never meets itself again.
NEVER = np.array([10**15])


def test_a_kernel_loses_what_the_collective_holds_while_it_is_there() -> None:
    cohort = _two_streams()
    kernel, collective = CollectivesBesideKernels.of([cohort], LAW).slowdowns(simulate([cohort]), NEVER)[0][:, 0, 0]
    # A quarter of 132 SMs is held, for 0.4 of the kernel's time.
    assert collective == pytest.approx(1.1)
    assert kernel == pytest.approx(1 / (1 - 0.4 / 4), rel=1e-3)


def test_a_smaller_share_of_a_gpu_loses_more() -> None:
    cohort = _two_streams()
    law = replace(LAW, held_sms=5.0)
    found = [
        CollectivesBesideKernels.of([cohort], law, share=share).slowdowns(simulate([cohort]), NEVER)[0][0, 0, 0]
        for share in (1, 2, 4, 8)
    ]
    assert found == sorted(set(found))


@given(jobs())
@settings(max_examples=40)
def test_where_nothing_was_measured_everything_is_played_as_ever(cohorts: list[Cohort]) -> None:
    found, settling = steady_settled(cohorts, [CollectivesBesideKernels.of(cohorts, Overlap())])
    assert settling.rounds == 1
    assert (found.period_ns == steady(cohorts).period_ns).all()


@given(jobs())
@settings(max_examples=40)
def test_nobody_goes_faster_than_alone(cohorts: list[Cohort]) -> None:
    timeline = simulate(cohorts)
    for slowdowns in CollectivesBesideKernels.of(cohorts, LAW).slowdowns(timeline, np.repeat(NEVER, len(timeline.end_ns))):
        assert (slowdowns >= 1.0 - 1e-12).all()
        assert (slowdowns < 5.0).all()


def test_a_steady_step_meets_the_collective_of_the_step_before() -> None:
    cohort = _two_streams(kernel_ns=300_000, collective_ns=900_000)
    found, settling = steady_settled([cohort], [CollectivesBesideKernels.of([cohort], LAW)])
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
