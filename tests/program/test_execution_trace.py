"""Laws of the execution-trace reader, on hand-written documents of each schema."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime._program.collectives import collective_kind
from steptime._program.execution import ExecutionTrace, to_program
from steptime._program.formats import TraceFile, execution_trace, opened
from steptime._program.program import CallKind, Phase, Tensor, WorkKind
from steptime.errors import InputError, TraceError

Json = dict[str, Any]


def flat(id: int, name: str, parent: int = 2, **more: Any) -> Json:
    """A node as schemas 1.0.0 and 1.0.1 write it."""
    node = {
        "name": name, "id": id, "rf_id": id + 100, "parent": parent, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1,
        "fw_tid": 0, "op_schema": "", "inputs": [], "input_shapes": [], "input_types": [], "outputs": [],
        "output_shapes": [], "output_types": [],
    }  # fmt: skip
    return {**node, **more}


def nested(
    id: int, name: str, parent: int = 2, inputs: Json | None = None, outputs: Json | None = None, tid: int = 1, **attrs: Any
) -> Json:
    """A node as 1.0.2-chakra and later write it."""
    nothing: Json = {"values": [], "shapes": [], "types": []}
    values = {"rf_id": id + 100, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": tid, "fw_tid": 0, "op_schema": "", **attrs}
    kinds = {int: "uint64", str: "string"}
    listed = [{"name": key, "type": kinds[type(value)], "value": value} for key, value in values.items()]
    sides = {"inputs": inputs or nothing, "outputs": outputs or nothing}
    return {"id": id, "name": name, "ctrl_deps": parent, **sides, "attrs": listed}


def document(nodes: list[Any], schema: str = "1.0.1") -> bytes:
    head = [flat(1, "[pytorch|profiler|execution_trace|process]", 1), flat(2, "[pytorch|profiler|execution_trace|thread]", 1)]
    text = {"schema": schema, "pid": 1, "time": "2024-01-01 00:00:00", "start_ts": 1, "nodes": [*head, *nodes], "finish_ts": 2}
    return json.dumps(text).encode()


def read(nodes: list[Any], schema: str = "1.0.1") -> ExecutionTrace:
    return execution_trace.read(document(nodes, schema), "et.json")


ADD_FLAT = flat(
    9, "aten::add",
    inputs=[[3, 4, 8, 12, 4, "cuda:0"], [5, 0, 0, 0, 0, ""], 1, "<None>", [7, 7]],
    input_shapes=[[3, 4], [], [], [], [[], []]],
    input_types=["Tensor(float)", "Tensor(nullptr (uninitialized))", "Int", "None", "GenericList[Int,Int]"],
    outputs=[[6, 8, 0, 12, 4, "cuda:0"]], output_shapes=[[3, 4]], output_types=["Tensor(float)"], seq_id=17,
)  # fmt: skip

ADD_NESTED = nested(
    9, "aten::add", seq_id=17,
    inputs={
        "values": [[3, 4, 8, 12, 4, "cuda:0"], [5, 0, 0, 0, 0, ""], 1, "<None>", [7, 7]],
        "shapes": [[3, 4], [], [], [], [[], []]],
        "types": ["Tensor(float)", "Tensor(nullptr (uninitialized))", "Int", "None", "GenericList[Int,Int]"],
    },
    outputs={"values": [[6, 8, 0, 12, 4, "cuda:0"]], "shapes": [[3, 4]], "types": ["Tensor(float)"]},
)  # fmt: skip

NESTED_SCHEMAS = [
    "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.0.4-chakra.0.0.4", "1.1.0-chakra.0.0.4", "1.1.1-chakra.0.0.4",
    "1.1.1-chakra.1.0.0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "node"), [("1.0.0", ADD_FLAT), ("1.0.1", ADD_FLAT), *((schema, ADD_NESTED) for schema in NESTED_SCHEMAS)]
)
def test_every_schema_gives_the_same_op(schema: str, node: Json) -> None:
    trace = read([node], schema)
    (op,) = trace.nodes
    assert not trace.warnings
    assert (op.id, op.name, op.rf_id, op.seq_id, op.tid) == (9, "aten::add", 109, 17, 1)
    tensor = Tensor((3, 4), "float32", None, 3, 4, 8, "cuda:0")
    assert op.signature.inputs == (tensor, None, 1, None, (7, 7))
    assert op.signature.outputs == (Tensor((3, 4), "float32", None, 6, 8, 0, "cuda:0"),)


def test_strides_are_read_where_recorded() -> None:
    sides = {"values": [[3, 4, 0, 12, 4, "cuda:0"]], "shapes": [[3, 4]], "types": ["Tensor(c10::Half)"], "strides": [[1, 3]]}
    (op,) = read([nested(5, "aten::t", inputs=sides)], "1.1.1-chakra.0.0.4").nodes
    assert op.signature.inputs == (Tensor((3, 4), "float16", (1, 3), 3, 4, 0, "cuda:0"),)


def test_tensors_in_lists_keep_their_types() -> None:
    sides = {
        "values": [[[3, 4, 0, 2, 4, "cuda:0"], [5, 6, 0, 3, 8, "cpu"]]],
        "shapes": [[[2], [3]]],
        "types": ["GenericList[Tensor(float),Tensor(long int)]"],
    }
    (op,) = read([nested(5, "aten::cat", inputs=sides)], "1.0.4-chakra.0.0.4").nodes
    assert op.signature.inputs == (
        (Tensor((2,), "float32", None, 3, 4, 0, "cuda:0"), Tensor((3,), "int64", None, 5, 6, 0, "cpu")),
    )


def old_comm(
    id: int, name: str, group: int, sequence: int, tid: int = 1, splits: tuple[list[int], list[int]] = ([], [])
) -> Json:
    tensor = [[id - 1, 4, 0, 8, 4, "cuda:0"]] if name != "wait" else []
    types = ["Tensor(float)"] if tensor else []
    return flat(
        id, "record_param_comms", tid=tid,
        inputs=[*tensor, sequence, group, 1, name, *splits, 2],
        input_shapes=[*([[8]] if tensor else []), [], [], [], [], [[]] * len(splits[0]), [[]] * len(splits[1]), []],
        input_types=[*types, "Int", "Int", "Int", "String", "GenericList[]", "GenericList[]", "Int"],
        outputs=tensor, output_shapes=[[8]] if tensor else [], output_types=types,
    )  # fmt: skip


def test_groups_known_by_address_are_numbered_and_tell_the_rank() -> None:
    trace = read([old_comm(10, "all_to_allv", 94598, 147, splits=([3, 5], [4, 4])), old_comm(12, "wait", 0, 147)])
    assert (trace.rank, trace.world_size) == (1, 2)
    assert trace.groups["pg0"].size == 2
    program = to_program(trace, rank=1, world_size=2)
    (collective,) = program.collectives
    assert (collective.kind, collective.group, collective.ranks, collective.sequence) == ("all_to_all", "pg0", (0, 1), 0)
    assert (collective.bytes_in, collective.bytes_out, collective.dtype) == (32, 32, "float32")
    assert (collective.in_splits, collective.out_splits) == ((3, 5), (4, 4))


def new_comm(id: int, name: str, rank: int, *, group: str = "7", start: int = 4, stride: int = 2, size: int = 3) -> Json:
    inputs = {
        "values": [[id - 1, 4, 0, 8, 4, "cuda:0"], [5, False], [group, "dp"], rank, name, [], [], start, stride, size],
        "shapes": [[8], [[], []], [[], []], [], [], [], [], [], [], []],
        "types": [
            "Tensor(float)", "Tuple[Int,Bool]", "Tuple[String,String]", "Int", "String", "GenericList[]", "GenericList[]",
            "Int", "Int", "Int",
        ],
    }  # fmt: skip
    return nested(id, "record_param_comms", inputs=inputs, collective_name=name, pg_name=group)


def test_ranks_of_a_group_follow_from_start_stride_and_size() -> None:
    trace = read([new_comm(10, "allreduce", 1)], "1.1.1-chakra.0.0.4")
    assert trace.groups["7"].ranks == (4, 6, 8)
    assert trace.rank == 6


def test_configured_groups_are_read_and_an_empty_list_is_everybody() -> None:
    config = json.dumps([
        {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 4},
        {"pg_name": "7", "pg_desc": "tp", "ranks": [2, 3], "group_size": 2},
    ])  # fmt: skip
    node = nested(3, "## process_group:init ##", inputs={"values": [config], "shapes": [[]], "types": ["String"]})
    trace = read([node, new_comm(10, "allreduce", 1, start=-1, stride=-1, size=2)], "1.1.1-chakra.0.0.4")
    assert trace.groups["0"].ranks == (0, 1, 2, 3)
    assert trace.groups["7"].ranks == (2, 3)
    assert (trace.rank, trace.world_size) == (3, 4)


def test_the_root_of_a_broadcast_is_not_taken_for_the_caller() -> None:
    trace = read([new_comm(10, "broadcast", 2)], "1.1.1-chakra.0.0.4")
    assert trace.rank is None
    (collective,) = to_program(trace, rank=4, world_size=9).collectives
    assert collective.root == 8


def test_both_sides_of_a_send_are_one_group() -> None:
    send = read([new_comm(10, "send", 1, start=0, stride=1, size=2)], "1.1.1-chakra.0.0.4")
    recv = read([new_comm(10, "recv", 0, start=0, stride=1, size=2)], "1.1.1-chakra.0.0.4")
    (sent,) = to_program(send, rank=0, world_size=2).collectives
    (received,) = to_program(recv, rank=1, world_size=2).collectives
    assert (sent.group, sent.ranks, sent.root) == (received.group, received.ranks, received.root) == ("7:0->1", (0, 1), 1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", "all_reduce"), ("allreduce_coalesced", "all_reduce"), ("_all_gather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"), ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"), ("_reduce_oop", "reduce"), ("_broadcast_oop", "broadcast"), ("gather", "gather"),
        ("anything else", "unknown"),
    ],
)  # fmt: skip
def test_every_spelling_of_a_collective_has_one_kind(name: str, kind: str) -> None:
    assert collective_kind(name) == kind


def test_an_execution_trace_alone_is_a_program_with_phases_threads_and_waits() -> None:
    trace = read([
        flat(10, "aten::mm"),
        old_comm(12, "allreduce", 94598, 1),
        flat(20, "autograd::engine::evaluate_function: MmBackward0", tid=2),
        flat(21, "aten::t", parent=20, tid=2),
        old_comm(22, "allreduce", 94598, 2, tid=2),
        flat(30, "Optimizer.step#SGD.step"),
        flat(31, "aten::add_", parent=30),
        old_comm(32, "wait", 0, 2),
    ])  # fmt: skip
    program = to_program(trace, rank=0, world_size=2)
    kinds = [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OPTIMIZER]
    assert program.ops.phase.tolist()[:7] == kinds
    assert program.ops.parent.tolist() == [-1, -1, -1, 2, -1, -1, 5, -1]
    assert [thread.role for thread in program.threads] == ["main", "backward"]
    assert [CallKind(kind) for kind in program.calls.kind] == [
        CallKind.STEP_BEGIN, CallKind.LAUNCH, CallKind.LAUNCH, CallKind.STREAM_WAIT, CallKind.STEP_END,
    ]  # fmt: skip
    assert program.calls.after.tolist() == [-1, -1, 1, 2, -1]
    assert program.calls.awaits.tolist() == [-1, -1, -1, 1, -1]
    assert program.works.kind.tolist() == [WorkKind.COLLECTIVE, WorkKind.COLLECTIVE]
    assert [each.sequence for each in program.collectives] == [0, 1]
    assert not program.recorded
    assert "no kernels" in program.warnings[-1]


def test_the_all_reduce_inside_a_barrier_is_counted_once() -> None:
    inner = {**old_comm(14, "allreduce", 94598, 3), "parent": 12}
    program = to_program(read([old_comm(12, "barrier", 94598, 3), inner]), rank=0, world_size=2)
    assert [each.kind for each in program.collectives] == ["all_reduce"]


def test_profiler_steps_divide_the_ops() -> None:
    nodes = [flat(3, "ProfilerStep#7"), flat(4, "aten::mm", 3), flat(5, "ProfilerStep#8"), flat(6, "aten::mm", 5)]
    program = to_program(read(nodes), rank=0, world_size=1)
    assert program.steps == (7, 8)
    assert program.ops.step.tolist() == [7, 7, 8, 8]


def test_a_missing_parent_makes_a_top_level_op_and_a_warning() -> None:
    trace = read([flat(5, "aten::mm", 77)])
    assert trace.parents == (-1,)
    assert "parent that is not there" in trace.warnings[0] and "aten::mm" in trace.warnings[0]


def test_what_is_inside_a_node_that_is_left_out_counts_as_inside_what_is_around() -> None:
    nodes = [
        flat(3, "op"),
        flat(4, "mode", 3),
        flat(5, "mode", 4),
        flat(6, "mark:1", 5),
        flat(7, "inner", 5),
        flat(8, "mode", 8),
    ]
    data = document([*nodes, flat(9, "lost", 8), "no node"])
    trace = execution_trace.read(data, "et.json", bare="mark:", around="mode")
    assert [(node.name, parent) for node, parent in zip(trace.nodes, trace.parents, strict=True)] == [
        ("op", -1), ("mark:1", 0), ("inner", 0), ("lost", -1)
    ]  # fmt: skip
    assert any("1 nodes have no usable id" in warning for warning in trace.warnings)


def test_calls_alike_are_read_each_with_its_own_tensors() -> None:
    """Equal shapes, types and strides are read once."""
    first = json.loads(json.dumps(ADD_NESTED))
    second, third = {**json.loads(json.dumps(ADD_NESTED)), "id": 10}, {**json.loads(json.dumps(ADD_NESTED)), "id": 11}
    second["inputs"]["values"][0][0], third["inputs"]["values"][4] = 33, [7, 7, 7]
    inputs = [node.signature.inputs for node in read([first, second, third], "1.1.1-chakra.0.0.4").nodes]
    tensors = [each[0] for each in inputs]
    assert all(isinstance(each, Tensor) for each in tensors)
    assert [each.id for each in tensors if isinstance(each, Tensor)] == [3, 33, 3]
    assert [each[4] for each in inputs] == [(7, 7), (7, 7), (7, 7, 7)]


def test_a_circle_of_parents_is_cut_and_named() -> None:
    trace = read([flat(5, "a", 7), flat(6, "b", 5), flat(7, "c", 6)])
    assert sorted(trace.parents)[0] == -1 and len(trace.nodes) == 3
    assert any("circle" in message for message in trace.warnings)
    assert all(parent < row for row, parent in enumerate(trace.parents))


def test_repeated_ids_are_kept_and_named() -> None:
    trace = read([flat(5, "a"), flat(5, "b"), flat(6, "c", 5)])
    assert [node.name for node in trace.nodes] == ["a", "b", "c"]
    assert trace.parents[2] == 0
    assert any("repeat an id" in message for message in trace.warnings)


def test_nodes_that_are_no_nodes_are_counted() -> None:
    trace = read([flat(5, "a"), 7, "text", None, {"id": "x", "name": "b"}, {"id": 4}, {"id": 2**70, "name": "huge"}])
    assert [node.name for node in trace.nodes] == ["a"]
    assert any(message.startswith("et.json: 6 nodes have no usable id or name") for message in trace.warnings)


def test_a_deep_tree_is_read_without_recursion() -> None:
    depth = 50_000
    trace = read([flat(3 + level, "aten::op", 2 + level) for level in range(depth)])
    assert trace.parents == (-1, *range(depth - 1))
    assert len(to_program(trace, rank=0, world_size=1).ops) == depth


def test_a_file_cut_short_gives_its_whole_nodes() -> None:
    whole = document([flat(id, f"aten::op{id}") for id in range(5, 25)])
    for cut in range(len(whole) // 2, len(whole) - 1, 97):
        trace = execution_trace.read(whole[:cut], "et.json")
        complete = whole[:cut].count(b'"output_types": []}') - 2
        assert len(trace.nodes) == complete
        assert "cut short" in trace.warnings[0]


def test_a_compressed_file_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = gzip.compress(document([flat(id, f"aten::op{id * 7919}") for id in range(5, 2000)]), mtime=0)
    (tmp_path / "et.json.gz").write_bytes(whole[: len(whole) // 2])
    trace = next(map(execution_trace.FORMAT.read, opened([TraceFile(tmp_path / "et.json.gz")])))
    assert isinstance(trace, ExecutionTrace)
    assert 500 < len(trace.nodes) < 1500
    assert "damaged" in trace.warnings[0]


def test_a_badly_escaped_name_costs_one_node() -> None:
    text = document([flat(5, "a"), flat(6, "BROKEN"), flat(7, "c")]).replace(b"BROKEN", b'say "hi" \\')
    trace = execution_trace.read(text, "et.json")
    assert [node.name for node in trace.nodes] == ["a", "c"]
    assert "1 places" in trace.warnings[0]


def test_bare_infinities_and_bytes_that_are_not_utf8_are_read() -> None:
    text = document([flat(5, "aten::fill\xff", inputs=["INF", 1], input_shapes=[[], []], input_types=["Double", "Int"])])
    text = text.replace(b'"INF"', b"-inf").replace(b"\\u00ff", b"\xff")
    (node,) = execution_trace.read(text, "et.json").nodes
    assert node.signature.inputs == ("-inf", 1)


def test_an_unknown_newer_schema_is_read_with_a_warning() -> None:
    trace = read([ADD_NESTED], "2.0.0-chakra.3.0.0")
    assert len(trace.nodes) == 1
    assert "2.0.0-chakra.3.0.0 is not known" in trace.warnings[0]


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"7", b'{"schema": 1, "nodes": []}', b'{"schema": "1.0.1", "nodes": []}', b'{"traceEvents": [',
     b"\x00\xff" * 40, b'{"schema": "1.0.1", "nodes": [' + b"[" * 100_000],
)  # fmt: skip
def test_what_holds_no_node_is_one_clear_line(data: bytes) -> None:
    with pytest.raises(TraceError) as caught:
        execution_trace.read(data, "et.json")
    assert str(caught.value).startswith("et.json: ") and "\n" not in str(caught.value)


WHOLE = document([
    ADD_FLAT, ADD_NESTED, old_comm(12, "allreduce", 94598, 1), new_comm(20, "broadcast", 2), old_comm(24, "wait", 0, 1),
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=4))
def test_damage_gives_a_program_or_one_clear_line(at: int, damage: bytes) -> None:
    mutated = WHOLE[:at] + damage + WHOLE[at + len(damage) :]
    try:
        trace = execution_trace.read(mutated, "et.json")
    except InputError as error:
        assert "\n" not in str(error)
        return
    program = to_program(trace, rank=trace.rank or 0, world_size=trace.world_size or 1)
    assert len(program.ops) == len(trace.nodes)


def test_compiled_functions_that_replay_graphs_are_refused_since_their_kernels_are_nowhere() -> None:
    frame = flat(3, "## Call CompiledFxGraph abc ##")
    launching = read([frame, flat(4, "triton_poi_fused_add_0", 3), flat(5, "aten::copy_", 3)])
    assert len(to_program(launching, rank=0, world_size=1).ops) == len(launching.nodes)
    replaying = read([frame, flat(4, "aten::_foreach_copy_", 3)])
    with pytest.raises(TraceError, match="1 calls of compiled functions replay CUDA graphs"):
        to_program(replaying, rank=0, world_size=1)
