"""Laws of timings read from recordings: own costs are kept, waiting of every kind is taken out, clocks are aligned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.program.traces import AUTOGRAD, MEMCPY, Trace, Work

from steptime._program.program import CallKind, Program
from steptime._program.workload import Workload
from steptime._sim import LONG_AGO
from steptime._sim.core.simulate import simulate
from steptime._sim.recorded.timing import DEFAULT_RETURN_NS, MeetingKey, clock_offsets, recorded, recorded_meetings

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def job(*traces: Trace, world_size: int | None = None) -> Workload:
    return Workload(tuple(trace.read(f"rank{trace.rank}.json") for trace in traces), world_size or len(traces))


def timing_of(trace: Trace) -> tuple[Program, dict[str, Any]]:
    """A single rank's program and its timing, one axis each."""
    cohort = recorded(job(trace)).cohorts[0]
    columns = {name: values.reshape(-1).tolist() for name, values in vars(cohort.timing).items()}
    return cohort.program, columns


def rows(program: Program, kind: CallKind) -> list[int]:
    return np.flatnonzero(program.calls.kind == kind).tolist()


def test_host_work_between_calls_and_kernel_times_are_kept_as_recorded() -> None:
    trace = Trace()
    trace.launch(1_000, 4_500, Work(7, 6_000, 17_777))
    trace.launch(9_123, 11_000, Work(7, 18_777, 20_000))
    program, timing = timing_of(trace)
    first, second = rows(program, CallKind.LAUNCH)
    assert [timing["call_ns"][first], timing["gap_ns"][second], timing["call_ns"][second]] == [3_500, 4_623, 1_877]
    assert timing["duration_ns"] == [11_777, 1_223]


@given(st.integers(10_000, 5_000_000))
def test_how_long_a_synchronisation_blocked_is_not_kept(blocked: int) -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(7, 6_000, 6_000 + blocked))
    trace.call("cudaDeviceSynchronize", 5_000, 6_000 + blocked + 3_000)
    program, timing = timing_of(trace)
    (sync,) = rows(program, CallKind.DEVICE_SYNC)
    assert timing["call_ns"][sync] <= DEFAULT_RETURN_NS
    assert timing["return_ns"][sync] == 3_000


@given(st.integers(10_000, 5_000_000))
def test_how_long_a_blocking_copy_queued_is_not_kept(busy: int) -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(7, 6_000, 6_000 + busy))
    copy = Work(7, 7_000 + busy, 9_000 + busy, "Memcpy DtoH (Device -> Pageable)", MEMCPY)
    trace.launch(5_000, 14_000 + busy, copy)
    program, timing = timing_of(trace)
    (call,) = rows(program, CallKind.BLOCKING_COPY)
    assert timing["call_ns"][call] <= 9_000
    assert timing["return_ns"][call] == 5_000
    assert timing["duration_ns"][-1] == 2_000


def test_a_hand_over_costs_what_lies_between_the_threads() -> None:
    trace = Trace()
    trace.step(1, 0, 100_000)
    trace.launch(1_000, 5_000, Work(7, 6_000, 7_000))
    trace.op("autograd::engine::evaluate_function: MmBackward0", 9_000, 30_000, AUTOGRAD)
    trace.launch(12_000, 15_000, Work(7, 16_000, 17_000), tid=AUTOGRAD)
    trace.launch(40_000, 45_000, Work(7, 46_000, 47_000))
    program, timing = timing_of(trace)
    _, backward, resumed = sorted(rows(program, CallKind.LAUNCH), key=lambda r: program.calls.start_ns[r])
    assert timing["gap_ns"][backward] == 12_000 - 5_000
    assert timing["gap_ns"][resumed] == 40_000 - 15_000
    assert timing["thread_start_ns"] == [0, LONG_AGO]


def test_backlog_starts_when_it_was_seen_to_start() -> None:
    trace = Trace()
    trace.launch(1_000, 5_000, Work(20, 6_000, 7_000))
    trace.work(Work(7, 2_500, 50_000, "backlog"), correlation=999)
    trace.work(Work(7, 52_000, 60_000, "more"), correlation=998)
    program, timing = timing_of(trace)
    stream = [s.id for s in program.streams].index(7)
    assert timing["stream_start_ns"][stream] == 1_500
    assert simulate(recorded(job(trace)).cohorts).cohorts[0].work_end_ns.max() == 59_000


def all_reduces(rank: int, spans: list[tuple[int, int]], world_size: int = 2, said: Any = None, **options: Any) -> Trace:
    """A rank whose collectives started and ended at the given times."""
    trace = Trace(rank=rank, world_size=world_size, **options)
    trace.step(1, 0, 10_000_000)
    for index, (start, end) in enumerate(spans):
        trace.collective(20_000 * index, 20_000 * index + 9_000, Work(20, start, end, NCCL), said=said)
    return trace


def test_moving_is_from_the_last_arrival_to_the_end() -> None:
    early, late = [(100_000, 300_000), (400_000, 700_000)], [(250_000, 301_000), (500_000, 699_000)]
    workload = job(all_reduces(0, early), all_reduces(1, late))
    durations = [cohort.timing.duration_ns.reshape(-1).tolist() for cohort in recorded(workload).cohorts]
    assert durations == [[50_000, 200_000], [51_000, 199_000]]
    assert all(cohort.timing.waits.all() for cohort in recorded(workload).cohorts)


@given(st.integers(-(10**12), 10**12), st.integers(2, 5))
def test_a_clock_that_is_ahead_is_told_exactly_from_common_ends(ahead: int, ranks: int) -> None:
    rng = np.random.default_rng(abs(ahead))
    ends = np.cumsum(rng.integers(100_000, 1_000_000, 7)).tolist()
    spans = {
        ("0", tuple(range(ranks)), i): {
            r: (end - 50_000 - int(rng.integers(0, 9_000)) + ahead * (r == 1), end + ahead * (r == 1)) for r in range(ranks)
        }
        for i, end in enumerate(ends)
    }
    offsets = clock_offsets(spans, tuple(range(ranks)))
    if abs(ahead) > 60_000:
        assert abs(offsets[1] - offsets[0] - ahead) <= 1
        assert len({offsets[r] for r in range(ranks) if r != 1}) == 1
    else:
        assert set(offsets.values()) == {0} or offsets[1] - offsets[0] == pytest.approx(ahead, abs=1)


def test_clocks_of_ranks_that_never_meet_are_tied_through_those_between_them() -> None:
    ahead = {0: 0, 1: 50_000_000, 2: -30_000_000, 3: 4_000_000}
    spans: dict[MeetingKey, dict[int, tuple[int, int]]] = {}
    for pair in ((0, 1), (1, 2), (2, 3)):
        for i in range(5):
            end = 1_000_000 * (i + 1)
            spans["pair", pair, i] = {r: (end - 50_000 + ahead[r], end + ahead[r]) for r in pair}
    offsets = clock_offsets(spans, (0, 1, 2, 3))
    assert [offsets[r] - offsets[0] for r in range(4)] == [ahead[r] for r in range(4)]


def test_clocks_that_agree_are_left_alone() -> None:
    early, late = [(100_000, 300_000), (400_000, 700_000)], [(250_000, 301_000), (500_000, 699_000)]
    assert set(recorded_meetings(job(all_reduces(0, early), all_reduces(1, late))).clock_ns.values()) == {0}


def test_early_senders_do_not_speak_against_the_clocks() -> None:
    """The root of a broadcast may be gone before the others come; only those who all wait for each other tell the time."""
    traces = []
    for rank in range(2):
        trace = Trace(rank=rank, world_size=2)
        trace.step(1, 0, 1_000_000)
        for index in range(6):
            at = 100_000 * index + 40_000 * rank
            trace.collective(at, at + 9_000, Work(20, at + 10_000, at + 30_000, "ncclKernel_Broadcast_RING"), name="broadcast")
        at = 700_000
        trace.collective(at, at + 9_000, Work(20, at + 10_000, at + 30_000, NCCL))
        traces.append(trace)
    assert set(recorded_meetings(job(*traces)).clock_ns.values()) == {0}


def test_peers_without_a_trace_arrive_as_late_as_the_recording_needs() -> None:
    trace = all_reduces(0, [(100_000, 150_000), (400_000, 700_000)], world_size=4)
    cohort = recorded(job(trace, world_size=4)).cohorts[0]
    # The quicker of two equal messages shows how long one moves; the rest of the slower one was waiting.
    assert cohort.timing.duration_ns.reshape(-1).tolist() == [50_000, 50_000]
    assert cohort.timing.absent_ns.reshape(-1).tolist() == [100_000, 650_000]


def test_a_collective_that_one_trace_lacks_does_not_stop_the_others() -> None:
    whole = all_reduces(0, [(100_000, 150_000), (400_000, 450_000), (500_000, 560_000)])
    shorter = all_reduces(1, [(100_000, 150_000), (400_000, 450_000)])
    ends = simulate(recorded(job(whole, shorter)).cohorts)
    assert ends.cohorts[0].work_end_ns[-1].item() == 560_000


def test_members_nobody_knows_count_as_absent() -> None:
    said = {"Process Group Name": "3", "Group size": 2}
    traces = [all_reduces(rank, [(100_000, 150_000), (200_000, 300_000)], 4, said) for rank in range(2)]
    for cohort in recorded(job(*traces, world_size=4)).cohorts:
        assert cohort.timing.absent_ns.reshape(-1).tolist() == [100_000, 250_000]


def test_timings_do_not_depend_on_when_the_run_was() -> None:
    spans = [(100_000, 300_000), (400_000, 700_000)]
    one = job(all_reduces(0, spans), all_reduces(1, spans))
    other = job(all_reduces(0, spans, epoch_ns=10**18), all_reduces(1, spans, epoch_ns=10**18))
    for a, b in zip(recorded(one).cohorts, recorded(other).cohorts, strict=True):
        assert all(np.array_equal(getattr(a.timing, name), getattr(b.timing, name)) for name in vars(a.timing))


def test_one_typical_latency_and_spacing_per_kind_of_work() -> None:
    trace = Trace()
    for index in range(8):
        at = 100_000 * index
        trace.launch(at, at + 4_000, Work(7, at + 6_000 + 10 * index, at + 50_000))
        trace.launch(at + 10_000, at + 14_000, Work(7, at + 50_700, at + 60_000))
    _, timing = timing_of(trace)
    assert set(timing["latency_ns"]) == {2_035}
    assert set(timing["spacing_ns"]) == {700}


def test_the_same_recording_gives_the_same_timings() -> None:
    workload = job(all_reduces(0, [(100_000, 300_000)]), all_reduces(1, [(200_000, 300_000)]))
    again = replace(workload)
    for a, b in zip(recorded(workload).cohorts, recorded(again).cohorts, strict=True):
        assert all(np.array_equal(getattr(a.timing, name), getattr(b.timing, name)) for name in vars(a.timing))
