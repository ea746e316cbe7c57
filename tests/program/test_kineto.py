"""Laws of the Kineto reader, on little traces in every spelling."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.program.traces import AUTOGRAD, EPOCH_NS, MAIN, MEMCPY, MEMSET, Spelling, Trace, Work, plain, read_text

from steptime._program.formats.kineto import stream as event_stream
from steptime._program.program import CallKind, Phase, Program, Tensor, WorkKind
from steptime.errors import TraceError

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SPELLINGS: tuple[Spelling, ...] = ("float", "integer", "epoch", "string", "nanoseconds")


def small_run(**options: Any) -> Trace:
    """Two steps: forward on the main thread, backward on autograd's with an all-reduce, whose result the optimiser awaits."""
    trace = Trace(**options)
    for step, at in ((4, 0), (5, 400_000)):
        trace.step(step, at, at + 390_000)
        trace.op("aten::linear", at + 5_000, at + 40_000)
        trace.op("aten::addmm", at + 6_000, at + 39_000)
        trace.launch(at + 10_000, at + 15_000, Work(7, at + 17_000, at + 90_000))
        trace.launch(at + 20_000, at + 24_000, Work(7, at + 91_000, at + 93_000, "Memset (Device)", MEMSET))
        trace.op("autograd::engine::evaluate_function: AddmmBackward0", at + 50_000, at + 80_000, AUTOGRAD)
        trace.op("aten::mm", at + 51_000, at + 70_000, AUTOGRAD)
        trace.launch(at + 52_000, at + 58_000, Work(7, at + 94_000, at + 180_000, "wgrad"), tid=AUTOGRAD)
        trace.collective(at + 72_000, at + 79_000, Work(20, at + 182_000, at + 250_000, NCCL), tid=AUTOGRAD)
        trace.op("Optimizer.step#SGD.step", at + 100_000, at + 200_000)
        trace.wait(at + 110_000, at + 111_000)
        trace.launch(at + 112_000, at + 118_000, Work(7, at + 252_000, at + 300_000, "sgd"))
        trace.call("cudaDeviceSynchronize", at + 130_000, at + 310_000)
    return trace


def names_of(program: Program, rows: Any) -> list[str]:
    return [program.names[i] for i in rows]


def launching_op(program: Program, work: str) -> str:
    """The op whose launch the first work of this name is."""
    row = names_of(program, program.works.name).index(work)
    op = program.calls.op[program.works.call[row]]
    return program.names[int(program.ops.name[op])]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_timestamps_of_every_spelling_give_the_same_nanoseconds(spelling: Spelling) -> None:
    assert plain(small_run(spelling=spelling).read()) == plain(small_run().read())
    assert small_run(spelling=spelling).read().origin_ns == EPOCH_NS


@pytest.mark.parametrize("spelling", ["float", "epoch", "string", "nanoseconds"])
def test_single_nanoseconds_survive(spelling: Spelling) -> None:
    trace = Trace(spelling=spelling)
    trace.launch(123_457, 130_001, Work(7, 987_654_321, 987_654_322))
    program = trace.read()
    assert program.works.start_ns.tolist() == [987_654_321 - 123_457]
    assert program.works.end_ns.tolist() == [987_654_322 - 123_457]
    assert program.origin_ns == EPOCH_NS + 123_457


@given(st.integers(1, 400))
def test_a_trace_cut_into_blocks_of_any_size_reads_the_same(size: int) -> None:
    text = small_run(spelling="epoch", world_size=2).text()
    whole = plain(read_text(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_stream, "CHUNK_BYTES", size)
        assert plain(read_text(text)) == whole


@given(st.randoms(use_true_random=False))
def test_events_in_any_order_read_the_same(rng: random.Random) -> None:
    trace = small_run()
    expected = plain(trace.read())
    rng.shuffle(trace.events)
    assert plain(trace.read()) == expected


def test_the_same_bytes_read_the_same() -> None:
    text = small_run().text()
    assert plain(read_text(text)) == plain(read_text(text))


LAUNCHES = [
    ("cudaLaunchKernel", False), ("cudaLaunchKernelExC", False), ("cudaLaunchCooperativeKernel", False),
    ("cuLaunchKernel", True), ("cuLaunchKernelEx", True), ("cudaGraphLaunch", False), ("cudaLaunchKernel_ptsz", False),
    ("hipLaunchKernel", False), ("hipExtModuleLaunchKernel", False), ("hipModuleLaunchKernel", False),
    ("hipGraphLaunch", False), ("an_api_nobody_has_seen_yet", False),
]  # fmt: skip


@pytest.mark.parametrize(("api", "driver"), LAUNCHES)
def test_every_launch_api_ties_its_work_through_the_correlation_id(api: str, driver: bool) -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(7, 5_000, 6_000))
    trace.launch(10_000, 14_000, Work(7, 15_000, 26_000, "mine"), api=api, driver=driver)
    program = trace.read()
    call = program.works.call[names_of(program, program.works.name).index("mine")]
    assert program.names[program.calls.api[call]] == api
    assert program.calls.kind[call] == CallKind.LAUNCH


MEMORY = [
    ("cudaMemcpyAsync", "Memcpy HtoD (Pinned -> Device)", MEMCPY, WorkKind.COPY),
    ("cudaMemcpy", "Memcpy DtoD (Device -> Device)", MEMCPY, WorkKind.COPY),
    ("cudaMemcpy2DAsync", "Memcpy DtoD (Device -> Device)", MEMCPY, WorkKind.COPY),
    ("cudaMemcpyPeerAsync", "Memcpy PtoP (Device -> Device)", MEMCPY, WorkKind.COPY),
    ("hipMemcpyWithStream", "CopyHostToDevice", MEMCPY, WorkKind.COPY),
    ("cudaMemsetAsync", "Memset (Device)", MEMSET, WorkKind.MEMSET),
    ("cuMemsetD32Async", "Memset (Device)", MEMSET, WorkKind.MEMSET),
]


@pytest.mark.parametrize(("api", "name", "kind", "expected"), MEMORY)
def test_copies_and_memsets_keep_kind_and_bytes(api: str, name: str, kind: str, expected: WorkKind) -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(7, 15_000, 26_000, name, kind, {"bytes": 123}), api=api)
    program = trace.read()
    assert program.works.kind.tolist() == [expected]
    assert program.works.bytes.tolist() == [123]
    assert program.works.call.tolist() == [names_of(program, program.calls.api).index(api)]


def test_all_kernels_of_a_graph_belong_to_its_launch() -> None:
    trace = Trace()
    graph = [Work(7 + index % 2, 10_000 + 5_000 * index, 14_000 + 5_000 * index, f"node{index}") for index in range(6)]
    trace.launch(0, 4_000, *graph, api="cudaGraphLaunch")
    program = trace.read()
    assert len(program.works) == 6
    assert len(set(program.works.call.tolist())) == 1
    assert not program.warnings[1:]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("api", ["cuda", "hip"])
@pytest.mark.parametrize("shapes", [False, True])
def test_a_kernel_never_loses_its_op(old: bool, api: str, shapes: bool) -> None:
    program = small_run(old=old, api=api, shapes=shapes).read()
    assert (program.works.call >= 0).all()
    assert launching_op(program, "gemm") == "aten::addmm"
    assert launching_op(program, "wgrad") == "aten::mm"
    assert launching_op(program, "sgd") == "Optimizer.step#SGD.step"
    assert launching_op(program, NCCL) == "record_param_comms"


def test_an_external_id_that_equals_the_correlation_id_does_not_mislead() -> None:
    """Old traces give a kernel its correlation id as external id, which is the external id of some other op."""
    trace = Trace(old=True)
    for index in range(5):
        trace.op(f"op{index}", 100_000 * index, 100_000 * index + 50_000)
    trace.launch(410_000, 420_000, Work(7, 425_000, 430_000, "mine"))
    assert launching_op(trace.read(), "mine") == "op4"


def test_work_belongs_to_the_step_that_launched_it_not_to_the_one_it_runs_in() -> None:
    trace = Trace()
    trace.step(1, 0, 100_000)
    trace.step(2, 100_000, 200_000)
    trace.launch(90_000, 95_000, Work(7, 150_000, 160_000, "late"))
    trace.launch(110_000, 115_000, Work(7, 170_000, 300_000, "later"))
    assert trace.read().works.step.tolist() == [1, 2]


def test_work_launched_outside_every_step_has_none() -> None:
    trace = Trace()
    trace.launch(0, 5_000, Work(7, 6_000, 7_000))
    trace.step(1, 10_000, 100_000)
    trace.launch(20_000, 25_000, Work(7, 26_000, 30_000))
    trace.launch(110_000, 115_000, Work(7, 116_000, 120_000))
    assert trace.read().works.step.tolist() == [-1, 1, -1]


def test_without_marks_the_whole_window_is_one_step_and_that_is_said() -> None:
    trace = Trace()
    trace.launch(0, 5_000, Work(7, 6_000, 7_000))
    program = trace.read()
    assert program.steps == (0,)
    assert program.works.step.tolist() == [0]
    assert any("no ProfilerStep" in warning for warning in program.warnings)


def test_a_step_begins_before_and_ends_after_the_calls_at_the_same_instant() -> None:
    trace = Trace()
    trace.step(1, 1_000, 9_000)
    trace.launch(1_000, 3_000, Work(7, 4_000, 5_000))
    trace.launch(9_000, 9_000, Work(7, 9_500, 9_900))
    program = trace.read()
    expected = [CallKind.STEP_BEGIN, CallKind.LAUNCH, CallKind.LAUNCH, CallKind.STEP_END]
    assert program.calls.kind.tolist() == expected
    assert program.works.step.tolist() == [1, 1]


def test_the_thread_with_the_step_marks_is_the_main_one_and_comes_first() -> None:
    program = small_run().read()
    assert [(thread.tid, thread.role) for thread in program.threads] == [(MAIN, "main"), (AUTOGRAD, "backward")]


def test_phases_follow_thread_and_optimiser() -> None:
    program = small_run().read()
    phases = dict(zip(names_of(program, program.ops.name), program.ops.phase.tolist(), strict=True))
    assert phases["aten::addmm"] == Phase.FORWARD
    assert phases["aten::mm"] == Phase.BACKWARD
    assert phases["Optimizer.step#SGD.step"] == Phase.OPTIMIZER


def test_arguments_are_read_where_recorded_and_shared_by_equal_calls() -> None:
    program = small_run().read()
    assert len(program.signatures) == 1
    assert program.signatures[0].inputs == (Tensor((2, 3), "float32"), 1)
    assert small_run(shapes=False).read().signatures == ()


CALLS = [
    ("cudaStreamSynchronize", CallKind.STREAM_SYNC), ("hipStreamSynchronize", CallKind.STREAM_SYNC),
    ("cudaEventSynchronize", CallKind.EVENT_SYNC), ("cuCtxSynchronize", CallKind.DEVICE_SYNC),
    ("hipDeviceSynchronize", CallKind.DEVICE_SYNC), ("cudaFree", CallKind.DEVICE_SYNC),
    ("cudaStreamWaitEvent", CallKind.STREAM_WAIT), ("hipStreamWaitEvent", CallKind.STREAM_WAIT),
]  # fmt: skip
NO_CALLS = ["cudaEventRecord", "cudaEventQuery", "cudaFreeAsync", "cudaMalloc", "cudaGetDevice", "cudaLaunchKernel", "INVALID"]


@pytest.mark.parametrize(("api", "kind"), CALLS)
def test_synchronising_calls_are_told_by_name(api: str, kind: CallKind) -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(7, 5_000, 6_000))
    trace.call(api, 10_000, 11_000)
    assert kind in trace.read().calls.kind


@pytest.mark.parametrize("api", NO_CALLS)
def test_calls_without_work_that_hold_nothing_up_are_host_time(api: str) -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(7, 5_000, 6_000))
    trace.call(api, 10_000, 11_000)
    assert trace.read().calls.kind.tolist() == [CallKind.STEP_BEGIN, CallKind.LAUNCH, CallKind.STEP_END]


@pytest.mark.parametrize("described", ["kernel", "op", "both"])
def test_a_collective_is_described_by_its_kernel_or_by_the_op_around_its_launch(described: Any) -> None:
    trace = Trace(rank=1, world_size=4)
    said = {"Process Group Name": "7", "Process Group Ranks": "[1, 3]", "Group size": 2}
    trace.collective(0, 9_000, Work(20, 10_000, 20_000, NCCL), described=described, said=said)
    (collective,) = trace.read().collectives
    assert (collective.kind, collective.group, collective.ranks) == ("all_reduce", "7", (1, 3))
    assert (collective.bytes_in, collective.bytes_out, collective.dtype) == (1024, 1024, "float32")


def test_what_a_kernel_lacks_comes_from_the_op_around_its_launch() -> None:
    trace = Trace(rank=1, world_size=4)
    known = {"Collective name": "all_to_allv", "In msg nelems": 64, "In split size": "[]"}
    said = {"Process Group Name": "7", "Process Group Ranks": "[1, 3]", "In split size": "[10, 54]", "In msg nelems": 99}
    work = Work(20, 10_000, 20_000, "ncclDevKernel_SendRecv", args=known)
    trace.collective(0, 9_000, work, name="all_to_allv", described="op", said=said)
    (collective,) = trace.read().collectives
    assert (collective.kind, collective.group, collective.ranks) == ("all_to_all", "7", (1, 3))
    assert (collective.bytes_in, collective.bytes_out, collective.in_splits) == (4 * 64, 4 * 256, (10, 54))


def test_groups_cut_short_in_the_event_come_from_the_header() -> None:
    groups = [{"pg_name": "7", "ranks": [5, 1, 2]}]
    trace = Trace(rank=1, world_size=6, groups=groups)
    said = {"Process Group Name": "7", "Process Group Ranks": "[1, 2, ...]", "Group size": 3}
    trace.collective(0, 9_000, Work(20, 10_000, 20_000, NCCL), said=said)
    assert trace.read().collectives[0].ranks == (1, 2, 5)


def test_a_group_nobody_describes_is_everyone() -> None:
    trace = Trace(rank=1, world_size=3)
    trace.collective(0, 9_000, Work(20, 10_000, 20_000, NCCL), described="no")
    (collective,) = trace.read().collectives
    assert (collective.kind, collective.group, collective.ranks) == ("all_reduce", "", (0, 1, 2))


def test_members_of_a_smaller_group_nobody_lists_are_not_known() -> None:
    trace = Trace(rank=1, world_size=8)
    trace.collective(0, 9_000, Work(20, 10_000, 20_000, NCCL), said={"Process Group Name": "3", "Group size": 2})
    assert trace.read().collectives[0].ranks == ()


def test_a_world_nobody_states_is_as_large_as_its_groups_and_that_is_said() -> None:
    trace = Trace(rank=None, world_size=None)
    trace.collective(0, 9_000, Work(20, 10_000, 20_000, NCCL), said={"Process Group Name": "0", "Group size": 4})
    program = trace.read()
    assert (program.world_size, program.collectives[0].ranks) == (4, (0, 1, 2, 3))
    assert any("how many ranks" in warning for warning in program.warnings)


def test_both_sides_of_a_message_name_the_same_pair() -> None:
    found = []
    for rank, name in ((2, "send"), (5, "recv")):
        trace = Trace(rank=rank, world_size=8)
        said = {"Process Group Name": "0", "Group size": 8, "Src Rank": 2, "Dst Rank": 5}
        trace.collective(0, 9_000, Work(20, 10_000, 20_000, "ncclDevKernel_SendRecv"), name=name, said=said)
        (collective,) = trace.read().collectives
        assert collective.kind == name
        found.append((collective.group, collective.ranks, collective.sequence, collective.root))
    assert found[0] == found[1]
    assert found[0][1:] == ((2, 5), 0, 5)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all_to_all"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("void ncclKernel_AllGather_TREE_LL", "all_gather"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
    ],
)
def test_a_collective_nobody_describes_is_told_by_its_kernel(kernel: str, kind: str) -> None:
    trace = Trace(world_size=2)
    trace.launch(0, 4_000, Work(20, 10_000, 20_000, kernel))
    program = trace.read()
    assert program.works.kind.tolist() == [WorkKind.COLLECTIVE]
    assert program.collectives[0].kind == kind


@pytest.mark.parametrize("kernel", ["reduce_kernel", "void at::native::reduce_1Block", "gather_nccl_like", "Memcpy DtoD"])
def test_other_kernels_are_no_collectives(kernel: str) -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(20, 10_000, 20_000, kernel))
    assert trace.read().collectives == ()


def test_collectives_are_counted_per_group_from_the_first_step_and_backwards_before_it() -> None:
    trace = Trace(world_size=2)
    at = 0
    for step in (None, 1, 2, None):
        if step is not None:
            trace.step(step, at, at + 100_000)
        for name in ("a", "b", "a"):
            trace.collective(
                at + 5_000, at + 14_000, Work(20, at + 15_000, at + 20_000, NCCL), said={"Process Group Name": name}
            )
            at += 25_000
        at += 30_000
    program = trace.read()
    counted = [(c.group, c.sequence) for c in program.collectives]
    assert [n for g, n in counted if g == "a"] == [-2, -1, 0, 1, 2, 3, 4, 5]
    assert [n for g, n in counted if g == "b"] == [-1, 0, 1, 2]


def test_a_lost_launch_does_not_shift_the_count_of_collectives() -> None:
    whole, lossy = Trace(world_size=2), Trace(world_size=2)
    for trace in (whole, lossy):
        trace.step(1, 0, 100_000)
        for index in range(4):
            # The device is far behind the host: launches come every 10 us, collectives every 50 us.
            at, begun = 10_000 * index, 20_000 + 50_000 * index
            trace.collective(at, at + 9_000, Work(20, begun, begun + 40_000, NCCL))
    lossy.events = [e for e in lossy.events if not (e["cat"] == "cuda_runtime" and e["args"]["correlation"] == 4)]
    ends = [(program.works.end_ns[row], program.collectives[program.works.collective[row]].sequence)
            for program in (whole.read(), lossy.read()) for row in range(4)]  # fmt: skip
    assert ends[:4] == ends[4:]


def test_rank_and_world_size_come_from_the_header_before_the_name() -> None:
    program = small_run(rank=3, world_size=5).read("rank7.json")
    assert (program.rank, program.world_size, program.meta["rank_said"]) == (3, 5, True)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3), ("run/rank-12.trace.json.gz", 12), ("worker_7.pt.trace.json", 7), ("kineto_3.json.gz", 3),
        ("job.4.json", 4), ("all.tar.gz:deep/rank_2.json", 2), ("trace.json", None), ("ranking_model.json", None),
        ("host_1234.1699345678901.pt.trace.json", None), ("Apr_03_18_51_38.1102.pt.trace.json", None),
    ],
)  # fmt: skip
def test_a_rank_not_in_the_header_is_taken_from_the_name(name: str, rank: int | None) -> None:
    program = small_run(rank=None, world_size=None).read(name)
    assert program.rank == (rank or 0)
    assert program.meta["rank_known"] == (rank is not None)
    assert not program.meta["rank_said"]


def test_the_device_is_named() -> None:
    assert small_run().read().device_name == "Toy GPU"


def test_a_bare_array_of_events_is_read() -> None:
    trace = small_run()
    text = trace.text()
    array = text[text.index(b'[{"ph"') : text.rindex(b"]") + 1]
    assert len(read_text(array).works) == len(trace.read().works)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"not json", b'{"traceEvents": []}', b'{"traceEvents": {}}'])
def test_what_holds_no_event_is_one_clear_line_that_names_the_file(text: bytes) -> None:
    with pytest.raises(TraceError, match=r"^here\.json: ") as failure:
        read_text(text, "here.json")
    assert "\n" not in str(failure.value)


def test_numbers_written_as_text_are_read_and_cost_nothing_else() -> None:
    trace = small_run()
    for event in trace.events:
        event["tid"] = str(event["tid"])
        event["args"] = {k: str(v) if k in ("correlation", "stream", "device") else v for k, v in event["args"].items()}
    assert plain(trace.read()) == plain(small_run().read())


def test_an_event_without_a_usable_time_is_left_out_and_counted() -> None:
    trace = small_run()
    text = trace.text().replace(b'"ts": 17.000', b'"ts": "soon"', 1)
    program = read_text(text)
    assert len(program.works) == len(trace.read().works) - 1
    assert any("1 events without a usable time" in warning for warning in program.warnings)


def test_step_numbers_that_occur_twice_are_replaced_by_their_order_and_that_is_said() -> None:
    trace = Trace()
    trace.step(3, 0, 10_000)
    trace.step(3, 20_000, 30_000)
    trace.launch(21_000, 25_000, Work(7, 26_000, 27_000))
    program = trace.read()
    assert program.steps == (0, 1)
    assert program.works.step.tolist() == [1]
    assert any("twice" in warning for warning in program.warnings)


def test_two_devices_of_one_process_keep_their_streams_apart() -> None:
    trace = Trace()
    trace.launch(0, 4_000, Work(7, 5_000, 6_000))
    trace.launch(10_000, 14_000, replace(Work(7, 15_000, 16_000), args={"device": 1}))
    program = trace.read()
    assert sorted((s.device, s.id) for s in program.streams) == [(0, 7), (1, 7)]


def test_names_come_in_the_same_order_whatever_the_hash_seed() -> None:
    program = "from steptime._program.load import load; print(load(['examples/prefetch_sync']).programs[0].names)"
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "3")
    ]
    assert said[0] == said[1] != b""
