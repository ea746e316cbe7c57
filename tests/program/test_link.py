"""Laws of linking an execution trace to a Kineto-read program."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.program.traces import read_text

from steptime._program.execution import Comm, ExecutionTrace, Node, ProcessGroup
from steptime._program.formats import execution_trace
from steptime._program.link import link
from steptime._program.program import (
    CallKind,
    Calls,
    Collective,
    Ops,
    Phase,
    Program,
    Signature,
    Stream,
    Tensor,
    Thread,
    WorkKind,
    Works,
)

NAMES = ("aten::mm", "aten::add", "aten::relu", "record_param_comms", "ProfilerStep", "engine", "nccl")
COMM = 3


def program(
    ops: Sequence[tuple[int, int, int]], *, steps: tuple[int, ...] = (0,), signatures: Sequence[Signature] = (),
    signature: Sequence[int] = (), collectives: Sequence[tuple[int, Collective]] = (), meta: Mapping[str, Any] | None = None,
) -> Program:  # fmt: skip
    """Ops as (name, thread, step); collectives as (launching op, what is known)."""
    count, columns = len(ops), list(zip(*ops, strict=True))
    table = Ops.from_columns({
        "name": columns[0], "thread": columns[1], "start_ns": range(count), "end_ns": range(1, count + 1),
        "parent": [-1] * count, "step": columns[2], "phase": [Phase.FORWARD] * count, "sequence": [-1] * count,
        "signature": signature or [-1] * count, "node": [-1] * count,
    })  # fmt: skip
    calls = [(CallKind.LAUNCH, 6, 0, op, 0, op, op, -1, -1, -1) for op, _ in collectives]
    works = [(WorkKind.COLLECTIVE, 6, 0, at, 0, at, at, 0, at) for at in range(len(collectives))]
    return Program(
        rank=0, world_size=4, names=NAMES, threads=(Thread(10), Thread(20)), streams=(Stream(7),), ops=table,
        calls=Calls.from_columns(dict(zip(Calls.TYPES, zip(*calls, strict=True), strict=True)) if calls else {}),
        works=Works.from_columns(dict(zip(Works.TYPES, zip(*works, strict=True), strict=True)) if works else {}),
        collectives=tuple(each for _, each in collectives), signatures=tuple(signatures), steps=steps, source="k.json",
        meta=meta or {},
    )  # fmt: skip


def trace(nodes: Sequence[Node], **more: Any) -> ExecutionTrace:
    return ExecutionTrace("1.0.1", tuple(nodes), (-1,) * len(nodes), source="et.json", **more)


def node(id: int, name: int, tid: int = 1, **more: Any) -> Node:
    return Node(id, NAMES[name], 2, tid=tid, **more)


def test_order_links_every_step_and_every_thread() -> None:
    main, backward = [0, 1, 0, 2, 0], [1, 1, 2]
    ops = [(name, lane, step) for step in (3, 4) for lane, names in enumerate((main, backward)) for name in names]
    recorded = [
        *(node(10 + i, name, 2) for i, name in enumerate(backward)),
        *(node(20 + i, name) for i, name in enumerate(main)),
    ]
    linked = link(program(ops, steps=(3, 4)), trace(recorded))
    assert linked.ops.node.tolist() == [20, 21, 22, 23, 24, 10, 11, 12] * 2
    assert "16 of 16 ops are linked to et.json by order of names; 0 of its 8 nodes" in linked.meta["linked"]


def test_ops_that_only_one_side_has_stay_unlinked() -> None:
    ops = [(name, 0, 0) for name in (4, 0, 1, 1, 2, 0, 2)]
    linked = link(program(ops), trace([node(10 + i, name) for i, name in enumerate([0, 1, 2, 0, 2, 5])]))
    assert linked.ops.node.tolist()[0] == -1
    assert sorted(linked.ops.node.tolist()) == [-1, -1, 10, 11, 12, 13, 14]


def test_record_function_ids_win_where_the_files_are_of_one_run() -> None:
    ids = np.array([52, 51, 53], dtype=np.int64)
    recorded = trace([node(10, 0, rf_id=51), node(11, 0, rf_id=52), node(12, 1, rf_id=53)])
    linked = link(program([(0, 0, 0), (0, 0, 0), (1, 0, 0)], meta={"record_function_id": ids}), recorded)
    assert linked.ops.node.tolist() == [11, 10, 12]
    assert "by record function id" in linked.meta["linked"]


def test_ids_that_agree_by_chance_are_not_believed() -> None:
    names = [0, 1, 0, 1, 2]
    ids = np.array([2, 3, 4, 5, 6], dtype=np.int64)
    recorded = trace([node(10 + i, name, rf_id=1 + i) for i, name in enumerate(names)])
    linked = link(program([(name, 0, 0) for name in names], meta={"external_id": ids}), recorded)
    assert linked.ops.node.tolist() == [10, 11, 12, 13, 14]


def test_external_ids_order_ops_that_start_in_one_tick() -> None:
    ids = np.array([7, 6, 8], dtype=np.int64)
    linked = link(
        program([(1, 0, 0), (0, 0, 0), (2, 0, 0)], meta={"external_id": ids}), trace([node(10 + i, i) for i in range(3)])
    )
    assert linked.ops.node.tolist() == [11, 10, 12]


def test_a_step_of_other_ops_is_not_linked_and_named() -> None:
    ops = [*((name, 0, 0) for name in (0, 1, 2, 0, 1)), *((2, 0, 1) for _ in range(5))]
    linked = link(program(ops, steps=(0, 1)), trace([node(10 + i, name) for i, name in enumerate((0, 1, 2, 0, 1))]))
    assert linked.ops.node.tolist() == [10, 11, 12, 13, 14, -1, -1, -1, -1, -1]
    assert any("steps 1" in message for message in linked.warnings)


def test_signatures_gain_identity_and_outputs_and_keep_strides() -> None:
    mine = Signature((Tensor((2, 3), "float32", (3, 1)), 1))
    recorded = Signature((Tensor((2, 3), "float32", None, 5, 6, 0, "cuda:0"), 1), (Tensor((2,), "float32", None, 8),))
    linked = link(program([(0, 0, 0)], signatures=[mine], signature=[0]), trace([node(10, 0, signature=recorded)]))
    merged = linked.signatures[linked.ops.signature[0]]
    assert merged.inputs == (Tensor((2, 3), "float32", (3, 1), 5, 6, 0, "cuda:0"), 1)
    assert merged.outputs == recorded.outputs


def test_other_shapes_keep_their_own_signature_and_say_so() -> None:
    mine = Signature((Tensor((2, 3), "float32"),))
    other = Signature((Tensor((9, 3), "float32", None, 5),))
    linked = link(program([(0, 0, 0)], signatures=[mine], signature=[0]), trace([node(10, 0, signature=other)]))
    assert linked.signatures[linked.ops.signature[0]] == mine
    assert any("1 linked ops have other shapes" in message for message in linked.warnings)


def comm(group: str = "a", **more: Any) -> Comm:
    return Comm(
        "all_to_allv",
        "all_to_all",
        group,
        in_splits=(1, 3),
        out_splits=(2, 2),
        bytes_in=16,
        bytes_out=32,
        dtype="int64",
        **more,
    )


def nameless(sequence: int) -> Collective:
    return Collective("unknown", "", (0, 1, 2, 3), sequence)


def test_collectives_gain_kind_splits_and_bytes() -> None:
    linked = link(program([(COMM, 0, 0)], collectives=[(0, nameless(0))]), trace([node(10, COMM, comm=comm())]))
    assert linked.collectives == (Collective("all_to_all", "", (0, 1, 2, 3), 0, 16, 32, "int64", (1, 3), (2, 2)),)


def test_splits_of_another_message_are_not_taken_over() -> None:
    known = Collective("all_to_all", "x", (0, 1), 0, bytes_in=99)
    linked = link(program([(COMM, 0, 0)], collectives=[(0, known)]), trace([node(10, COMM, comm=comm())]))
    assert linked.collectives == (known,)


def test_groups_that_differ_divide_nameless_collectives_and_number_them_anew() -> None:
    ops = [(COMM, 0, 0)] * 3
    before = program(ops, collectives=[(at, nameless(at)) for at in range(3)])
    groups = {"a": ProcessGroup("a", "", (0, 1)), "b": ProcessGroup("b", "", (0, 2))}
    recorded = trace([node(10 + at, COMM, comm=comm(group)) for at, group in enumerate("aba")], groups=groups)
    after = link(before, recorded).collectives
    assert [(each.group, each.ranks, each.sequence) for each in after] == [("a", (0, 1), 0), ("b", (0, 2), 0), ("a", (0, 1), 1)]


def test_a_trace_of_another_rank_is_pointed_out() -> None:
    linked = link(program([(0, 0, 0)]), trace([node(10, 0)], rank=3))
    assert any("rank 0 is linked to a trace of rank 3" in message for message in linked.warnings)


def shared_traces() -> Path:
    folder = Path(os.environ.get("STEPTIME_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "traces"
    if not folder.is_dir():
        pytest.skip(f"no public traces at {folder}; set STEPTIME_SHARED")
    return folder


def member(archive: Path, part: str) -> tuple[str, bytes]:
    with tarfile.open(archive) as files:
        name = next(each for each in files.getnames() if part in each)
        extracted = files.extractfile(name)
        assert extracted is not None
        return name, extracted.read()


@pytest.mark.parametrize("rank", [0, 1])
def test_kernels_meet_the_same_nodes_as_in_the_published_linking(rank: int) -> None:
    folder = shared_traces()
    name, data = member(folder / "dlrm_8xV100/dlrm_kineto.tar.gz", f"worker{rank}_")
    _, recorded = member(folder / "dlrm_8xV100/dlrm_pytorch_et.tar.gz", f"eg_{rank}.json")
    nodes = execution_trace.read(recorded, f"dlrm_eg_{rank}.json")
    linked = link(read_text(data, name), nodes)
    assert (linked.ops.node >= 0).all()
    rf_id = {each.id: each.rf_id for each in nodes.nodes}
    published = json.loads(gzip.decompress((folder / f"dlrm_8xV100_linked/dlrm_eg_{rank}_plus.json.gz").read_bytes()))["nodes"]
    theirs = {each["id"]: each["rf_id"] for each in published if "rf_id" in each}
    raw = {
        each["args"]["correlation"]: each
        for each in json.loads(data)["traceEvents"]
        if each.get("cat") in ("kernel", "gpu_memcpy")
    }
    starts = (linked.origin_ns + linked.works.start_ns) // 1000
    ours = {(linked.names[which], int(at)): row for row, (which, at) in enumerate(zip(linked.works.name, starts, strict=True))}
    compared = 0
    for each in published:
        if "cat" not in each:
            continue
        event = raw[each["args"]["correlation"]]
        call = int(linked.works.call[ours[event["name"], event["ts"]]])
        # What was launched before the window has no launching op; the published file gives it the op that ran meanwhile.
        if call >= 0:
            assert rf_id[int(linked.ops.node[linked.calls.op[call]])] == theirs[each["parent"]]
            compared += 1
    assert compared > 250
