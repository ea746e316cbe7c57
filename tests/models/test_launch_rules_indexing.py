"""Laws of what gathers and scatters launch."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.launching import rules_of

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.launches import GATHER, MEMCPY, SCATTER_GATHER, SMALL_INDEX, STRIDED, Launch
from steptime.errors import InputError

launches = rules_of("indexing")


def kernels(call: Call) -> list[str]:
    return [launch.kernel for launch in launches(call)]


def indices(count: int, high: int) -> TensorArg:
    return TensorArg((count,), "int64", high=high)


def put(op: str, rows: int, asked: int, *, columns: int = 64, strides: tuple[int, int] | None = None) -> Call:
    table, values = TensorArg((rows, columns)), TensorArg((asked, columns), strides=strides)
    return Call(op, (table, (indices(asked, rows),), values, True, True))


@pytest.mark.parametrize("op", ["scatter_add", "scatter_add_"])
def test_adding_rows_by_one_index_each_is_timed_apart_from_adding_elements(op: str) -> None:
    table, values = TensorArg((500, 64)), TensorArg((2000, 64))

    def path(strides: tuple[int, int] | None) -> str:
        index = TensorArg((2000, 64), "int64", strides, high=500)
        return launches(Call(f"aten::{op}.default", (table, 0, index, values)))[-1].path

    assert (path((1, 0)), path(None)) == ("rows", "added")


@given(st.integers(17, 10_000), st.integers(1, 300), st.sampled_from(["float32", "float16"]))
def test_rows_of_whole_vectors_are_gathered_and_others_go_by_element(asked: int, columns: int, dtype: str) -> None:
    (kernel,) = kernels(Call("aten::index_select.default", (TensorArg((500, columns), dtype), 0, indices(asked, 500))))
    row_bytes = columns * (4 if dtype == "float32" else 2)
    assert kernel == (GATHER if row_bytes % 16 == 0 else SCATTER_GATHER)


def test_few_rows_and_inner_dimensions_have_kernels_of_their_own() -> None:
    table = TensorArg((500, 64))
    assert kernels(Call("aten::index_select.default", (table, 0, indices(16, 500)))) == [SMALL_INDEX]
    assert kernels(Call("aten::index_select.default", (table, 1, indices(32, 64)))) == [SCATTER_GATHER]


@given(st.integers(2305, 500_000), st.integers(1, 30))
def test_a_larger_table_takes_more_passes_of_the_sort(asked: int, bits: int) -> None:
    passes = Counter(kernels(put("aten::_index_put_impl_.default", 1 << bits, asked, columns=1)))
    assert passes["DeviceRadixSortOnesweepKernel"] == -(-bits // 8)


def test_few_indices_are_sorted_by_one_block_in_as_many_passes_as_six_bits_take() -> None:
    for rows, passes in ((64, 1), (65, 2), (4096, 2), (4097, 3)):
        launch = next(one for one in launches(put("aten::_index_put_impl_.default", rows, 100)) if "SingleTile" in one.kernel)
        assert launch.facts["passes"] == passes


def test_checked_indices_are_asserted_from_both_sides_each() -> None:
    asserted = "_assert_async_cuda_kernel"
    assert Counter(kernels(put("aten::_index_put_impl_.default", 100, 50)))[asserted] == 0
    assert Counter(kernels(put("aten::index_put_.default", 100, 50)))[asserted] == 2
    pairs = (TensorArg((32, 8, 8)), (None, indices(28, 8), indices(28, 8)), TensorArg((32, 28)), True)
    assert Counter(kernels(Call("aten::index_put_.default", pairs)))[asserted] == 4


def test_what_is_not_in_place_copies_first_and_values_with_holes_are_packed() -> None:
    plain = kernels(put("aten::index_put_.default", 100, 50))
    assert kernels(put("aten::index_put.default", 100, 50)) == [MEMCPY, *plain]
    assert Counter(kernels(put("aten::index_put_.default", 100, 50, strides=(100, 1)))) - Counter(plain) == Counter([STRIDED])


@given(st.integers(17, 512), st.integers(513, 2000), st.sampled_from(["float32", "bfloat16"]))
def test_an_index_that_counts_meets_each_place_once_and_fewer_sectors(asked: int, length: int, dtype: str) -> None:
    def added(values: str) -> Launch:
        index = TensorArg((asked,), "int64", high=length, values=values)
        table, source = TensorArg((4, 64, length), dtype), TensorArg((4, 64, asked), dtype)
        return launches(Call("aten::index_add_.default", (table, 2, index, source)))[0]

    counted, drawn = added("ordered"), added("normal")
    assert counted.kernel == drawn.kernel
    assert counted.facts["reuse"] == 1.0 <= drawn.facts["reuse"]
    assert counted.writes[0].numel == counted.elements
    sectors = [launch.grids[1][0] for launch in (counted, drawn)]
    assert sectors[1] / sectors[0] == pytest.approx(32 // (4 if dtype == "float32" else 2))


def test_single_elements_added_at_random_meet_whole_sectors() -> None:
    index = indices(512, 1023)
    (launch,) = launches(Call("aten::index_add_.default", (TensorArg((64, 1023)), 1, index, TensorArg((64, 512)))))
    # 128 sectors of 8 elements, each met with probability 1 - exp(-4).
    assert 0.95 * 64 * 1023 < launch.writes[0].numel <= 64 * 1023
    (rows,) = launches(Call("aten::index_add_.default", (TensorArg((1023, 64)), 0, index, TensorArg((512, 64)))))
    assert rows.writes[0].numel < 0.5 * 64 * 1023


@given(st.integers(17, 100_000), st.integers(1, 512))
def test_threads_that_add_walk_on_once_every_sm_has_its_blocks(asked: int, columns: int) -> None:
    table, source = TensorArg((1000, columns)), TensorArg((asked, columns))
    (launch,) = launches(Call("aten::index_add_.default", (table, 0, indices(asked, 1000), source)))
    blocks, serial = launch.grids[2]
    assert blocks <= 8 * 132
    assert 128 * blocks * (serial - 1) < asked * columns <= 128 * blocks * serial


@pytest.mark.parametrize("places", [(), (None,), 3])
def test_indexing_without_an_index_is_one_clear_line(places: object) -> None:
    with pytest.raises(InputError, match=r"aten::index\.Tensor"):
        launches(Call("aten::index.Tensor", (TensorArg((8, 8)), places)))  # type: ignore[arg-type]


def test_a_mask_meets_every_place_once_and_a_number_is_filled_in() -> None:
    x, mask, values = TensorArg((2, 9000, 4)), TensorArg((2, 9000), "bool", values="mask"), TensorArg((18_000, 4))
    added = launches(Call("aten::_index_put_impl_.default", (x, (mask,), values, True)))[-1]
    places = launches(Call("aten::_index_put_impl_.default", (x, (indices(18_000, 2), indices(18_000, 9000)), values, True)))[
        -1
    ]
    assert added.facts["reuse"] == places.facts["reuse"] == 1.0
    (filled,) = launches(Call("aten::index_put_.default", (x, (mask,), 0.0)))
    assert filled.elements == x.numel
    with pytest.raises(InputError, match="expected one mask"):
        launches(Call("aten::index_put_.default", (x, (indices(4, 2),), 0.0)))


@pytest.mark.parametrize(("shape", "strides", "count"), [((4096,), None, 4), ((5000,), None, 5), ((2, 6300), (10, 20), 7)])
def test_what_is_not_zero_is_counted_in_two_kernels_beyond_a_block_and_copied_where_it_has_gaps(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, count: int
) -> None:
    launched = kernels(Call("aten::nonzero.default", (TensorArg(shape, "bool", strides),)))
    assert len(launched) == count
    assert launched.count(MEMCPY) == 1
