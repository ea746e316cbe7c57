"""Laws of what waits and synchronisations refer to."""

from __future__ import annotations

import pytest
from tests.program.traces import AUTOGRAD, Trace, Work

from steptime._program.program import CallKind, Program

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
COMPUTE, COMMUNICATION, OTHER = 7, 20, 24
Wait = tuple[int, str] | None  # the waiting stream, and the work it waits for


def work_names(program: Program) -> list[str]:
    return [program.names[n] for n in program.works.name]


def resolved(program: Program, kind: CallKind = CallKind.STREAM_WAIT) -> list[Wait]:
    """What every wait refers to, in order; None where it holds nothing back."""
    calls, names = program.calls, work_names(program)
    found: list[Wait] = []
    for row in range(len(calls)):
        if calls.kind[row] == kind:
            awaited, stream = int(calls.awaits[row]), int(calls.stream[row])
            found.append((program.streams[stream].id if stream >= 0 else -1, names[awaited]) if awaited >= 0 else None)
    return found


def group(name: str) -> dict[str, str]:
    return {"Process Group Name": name}


def test_a_wait_before_a_collective_holds_its_stream_behind_the_compute_stream() -> None:
    trace = Trace(world_size=2)
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 50_000, "earlier"))
    trace.launch(5_000, 9_000, Work(COMPUTE, 51_000, 90_000, "gradient"))
    trace.collective(10_000, 20_000, Work(COMMUNICATION, 92_000, 120_000, ALL_REDUCE))
    assert resolved(trace.read()) == [(COMMUNICATION, "gradient")]


def test_work_launched_after_the_wait_is_not_what_a_collective_waited_for() -> None:
    trace = Trace(world_size=2)
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 50_000, "gradient"))
    trace.collective(10_000, 20_000, Work(COMMUNICATION, 52_000, 120_000, ALL_REDUCE))
    trace.launch(30_000, 34_000, Work(COMPUTE, 51_000, 90_000, "next layer"))
    assert resolved(trace.read()) == [(COMMUNICATION, "gradient")]


def test_one_communicators_collectives_play_in_order_across_streams() -> None:
    trace = Trace(world_size=2)
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 20_000, "gradient"))
    trace.collective(10_000, 20_000, Work(COMMUNICATION, 22_000, 80_000, ALL_REDUCE), waits=2, said=group("0"))
    trace.collective(30_000, 40_000, Work(OTHER, 82_000, 90_000, "ncclDevKernel_AllGather_RING_LL"), waits=2, said=group("0"))
    assert resolved(trace.read()) == [(COMMUNICATION, "gradient"), None, (OTHER, "gradient"), (OTHER, ALL_REDUCE)]


def test_other_communicators_do_not_hold_a_collective_back() -> None:
    trace = Trace(world_size=2)
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 20_000, "gradient"))
    trace.collective(10_000, 20_000, Work(COMMUNICATION, 22_000, 80_000, ALL_REDUCE), waits=2, said=group("0"))
    trace.collective(30_000, 40_000, Work(OTHER, 41_000, 50_000, "ncclDevKernel_AllGather_RING_LL"), waits=2, said=group("1"))
    assert resolved(trace.read())[2:] == [(OTHER, "gradient"), None]


def test_waits_behind_a_collectives_launch_are_its_own_business() -> None:
    trace = Trace(world_size=2)
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 50_000, "gradient"))
    trace.collective(10_000, 20_000, Work(COMMUNICATION, 52_000, 120_000, ALL_REDUCE), waits=0)
    trace.wait(15_000, 16_000)
    trace.launch(30_000, 34_000, Work(COMPUTE, 200_000, 210_000, "later"))
    assert resolved(trace.read()) == [None]


def buckets() -> Trace:
    """DDP: three buckets reduced while backward goes on, awaited in order at its end, then the optimiser."""
    trace = Trace(world_size=2)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 0, 140_000, AUTOGRAD)
    for index in range(3):
        at, done = 20_000 * index, 30_000 * (index + 1)
        trace.launch(at, at + 4_000, Work(COMPUTE, done - 20_000, done - 1_000, f"gradient{index}"), tid=AUTOGRAD)
        reduced = Work(COMMUNICATION, 100_000 + 50_000 * index, 145_000 + 50_000 * index, f"ncclKernel_AllReduce_{index}")
        trace.collective(at + 5_000, at + 15_000, reduced, tid=AUTOGRAD)
    for index in range(3):
        trace.wait(100_000 + 10_000 * index, 101_000 + 10_000 * index, AUTOGRAD)
        copied = Work(COMPUTE, 147_000 + 50_000 * index, 150_000 + 50_000 * index, f"copy{index}")
        trace.launch(102_000 + 10_000 * index, 106_000 + 10_000 * index, copied, tid=AUTOGRAD)
    return trace


def test_final_waits_refer_to_the_buckets_one_after_the_other() -> None:
    assert resolved(buckets().read())[3:] == [(COMPUTE, f"ncclKernel_AllReduce_{index}") for index in range(3)]


def test_final_waits_in_a_row_hold_the_work_behind_them() -> None:
    trace = Trace(world_size=2)
    for index in range(3):
        at = 20_000 * index
        trace.launch(at, at + 4_000, Work(COMPUTE, at + 5_000, at + 9_000, f"gradient{index}"))
        reduced = Work(COMMUNICATION, 100_000 + 50_000 * index, 145_000 + 50_000 * index, f"ncclKernel_AllReduce_{index}")
        trace.collective(at + 5_000, at + 15_000, reduced)
    for index in range(3):
        trace.wait(100_000 + 2_000 * index, 101_000 + 2_000 * index)
    trace.launch(110_000, 114_000, Work(COMPUTE, 247_000, 260_000, "optimiser"))
    assert (COMPUTE, "ncclKernel_AllReduce_2") in resolved(trace.read())[3:]


def test_a_wait_the_recording_contradicts_is_dropped() -> None:
    trace = Trace(world_size=2)
    trace.launch(0, 4_000, Work(OTHER, 5_000, 500_000, "prefetch"))
    trace.wait(10_000, 11_000)
    trace.launch(12_000, 16_000, Work(COMPUTE, 18_000, 30_000, "on time"))
    assert resolved(trace.read()) == [None]


def test_a_collective_that_started_before_the_compute_stream_was_done_did_not_wait_for_it() -> None:
    trace = Trace(world_size=2)
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 500_000, "unrelated"))
    trace.collective(10_000, 20_000, Work(COMMUNICATION, 22_000, 120_000, ALL_REDUCE))
    assert resolved(trace.read()) == [None]


def test_a_late_start_is_explained_before_a_wait_goes_to_what_is_only_plausible() -> None:
    trace = Trace()
    trace.launch(0, 3_000, Work(COMMUNICATION, 4_000, 8_000, "long done"))
    trace.launch(4_000, 7_000, Work(OTHER, 8_000, 100_000, "slow"))
    trace.wait(10_000, 11_000)
    trace.launch(12_000, 15_000, Work(OTHER, 101_000, 102_000, "next on the thread"))
    trace.launch(16_000, 19_000, Work(COMPUTE, 101_000, 110_000, "late"))
    assert resolved(trace.read()) == [(COMPUTE, "slow")]


def test_a_wait_without_work_behind_it_holds_nothing_back() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 10_000))
    trace.wait(20_000, 21_000)
    assert resolved(trace.read()) == [None]


def test_a_late_start_right_behind_another_stream_was_caused_by_it() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(OTHER, 5_000, 100_000, "slow"))
    trace.launch(5_000, 9_000, Work(COMMUNICATION, 10_000, 50_000, "quick"))
    trace.wait(10_000, 11_000)
    trace.launch(12_000, 16_000, Work(COMPUTE, 102_000, 110_000, "late"))
    assert resolved(trace.read()) == [(COMPUTE, "slow")]


def test_a_late_start_nobody_explains_claims_a_wait_that_another_thread_made() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(OTHER, 5_000, 100_000, "slow"))
    trace.wait(10_000, 11_000, tid=300)
    trace.launch(12_000, 16_000, Work(COMPUTE, 102_000, 110_000, "late"))
    assert resolved(trace.read()) == [(COMPUTE, "slow")]


def test_what_a_record_says_is_believed() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(OTHER, 5_000, 100_000, "first"))
    record = trace.call("cudaEventRecord", 5_000, 6_000)
    trace.launch(7_000, 9_000, Work(OTHER, 101_000, 150_000, "second"))
    trace.wait(10_000, 11_000, stream=COMPUTE, wait_on_stream=OTHER, wait_on_cuda_event_record_corr_id=record)
    trace.launch(12_000, 16_000, Work(COMPUTE, 152_000, 160_000, "late"))
    assert resolved(trace.read()) == [(COMPUTE, "first")]


def test_a_record_of_an_unknown_event_means_everything_enqueued_so_far() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(OTHER, 5_000, 100_000, "first"))
    trace.launch(7_000, 9_000, Work(OTHER, 101_000, 150_000, "second"))
    trace.wait(10_000, 11_000, stream=COMPUTE, wait_on_stream=OTHER)
    trace.launch(12_000, 16_000, Work(COMPUTE, 152_000, 160_000, "late"))
    assert resolved(trace.read()) == [(COMPUTE, "second")]


def test_a_wait_that_is_said_to_be_for_an_idle_stream_holds_nothing_back() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(OTHER, 5_000, 100_000, "slow"))
    trace.wait(10_000, 11_000, stream=COMPUTE, wait_on_stream=99)
    trace.launch(12_000, 16_000, Work(COMPUTE, 102_000, 110_000, "late for another reason"))
    assert resolved(trace.read()) == [None]


def synchronised(trace: Trace) -> int:
    """The stream that the only stream synchronisation refers to, by number."""
    program = trace.read()
    (row,) = (r for r in range(len(program.calls)) if program.calls.kind[r] == CallKind.STREAM_SYNC)
    stream = int(program.calls.stream[row])
    return program.streams[stream].id if stream >= 0 else -1


def test_a_stream_synchronisation_is_of_the_stream_used_last() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(OTHER, 5_000, 10_000))
    trace.launch(5_000, 9_000, Work(COMPUTE, 10_000, 50_000))
    trace.call("cudaStreamSynchronize", 10_000, 52_000)
    assert synchronised(trace) == COMPUTE


def test_a_stream_synchronisation_that_returned_before_its_stream_was_done_is_of_another() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(OTHER, 5_000, 40_000))
    trace.launch(5_000, 9_000, Work(COMPUTE, 10_000, 500_000))
    trace.call("cudaStreamSynchronize", 10_000, 42_000)
    assert synchronised(trace) == OTHER


def test_a_stream_synchronisation_that_blocked_is_of_the_stream_that_was_done_as_it_returned() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(OTHER, 5_000, 90_000))
    trace.launch(5_000, 9_000, Work(COMPUTE, 10_000, 20_000))
    trace.call("cudaStreamSynchronize", 12_000, 95_000)
    assert synchronised(trace) == OTHER


def test_a_record_names_the_stream_of_a_synchronisation() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(OTHER, 5_000, 40_000))
    trace.launch(5_000, 9_000, Work(COMPUTE, 10_000, 20_000))
    correlation = trace.call("cudaStreamSynchronize", 10_000, 42_000)
    trace.sync_record("Stream Sync", correlation, 10_000, 42_000, stream=OTHER)
    assert synchronised(trace) == OTHER


@pytest.mark.parametrize(("returned", "awaited"), [(101_000, "late"), (62_000, "middle")])
def test_an_event_synchronisation_waits_for_the_last_work_done_when_it_returned(returned: int, awaited: str) -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 10_000, "early"))
    trace.launch(5_000, 9_000, Work(COMPUTE, 10_000, 60_000, "middle"))
    trace.launch(10_000, 14_000, Work(COMPUTE, 61_000, 100_000, "late"))
    trace.call("cudaEventSynchronize", 20_000, returned)
    assert resolved(trace.read(), CallKind.EVENT_SYNC) == [(-1, awaited)]


def test_an_event_synchronisation_that_did_not_block_waited_for_nothing_unfinished() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 10_000, "early"))
    trace.launch(5_000, 9_000, Work(COMPUTE, 11_000, 21_000, "running"))
    trace.call("cudaEventSynchronize", 20_000, 22_000)
    assert resolved(trace.read(), CallKind.EVENT_SYNC) == [(-1, "early")]


def test_records_of_streams_on_two_devices_are_not_mixed_up() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(COMPUTE, 5_000, 9_000, "elsewhere", args={"device": 1}))
    trace.launch(1_000, 4_000, Work(OTHER, 5_000, 9_000, "busiest", args={"device": 1}))
    trace.launch(5_000, 8_000, Work(OTHER, 9_000, 30_000, "awaited"))
    trace.wait(10_000, 11_000, stream=COMPUTE, wait_on_stream=OTHER)
    trace.launch(12_000, 16_000, Work(COMPUTE, 32_000, 40_000, "late"))
    program = trace.read()
    assert resolved(program) == [(COMPUTE, "awaited")]
    (waiting,) = (program.streams[s] for s in program.calls.stream.tolist() if s >= 0)
    assert waiting.device == 0


def test_a_last_wait_on_autograds_thread_holds_back_what_the_main_thread_launches() -> None:
    trace = Trace(world_size=2)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 0, 50_000, AUTOGRAD)
    trace.launch(1_000, 5_000, Work(COMPUTE, 6_000, 20_000, "gradient"), tid=AUTOGRAD)
    trace.collective(10_000, 20_000, Work(COMMUNICATION, 21_000, 60_000, ALL_REDUCE), tid=AUTOGRAD)
    trace.wait(30_000, 31_000, AUTOGRAD)
    trace.launch(55_000, 59_000, Work(COMPUTE, 61_000, 70_000, "optimiser"))
    assert resolved(trace.read()) == [(COMMUNICATION, "gradient"), (COMPUTE, ALL_REDUCE)]
