"""Host time in the order in which it is spent: nothing is lost or counted twice, and every piece stands where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.host_time import Part, columns_of, host_time
from tests.models.test_host_model import ENGINE, program

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._models.host.columns import HostColumns, Piece, _optimizer_cost, host_columns
from steptime._models.host.model import STEP, HostCost, HostModel, OpCost, Speed, read_host
from steptime._ops.catalogue import HostClass
from steptime._program.execution import to_program
from steptime._program.formats.execution_trace import read
from steptime._program.program import Phase, Program
from steptime.errors import InputError
from steptime_lab.measurements.shipped import shipped_programs

# A host with costs of its own, so that sums over shipped programs stay when the shipped host is fitted again.
MODEL = HostModel(
    recipe={}, reference_cpu_ns=1000.0, reference_launch_ns=5000.0, launch_ns=4000.0, binding_ns=500.0, first_call=1.5,
    ops={"aten::mm": OpCost(6000.0, launches=1.0), "aten::addmm": OpCost(7000.0, launches=1.5), "aten::view": OpCost(1500.0),
         "aten::empty": OpCost(1800.0), "aten::sort": OpCost(9000.0, launches=3.0), "aten::mul": OpCost(2500.0, launches=1.0),
         "aten::copy_": OpCost(3000.0, launches=1.0), "aten::_foreach_add_": OpCost(4000.0, 300.0, launches=2.0)},
    classes={HostClass.VIEW: OpCost(1100.0), HostClass.ALLOCATION: OpCost(1700.0),
             HostClass.LAUNCH: OpCost(2300.0, launches=1.0), HostClass.FOREACH: OpCost(3100.0, 290.0, launches=1.0),
             HostClass.COLLECTIVE: OpCost(20500.0)},
    around={
        "between forward": HostCost(7000.0), "record graph": HostCost(1300.0), "python_function forward": HostCost(5400.0),
        "engine node": HostCost(3010.0), "backward_call all": HostCost(241e3), "ddp_forward_fixed ddp": HostCost(99e3),
        "ddp_backward ddp": HostCost(10300.0), "ddp_bucket ddp": HostCost(36500.0), "stream_wait stream_wait": HostCost(2530.0),
        "table_batched forward_sgd": HostCost(14100.0, 4000.0), "collective_call all_reduce": HostCost(22400.0, 4000.0),
        "collective_call all_to_all_single": HostCost(26300.0, 4000.0), "zero_grad to_none": HostCost(527.0),
        "zero_grad_fixed to_none": HostCost(16100.0), "optimizer_step adam_foreach": HostCost(6200.0),
        "optimizer_step_fixed adam_foreach": HostCost(125e3), "optimizer_step adam_for_loop": HostCost(49200.0),
        "optimizer_step_fixed adam_for_loop": HostCost(43500.0), "optimizer_step sgd_foreach": HostCost(735.0),
        "optimizer_step_fixed sgd_foreach": HostCost(32100.0), "optimizer_step adam_fused": HostCost(1800.0),
        "optimizer_step_fixed adam_fused": HostCost(66600.0),
    },
)  # fmt: skip
GIVEN = {"aten::mm": 31.0, "aten::addmm": 17.0, "aten::copy_": 11.0, "aten::native_layer_norm": 25.0,
         "TableBatchedLookupFunction": 2.0, "TableBatchedLookupFunctionBackward": 5.0, "MeanBackward0": 3.0}  # fmt: skip
# Found with the sum over ops that came before the columns did: total at speed 1, at a step's speed, and launches.
# The speed of steps when these sums were found.
_THEN = Speed.of_cpu(2.32)
SHIPPED = {
    ("dlrm-t00-b2048-r4", False): (1731035.0, 3764501.5999999996, 55.5),
    ("dlrm-t00-b2048-r4", True): (1840961.3736263737, 4022299.8131868127, 58.3),
    ("resnet50-b32-r1-bf16", False): (7982247.0, 17091721.439999998, 361.5),
    ("gpt2-b64-r4", False): (14534760.0, 31462928.399999995, 577.5),
    ("gpt2-b64-r4", True): (12490481.59234064, 28690069.167850837, 73.81481481481467),
}


def test_python_before_a_view_is_that_of_views_where_it_was_measured() -> None:
    costs = {**MODEL.around, "between view": HostCost(1500.0)}
    plain = program([("aten::view", -1), ("aten::mm", -1)])
    both = [host_columns(plain, replace(MODEL, around=around)) for around in (MODEL.around, costs)]
    before = [each.cpu_ns[each.piece == Piece.PYTHON].tolist() for each in both]
    assert before == [[7000.0, 7000.0], [1500.0, 7000.0]]


def test_a_loop_over_parameters_costs_its_own_for_each_however_many_additions_it_makes() -> None:
    loop = ["aten::lerp_", "aten::addcmul_", "aten::add_", "aten::addcdiv_"] * 3
    columns = host_columns(program([("Optimizer.step#Adam.step", -1), *((name, 0) for name in loop)]), MODEL)
    assert columns.cpu_ns.sum() == pytest.approx(3 * 49200.0 + 43500.0)


def test_a_loop_of_an_optimiser_that_nobody_measured_costs_what_its_ops_do() -> None:
    columns = host_columns(program([("Optimizer.step#Lamb.step", -1), ("aten::mul", 0), ("aten::mm", 0)]), MODEL)
    assert pieces(columns) == [(Piece.PYTHON, 1), (Piece.OP, 1), (Piece.PYTHON, 2), (Piece.OP, 2)]


LEAF = "torch::autograd::AccumulateGrad"
HOOK = "torch::distributed::reducer::mul_out"
COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
Nodes = list[tuple[str, int]]
# What a step is made of: each a tree by itself.
TREES: Sequence[Nodes] = (
    [("aten::mm", -1)],
    [("aten::linear", -1), ("aten::view", 0), ("aten::addmm", 0)],
    [("aten::mul", -1), ("aten::mul", 0)],
    [("Lookup", -1), ("aten::empty", 0), ("aten::sort", 0), ("aten::copy_", 2)],
    [("DistributedDataParallel.forward", -1), ("aten::relu", 0), ("aten::mm", 0)],
    [("c10d::alltoall_base_", -1), ("record_param_comms", 0), ("nccl:all_to_all", 1)],
    [("Finish", -1), ("record_param_comms", 0), ("aten::view", 0)],
    [(ENGINE + "MmBackward0", -1), ("MmBackward0", 0), ("aten::mm", 1), ("aten::mm", 1)],
    [(ENGINE + "LookupBackward", -1), ("LookupBackward", 0), ("aten::empty", 1), ("aten::sort", 1)],
    [(ENGINE + LEAF, -1), (LEAF, 0), (HOOK, 0), ("aten::mul", 2), ("c10d::allreduce_", 0)],
    [("Optimizer.zero_grad#Adam.zero_grad", -1)],
    [("Optimizer.step#Adam.step", -1), ("aten::_foreach_add_", 0), ("aten::mul", 0), ("aten::mul", 2)],
)


def joined(trees: Sequence[Nodes]) -> Nodes:
    nodes: Nodes = []
    for tree in trees:
        first = len(nodes)
        nodes += [(name, parent + first if parent >= 0 else -1) for name, parent in tree]
    return nodes


steps_of_trees = st.lists(st.sampled_from(TREES), min_size=1, max_size=15).map(joined)
launches_by_op = st.none() | st.dictionaries(
    st.sampled_from(["aten::mm", "aten::mul", "aten::sort", "aten::copy_", "aten::relu", "Lookup", "LookupBackward"]),
    st.floats(0.25, 40.0),
)


def pieces(columns: HostColumns) -> list[tuple[Piece, int]]:
    return [(Piece(piece), op) for piece, op in zip(columns.piece.tolist(), columns.op.tolist(), strict=True)]


def shipped_program(name: str) -> Program:
    programs = shipped_programs(name)
    owner = max(programs.traces, key=lambda rank: len(programs.traces[rank]))
    trace = read(programs.traces[owner].encode(), programs.name)
    return to_program(trace, rank=owner, world_size=len(programs.owners))


@pytest.mark.parametrize("name", sorted({name for name, _ in SHIPPED}))
def test_shipped_programs_cost_what_they_did_when_only_their_sum_was_known(name: str) -> None:
    found = shipped_program(name)
    for counted in {counted for known, counted in SHIPPED if known == name}:
        columns = columns_of(found, MODEL, GIVEN if counted else None)
        time = host_time(found, MODEL, GIVEN if counted else None)
        bare_ns, step_ns, launches = SHIPPED[name, counted]
        assert (time.total_ns(Speed()), time.total_ns(_THEN), time.launches) == pytest.approx(
            (bare_ns, step_ns, launches), rel=1e-12
        )
        assert columns.time_ns(_THEN).sum() == pytest.approx(step_ns, rel=1e-12)
        assert set(columns.step.tolist()) == {0}


@given(steps_of_trees, launches_by_op)
def test_columns_sum_up_to_the_time_of_every_phase_and_each_piece_to_its_own(
    nodes: Nodes, launches: dict[str, float] | None
) -> None:
    columns, time = columns_of(program(nodes), MODEL, launches), host_time(program(nodes), MODEL, launches)
    taken = columns.time_ns(STEP)
    for phase, phase_ns in time.phase_ns(STEP).items():
        assert taken[columns.phase == phase].sum() == pytest.approx(phase_ns)
    assert np.allclose(columns.before_ns + columns.between_ns + columns.after_ns, columns.cpu_ns, rtol=1e-12)
    assert min(column.min() for column in (columns.before_ns, columns.between_ns, columns.after_ns, columns.launches)) >= 0.0
    silent = columns.launches == 0.0
    assert np.array_equal(columns.before_ns[silent], columns.cpu_ns[silent])
    assert not columns.launch_ns[silent].any()


@given(steps_of_trees, launches_by_op.filter(lambda launches: launches is not None))
def test_every_launch_that_is_given_stands_in_one_column(nodes: Nodes, launches: dict[str, float]) -> None:
    columns = columns_of(program(nodes), MODEL, launches)
    called = {name for name, _ in nodes}
    collectives = np.isin(columns.piece, (Piece.COLLECTIVE, Piece.DDP_BUCKET))
    assert columns.launches[~collectives].sum() == pytest.approx(sum(launches[name] for name in called & set(launches)))
    assert (columns.launches[collectives] == 1.0).all()


@given(steps_of_trees, launches_by_op)
def test_pieces_stand_in_the_order_of_the_program(nodes: Nodes, launches: dict[str, float] | None) -> None:
    last = list(range(len(nodes)))  # per op, the last one inside it
    for row in reversed(range(len(nodes))):
        parent = nodes[row][1]
        if parent >= 0:
            last[parent] = max(last[parent], last[row])
    found = pieces(columns_of(program(nodes), MODEL, launches))
    places = [last[op] if piece is Piece.OWN_LAUNCHES else op for piece, op in found]
    assert all(one <= other for one, other in pairwise(places))


@given(steps_of_trees, launches_by_op)
def test_two_steps_cost_each_what_one_does(nodes: Nodes, launches: dict[str, float] | None) -> None:
    one, twice = program(nodes), program(joined([nodes, nodes]))
    step = np.repeat(np.arange(2), len(nodes)).astype(np.int32)
    two = replace(twice, ops=twice.ops.replace(step=step), steps=(0, 1))
    first, second = (host_time(each, MODEL, launches) for each in (one, two))
    assert second.total_ns() == pytest.approx(first.total_ns())
    assert second.launches == pytest.approx(first.launches)
    columns = columns_of(two, MODEL, launches)
    assert columns.time_ns()[columns.step == 1].sum() == pytest.approx(first.total_ns())


def test_an_op_of_the_forward_pass_comes_after_python_and_the_recording_of_its_graph() -> None:
    columns = columns_of(program(joined([TREES[1]])), MODEL)
    assert pieces(columns) == [(Piece.PYTHON, 0), (Piece.RECORD, 0), (Piece.OP, 1), (Piece.OP, 2)]
    assert columns.cpu_ns.tolist() == [7000.0, 1300.0, 1000.0 * 1.5, 6500.0 * 1.5]
    assert columns.launch_ns.tolist() == [0.0, 0.0, 0.0, 4000.0 * 1.5 * 1.5]
    assert columns.launches.tolist() == [0.0, 0.0, 0.0, 1.5]


def test_a_backward_pass_is_called_once_on_the_main_thread_before_its_first_node() -> None:
    nodes = joined([TREES[0], TREES[7], TREES[7], TREES[11]])
    columns = columns_of(program(nodes), MODEL)
    found = pieces(columns)
    call = found.index((Piece.BACKWARD_CALL, 1))
    assert [piece for piece, _ in found].count(Piece.BACKWARD_CALL) == 1
    assert found[call + 1] == (Piece.NODE, 1)
    assert columns.phase[call] == Phase.BACKWARD
    assert columns.thread.tolist() == [0] * (call + 1) + [1] * 6 + [0]


def test_most_of_an_op_lies_before_its_launch_and_little_between_two() -> None:
    columns = columns_of(program([("aten::mm", -1), ("aten::sort", -1), ("aten::view", -1)]), MODEL)
    one, three, none = np.flatnonzero(columns.piece == Piece.OP).tolist()
    assert 0.8 < columns.before_ns[one] / columns.cpu_ns[one] < 0.9
    assert columns.between_ns[one] == 0.0
    assert 0.0 < columns.between_ns[three] < columns.after_ns[three] * 2 < columns.before_ns[three]
    assert columns.before_ns[none] == columns.cpu_ns[none]


def test_a_function_in_python_prepares_each_of_its_launches_after_the_ops_in_it_and_the_first_for_longest() -> None:
    columns = columns_of(program(TREES[8]), MODEL, {"LookupBackward": 3.0})
    assert pieces(columns)[-1] == (Piece.OWN_LAUNCHES, 1)
    assert columns.before_ns[-1] == pytest.approx(1.5 * 14100.0)
    assert columns.between_ns[-1] == pytest.approx(2 * 14100.0)
    assert columns.after_ns[-1] == 0.0


def test_what_was_measured_as_a_whole_says_how_many_launches_are_in_it() -> None:
    columns = columns_of(program(joined([TREES[9], [(COPY, -1), ("aten::copy_", 0)], TREES[11]])), MODEL)
    found = {Piece(piece): place for place, piece in enumerate(columns.piece.tolist())}
    launches = {piece: columns.launches[found[piece]] for piece in found}
    assert (launches[Piece.DDP_GRADIENT], launches[Piece.DDP_BUCKET], launches[Piece.DDP_COPY]) == (1.0, 1.0, 1.0)
    assert launches[Piece.OPTIMIZER_STEP] == 3.0  # an op around itself launches once
    assert columns.cpu_ns[found[Piece.DDP_COPY]] == 0.0
    # Only launches that cost apart are those of the sum.
    assert host_time(program(TREES[11]), MODEL).launches == 0.0


def test_a_collective_is_launched_once_and_waiting_for_it_never() -> None:
    wait = [(ENGINE + "StartBackward", -1), ("StartBackward", 0), ("record_param_comms", 1)]
    columns = columns_of(program(joined([TREES[5], wait])), MODEL)
    found = {Piece(piece): place for place, piece in enumerate(columns.piece.tolist())}
    assert columns.launches[found[Piece.COLLECTIVE]] == 1.0
    assert columns.launches[found[Piece.STREAM_WAIT]] == 0.0
    assert 0.0 < columns.after_ns[found[Piece.COLLECTIVE]] < columns.before_ns[found[Piece.COLLECTIVE]]


def test_what_was_never_measured_is_said_with_the_columns() -> None:
    assert "aten::cosh" in columns_of(program([("aten::cosh", -1)]), MODEL).warnings[0]
    assert host_time(program([("aten::mm", -1)]), MODEL).costs[Phase.FORWARD, Part.LAUNCHES] == HostCost(0.0, 6000.0)


def test_a_program_without_ops_is_one_clear_error() -> None:
    with pytest.raises(InputError, match="no ops"):
        columns_of(program([]), MODEL)


def test_step_counts_on_the_device_cost_adam_their_own_calls() -> None:
    usual = ["add_", "lerp_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_", "mul_"]
    more = ["pow", "pow", "sub_", "sub_", "neg_", "div_", "reciprocal_", "sqrt_", "div_"]
    plain, capturable = (
        _optimizer_cost(MODEL, "Optimizer.step#AdamW.step", [(f"aten::_foreach_{name}", 20) for name in names], frozenset())[0]
        for names in (usual, usual + more)
    )
    assert plain is not None
    assert capturable is not None
    class_cost = MODEL.classes[HostClass.FOREACH]
    assert capturable.cpu_ns - plain.cpu_ns == pytest.approx(len(more) * (class_cost.cpu_ns + 20 * class_cost.per_tensor_ns))


def checkpointed(function: str, inside: Nodes, numbers: Sequence[int]) -> Program:
    """One node of the backward pass, whose function has these ops with these numbers of autograd."""
    plain = program([(ENGINE + function, -1), (function, 0), *inside])
    return replace(plain, ops=replace(plain.ops, sequence=np.array([-1, 7, *numbers], dtype=plain.ops.sequence.dtype)))


PYTHON = (Piece.FUNCTION, Piece.PYTHON, Piece.RECORD)


def test_what_a_checkpoint_computes_again_is_called_from_python() -> None:
    inside = [("aten::mm", 1), ("aten::detach", 2), ("aten::view", 1), ("aten::detach", 1), ("aten::mm", 1)]
    again = host_columns(checkpointed("MulBackward0", inside, [8, -1, 9, -1, -1]), MODEL)
    assert [(piece, row) for piece, row in pieces(again) if piece in PYTHON] == [
        (Piece.FUNCTION, 1), (Piece.PYTHON, 2), (Piece.RECORD, 2), (Piece.PYTHON, 4), (Piece.RECORD, 4),
    ]  # fmt: skip
    more = host_columns(checkpointed("MulBackward0", [*inside, ("aten::detach", 1)], [8, -1, 9, -1, -1, -1]), MODEL)
    spent = [each.cpu_ns[each.piece == Piece.FUNCTION].sum() for each in (again, more)]
    assert 0 < spent[0] < spent[1]


def test_a_reentrant_checkpoint_costs_the_same_however_much_its_block_keeps() -> None:
    inside = [("aten::mm", 1), ("aten::view", 1), (ENGINE + "ViewBackward0", 1), ("ViewBackward0", 4), ("aten::detach", 5)]
    columns = host_columns(checkpointed("CheckpointFunctionBackward", inside, [8, 9, -1, 9, -1]), MODEL)
    assert [row for piece, row in pieces(columns) if piece in PYTHON] == [1, 2, 2, 3, 3]


def test_nodes_that_compute_nothing_again_have_no_python() -> None:
    twice = [("aten::mm", 1), ("aten::mm", 1)]  # numbered where gradients are differentiated themselves
    for numbers in ([-1, -1], [8, 9]):
        assert not set(PYTHON) & {
            piece for piece, _ in pieces(host_columns(checkpointed("MulBackward0", twice, numbers), MODEL))
        }


def test_a_checkpointed_layer_takes_as_much_python_as_hosts_were_seen_to() -> None:
    spent_ms = []
    for recompute in ("none", "full"):
        layers = Transformer(2, 768, 12, 128, 1000, batch=16, dropout=0.1, precision="bf16-autocast", recompute=recompute)
        columns = host_columns(build(layers).programs[0], read_host("xeon-h200"))
        spent_ms.append(columns.time_ns()[np.isin(columns.piece, PYTHON)].sum() / 1e6)
    # 1.2 to 1.8 ms a block, as modules of other people's models (H200, torch 2.11, 2026-11-19).
    assert 1.0 < (spent_ms[1] - spent_ms[0]) / 2 < 1.8
