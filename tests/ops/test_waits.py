"""Waits worked out from tensors: storages, views, ops in place, memory used again, and what the calls say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.support.waits import needed_by_nobody

from steptime._ops.waits import (
    DATA,
    NOBODY,
    ORDER,
    REDUCER,
    UNSEEN,
    WAIT,
    TensorWaits,
    tensor_waits,
)
from steptime._program.execution import Comm, ExecutionTrace, Node, to_program
from steptime._program.formats.execution_trace import enclosing
from steptime._program.load import load
from steptime._program.program import Program, Signature, Tensor, Value

EXAMPLES = Path(__file__).parents[2] / "examples"
READY = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def tensor(number: int, storage: int, *shape: int, offset: int = 0) -> Tensor:
    return Tensor(shape or (8,), "float", id=number, storage=storage, offset=offset, device="cuda:0")


@dataclass
class Written:
    """An execution trace as it is written, op by op; every op answers with its row."""

    nodes: list[Node] = field(default_factory=list)
    sequence: int = 0
    tid: int = 1

    def op(self, name: str, inputs: tuple[Value, ...] = (), outputs: tuple[Value, ...] = (), inside: int = -1) -> int:
        signature = Signature(inputs, outputs)
        self.nodes.append(Node(len(self.nodes) + 2, name, inside + 2 if inside >= 0 else 1, tid=self.tid, signature=signature))
        return len(self.nodes) - 1

    def comm(
        self, kind: str, sent: tuple[Tensor, ...], got: tuple[Tensor, ...], inside: int = -1, *, later: bool = True
    ) -> int:
        """A collective as c10d records it: the call, the record inside it, and NCCL's inside that."""
        call = self.op(f"c10d::{kind}_", (sent, "<Object>", later, -1), inside=inside)
        row = self.op("record_param_comms", (sent,), (got,), inside=call)
        self.sequence += 1
        comm = Comm(kind, kind, "0", sequence=self.sequence, inputs=sent, outputs=got)
        self.nodes[row] = replace(self.nodes[row], comm=comm)
        self.op(f"nccl:{kind}", (sent,), inside=row)
        return row

    def wait(self, inside: int = -1) -> int:
        """A recorded wait for the latest collective."""
        row = self.op("record_param_comms", inside=inside)
        self.nodes[row] = replace(self.nodes[row], comm=Comm("wait", "wait", "0", sequence=self.sequence))
        return row

    def program(self) -> Program:
        nodes, parents, _ = enclosing(self.nodes)
        return to_program(ExecutionTrace("test", nodes, parents), rank=0, world_size=2)

    def only(self, *, recorded: bool = True) -> TensorWaits:
        (found,) = tensor_waits(self.program(), recorded=recorded)
        return found


def test_views_are_followed_and_need_nothing() -> None:
    trace = Written()
    made = trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    trace.op("aten::view", (tensor(2, 2), (8,)), (tensor(3, 2),))
    launch = trace.comm("all_to_all", (tensor(3, 2),), (tensor(4, 4),))
    trace.op("aten::relu", (tensor(1, 1),), (tensor(9, 9),))
    trace.op("aten::view", (tensor(4, 4), (2, 4)), (tensor(5, 4, 2, 4),))
    trace.op("aten::to", (tensor(5, 4, 2, 4), 6), (tensor(5, 4, 2, 4),))
    trace.op("aten::new_empty", (tensor(5, 4, 2, 4), (2,)), (tensor(7, 7),))
    used = trace.op("aten::cat", ((tensor(5, 4, 2, 4), tensor(9, 9)),), (tensor(6, 6),))
    assert trace.only() == TensorWaits(0, launch, made, used, DATA)


def test_the_last_writer_in_place_sends() -> None:
    trace = Written()
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    trace.op("aten::div_", (tensor(2, 2), 2), (tensor(2, 2),))
    out = trace.op("aten::mul", (tensor(1, 1), tensor(1, 1), tensor(2, 2)), (tensor(2, 2),))
    trace.op("aten::add", (tensor(2, 2), tensor(1, 1)), (tensor(3, 3),))
    trace.comm("all_reduce", (tensor(2, 2),), (tensor(2, 2),))
    assert trace.only().sent_by == out


def test_an_op_inside_another_is_the_one_that_works() -> None:
    trace = Written()
    outer = trace.op("aten::clone", (tensor(1, 1),), (tensor(2, 2),))
    trace.op("aten::empty_like", (tensor(1, 1),), (tensor(2, 2),), inside=outer)
    copy = trace.op("aten::copy_", (tensor(2, 2), tensor(1, 1)), (tensor(2, 2),), inside=outer)
    trace.comm("all_reduce", (tensor(2, 2),), (tensor(2, 2),))
    linear = trace.op("aten::linear", (tensor(2, 2), tensor(1, 1)), (tensor(3, 3),))
    inner = trace.op("aten::addmm", (tensor(2, 2), tensor(1, 1)), (tensor(3, 3),), inside=linear)
    found = trace.only()
    assert (found.sent_by, found.needed_by) == (copy, inner)


def test_a_function_of_its_own_writes_what_it_reserves_and_reads_what_it_is_given() -> None:
    trace = Written()
    lookup = trace.op("TableBatchedLookupFunction", (tensor(1, 1),))
    trace.op("aten::empty", ((8,),), (tensor(2, 2),), inside=lookup)
    start = trace.op("_Start", (tensor(2, 2),))
    trace.op("aten::new_empty", (tensor(2, 2), (8,)), (tensor(3, 3),), inside=start)
    launch = trace.comm("all_to_all", (tensor(2, 2),), (tensor(3, 3),), inside=start)
    finish = trace.op("_Finish", (tensor(3, 3),))
    trace.op("aten::view", (tensor(3, 3), (8,)), (tensor(4, 3),), inside=finish)
    trace.op("ViewBackward0", (tensor(4, 3),))
    update = trace.op("TableBatchedLookupFunctionBackward", (tensor(4, 3),))
    assert trace.only() == TensorWaits(0, launch, lookup, update, DATA)


def test_memory_used_again_is_something_else() -> None:
    trace = Written()
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    trace.comm("all_to_all", (tensor(2, 2),), (tensor(3, 3),))
    trace.op("aten::relu", (tensor(1, 1),), (tensor(4, 3),))  # the result was dropped and its storage given out again
    trace.op("aten::relu", (tensor(1, 1),), (tensor(5, 2),))  # so was what is sent
    trace.op("aten::mm", (tensor(4, 3), tensor(5, 2)), (tensor(6, 6),))
    found = trace.only()
    assert (found.needed_by, found.reason) == (-1, NOBODY)
    assert needed_by_nobody((found,)) == (0,)


def test_overwriting_what_is_sent_has_to_wait_but_reading_it_does_not() -> None:
    trace = Written()
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    trace.comm("all_to_all", (tensor(2, 2),), (tensor(3, 3),))
    trace.op("aten::sum", (tensor(2, 2),), (tensor(4, 4),))
    zero = trace.op("aten::zero_", (tensor(2, 2),), (tensor(2, 2),))
    assert trace.only().needed_by == zero


def test_parts_of_one_buffer_are_apart() -> None:
    trace = Written()
    left, right = tensor(2, 2, 4), tensor(3, 2, 4, offset=4)
    first = trace.op("aten::copy_", (left, tensor(1, 1)), (left,))
    trace.op("aten::copy_", (right, tensor(1, 1)), (right,))
    trace.comm("all_reduce", (left,), (left,))
    trace.op("aten::mul_", (right, 2), (right,))
    used = trace.op("aten::add_", (tensor(1, 1), left), (tensor(1, 1),))
    found = trace.only()
    assert (found.sent_by, found.needed_by) == (first, used)


def test_recorded_waits_come_first_and_can_be_hidden() -> None:
    trace = Written()
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    trace.comm("all_to_all", (tensor(2, 2),), (tensor(3, 3),))
    wait = trace.wait()
    trace.op("aten::relu", (tensor(1, 1),), (tensor(5, 5),))
    used = trace.op("aten::relu", (tensor(3, 3),), (tensor(4, 4),))
    assert (trace.only().needed_by, trace.only().reason) == (wait, WAIT)
    assert (trace.only(recorded=False).needed_by, trace.only(recorded=False).reason) == (used, DATA)


def test_wait_tensor_waits_for_the_collective_of_its_tensor() -> None:
    trace = Written()
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    trace.comm("all_gather", (tensor(2, 2),), (tensor(3, 3),))
    trace.comm("all_gather", (tensor(2, 2),), (tensor(4, 4),))
    second = trace.op("_c10d_functional::wait_tensor", (tensor(4, 4),), (tensor(4, 4),))
    first = trace.op("_c10d_functional::wait_tensor", (tensor(3, 3),), (tensor(3, 3),))
    found = tensor_waits(trace.program())
    assert [(each.needed_by, each.reason) for each in found] == [(first, WAIT), (second, WAIT)]


def test_a_call_in_order_holds_whatever_comes_next() -> None:
    trace = Written()
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    trace.comm("all_to_all", (tensor(2, 2),), (tensor(3, 3),), later=False)
    trace.op("aten::view", (tensor(3, 3), (8,)), (tensor(4, 3),))
    other = trace.op("aten::relu", (tensor(1, 1),), (tensor(5, 5),))
    assert (trace.only().needed_by, trace.only().reason) == (other, ORDER)


@pytest.mark.parametrize("copied", [True, False])
def test_buckets_are_waited_for_at_the_end_of_backward(copied: bool) -> None:
    trace = Written()
    trace.op("aten::relu", (tensor(1, 1),), (tensor(8, 8),))
    trace.tid = 2
    ready = trace.op(READY)
    scaled = trace.op("aten::mul", (tensor(1, 1), 0.5, tensor(2, 2)), (tensor(2, 2),), inside=ready)
    launch = trace.comm("all_reduce", (tensor(2, 2),), (tensor(2, 2),), inside=ready)
    again = trace.op(READY)
    trace.op("aten::mul", (tensor(1, 1), 0.5, tensor(3, 3)), (tensor(3, 3),), inside=again)
    trace.op("aten::as_strided", (tensor(2, 2), (8,)), (tensor(4, 2),))
    copies = trace.op("aten::copy_", (tensor(5, 5), tensor(4, 2)), (tensor(5, 5),)) if copied else -1
    trace.tid = 1
    # With gradients in the buckets the wait is over before the first op of the main thread, gradients or not.
    norm = trace.op("aten::sum", (tensor(8, 8),), (tensor(9, 9),))
    step = trace.op("Optimizer.step#SGD.step")
    trace.op("aten::_foreach_add_", ((tensor(8, 8),), (tensor(4, 2),)), inside=step)
    expected = (copies, DATA) if copied else (norm, REDUCER)
    assert trace.only() == TensorWaits(0, launch, scaled, *expected)


def test_one_collective_may_need_another() -> None:
    trace = Written()
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    first = trace.comm("reduce_scatter", (tensor(2, 2),), (tensor(3, 3),))
    second = trace.comm("all_gather", (tensor(3, 3),), (tensor(4, 4),))
    found = tensor_waits(trace.program())
    assert (found[0].needed_by, found[1].sent_by) == (second, first)


def test_a_result_that_only_compiled_kernels_can_use_is_needed_by_the_first() -> None:
    trace = Written()
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    trace.comm("all_reduce", (tensor(2, 2),), (tensor(2, 2),))
    trace.op("aten::relu", (tensor(1, 1),), (tensor(5, 5),))
    kernel = trace.op("triton_poi_fused_add_0")
    trace.op("triton_poi_fused_mul_1")
    trace.op("aten::empty", ((8,),), (tensor(6, 2),))
    trace.op("triton_poi_fused_mul_2")
    assert (trace.only().needed_by, trace.only().reason) == (kernel, UNSEEN)


def test_what_the_next_step_uses_is_needed_by_nobody_in_this_one() -> None:
    trace = Written()
    trace.op("ProfilerStep#1")
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    trace.comm("all_reduce", (tensor(2, 2),), (tensor(2, 2),))
    trace.op("ProfilerStep#2")
    trace.op("aten::relu", (tensor(2, 2),), (tensor(3, 3),))
    assert needed_by_nobody(tensor_waits(trace.program())) == (0,)


def test_a_program_without_collectives_or_ops_has_no_waits() -> None:
    trace = Written()
    assert tensor_waits(trace.program()) == ()
    trace.op("aten::mm", (tensor(1, 1),), (tensor(2, 2),))
    assert tensor_waits(trace.program()) == ()


def test_a_real_step_of_dlrm() -> None:
    # As its recorded kernels have it: benchmarks/tensor_waits.py compares every step and rank of the same run.
    (program,) = load([EXAMPLES / "h200_mps4_dlrm" / "rank0.et.json.gz"]).programs

    def name(row: int) -> str:
        return str(program.names[program.ops.name[row]])

    found = [
        (program.collectives[each.collective].kind, name(each.sent_by), name(each.needed_by), each.reason)
        for each in tensor_waits(program)
    ]
    assert found == [
        ("all_to_all", "aten::cat", "aten::cat", ORDER),
        ("broadcast", "aten::cat", "record_param_comms", WAIT),
        ("all_reduce", "aten::mul", "aten::copy_", DATA),
        ("all_reduce", "aten::mul", "aten::copy_", DATA),
        ("all_to_all", "aten::cat", "aten::_embedding_bag_sparse_backward", ORDER),
    ]
