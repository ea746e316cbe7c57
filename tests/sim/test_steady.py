"""Laws of the steady state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.worlds import Draft, constant_timing, jobs

from steptime._program.program import CallKind, Program
from steptime._sim import LONG_AGO, Cohort, Timing
from steptime._sim.core.simulate import simulate
from steptime._sim.core.steady import steady

DEPTHS = st.sampled_from([None, 1, 2, 3, 5, 40])


def repeated(program: Program, times: int) -> Program:
    """The program with its rows repeated, as one long window."""
    calls, works = program.calls, program.works
    copies = np.arange(times)

    def shifted(values: np.ndarray[tuple[int], np.dtype[np.int32]], by: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.concatenate([np.where(values >= 0, values + by * k, values) for k in copies])

    rows = np.tile(np.arange(len(calls)), times)
    all_calls = calls.take(rows).replace(
        awaits=shifted(calls.awaits, len(works)), after=shifted(calls.after, len(calls)), start_ns=-1 - 0 * rows
    )
    all_works = works.take(np.tile(np.arange(len(works)), times)).replace(
        call=shifted(works.call, len(calls)), collective=shifted(works.collective, len(program.collectives))
    )
    collectives = tuple(replace(c, sequence=c.sequence + 1000 * int(k)) for k in copies for c in program.collectives)
    return replace(program, calls=all_calls, works=all_works, collectives=collectives)


def tiled(timing: Timing, times: int) -> Timing:
    changes = {
        name: np.tile(values, (times,) + (1,) * (values.ndim - 1))
        for name, values in vars(timing).items()
        if name not in ("thread_start_ns", "stream_start_ns")
    }
    return replace(timing, **changes)


def without_window(cohort: Cohort) -> Cohort:
    """The cohort with nothing that belongs to one absolute time: no backlog, no absent peers, unrecorded."""
    calls, works = cohort.program.calls, cohort.program.works
    kept = np.flatnonzero(works.call >= 0)
    place = np.full(len(works) + 1, -1)
    place[kept] = np.arange(len(kept))
    program = replace(cohort.program, works=works.take(kept), calls=calls.replace(awaits=place[calls.awaits]))
    t = cohort.timing
    timing = replace(
        t,
        **{name: getattr(t, name)[kept] for name in ("latency_ns", "spacing_ns", "release_ns", "duration_ns", "waits")},
        absent_ns=np.full((len(kept), 1, 1), LONG_AGO, dtype=np.int64),
        stream_start_ns=np.zeros_like(t.stream_start_ns),
    )
    return replace(cohort, program=program, timing=timing)


@given(jobs(), DEPTHS)
def test_windows_one_after_another_play_as_one_long_window(cohorts: list[Cohort], depth: int | None) -> None:
    once = [without_window(c) for c in cohorts if (c.program.calls.start_ns < 0).all()]
    if not once:
        return
    times = 4
    many = [
        replace(
            c,
            program=repeated(c.program, times),
            timing=tiled(c.timing, times),
            members=None if c.members is None else tuple(m * times for m in c.members),
        )
        for c in once
    ]
    long = simulate(many, queue_depth=depth)
    short = steady(once, queue_depth=depth, iterations_at_most=times)
    if short.iterations < times:
        return  # it repeated itself before; the windows that follow are the same again
    for a, b in zip(long.cohorts, short.timeline.cohorts, strict=True):
        assert (a.call_end_ns[-len(b.call_end_ns) or len(a.call_end_ns) :] == b.call_end_ns).all()
        assert (a.work_end_ns[-len(b.work_end_ns) or len(a.work_end_ns) :] == b.work_end_ns).all()
        assert (a.call_start_ns[-len(b.call_start_ns) or len(a.call_start_ns) :] == b.call_start_ns).all()


def job(*, host_ns: int, kernel_ns: int, launches: int = 3, sync: bool = False) -> Cohort:
    draft = Draft()
    for _ in range(launches):
        draft.launch()
    if sync:
        draft.call(CallKind.DEVICE_SYNC)
    program = draft.program()
    return Cohort(program, (0,), constant_timing(program, call_ns=host_ns, duration_ns=kernel_ns, latency_ns=7, return_ns=2))


def test_period_is_the_devices_when_the_host_runs_ahead() -> None:
    found = steady([job(host_ns=10, kernel_ns=100)])
    assert (found.period_ns[0], found.first_ns[0], found.converged) == (300, 317, True)


def test_period_is_the_hosts_when_the_device_starves() -> None:
    found = steady([job(host_ns=100, kernel_ns=10)])
    assert (found.period_ns[0], found.first_ns[0]) == (300, 317)


def test_period_with_a_synchronisation_is_the_whole_step() -> None:
    found = steady([job(host_ns=10, kernel_ns=100, sync=True)])
    assert found.period_ns[0] == found.first_ns[0] == 10 + 7 + 300 + 2


def test_slowest_lane_counts_even_while_another_ends_later() -> None:
    """A long latency makes rank 1 end last for thousands of windows, but rank 0 is the slower one."""
    cohort = job(host_ns=101, kernel_ns=100, launches=1)
    timing = replace(cohort.timing, latency_ns=np.full((1, 1, 1), 0, dtype=np.int64))
    late = replace(cohort, ranks=(1,), timing=constant_timing(cohort.program, call_ns=100, latency_ns=5000))
    found = steady([replace(cohort, timing=timing), late])
    assert found.timeline.end_ns[0] > 5000
    assert found.period_ns[0] == 101


def test_period_is_per_step_of_the_window() -> None:
    cohort = job(host_ns=10, kernel_ns=100, launches=4)
    step = np.array([5, 5, 6, 6])
    program = replace(cohort.program, steps=(5, 6), calls=cohort.program.calls.replace(step=step))
    program = replace(program, works=program.works.replace(step=step))
    found = steady([replace(cohort, program=program)])
    assert (found.period_ns[0], found.first_ns[0]) == (200, 217)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_launch_queue_carries_over_to_the_next_window(depth: int) -> None:
    found = steady([job(host_ns=10, kernel_ns=100)], queue_depth=depth, iterations_at_most=32)
    (t,) = found.timeline.cohorts
    ahead = t.work_end_ns[-1, 0, 0] - t.call_end_ns[-1, 0, 0]
    assert ahead == (depth + 1) * 100 - 10  # launched as the kernel `depth` before it starts
    assert found.period_ns[0] == 100 * 3


def test_backlog_and_absent_peers_do_not_repeat() -> None:
    draft = Draft()
    draft.work()
    draft.launch()
    program = draft.program()
    timing = constant_timing(program, call_ns=1, duration_ns=50, absent_ns=10**9, stream_start_ns=10**9)
    assert steady([Cohort(program, (0,), timing)]).period_ns[0] == 50


def test_windows_that_alternate_are_averaged() -> None:
    """Two launches fit the queue and share one latency, so that windows take 30 and 50 in turn."""
    cohort = job(host_ns=30, kernel_ns=20, launches=1)
    timing = replace(cohort.timing, latency_ns=np.full((1, 1, 1), 50, dtype=np.int64))
    found = steady([replace(cohort, timing=timing)], queue_depth=2)
    assert found.converged
    assert found.period_ns[0] == 40


def test_wait_left_open_holds_up_the_next_window() -> None:
    """The stream of the first kernel waits for the second kernel, which the next window's first kernel feels."""
    draft = Draft(streams=2)
    draft.launch(stream=1)
    draft.call(CallKind.STREAM_WAIT, stream=1, awaits=draft.launch(stream=0))
    program = draft.program()
    timing = constant_timing(program, call_ns=1, duration_ns=100)
    (t,) = steady([Cohort(program, (0,), timing)], iterations_at_most=2).timeline.cohorts
    assert t.work_start_ns[0, 0, 0] == 2 + 100
