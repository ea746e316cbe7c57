"""Laws of what a recording does not say outright: blocking copies, lost launches, backlog, hand-overs."""

from __future__ import annotations

import pytest
from tests.program.traces import AUTOGRAD, MAIN, MEMCPY, Trace, Work

from steptime._program.program import CallKind, Program

TO_HOST, TO_DEVICE = "Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pinned -> Device)"


def call_of(program: Program, work: str) -> int:
    """The launching call of the first work of this name."""
    return int(program.works.call[[program.names[n] for n in program.works.name].index(work)])


def copying(api: str, name: str, call_end: int, copy_end: int) -> CallKind:
    trace = Trace()
    trace.launch(0, call_end, Work(7, 5_000, copy_end, name, MEMCPY), api=api)
    program = trace.read()
    return CallKind(program.calls.kind[call_of(program, name)])


def test_a_copy_to_the_host_that_the_call_outlasted_was_waited_for() -> None:
    assert copying("cudaMemcpyAsync", TO_HOST, 60_000, 50_000) == CallKind.BLOCKING_COPY
    assert copying("hipMemcpyWithStream", TO_HOST, 60_000, 50_000) == CallKind.BLOCKING_COPY


def test_a_copy_that_outlasted_its_call_was_not_waited_for() -> None:
    assert copying("cudaMemcpyAsync", TO_HOST, 6_000, 50_000) == CallKind.LAUNCH


def test_a_synchronous_copy_blocks_whatever_it_copies() -> None:
    assert copying("cudaMemcpy", "Memcpy DtoD (Device -> Device)", 60_000, 50_000) == CallKind.BLOCKING_COPY


def test_an_asynchronous_copy_within_the_device_never_blocks() -> None:
    assert copying("cudaMemcpyAsync", "Memcpy DtoD (Device -> Device)", 60_000, 50_000) == CallKind.LAUNCH
    assert copying("cudaMemcpyAsync", TO_DEVICE, 60_000, 50_000) == CallKind.LAUNCH


def test_work_at_the_head_of_a_stream_without_a_launch_is_backlog() -> None:
    trace = Trace()
    trace.work(Work(7, 1_000, 50_000, "before"), correlation=999)
    trace.launch(10_000, 14_000, Work(7, 51_000, 60_000))
    program = trace.read()
    assert call_of(program, "before") == -1
    assert not any("no launch" in warning for warning in program.warnings)


def test_work_in_mid_window_without_a_launch_gets_one_where_it_was_seen_to_start_and_that_is_said() -> None:
    trace = Trace()
    trace.step(3, 0, 200_000)
    trace.launch(10_000, 14_000, Work(7, 51_000, 60_000))
    trace.work(Work(7, 70_000, 80_000, "lost"), correlation=999)
    trace.launch(20_000, 24_000, Work(7, 90_000, 95_000))
    program = trace.read()
    call = call_of(program, "lost")
    assert program.calls.kind[call] == CallKind.LAUNCH
    assert program.calls.start_ns[call] == program.calls.end_ns[call] == 70_000
    assert program.threads[program.calls.thread[call]].role == "unrecorded"
    assert any("1 of 3 device events have no launch" in warning for warning in program.warnings)


def test_lost_work_belongs_to_the_step_of_its_neighbours_not_to_the_one_it_ran_in() -> None:
    trace = Trace()
    trace.step(1, 0, 100_000)
    trace.step(2, 100_000, 200_000)
    trace.launch(10_000, 14_000, Work(7, 110_000, 120_000))
    trace.work(Work(7, 121_000, 130_000, "lost"), correlation=999)
    trace.launch(90_000, 94_000, Work(7, 131_000, 140_000))
    assert trace.read().works.step.tolist() == [1, 1, 1]


def two_threads() -> Trace:
    trace = Trace()
    trace.step(1, 0, 300_000)
    trace.launch(10_000, 14_000, Work(7, 15_000, 20_000, "forward"))
    trace.op("autograd::engine::evaluate_function: MmBackward0", 30_000, 90_000, AUTOGRAD)
    trace.launch(40_000, 44_000, Work(7, 45_000, 50_000, "first"), tid=AUTOGRAD)
    trace.launch(60_000, 64_000, Work(7, 65_000, 70_000, "last"), tid=AUTOGRAD)
    return trace


def test_main_hands_over_to_autograd_and_resumes_when_it_is_done() -> None:
    trace = two_threads()
    trace.launch(100_000, 104_000, Work(7, 105_000, 110_000, "optimiser"))
    program = trace.read()
    after = program.calls.after
    assert after[call_of(program, "first")] == call_of(program, "forward")
    assert after[call_of(program, "optimiser")] == call_of(program, "last")
    assert after[call_of(program, "forward")] == after[call_of(program, "last")] == -1


def test_a_call_that_began_before_autograd_was_done_did_not_wait_for_it() -> None:
    trace = two_threads()
    trace.launch(61_000, 104_000, Work(7, 105_000, 110_000, "meanwhile"))
    program = trace.read()
    assert program.calls.after[call_of(program, "meanwhile")] == -1


def test_a_thread_that_is_not_autograds_is_handed_nothing() -> None:
    trace = Trace()
    trace.step(1, 0, 300_000)
    trace.launch(10_000, 14_000, Work(7, 15_000, 20_000))
    trace.op("DataLoader", 30_000, 90_000, 300)
    trace.launch(40_000, 44_000, Work(9, 45_000, 50_000), tid=300)
    trace.launch(100_000, 104_000, Work(7, 105_000, 110_000), tid=MAIN)
    assert (trace.read().calls.after == -1).all()


@pytest.mark.parametrize("bursts", [4, 40])
def test_threads_that_take_turns_all_the_time_run_side_by_side(bursts: int) -> None:
    trace = Trace()
    trace.step(1, 0, 10_000_000)
    for index in range(bursts):
        at = 50_000 * index
        trace.launch(at + 1_000, at + 5_000, Work(7, at + 6_000, at + 7_000))
        trace.op("autograd::engine::evaluate_function: MmBackward0", at + 10_000, at + 20_000, AUTOGRAD)
        trace.launch(at + 11_000, at + 15_000, Work(7, at + 16_000, at + 17_000), tid=AUTOGRAD)
    handed = int((trace.read().calls.after >= 0).sum())
    assert handed == (2 * bursts if bursts == 4 else 0)
