from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from steptime._models.kernels.call import Call, TensorArg
from steptime._units import MIB
from steptime_lab.measure.op_calls import ALIGNMENT_BYTES, Arena, DoesNotFitError, PreparedCall


@pytest.fixture
def arena() -> Arena:
    return Arena(torch.device("cpu"), 4 * MIB, host_bytes=MIB)


def spans(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """First and last byte of contiguous tensors, by address."""
    return sorted((one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in tensors)


def test_arguments_of_one_run_are_aligned_and_never_overlap(arena: Arena) -> None:
    sizes = (1000, 3, 77_777, 64, 0, 12_345)
    prepared = PreparedCall(Call("aten::cat.default", (tuple(TensorArg((size,)) for size in sizes),)), arena)
    for _ in range(50):
        tensors = [tensor for tensor in prepared.fresh()[0][0] if tensor.numel()]
        assert all(tensor.data_ptr() % ALIGNMENT_BYTES == tensors[0].data_ptr() % ALIGNMENT_BYTES for tensor in tensors)
        assert all(left[1] <= right[0] for left, right in pairwise(spans(tensors)))


def test_memory_comes_round_only_after_the_whole_region(arena: Arena) -> None:
    prepared = PreparedCall(Call("aten::relu.default", (TensorArg((4096,)),)), arena)
    addresses = [prepared.fresh()[0][0].data_ptr() for _ in range(200)]
    region = arena.region(TensorArg((1,)), mutable=False)
    period = region.size // 4096
    assert len(set(addresses)) == period
    assert addresses[:5] == addresses[period : period + 5]


def test_what_an_op_writes_is_not_what_others_read(arena: Arena) -> None:
    added = PreparedCall(Call("aten::add_.Tensor", (TensorArg((64,)), TensorArg((64,)))), arena)
    target, source = added.fresh()[0]
    assert target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


def test_refilling_renews_what_ops_have_written_and_nothing_else(arena: Arena) -> None:
    target, source = PreparedCall(Call("aten::copy_.default", (TensorArg((64,)), TensorArg((64,)))), arena).fresh()[0]
    before = source.clone()
    target.zero_()
    arena.refill()
    assert target.abs().min() > 0
    assert torch.equal(source, before)


@pytest.mark.parametrize(("values", "low", "high"), [("positive", 0.01, 100.0), ("unit", 0.0, 1.0)])
def test_values_are_of_the_kind_asked_for(arena: Arena, values: str, low: float, high: float) -> None:
    (tensor,) = PreparedCall(Call("aten::log.default", (TensorArg((5000,), values=values),)), arena).fresh()[0]
    assert low <= float(tensor.min()) <= float(tensor.max()) <= high


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_normal_values_are_normal_in_every_dtype(arena: Arena, dtype: str) -> None:
    (tensor,) = PreparedCall(Call("aten::relu.default", (TensorArg((20_000,), dtype),)), arena).fresh()[0]
    assert abs(float(tensor.float().mean())) < 0.05
    assert abs(float(tensor.float().std()) - 1.0) < 0.05


def test_a_call_larger_than_its_region_says_so(arena: Arena) -> None:
    with pytest.raises(DoesNotFitError, match="does not fit the arena"):
        PreparedCall(Call("aten::relu.default", (TensorArg((2 * MIB,)),)), arena)


def test_host_values_differ_from_element_to_element(arena: Arena) -> None:
    call = Call("aten::copy_.default", (TensorArg((1000,)), TensorArg((1000,), device="pageable")))
    source = PreparedCall(call, arena).fresh()[0][1]
    assert len(source.unique()) > 990
