"""Laws of storages' lives, of the allocator that serves them, and of the peak that comes out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.test_issued import Trace, gpu, on

from steptime._hardware.device import reference_device
from steptime._models.memory.allocator import Block, CachingAllocator
from steptime._models.memory.lifetimes import MemoryKind, Storage, storages
from steptime._models.memory.peak import BIAS_WORKSPACE_BYTES, WORKSPACE_BYTES, peak_memory, process_bytes
from steptime._models.memory.tensors import extent_bytes
from steptime._program.program import Tensor

MIB = 1 << 20


def mib(count: int, storage: int) -> dict[str, Any]:
    """A tensor of so many MiB."""
    return gpu([count, MIB // 4], storage)


def seen(trace: Trace) -> list[Storage]:
    """The storages of a trace, with ops counted from the first one that was added: a root comes before it."""
    lives = storages(trace.program(), reference_device())
    return [replace(each, born=each.born - (each.born >= 0), dies=each.dies - 1) for each in lives]


def lives(trace: Trace) -> list[tuple[int, int, MemoryKind]]:
    return [(each.born, each.dies, each.kind) for each in seen(trace)]


def test_what_is_there_before_the_step_stays_and_what_the_step_makes_ends_with_its_last_use() -> None:
    trace = Trace()
    trace.op("aten::mul", gpu([4], 3), gpu([4], 4), outputs=(gpu([4], 5),))
    trace.op("aten::neg", gpu([4], 5), outputs=(gpu([4], 6),))
    trace.op("aten::neg", gpu([4], 6), outputs=(gpu([4], 7),))
    made = [(0, 1, MemoryKind.TEMPORARIES), (1, 2, MemoryKind.TEMPORARIES), (2, 2, MemoryKind.TEMPORARIES)]
    assert lives(trace) == [(-1, 3, MemoryKind.INPUTS), (-1, 3, MemoryKind.INPUTS), *made]
    assert [each.stays for each in seen(trace)] == [True, True, False, False, False]


def test_an_address_that_is_returned_anew_is_another_storage() -> None:
    trace = Trace()
    trace.op("aten::neg", gpu([4], 3), outputs=(gpu([4], 5),))
    trace.op("aten::neg", gpu([4], 5), outputs=(gpu([4], 6),))
    trace.op("aten::neg", gpu([4], 6), outputs=(gpu([8], 5),))
    trace.op("aten::view", gpu([8], 5), outputs=(gpu([2, 4], 5),))
    found = [each for each in seen(trace) if not each.stays]
    assert [(each.nbytes, each.born, each.dies) for each in found] == [(16, 0, 1), (16, 1, 2), (32, 2, 3)]


def test_of_nested_ops_the_innermost_that_returns_a_storage_makes_it_and_the_outer_ones_hold_their_inputs() -> None:
    trace = Trace()
    outer = trace.op("aten::linear", gpu([4], 3), outputs=(gpu([4], 6),))
    trace.op("aten::empty", 4, outputs=(gpu([4], 5),), inside=outer)
    trace.op("aten::addmm", gpu([4], 5), outputs=(gpu([4], 6),), inside=outer)
    trace.op("aten::neg", 1, outputs=(gpu([4], 9),))
    passing = [each for each in seen(trace) if not each.stays]
    assert sorted((each.born, each.dies) for each in passing) == [(1, 2), (2, 2), (3, 3)]


def test_what_an_op_makes_before_it_calls_others_is_its_own() -> None:
    """`aten::cat` makes its result without an op, then takes views of it."""
    trace = Trace()
    trace.op("aten::neg", gpu([4], 3), outputs=(gpu([4], 5),))
    cat = trace.op("aten::cat", [gpu([4], 3)], outputs=(gpu([4], 5),))
    trace.op("aten::narrow", gpu([4], 5), 0, outputs=(gpu([4], 5),), inside=cat)
    assert [life[:2] for life in lives(trace)[1:]] == [(0, 0), (1, 2)]


def test_memory_that_no_op_takes_is_for_the_op_around_it_and_goes_when_that_ends() -> None:
    trace = Trace()
    lookup = trace.op("TableBatchedLookupFunctionBackward")
    trace.op("aten::empty", 4, outputs=(gpu([4], 5),), inside=lookup)
    trace.op("aten::empty", 4, outputs=(gpu([4], 6),), inside=lookup)
    trace.op("aten::neg", gpu([4], 6), outputs=(gpu([4], 7),), inside=lookup)
    trace.op("aten::neg", 1, inside=lookup)
    assert [life[:2] for life in lives(trace)] == [(1, 4), (2, 3), (3, 3)]


def test_an_autograd_node_keeps_what_it_was_given_until_it_is_done() -> None:
    trace = Trace()
    trace.op("aten::neg", gpu([4], 3), outputs=(gpu([4], 5),))
    node = trace.op("autograd::engine::evaluate_function: AddmmBackward0")
    product = trace.op("AddmmBackward0", inside=node)
    trace.op("aten::mm", gpu([4], 5), outputs=(gpu([4], 6),), inside=product)
    trace.op("aten::neg", gpu([4], 6), outputs=(gpu([4], 7),), inside=product)
    trace.op("aten::sum", gpu([4], 3), [0], outputs=(gpu([], 8),), inside=product)
    passing = [(each.born, each.dies, each.kind) for each in seen(trace) if not each.stays]
    assert passing[0] == (0, 5, MemoryKind.ACTIVATIONS)
    assert passing[1] == (3, 4, MemoryKind.TEMPORARIES)


def test_what_was_computed_again_inside_a_node_is_lent_to_others_until_their_formula_ends() -> None:
    trace = Trace()
    first = trace.op("MulBackward0", gpu([4], 3), inside=trace.op("autograd::engine::evaluate_function: MulBackward0"))
    trace.op("aten::gelu", gpu([4], 4), outputs=(gpu([4], 5),), inside=first)  # again
    trace.op("aten::mul", gpu([4], 3), outputs=(gpu([4], 6),), inside=first)
    node = trace.op("autograd::engine::evaluate_function: AddmmBackward0")
    product = trace.op("AddmmBackward0", gpu([4], 6), inside=node)
    trace.op("aten::mm", gpu([4], 5), gpu([4], 6), outputs=(gpu([4], 7),), inside=product)
    trace.op("aten::sum", gpu([4], 6), [0], outputs=(gpu([], 8),), inside=node)
    ends = {each.born: each.dies for each in seen(trace) if not each.stays}
    assert ends[2] == 6  # with the formula
    assert ends[3] == 7  # the gradient it is given: with the node


def test_inputs_that_are_copied_for_a_graph_lie_in_its_pool() -> None:
    trace = Trace()
    wrapper = trace.op("## Call CompiledFxGraph f0 ##", inside=trace.op("Torch-Compiled Region: 0/0"))
    trace.op("aten::_foreach_copy_", [mib(10, 3)], [mib(10, 4)], inside=wrapper)
    trace.op("aten::fill_", gpu([], 9), 0, inside=wrapper)
    graph = trace.op("cudagraph:0", inside=wrapper)
    trace.op("aten::neg", mib(10, 3), outputs=(mib(10, 5),), inside=graph)
    every = [each for each in storages(trace.program(), reference_device()) if each.nbytes > MIB]
    assert sorted((each.stays, each.pooled) for each in every) == [(False, True), (False, True), (True, False)]
    peak = peak_memory(trace.program())
    assert peak.steady_allocated - peak.steady_allocated % MIB == 10 * MIB  # the input itself
    assert peak.reserved >= 30 * MIB


def test_kinds_follow_from_who_takes_a_storage() -> None:
    trace = Trace()
    trace.op("aten::mul", gpu([4], 3), gpu([4], 4), outputs=(gpu([4], 5),))
    trace.op("c10d::allreduce_", [gpu([4], 8)], outputs=([gpu([4], 8)],))
    trace.op("c10d::alltoall_base_", gpu([4], 5), outputs=(gpu([4], 10),))
    step = trace.op("Optimizer.step#SGD.step")
    trace.op("aten::add_", gpu([4], 3), gpu([4], 8), outputs=(gpu([4], 3),), inside=step)
    trace.op("aten::mul_", gpu([4], 11), gpu([4], 4, "long int"), outputs=(gpu([4], 11),), inside=step)
    kinds = [MemoryKind.PARAMETERS] * 2 + [MemoryKind.COMMUNICATION] * 3 + [MemoryKind.OPTIMIZER_STATE]
    assert [kind for _, _, kind in lives(trace)] == kinds


def test_gradients_that_stay_from_step_to_step_are_gradients() -> None:
    trace = Trace()
    backward = trace.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad")
    trace.op("aten::add_", gpu([4], 7), outputs=(gpu([4], 7),), inside=backward)
    step = trace.op("Optimizer.step#SGD.step")
    trace.op("aten::add_", gpu([4], 3), gpu([4], 7), outputs=(gpu([4], 3),), inside=step)
    assert (-1, 4, MemoryKind.GRADIENTS) in lives(trace)


def test_indices_are_inputs_even_where_the_optimiser_takes_them() -> None:
    """A sparse gradient has the very indices that were looked up."""
    trace = Trace()
    trace.op("aten::embedding_bag", gpu([4], 3), gpu([4], 4, "long int"), outputs=(gpu([4], 5),))
    step = trace.op("Optimizer.step#SGD.step")
    trace.op("aten::index_add_", gpu([4], 3), gpu([4], 4, "long int"), outputs=(gpu([4], 3),), inside=step)
    assert [kind for _, _, kind in lives(trace)][:2] == [MemoryKind.PARAMETERS, MemoryKind.INPUTS]


def test_a_gradient_lasts_until_the_next_step_drops_it() -> None:
    trace = Trace()
    backward = trace.op("autograd::engine::evaluate_function: MmBackward0")
    trace.op("aten::mm", gpu([4], 3), outputs=(gpu([4], 7),), inside=backward)
    step = trace.op("Optimizer.step#SGD.step")
    trace.op("aten::add_", gpu([4], 3), gpu([4], 7), outputs=(gpu([4], 3),), inside=step)
    trace.op("aten::neg", gpu([4], 3), outputs=(gpu([4], 9),))
    assert (1, 5, MemoryKind.GRADIENTS) in lives(trace)


def test_only_memory_of_the_device_counts() -> None:
    trace = Trace()
    trace.op("aten::neg", on("cpu", [4], 3), outputs=(gpu([0], 5),))
    assert storages(trace.program(), reference_device()) == ()


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (Tensor((4, 8), "float32", (8, 1)), 128),
        (Tensor((4, 8), "float32", (0, 1)), 32),  # an expanded view
        (Tensor((4, 8), "bfloat16", (1, 4), offset=10), 84),
        (Tensor((4, 8), "int64"), 256),
        (Tensor((0, 8), "float32", (8, 1), offset=3), 0),
        (Tensor((), "float64", ()), 8),
    ],
)
def test_a_tensor_reaches_as_far_as_its_strides(tensor: Tensor, nbytes: int) -> None:
    assert extent_bytes(tensor) == nbytes


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513, MIB], 1024 + MIB, 2 * MIB),
        ([MIB, MIB, 512], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([10 * MIB + 1], 12 * MIB - MIB - MIB + 512, 12 * MIB),
        ([11 * MIB], 12 * MIB, 12 * MIB),  # what is left of a large block is split off above 1 MiB only
        ([19 * MIB // 2, 19 * MIB // 2], 20 * MIB, 20 * MIB),  # the second takes the 1 MiB that is left along
    ],
)
def test_requests_take_blocks_and_segments_as_pytorch_cuts_them(requests: list[int], allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    for nbytes in requests:
        allocator.take(nbytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_free_neighbours_serve_a_larger_request_and_pools_do_not_mix() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(4 * MIB) for _ in range(4)]
    for place in (0, 2, 1):
        allocator.give_back(blocks[place])
    assert allocator.take(12 * MIB).begin == 0
    assert allocator.reserved == 20 * MIB
    allocator.take(512)
    assert allocator.reserved == 22 * MIB


@given(st.lists(st.one_of(st.integers(1, 40 * MIB), st.integers(1, 4096), st.just(0)), max_size=60))
def test_blocks_never_overlap_and_all_comes_back(requests: list[int]) -> None:
    allocator = CachingAllocator()
    held: list[Block] = []
    for nbytes in requests:
        if nbytes == 0 and held:
            allocator.give_back(held.pop(len(held) // 2))
        elif nbytes:
            held.append(allocator.take(nbytes))
        ordered = sorted(held, key=lambda block: block.begin)
        assert all(one.begin + one.nbytes <= two.begin for one, two in pairwise(ordered))
        assert allocator.allocated == sum(block.nbytes for block in held) <= allocator.reserved
        assert allocator.most_allocated >= allocator.allocated
    before = allocator.reserved
    for block in held:
        allocator.give_back(block)
    assert (allocator.allocated, allocator.reserved) == (0, before)


def training(optimizer_mib: int = 0) -> Trace:
    """A parameter of 20 MiB, an input of 10, an activation of 30 that backward takes, a gradient and its bucket."""
    trace = Trace()
    trace.op("aten::mm", mib(10, 3), mib(20, 4), outputs=(mib(30, 5),))
    trace.op("aten::neg", mib(30, 5), outputs=(mib(40, 6),))
    backward = trace.op("autograd::engine::evaluate_function: MmBackward0")
    trace.op("aten::mul", mib(30, 5), outputs=(mib(20, 7),), inside=backward)
    trace.op("aten::mul", mib(20, 7), mib(20, 8), outputs=(mib(20, 8),), inside=backward)
    trace.op("c10d::allreduce_", [mib(20, 8)], outputs=([mib(20, 8)],), inside=backward)
    step = trace.op("Optimizer.step#SGD.step")
    trace.op("aten::add_", mib(20, 4), mib(20, 7), outputs=(mib(20, 4),), inside=step)
    if optimizer_mib:
        trace.op("aten::add_", mib(optimizer_mib, 9), mib(20, 7), outputs=(mib(optimizer_mib, 9),), inside=step)
    return trace


def test_the_peak_is_what_lives_at_once_and_what_stays() -> None:
    peak = peak_memory(training().program())
    assert peak.parts == {
        **dict.fromkeys(MemoryKind, 0),
        MemoryKind.PARAMETERS: 20 * MIB,
        MemoryKind.INPUTS: 10 * MIB,
        MemoryKind.COMMUNICATION: 20 * MIB,
        MemoryKind.WORKSPACES: WORKSPACE_BYTES,
        MemoryKind.ACTIVATIONS: 30 * MIB,
        MemoryKind.TEMPORARIES: 40 * MIB,
    }
    assert peak.steady_allocated == sum(peak.parts.values())
    assert peak.allocated == peak.steady_allocated + 20 * MIB  # the former bucket
    assert peak.reserved >= peak.allocated


def test_parts_add_up_to_the_peak_whatever_the_sizes() -> None:
    trace = training(optimizer_mib=3)
    trace.op("aten::neg", gpu([7, 777], 20), outputs=(gpu([333_333], 21),))
    peak = peak_memory(trace.program())
    assert peak.parts[MemoryKind.OPTIMIZER_STATE] == 3 * MIB
    assert 0 < peak.parts[MemoryKind.ROUNDING] < 2 * MIB
    assert sum(peak.parts.values()) == peak.steady_allocated


def test_the_optimisers_state_comes_into_a_hole_of_the_first_step_which_then_is_too_small() -> None:
    trace = Trace()
    trace.op("aten::neg", mib(10, 3), outputs=(mib(40, 5),))
    step = trace.op("Optimizer.step#SGD.step")
    trace.op("aten::add_", mib(12, 9), outputs=(mib(12, 9),), inside=step)
    peak = peak_memory(trace.program())
    assert peak.steady_allocated == (10 + 12 + 40) * MIB
    assert peak.reserved == (10 + 40 + 40) * MIB


def test_products_with_a_bias_have_a_second_workspace() -> None:
    trace = Trace()
    trace.op("aten::addmm", mib(1, 2), mib(1, 3), mib(1, 4), outputs=(mib(1, 5),))
    assert peak_memory(trace.program()).parts[MemoryKind.WORKSPACES] == WORKSPACE_BYTES + BIAS_WORKSPACE_BYTES


def test_more_batches_and_unnamed_memory_add_up() -> None:
    one = peak_memory(training().program())
    sizes: dict[str, Any] = {"parameters": [100 * MIB], "optimizer_state": [12 * MIB], "outside_bytes": [14 * MIB]}
    more = peak_memory(training().program(), **sizes, batches=4)
    assert more.parts[MemoryKind.INPUTS] == 4 * one.parts[MemoryKind.INPUTS] + 14 * MIB
    assert more.parts[MemoryKind.PARAMETERS] == one.parts[MemoryKind.PARAMETERS] + 100 * MIB
    assert more.parts[MemoryKind.OPTIMIZER_STATE] == 12 * MIB
    assert more.allocated == one.allocated + 3 * one.parts[MemoryKind.INPUTS] + 126 * MIB


def test_a_process_holds_more_than_its_allocator_and_most_with_a_gpu_and_a_group() -> None:
    peak = peak_memory(training().program())
    assert peak.device_bytes(1) == peak.reserved + process_bytes(1)
    assert process_bytes(8, 8) < process_bytes(4, 4) < process_bytes(2, 2) < process_bytes(2) == process_bytes(8)
    assert process_bytes(3, 3) == process_bytes(2, 2)
    assert process_bytes(1) < process_bytes(2)


def test_a_program_without_memory_needs_none() -> None:
    trace = Trace()
    trace.op("aten::neg", 1)
    assert peak_memory(trace.program()).reserved == 0
