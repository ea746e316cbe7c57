"""Laws of the Chakra reader, on bytes written here and, where protobuf is installed, by protobuf itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.program.chakra_messages import COLL, LOAD, RECV, SEND, file, node

from steptime._program.formats import TraceFile, chakra, opened
from steptime._program.formats.protobuf import decode_node, messages
from steptime._program.program import CallKind, Program, Tensor, WorkKind
from steptime.errors import InputError, TraceError


def test_a_synthetic_trace_without_times_becomes_work_in_order_of_dependency() -> None:
    data = file(node(3, deps=(2,), num_ops=30), node(2, COLL, (1,), comm_type=0, comm_size=4096), node(1, num_ops=10))
    program = chakra.read(data, "toy.2.et", world_size=4)
    assert (program.rank, program.world_size) == (2, 4)
    assert program.works.kind.tolist() == [WorkKind.KERNEL, WorkKind.COLLECTIVE, WorkKind.KERNEL]
    assert not program.recorded
    waits = [(CallKind(kind), awaits) for kind, awaits in zip(program.calls.kind, program.calls.awaits, strict=True)]
    launch = (CallKind.LAUNCH, -1)
    assert waits == [launch, (CallKind.STREAM_WAIT, 0), launch, (CallKind.STREAM_WAIT, 1), launch]
    (collective,) = program.collectives
    assert (collective.kind, collective.ranks, collective.bytes_in) == ("all_reduce", (0, 1, 2, 3), 4096)


def test_work_of_one_stream_needs_no_wait() -> None:
    program = chakra.read(file(node(1), node(2, deps=(1,)), node(3, ctrl=(2,))), "toy.0.et")
    assert set(program.calls.kind.tolist()) == {CallKind.LAUNCH}


def test_durations_without_starts_are_laid_end_to_end() -> None:
    data = file(
        node(1, took=5), node(2, COLL, (1,), took=7, comm_type=6), node(3, deps=(1,), took=2), node(4, deps=(2, 3), took=1)
    )
    program = chakra.read(data, "toy.0.et")
    spans = list(zip(program.works.start_ns.tolist(), program.works.end_ns.tolist(), strict=True))
    assert spans == [(0, 5000), (5000, 12000), (5000, 7000), (12000, 13000)]
    assert any("end to end" in message for message in program.warnings)


def test_recorded_times_are_kept_relative_to_the_first() -> None:
    data = file(
        node(1, start=1000, took=3, is_cpu_op=True, name="aten::mm", tid=9), node(2, deps=(1,), start=1002, took=4, stream=7)
    )
    program = chakra.read(data, "toy.0.et")
    assert program.origin_ns == 1_000_000
    assert (program.ops.start_ns.tolist(), program.ops.end_ns.tolist()) == ([0], [3000])
    assert (program.works.start_ns.tolist(), program.works.end_ns.tolist()) == ([2000], [6000])
    assert program.calls.op.tolist() == [0, 0]
    assert (program.threads[0].tid, program.streams[0].id) == (9, 7)


def test_a_host_op_after_work_synchronises_with_it() -> None:
    program = chakra.read(file(node(1, took=1), node(2, deps=(1,), is_cpu_op=True, name="aten::item")), "toy.0.et")
    assert program.calls.kind.tolist() == [CallKind.LAUNCH, CallKind.EVENT_SYNC, CallKind.HOST]
    assert program.calls.awaits.tolist() == [-1, 0, -1]


def test_arguments_of_host_ops_are_read() -> None:
    io = ("[[3, 4, 0, 6, 4, 'cuda:0'], 1]", "[[2, 3], []]", "['Tensor(float)', 'Int']")
    program = chakra.read(file(node(1, is_cpu_op=True, io=io)), "toy.0.et")
    assert program.signatures[0].inputs == (Tensor((2, 3), "float32", None, 3, 4, 0, "cuda:0"), 1)


def test_groups_beside_the_traces_name_the_ranks() -> None:
    groups = chakra.read_groups(b'{"5": [3, 1]}', "comm_group.json")
    program = chakra.read(file(node(1, COLL, comm_type=2, pg_name="5")), "toy.1.et", groups=groups)
    assert (program.world_size, program.collectives[0].ranks, program.collectives[0].kind) == (4, (1, 3), "all_gather")


def test_both_sides_of_a_send_are_one_group() -> None:
    sent = chakra.read(file(node(1, SEND, comm_src=0, comm_dst=1, comm_size=8)), "toy.0.et").collectives[0]
    received = chakra.read(file(node(1, RECV, comm_src=0, comm_dst=1, comm_size=8)), "toy.1.et").collectives[0]
    assert (sent.group, sent.ranks, sent.sequence) == (received.group, received.ranks, received.sequence)
    assert (sent.kind, received.kind) == ("send", "recv")


def test_memory_nodes_are_copies() -> None:
    program = chakra.read(file(node(1, LOAD, tensor_size=64)), "toy.0.et")
    assert (program.works.kind.tolist(), program.works.bytes.tolist()) == ([WorkKind.COPY], [64])


def test_circles_and_missing_dependencies_are_named() -> None:
    program = chakra.read(file(node(1, deps=(2,)), node(2, deps=(1,)), node(3, deps=(99,))), "toy.0.et")
    assert len(program.works) == 3
    assert any("circles" in message for message in program.warnings)
    assert any("not there" in message for message in program.warnings)


def test_a_file_cut_short_gives_its_whole_nodes() -> None:
    data = file(*(node(id, took=1) for id in range(1, 20)))
    sizes = [end for _, end in messages(data)]
    for cut in range(sizes[1], len(data)):
        program = chakra.read(data[:cut], "toy.0.et")
        assert len(program.works) == sum(end <= cut for end in sizes) - 1
        assert cut in sizes or any("breaks off" in message for message in program.warnings)


def test_files_of_one_prefix_and_the_groups_beside_them_make_the_job(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"toy.{rank}.et").write_bytes(file(node(1, COLL, comm_type=0, comm_size=64, pg_name="5")))
    (tmp_path / "comm_group.json").write_text('{"5": [0, 2]}')
    program = next(map(chakra.FORMAT.read, opened([TraceFile(tmp_path / "toy.2.et")])))
    assert isinstance(program, Program)
    assert (program.rank, program.world_size, program.collectives[0].ranks) == (2, 3, (0, 2))


@pytest.mark.parametrize("data", [b"", b"\x05\x0a\x03abc", b"\xff" * 30, b"{}", b"\x00"])
def test_what_holds_no_node_is_one_clear_line(data: bytes) -> None:
    with pytest.raises(TraceError) as caught:
        chakra.read(data, "toy.0.et")
    assert str(caught.value).startswith("toy.0.et: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"[]", b'{"1": "x"}', b'{"1": [-1]}', b'{"1": [99999999]}'])
def test_wrong_groups_are_one_clear_line(data: bytes) -> None:
    with pytest.raises(TraceError, match=r"comm_group\.json"):
        chakra.read_groups(data, "comm_group.json")


WHOLE = file(
    node(1, start=10, took=3, is_cpu_op=True, tid=4, seq_id=-1), node(2, deps=(1,), start=12, took=4, stream=7, num_ops=5),
    node(3, COLL, (2,), start=17, took=9, comm_type=0, comm_size=64, involved_dim=[1, 0], scale=1.5),
    node(4, SEND, (3,), comm_dst=2),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=6))
def test_damage_gives_a_program_or_one_clear_line(at: int, damage: bytes) -> None:
    try:
        program = chakra.read(WHOLE[:at] + damage + WHOLE[at + len(damage) :], "toy.0.et")
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert len(program.works) + len(program.ops) > 0


SCALARS = {
    "double": 1, "float": 2, "int32": 5, "int64": 3, "uint32": 13, "uint64": 4, "sint32": 17, "sint64": 18, "fixed32": 7,
    "fixed64": 6, "sfixed32": 15, "sfixed64": 16, "bool": 8, "string": 9, "bytes": 12,
}  # fmt: skip


def protobuf_node() -> Any:
    """A Node class made by protobuf from the published field numbers."""
    pb = pytest.importorskip("google.protobuf.descriptor_pb2", reason="protobuf is not installed")
    pool = pytest.importorskip("google.protobuf.descriptor_pool").DescriptorPool()
    message_factory = pytest.importorskip("google.protobuf.message_factory")
    schema = pb.FileDescriptorProto(name="et_def_test.proto", package="c", syntax="proto3")
    attr = schema.message_type.add(name="Attr")
    attr.field.add(name="name", number=1, type=9, label=1)
    attr.oneof_decl.add(name="value")
    for at, (name, kind) in enumerate(SCALARS.items()):
        holder = schema.message_type.add(name=f"{name}_list")
        holder.field.add(name="values", number=1, type=kind, label=3)
        attr.field.add(name=f"{name}_val", number=3 + 2 * at, type=kind, label=1, oneof_index=0)
        attr.field.add(name=f"{name}_list", number=4 + 2 * at, type=11, type_name=f".c.{name}_list", label=1, oneof_index=0)
    node_type = schema.message_type.add(name="Node")
    for name, number_, kind, label in (
        ("id", 1, 4, 1), ("name", 2, 9, 1), ("type", 3, 13, 1), ("ctrl_deps", 4, 4, 3), ("data_deps", 5, 4, 3),
        ("start_time_micros", 6, 4, 1), ("duration_micros", 7, 4, 1),
    ):  # fmt: skip
        node_type.field.add(name=name, number=number_, type=kind, label=label)
    node_type.field.add(name="attr", number=10, type=11, type_name=".c.Attr", label=3)
    pool.Add(schema)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("c.Node"))


def test_wire_decoding_agrees_with_protobuf_for_every_attribute_type() -> None:
    message = protobuf_node()(id=2**63 + 5, name="é", type=7, ctrl_deps=[1, 300], data_deps=[2**40], start_time_micros=9)
    message.duration_micros = 4
    samples: dict[str, list[Any]] = {
        "double": [1.5, -2.0], "float": [0.25, -3.0], "int32": [-7, 8], "int64": [-(2**62), 9], "uint32": [2**31, 1],
        "uint64": [2**63, 2], "sint32": [-5, 6], "sint64": [-(2**61), 3], "fixed32": [2**31, 4], "fixed64": [2**63, 5],
        "sfixed32": [-6, 7], "sfixed64": [-(2**60), 8], "bool": [True, False], "string": ["a", "ü"], "bytes": [b"\xff", b"z"],
    }  # fmt: skip
    for name, values in samples.items():
        single = message.attr.add(name=f"{name}_one")
        setattr(single, f"{name}_val", values[0])
        many = message.attr.add(name=f"{name}_many")
        getattr(many, f"{name}_list").values.extend(values)
    data = message.SerializeToString()
    decoded = decode_node(data, 0, len(data))
    assert (decoded.id, decoded.name, decoded.type, decoded.deps) == (2**63 + 5, "é", 7, (1, 300, 2**40))
    assert (decoded.start_us, decoded.duration_us) == (9, 4)
    for name, values in samples.items():
        assert decoded.attrs[f"{name}_one"] == values[0]
        assert decoded.attrs[f"{name}_many"] == tuple(values)
