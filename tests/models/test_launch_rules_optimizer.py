"""Laws of what optimisers over lists of tensors launch, of transfers, and of what no other family answers for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.launching import GPU, rules_of

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._models.kernels.family import family_of
from steptime._models.kernels.launches import MEMCPY, OVER_LISTS, STRIDED, UNROLLED, VECTORIZED
from steptime._models.kernels.launches.lists import CHUNK, packed
from steptime.errors import InputError

launches, other, transfer = (rules_of(family) for family in ("optimizer", "other", "transfer"))

COUNTS = st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=300)


def kernels(op: str, *args: Argument) -> list[str]:
    return [launch.kernel for launch in launches(Call(op, args))]


@given(COUNTS, st.integers(1, 110))
def test_launches_hold_every_element_once_and_never_more_than_fits(counts: list[int], most: int) -> None:
    found = packed(counts, most)
    assert sum(launch.elements for launch in found) == sum(counts)
    for launch in found:
        assert len(launch.chunks) <= 320
        assert launch.tensors <= most
        assert max(launch.chunks) <= min(CHUNK, launch.heaviest(GPU.sms))
        assert launch.heaviest(GPU.sms) * min(GPU.sms, len(launch.chunks)) >= launch.elements


@given(COUNTS, st.integers(1, 110), st.integers(1, 5 * CHUNK))
def test_more_chunks_are_more_launches(counts: list[int], most: int, extra: int) -> None:
    assert len(packed([*counts, extra], most)) >= len(packed(counts, most))


def test_more_lists_side_by_side_leave_room_for_fewer_tensors() -> None:
    many = tuple(TensorArg((1000,)) for _ in range(110))
    assert kernels("aten::_foreach_mul_.Scalar", many, 0.5) == [OVER_LISTS]
    assert kernels("aten::_foreach_mul.Scalar", many, 0.5) == [OVER_LISTS] * 2, "the result is a list as well"
    assert kernels("aten::_foreach_addcmul_.Scalar", many, many, many, 0.5) == [OVER_LISTS] * 3
    assert kernels("aten::_foreach_mul_.ScalarList", many, (0.5,) * 110) == [OVER_LISTS] * 2


def test_a_scale_of_another_dtype_is_one_kernel_per_tensor() -> None:
    halves = tuple(TensorArg((1000,), "float16") for _ in range(5))
    assert kernels("aten::_foreach_mul_.Tensor", halves, TensorArg(())) == [STRIDED] * 5
    assert kernels("aten::_foreach_mul_.Tensor", halves, TensorArg((), "float16")) == [OVER_LISTS]


def test_an_optimiser_without_lists_is_one_clear_line() -> None:
    with pytest.raises(InputError, match=r"aten::_foreach_mul_\.Scalar"):
        kernels("aten::_foreach_mul_.Scalar", (), 0.5)


def test_a_transfer_converts_where_the_bytes_leave() -> None:
    here, there = TensorArg((1 << 20,)), TensorArg((1 << 20,), "bfloat16", device="pinned")
    assert [one.kernel for one in transfer(Call("aten::copy_.default", (there, here)))] == [VECTORIZED, MEMCPY]
    back = transfer(Call("aten::copy_.default", (here, there)))
    assert [one.kernel for one in back] == [MEMCPY]
    assert back[0].facts["host_bytes"] == here.nbytes
    with pytest.raises(InputError, match=r"aten::copy_\.default"):
        transfer(Call("aten::copy_.default", (here, here)))


def test_other_ops_launch_what_their_siblings_do() -> None:
    x, many = TensorArg((512, 512)), tuple(TensorArg((1000,)) for _ in range(5))
    elementwise = rules_of("elementwise")
    given_result = other(Call("aten::mul.out", (x, 0.25), (("out", x),)))
    assert [one.kernel for one in given_result] == [one.kernel for one in elementwise(Call("aten::mul.Scalar", (x, 0.25)))]
    assert other(Call("aten::_foreach_mul.List", (many, many)))[0].facts["depth"] == 3
    assert family_of("aten::mul.out") == family_of("aten::_foreach_mul.List") == "other"


def test_a_number_to_a_power_and_a_range_by_steps() -> None:
    power = other(Call("aten::pow.Scalar", (10_000, TensorArg((384,)))))
    assert [one.kernel for one in power] == [VECTORIZED, STRIDED]
    options = (("dtype", DtypeArg("int64")),)
    assert other(Call("aten::arange.start_step", (512, -512, -1.0), options))[0].elements == 1024
    with pytest.raises(InputError, match=r"aten::arange\.start_step"):
        other(Call("aten::arange.start_step", (0, 5, 0), options))


def test_rows_are_sorted_in_blocks_all_at_once_or_each_by_itself() -> None:
    keys = TensorArg((960_230,), "int32", high=1 << 25)
    assert sum("Onesweep" in one.kernel for one in other(Call("aten::sort.stable", (keys,)))) == 4
    assert [one.kernel for one in other(Call("aten::sort.default", (TensorArg((64, 64)), -1, False)))][
        -1
    ] == "radixSortKVInPlace"
    few = [one.kernel for one in other(Call("aten::sort.default", (TensorArg((64, 5000)), -1, False)))]
    assert (few[1], few[-1], sum("Onesweep" in name for name in few)) == (
        *("fill_index_and_segment_kernel", "sort_postprocess_kernel"),
        5,
    )
    many = [one.kernel for one in other(Call("aten::sort.default", (TensorArg((200, 5000)), -1, False)))]
    assert many[2:] == ["DeviceSegmentedRadixSortKernel"] * 6


def test_no_kernel_of_a_cast_is_vectorised_over_lists() -> None:
    assert UNROLLED not in kernels("aten::_foreach_add_.Scalar", (TensorArg((1000,), "bfloat16"),), 1.0)
