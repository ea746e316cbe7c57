"""Laws of the host of compiled steps: each frame is paid once, inside wrappers nothing of Python is, a graph is one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from tests.models.test_host_columns import MODEL, pieces
from tests.models.test_host_model import ENGINE, program

from steptime._models.estimate import Estimate, Source
from steptime._models.host.columns import Piece, host_columns
from steptime._models.host.compiled import Counts, FrameCounts
from steptime._models.host.model import STEP, HostCost
from steptime._models.kernels.question import LaunchTime
from steptime._models.memory.peak import peak_memory
from steptime._ops.compiled import Frame, frame_of
from steptime._ops.table import op_table
from steptime._platforms.platform import Platform
from steptime._program.program import CallKind, Program, Signature, Tensor
from steptime._sim.modelled.issue import DeviceWork, OpWork, issue

COSTS = {
    "region": 11e3, "region_taken": 300.0, "function": 13e3, "function_given": 700.0, "backward": 17e3, "backward_taken": 200.0,
    "kernel": 3e3, "argument": 50.0, "empty": 400.0, "graph": 19e3, "replay": 2e3, "replay_kernel": 10.0,
}  # fmt: skip
HOST = replace(
    MODEL,
    around={
        **MODEL.around,
        **{f"compiled {name}": HostCost(cost, 4e3 * (name == "replay")) for name, cost in COSTS.items()},
    },
)
REGION, WRAPPER, GRAPH = "Torch-Compiled Region: 0/0", "## Call CompiledFxGraph fa ##", "cudagraph:fa"
KERNEL = "triton_poi_fused_relu_0"
FORWARD = [(REGION, -1), ("CompiledFunction", 0), (WRAPPER, 1), ("aten::empty_strided", 2), ("aten::mm", 2), (KERNEL, 2)]


def tensor(storage: int) -> Tensor:
    return Tensor((4, 4), "float32", (4, 1), storage, storage, device="cuda:0")


def with_tensors(given: Program, arguments: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> Program:
    """Ops of these rows read and write these storages, generated kernels as such say it."""
    signatures, numbers = list(given.signatures), given.ops.signature.copy()
    for row, (read, written) in arguments.items():
        reads, writes = (tuple(map(tensor, each)) for each in (read, written))
        generated = given.names[given.ops.name[row]].startswith("triton_")
        signatures.append(Signature((reads, writes, "{}")) if generated else Signature(reads, writes))
        numbers[row] = len(signatures) - 1
    return replace(given, signatures=tuple(signatures), ops=given.ops.replace(signature=numbers))


def works(rows: list[int]) -> DeviceWork:
    estimate = Estimate(2000.0, 1900.0, 2100.0, Source.FITTED, inside=True)
    return DeviceWork(tuple(OpWork(row, (LaunchTime(f"k{row}", 2000.0),), estimate, "made up") for row in rows))


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        (REGION, Frame.REGION), ("CompiledFunction", Frame.FUNCTION), ("CompiledFunctionBackward", Frame.BACKWARD),
        (WRAPPER, Frame.WRAPPER), (GRAPH, Frame.GRAPH), ("aten::mm", None), ("## process_group:init ##", None),
    ],
)  # fmt: skip
def test_frames_are_known_by_their_names(name: str, frame: Frame | None) -> None:
    assert frame_of(name) is frame


def test_a_frame_takes_what_was_there_and_gives_what_is_used_after_it() -> None:
    made = program([*FORWARD, ("aten::mul", -1)])
    # A buffer is taken, the product written into it, the kernel reads it and a weight and writes over the buffer.
    made = with_tensors(made, {3: ((), (7,)), 4: ((1, 2), (7,)), 5: ((7, 3), (7,)), 6: ((7,), (9,))})
    counts = FrameCounts(op_table(made))
    assert counts.of(2) == counts.of(0) == Counts(taken=3, given=1)


def test_a_compiled_call_costs_its_frames_and_no_python_inside() -> None:
    columns = host_columns(program(FORWARD), HOST, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    assert pieces(columns) == [
        (Piece.COMPILED, 0), (Piece.COMPILED, 1), (Piece.COMPILED, 2), (Piece.OP, 3), (Piece.OP, 4), (Piece.OP, 5)
    ]  # fmt: skip
    # The first call of an op in a phase is a cold one, external calls are as from Python.
    assert columns.cpu_ns.tolist() == [11e3, 13e3, 0.0, 400.0, 1.5 * 6000.0, 1.5 * 3e3]
    assert columns.launch_ns.tolist() == [0.0, 0.0, 0.0, 0.0, 1.5 * 4000.0, 1.5 * 4000.0]


def test_tensors_cost_the_frames_around_their_wrapper_and_not_the_region_that_it_resumes() -> None:
    resumed = [(REGION, -1), ("CompiledFunction", 0), (WRAPPER, 1), (KERNEL, 2), (REGION, 0), (WRAPPER, 4), (KERNEL, 5)]
    made = with_tensors(program([*resumed, ("aten::mul", -1)]), {3: ((1, 2), (7,)), 6: ((7,), (8,)), 7: ((8,), (9,))})
    columns = host_columns(made, HOST, [0.0] * 8)
    costs = dict(zip(columns.op.tolist(), columns.cpu_ns.tolist(), strict=False))
    assert costs[2] == 2 * 300.0 + 1 * 700.0
    assert costs[5] == 1 * 300.0


def test_a_kernel_costs_more_with_every_argument() -> None:
    made = [with_tensors(program(FORWARD), {5: (read, (7,))}) for read in ((1,), (1, 2, 3))]
    few, many = (host_columns(each, HOST, [0.0] * 5 + [1.0]).cpu_ns[-1] for each in made)
    assert many - few == pytest.approx(1.5 * 2 * 50.0)


def test_the_backward_of_a_compiled_function_is_a_node_of_the_engine() -> None:
    nodes = [(ENGINE + "CompiledFunctionBackward", -1), ("CompiledFunctionBackward", 0), (WRAPPER, 1), (KERNEL, 2)]
    columns = host_columns(program(nodes), HOST, [0.0, 0.0, 0.0, 1.0])
    assert pieces(columns) == [
        (Piece.BACKWARD_CALL, 0), (Piece.NODE, 0), (Piece.COMPILED, 1), (Piece.COMPILED, 2), (Piece.OP, 3)
    ]  # fmt: skip


def test_a_host_without_such_costs_has_those_of_the_reference_host_as_fast_as_it_is() -> None:
    slow = replace(MODEL, reference_cpu_ns=3.0 * Platform.load("1xh200").host.reference_cpu_ns)
    usual = host_columns(program(FORWARD), Platform.load("1xh200").host, [0.0] * 6)
    columns = host_columns(program(FORWARD), slow, [0.0] * 6)
    frames = columns.piece == Piece.COMPILED
    assert columns.cpu_ns[frames] == pytest.approx(3.0 * usual.cpu_ns[usual.piece == Piece.COMPILED])
    assert columns.cpu_ns[frames].sum() > 0


def graphed(kernels: int) -> Program:
    return program([(WRAPPER, -1), ("aten::copy_", 0), (GRAPH, 0), *((f"triton_{i}", 2) for i in range(kernels))])


@pytest.mark.parametrize("kernels", [1, 40])
def test_a_graph_is_launched_by_one_call_whatever_is_in_it(kernels: int) -> None:
    made = graphed(kernels)
    launches = [0.0, 1.0, 0.0, *[1.0] * kernels]
    host = host_columns(made, HOST, launches)
    assert pieces(host)[-1] == (Piece.REPLAY, 2)
    assert host.cpu_ns[-1] == pytest.approx(19e3 + 2e3 + 10.0 * kernels)
    issued = issue(made, host, works([1, *range(3, 3 + kernels)]), [])
    calls, found = issued.program.calls, issued.program.works
    apis = [issued.program.names[api] for api in calls.api[calls.kind == CallKind.LAUNCH].tolist()]
    assert apis == ["cudaLaunchKernel", "cudaGraphLaunch"]
    assert len(np.unique(found.call[1:])) == 1
    assert [issued.program.names[name] for name in found.name[1:].tolist()] == [f"k{3 + i}" for i in range(kernels)]


def test_kernels_of_a_graph_follow_each_other_more_closely_and_none_is_lost() -> None:
    made, limits = graphed(3), Platform.load("1xh200").device.limits
    launches = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    issued = issue(made, host_columns(made, HOST, launches), works([1, 3, 4, 5]), [])
    spacing = issued.timing(STEP, limits).spacing_ns[:, 0, 0].tolist()
    launched, within = round(limits.dispatch.spacing_of(1)), round(limits.dispatch.graph_spacing_of(1))
    assert spacing == [launched, launched, within, within]
    assert within < launched


def test_a_graph_of_a_script_has_none_of_what_the_compiler_does_about_its_own() -> None:
    alone = host_columns(program([(GRAPH, -1), (KERNEL, 0)]), HOST, [0.0, 1.0])
    assert alone.cpu_ns.tolist() == [2e3 + 10.0]


def test_what_a_graph_makes_is_kept_in_its_pool_and_counts_as_reserved_alone() -> None:
    nodes = [(WRAPPER, -1), (GRAPH, 0), ("aten::empty_strided", 1), (KERNEL, 1)]
    launched = program([(WRAPPER, -1), ("aten::empty_strided", 0), (KERNEL, 0)])
    eager = peak_memory(with_tensors(launched, {1: ((), (7,)), 2: ((1,), (7,))}))
    pooled = peak_memory(with_tensors(program(nodes), {2: ((), (7,)), 3: ((1,), (7,))}))
    assert eager.steady_allocated - pooled.steady_allocated == 512  # a block
    assert pooled.steady_reserved == 2 * eager.steady_reserved  # the pool has a segment of its own


def test_a_compiled_backward_drops_what_it_was_given_where_it_needs_it_last() -> None:
    """A node keeps what it saved until it is done; Inductor's wrapper does not."""
    inside = [("aten::empty_strided", 2), (KERNEL, 2), ("aten::empty_strided", 2), ("triton_poi_fused_1", 2)]
    arguments: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
        0: ((), (5,)),
        4: ((), (7,)),
        5: ((5,), (7,)),
        6: ((), (8,)),
        7: ((7,), (8,)),
    }
    peaks = []
    for frame, within in (("CompiledFunctionBackward", WRAPPER), ("MineBackward", "my label")):
        nodes = [(ENGINE + frame, -1), (frame, 0), (within, 1), *inside]
        made = program([("aten::empty", -1), *((name, parent + 1 if parent >= 0 else -1) for name, parent in nodes)])
        peaks.append(peak_memory(with_tensors(made, arguments)).steady_allocated)
    assert peaks[0] < peaks[1]
