"""Laws of storages' lives, of the allocator that serves them, and of the peak that comes out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.test_issued import Trace, gpu, on

from steptime.graph.memory.allocator import Block, CachingAllocator
from steptime.graph.memory.lifetimes import Role, Storage, extent_bytes, storages
from steptime.graph.memory.peak import WORKSPACE_BYTES, peak_memory
from steptime.graph.program import Tensor

MIB = 1 << 20


def mib(count: int, storage: int) -> dict[str, Any]:
    """A tensor of so many MiB."""
    return gpu([count, MIB // 4], storage)


def seen(trace: Trace) -> list[Storage]:
    """The storages of a trace, with ops counted from the first one that was added: a root comes before it."""
    return [
        replace(each, born=each.born - (each.born >= 0), dies=each.dies - 1) for each in storages(trace.program())
    ]  # fmt: skip


def lives(trace: Trace) -> list[tuple[int, int, Role]]:
    return [(each.born, each.dies, each.role) for each in seen(trace)]


def test_what_is_there_before_the_step_stays_and_what_the_step_makes_ends_with_its_last_use() -> None:
    trace = Trace()
    trace.op("aten::mul", gpu([4], 3), gpu([4], 4), outputs=(gpu([4], 5),))
    trace.op("aten::neg", gpu([4], 5), outputs=(gpu([4], 6),))
    trace.op("aten::neg", gpu([4], 6), outputs=(gpu([4], 7),))
    assert lives(trace) == [
        (-1, 3, Role.INPUT), (-1, 3, Role.INPUT), (0, 1, Role.PASSING), (1, 2, Role.PASSING), (2, 2, Role.PASSING)
    ]  # fmt: skip


def test_an_address_that_is_returned_anew_is_another_storage() -> None:
    trace = Trace()
    trace.op("aten::neg", gpu([4], 3), outputs=(gpu([4], 5),))
    trace.op("aten::neg", gpu([4], 5), outputs=(gpu([4], 6),))
    trace.op("aten::neg", gpu([4], 6), outputs=(gpu([8], 5),))
    trace.op("aten::view", gpu([8], 5), outputs=(gpu([2, 4], 5),))
    found = [each for each in seen(trace) if each.role is Role.PASSING]
    assert found == [
        Storage(16, 0, 1, Role.PASSING), Storage(16, 1, 2, Role.PASSING), Storage(32, 2, 3, Role.PASSING)
    ]  # fmt: skip


def test_of_nested_ops_the_innermost_that_returns_a_storage_makes_it_and_the_outer_ones_hold_their_inputs() -> None:
    trace = Trace()
    outer = trace.op("aten::linear", gpu([4], 3), outputs=(gpu([4], 6),))
    trace.op("aten::empty", 4, outputs=(gpu([4], 5),), inside=outer)
    trace.op("aten::addmm", gpu([4], 5), outputs=(gpu([4], 6),), inside=outer)
    trace.op("aten::neg", 1, outputs=(gpu([4], 9),))
    passing = [each for each in seen(trace) if each.role is Role.PASSING]
    assert sorted((each.born, each.dies) for each in passing) == [(1, 2), (2, 2), (3, 3)]


def test_what_an_op_makes_before_it_calls_others_is_its_own() -> None:
    """`aten::cat` makes its result without an op, then takes views of it."""
    trace = Trace()
    trace.op("aten::neg", gpu([4], 3), outputs=(gpu([4], 5),))
    cat = trace.op("aten::cat", [gpu([4], 3)], outputs=(gpu([4], 5),))
    trace.op("aten::narrow", gpu([4], 5), 0, outputs=(gpu([4], 5),), inside=cat)
    assert lives(trace)[1:] == [(0, 0, Role.PASSING), (1, 2, Role.PASSING)]


def test_roles_follow_from_who_takes_a_storage() -> None:
    trace = Trace()
    trace.op("aten::mul", gpu([4], 3), gpu([4], 4), outputs=(gpu([4], 5),))
    trace.op("c10d::allreduce_", [gpu([4], 8)], outputs=([gpu([4], 8)],))
    step = trace.op("Optimizer.step#SGD.step")
    trace.op("aten::add_", gpu([4], 3), gpu([4], 8), outputs=(gpu([4], 3),), inside=step)
    assert [role for _, _, role in lives(trace)] == [Role.STATE, Role.INPUT, Role.PASSING, Role.BUCKET]


def test_a_gradient_lasts_until_the_next_step_drops_it() -> None:
    trace = Trace()
    backward = trace.op("autograd::engine::evaluate_function: MmBackward0")
    trace.op("aten::mm", gpu([4], 3), outputs=(gpu([4], 7),), inside=backward)
    step = trace.op("Optimizer.step#SGD.step")
    trace.op("aten::add_", gpu([4], 3), gpu([4], 7), outputs=(gpu([4], 3),), inside=step)
    trace.op("aten::neg", gpu([4], 3), outputs=(gpu([4], 9),))
    assert (1, 5, Role.PASSING) in lives(trace)


def test_a_sort_takes_positions_and_a_second_copy_while_it_runs() -> None:
    trace = Trace()
    trace.op("aten::sort", gpu([100], 3, "int"), outputs=(gpu([100], 5, "int"), gpu([100], 6, "long int")))
    assert seen(trace)[-1] == Storage(100 * (8 + 8 + 4), 0, 0, Role.PASSING)


def test_only_memory_of_the_device_counts() -> None:
    trace = Trace()
    trace.op("aten::neg", on("cpu", [4], 3), outputs=(gpu([0], 5),))
    assert storages(trace.program()) == ()


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


def training() -> Trace:
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
    return trace


def test_the_peak_is_what_lives_at_once_and_what_stays() -> None:
    peak = peak_memory(training().program())
    assert (peak.state, peak.inputs, peak.buckets, peak.workspaces) == (20 * MIB, 10 * MIB, 20 * MIB, WORKSPACE_BYTES)
    assert peak.passing == (30 + 40) * MIB
    assert peak.steady_allocated == (20 + 10 + 20 + 70) * MIB + WORKSPACE_BYTES
    assert peak.allocated == peak.steady_allocated + 20 * MIB  # the former bucket
    assert peak.reserved >= peak.allocated


def test_more_batches_and_unnamed_memory_add_up() -> None:
    one = peak_memory(training().program())
    more = peak_memory(training().program(), outside_bytes=[100 * MIB], batches=4)
    assert more.inputs == 4 * one.inputs
    assert more.allocated == one.allocated + 3 * one.inputs + 100 * MIB
    assert (more.passing, more.outside) == (one.passing, 100 * MIB)


def test_a_program_without_memory_needs_none() -> None:
    trace = Trace()
    trace.op("aten::neg", 1)
    assert peak_memory(trace.program()).reserved == 0
