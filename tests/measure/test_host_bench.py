from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.measure.test_host_runner import a_bench

from steptime._calibrate.harness.group import no_collector
from steptime_lab.measure.host.bench import Action, burst_ns, less, line, net


class Clock:
    """A clock that moves only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now_ns)

    def action(self, cost_ns: int) -> Action:
        def spend() -> None:
            self.now_ns += cost_ns

        return spend


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_burst_gives_the_time_of_one_call(clock: Clock) -> None:
    assert burst_ns(clock.action(700), 9) == 700


@given(st.floats(0, 1e6), st.floats(-1e6, 1e6), st.integers(1, 50), st.integers(51, 500))
def test_a_line_through_two_sizes_has_their_slope_and_intercept(slope: float, fixed: float, small: int, large: int) -> None:
    slopes, intercepts = line(small, [fixed + slope * small] * 3, large, [fixed + slope * large] * 3)
    assert slopes == pytest.approx([slope] * 3, abs=1e-3)
    assert intercepts == pytest.approx([fixed] * 3, abs=0.1)


def test_a_chain_recovers_the_planted_cost_of_a_node_and_of_starting(clock: Clock) -> None:
    def make(length: int) -> Action:
        clock.action(10_000_000)()
        return clock.action(5_000 + 120 * length)

    node, start = a_bench(bursts=3).at_two_sizes(make, 50, 200)
    assert node == pytest.approx([120.0] * 6)
    assert start == pytest.approx([5_000.0] * 6)


def test_slow_calls_get_shorter_bursts_and_the_same_time(clock: Clock) -> None:
    bench = a_bench(bursts=2, calls=200)
    assert bench.per_call(clock.action(1_000)) == [1_000, 1_000]
    quick = bench.calls_made
    assert bench.per_call(clock.action(2_000_000)) == [2_000_000, 2_000_000]
    assert bench.calls_made < quick


def test_a_burst_never_has_more_calls_than_the_launch_queue_takes(clock: Clock) -> None:
    bench = a_bench(bursts=1, calls=200)
    bench.per_call(clock.action(10), most_calls=3)
    assert bench.calls_made == 5 + 3


def test_a_loop_that_fails_is_counted_like_the_others(clock: Clock) -> None:
    bench = a_bench()
    with pytest.raises(ZeroDivisionError):
        bench.per_call(lambda: 1 // 0)
    bench.per_call(clock.action(1))
    assert bench.loops == 2


def test_what_the_loop_costs_is_taken_off_and_nothing_is_below_zero() -> None:
    assert net([10.0, 3.0], 4.0) == [6.0, 0.0]
    assert less([10.0, 3.0], [1.0, 4.0, 100.0]) == [6.0, -1.0]


def test_the_collector_is_off_while_timing_and_on_again_afterwards() -> None:
    with pytest.raises(RuntimeError), no_collector():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()


def test_a_call_is_timed_with_its_arguments() -> None:
    seen: list[tuple[int, int]] = []
    function: Callable[..., None] = lambda a, *, b: seen.append((a, b))  # noqa: E731
    assert len(a_bench(bursts=2, calls=4).per_op(function, 1, b=2)) == 2
    assert set(seen) == {(1, 2)}
