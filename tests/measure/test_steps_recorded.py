"""What is kept of recorded steps: kernels by the step and op that launched them, one trace per distinct program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.measure.raw_events import RawEvent

from steptime_lab.measure.steps.profiled import StepKernels, comparable, cut, mark
from steptime_lab.measure.steps.traced import digest, owners, parse, stripped, write_packed


def host_of_two_steps() -> list[RawEvent]:
    return [
        RawEvent(mark(0, 1), 200, 100, annotation=True),
        RawEvent(mark(0, 0), 100, 100, annotation=True),
        RawEvent("aten::mm", 110, 20, correlation=5),
        RawEvent("cudaLaunchKernel", 115, correlation=1000, linked=5),
        RawEvent("cudaLaunchKernel", 190, correlation=1001),
        RawEvent("cuLaunchKernelEx", 250, correlation=5, linked=5),
    ]


def test_a_kernel_belongs_to_the_step_that_launched_it_not_to_the_one_it_ran_in() -> None:
    late = RawEvent("gemm", 5_000, 30, correlation=1000, linked=5)
    found = cut(host_of_two_steps(), [late])
    assert [each.kernel for each in found[0, 0].work] == ["gemm"]
    assert found[0, 1].work == ()


def test_kernels_come_in_the_order_of_launches_with_their_innermost_op() -> None:
    device = [
        RawEvent("second", 400, 30, correlation=1001),
        RawEvent("first", 500, 20, correlation=1000, linked=5, stream=20),
        RawEvent("third", 600, 10, correlation=5, linked=5),
    ]
    found = cut(host_of_two_steps(), device)
    first, second = found[0, 0].work
    assert (first.kernel, first.op, first.stream, first.launched_ns, first.start_ns) == ("first", "aten::mm", 20, 115, 500)
    assert (second.kernel, second.op) == ("second", "")
    assert [each.kernel for each in found[0, 1].work] == ["third"]


def test_ranges_mirrored_on_the_device_are_no_kernels_and_neither_is_work_of_no_step() -> None:
    mirrored = RawEvent(mark(0, 0), 120, 50, correlation=1000, annotation=True)
    outside = RawEvent("warm_up", 90, 5, correlation=999)
    assert all(not step.work for step in cut(host_of_two_steps(), [mirrored, outside]).values())


def test_a_launch_that_was_not_recorded_is_placed_by_its_op() -> None:
    assert cut(host_of_two_steps(), [RawEvent("lost", 999, correlation=77, linked=5)])[0, 0].names == ["lost"]


def test_steps_that_launched_other_kernels_are_not_put_side_by_side() -> None:
    one = cut(host_of_two_steps(), [RawEvent("a", 120, correlation=1000)])[0, 0]
    other = cut(host_of_two_steps(), [RawEvent("b", 120, correlation=1000)])[0, 0]
    assert comparable([one, one]) == [one, one]
    assert comparable([one, one, other]) == [other]
    assert isinstance(other, StepKernels)


def node(number: int, name: str, shape: Sequence[int], **more: Any) -> dict[str, Any]:
    tensor = [number + 50, number + 51, 0, 4, 4, "cuda:0"]
    side = {"values": [tensor], "shapes": [list(shape)], "types": ["Tensor(float)"], "strides": [[1] * len(shape)]}
    attributes = {"rf_id": number, "seq_id": -1, "tid": 1, "fw_tid": 0, "op_schema": "long", "kernel_file": "", **more}
    attrs = [{"name": key, "type": "int64", "value": value} for key, value in attributes.items()]
    return {"id": number, "name": name, "ctrl_deps": 1, "inputs": side, "outputs": side, "attrs": attrs}


def trace(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"schema": "1.1.1-chakra.0.0.4", "pid": 4, "time": "today", "start_ts": 1, "nodes": list(nodes), "finish_ts": 2}


def test_ranks_that_run_the_same_ops_on_the_same_shapes_are_one_program_whatever_their_ids() -> None:
    one = digest(stripped(trace(node(2, "aten::mm", (2, 3)), node(5, "aten::relu", (3,)))))
    renumbered = digest(stripped(trace(node(7, "aten::relu", (3,)), node(3, "aten::mm", (2, 3)))))
    wider = digest(stripped(trace(node(2, "aten::mm", (2, 4)), node(5, "aten::relu", (3,)))))
    assert one == renumbered
    assert one != wider
    assert owners([one, wider, renumbered, wider]) == [0, 1, 0, 1]


def test_exchanges_with_other_splits_are_other_programs() -> None:
    def exchange(splits: list[int], rank: int) -> dict[str, Any]:
        made = node(2, "record_param_comms", (8,))
        values = [[1, 2, 0, 8, 4, "cuda:0"], rank, splits]
        kinds = ["Tensor(float)", "Int", "GenericList[Int,Int]"]
        made["inputs"] = {"values": values, "shapes": [[8], [], [[], []]], "types": kinds, "strides": [[1], [], []]}
        return trace(made)

    assert digest(exchange([1, 7], 0)) == digest(exchange([1, 7], 1))
    assert digest(exchange([1, 7], 0)) != digest(exchange([7, 1], 0))


def test_infinities_are_read_as_pytorch_writes_them() -> None:
    assert parse('{"values": [1, -inf, inf]}') == {"values": [1, "-inf", "inf"]}


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_packed(tmp_path / name, trace(node(2, "aten::mm", (2, 3))))
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
