"""Which kernels an op launches, by rules alone: against measured rows, and by ATen's laws on made-up calls."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.launching import GPU, rules_of

from steptime._models.kernels.call import Call, DtypeArg, TensorArg, base_of, contiguous
from steptime._models.kernels.family import families, family_of, launches_of, swept_families
from steptime._models.kernels.launches import MEMCPY, MEMSET, REDUCE, STRIDED, UNROLLED, VECTORIZED, fresh, operand, short_name
from steptime._models.kernels.launches.iterator import broadcast, copies, iterate, pointwise, reduction
from steptime.errors import InputError
from steptime_lab.measurements.kernels import Row, rows_of
from steptime_lab.measurements.shipped import shipped

_RULED = sorted(name for name, family in swept_families().items() if family.rules is not None)
# Every so many of a family's rows are looked at.
_EVERY = 7
# Calls drawn anew from a family's sweep.
_DRAWN = 60

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    """A sample of the measured rows of every family with rules."""
    table = shipped("kernels")
    found = rows_of(table.take(np.arange(0, table.num_rows, _EVERY)), families=_RULED, shares=[1])
    return {family: [row for row in found if row.family == family and ruled(row.question.call)] for family in _RULED}


def ruled(call: Call) -> bool:
    """Whether rules are to say what a call launches.

    Not of recurrent layers, nor of Fourier transforms of long lines and of lengths with primes above 13, for which cuFFT has
    several kernels.
    """
    first = next(call.tensors(), None)
    if first is not None and base_of(call.op).startswith("aten::_fft_"):
        axes = call.args[1]
        assert isinstance(axes, tuple)
        lengths = [first.shape[axis] for axis in axes if isinstance(axis, int)]
        lengths += [value for value in call.args[3:] if isinstance(value, int) and not isinstance(value, bool)]
        if any(length > 4096 or any(length % prime == 0 for prime in (17, 43, 67, 113, 127)) for length in lengths):
            return False
    return bool(family_of(call.op))


def kernels(call: Call) -> list[str]:
    return [launch.kernel for launch in launches_of(call, GPU)]


@pytest.mark.parametrize("family", _RULED)
def test_rules_name_the_kernels_that_were_measured_in_their_order(rows: dict[str, list[Row]], family: str) -> None:
    assert rows[family]
    wrong = [
        row.question.call.to_json()
        for row in rows[family]
        if kernels(row.question.call) != [short_name(name) for name in row.kernel_names]
    ]
    assert wrong == []


@pytest.mark.parametrize("family", _RULED)
def test_every_launch_says_how_its_grid_divides_positive_work(rows: dict[str, list[Row]], family: str) -> None:
    for row in rows[family]:
        for launch in launches_of(row.question.call, GPU):
            assert launch.elements > 0
            assert launch.grids
            assert all(blocks >= 0 and work >= 0 and math.isfinite(blocks + work) for blocks, work in launch.grids)
            assert all(value >= 0 for value in launch.facts.values()), launch


@pytest.mark.parametrize("family", _RULED)
def test_every_call_that_a_sweep_draws_launches_something(family: str) -> None:
    rng = np.random.default_rng(11)
    for call in families()[family].sweep(rng, _DRAWN):
        assert launches_of(call, GPU), call.to_json()


@given(SHAPES, st.randoms(use_true_random=False))
def test_a_dense_tensor_is_walked_in_one_dimension_however_it_is_permuted(shape: tuple[int, ...], random: Random) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    strides = contiguous(shape)
    x = fresh(shape, "float32")
    turned = type(x)(tuple(shape[axis] for axis in order), "float32", tuple(strides[axis] for axis in order))
    walk = iterate(turned.shape, (None, turned))
    assert walk.sizes == (math.prod(shape),)
    assert pointwise((turned,), fresh(turned.shape, "float32")).kernel == VECTORIZED


@given(SHAPES, SHAPES)
def test_a_walk_covers_every_element_once(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    shape = left + right
    first, second = fresh(shape, "float32"), fresh((*(1 for _ in left), *right), "float32")
    assert math.prod(iterate(broadcast([first.shape, second.shape]), (None, first, second)).sizes) == math.prod(shape)


def test_operands_of_two_dtypes_are_unrolled_and_strided_ones_are_neither() -> None:
    shape = (64, 48)
    full, half = fresh(shape, "float32"), fresh(shape, "bfloat16")
    turned = type(full)(shape, "float32", (1, 64))
    assert pointwise((full, full), full).kernel == VECTORIZED
    assert pointwise((full, half), full, casts=True).kernel == UNROLLED
    assert pointwise((full, turned), full).kernel == STRIDED


def test_threads_less_than_a_line_apart_go_another_way_than_those_further() -> None:
    shape = (256, 8, 128)
    full = fresh(shape, "float32")
    near, far = (type(full)(shape, "float32", strides) for strides in ((1024, 1, 8), (1, 32_768, 256)))
    assert pointwise((full, near), full, existing=True).path == "transposed-near"
    assert pointwise((full, far), full, existing=True).path == "transposed"


@pytest.mark.parametrize(("dtype", "each"), [("float32", 2), ("int64", 2), ("bfloat16", 4), ("bool", 4)])
def test_a_thread_takes_two_strided_elements_or_four_short_ones(dtype: str, each: int) -> None:
    turned = type(fresh((), dtype))((512, 512), dtype, (1, 512))
    launch = pointwise((fresh((512, 512), dtype), turned), fresh((512, 512), dtype))
    assert launch.grids[0] == (512 * 512 / (128 * each), each)


def test_joining_one_tensor_copies_it() -> None:
    assert kernels(Call("aten::cat.default", ((TensorArg((64, 48)),), 1))) == [MEMCPY]
    assert kernels(Call("aten::cat.default", ((TensorArg((64, 48), "float32", (1, 64)),), 1))) == [STRIDED]


def test_tensors_of_several_dtypes_are_copied_to_their_places_one_by_one() -> None:
    parts = (TensorArg((64, 16), "bfloat16"), TensorArg((64, 48)))
    assert kernels(Call("aten::cat.default", (parts, 1))) == [STRIDED, STRIDED]


def test_dense_bytes_are_copied_by_the_driver_and_narrowing_is_vectorised() -> None:
    full, half = fresh((64, 48), "float32"), fresh((64, 48), "bfloat16")
    assert [one.kernel for one in copies(full, full)] == [MEMCPY]
    assert [one.kernel for one in copies(half, full)] == [VECTORIZED]
    assert [one.kernel for one in copies(full, half)] == [UNROLLED]


def test_a_clone_keeps_dense_strides_unless_rows_are_asked_for() -> None:
    turned = TensorArg((64, 48), "float32", (1, 64))
    assert kernels(Call("aten::clone.default", (turned,))) == [MEMCPY]
    assert kernels(Call("aten::clone.default", (turned,), (("memory_format", "contiguous_format"),))) == [STRIDED]


def test_blocks_that_share_an_output_need_a_cleared_semaphore() -> None:
    assert [one.kernel for one in reduction(fresh((1 << 24,), "float32"), (0,), GPU)] == [MEMSET, REDUCE]
    assert [one.kernel for one in reduction(fresh((1 << 14, 512), "float32"), (1,), GPU)] == [REDUCE]


@given(SHAPES, st.data())
def test_a_reduction_has_one_output_for_every_place_that_is_kept(shape: tuple[int, ...], data: st.DataObject) -> None:
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    launch = reduction(fresh(shape, "float32"), axes, GPU)[-1]
    assert launch.facts["outputs"] == math.prod(size for axis, size in enumerate(shape) if axis not in axes)
    assert launch.elements == math.prod(shape)


def test_softmax_takes_a_warp_for_short_rows_and_a_block_for_long_ones() -> None:
    def forward(columns: int) -> list[str]:
        return kernels(Call("aten::_softmax.default", (TensorArg((64, columns)), -1, False)))

    assert forward(512) == ["softmax_warp_forward"]
    assert forward(4096) == ["cunn_SoftMaxForwardReg"]
    assert forward(32_001) == ["cunn_SoftMaxForward"]


@pytest.mark.parametrize("last", [False, True])
def test_the_halves_of_a_batch_norm_over_ranks_launch_what_the_whole_does(last: bool) -> None:
    """But for the running statistics, and for the backward pass of one kernel where channels do not lie side by side."""
    x, channel, ranks = TensorArg((16, 64, 28, 28)), TensorArg((64,)), TensorArg((8, 64))
    x = x.channels_last() if last else x
    statistics = Call("aten::batch_norm_stats.default", (x, 1e-5))
    applied = Call("aten::batch_norm_elemt.default", (x, channel, channel, channel, channel, 1e-5))
    *before, _, after = kernels(
        Call("aten::native_batch_norm.default", (x, channel, channel, channel, channel, True, 0.1, 1e-5))
    )
    assert kernels(statistics) == before
    assert kernels(applied) == [after]
    sums = Call("aten::batch_norm_backward_reduce.default", (x, x, channel, channel, channel, True, True, True))
    given = (x, x, channel, channel, channel, channel, channel, TensorArg((8,), "int32"))
    backward = [*kernels(sums), *kernels(Call("aten::batch_norm_backward_elemt.default", given))]
    whole = (x, x, channel, channel, channel, channel, channel, True, 1e-5, (True, True, True))
    if last:
        assert backward == kernels(Call("aten::native_batch_norm_backward.default", whole))
    assert len(backward) == 2 + last
    gathered = Call(
        "aten::batch_norm_gather_stats_with_counts.default", (x, ranks, ranks, channel, channel, 0.1, 1e-5, TensorArg((8,)))
    )
    assert kernels(gathered) == ["batch_norm_reduce_statistics_kernel"]


def test_nothing_is_launched_over_no_elements() -> None:
    assert kernels(Call("aten::relu.default", (TensorArg((0, 5)),))) == []


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call("aten::relu.default", (TensorArg((4,), "float33"),)), "dtype 'float33'"),
        (Call("aten::relu.default", (TensorArg((-4,)),)), "-4"),
        (Call("aten::no_such_op.default", (TensorArg((4,)),)), "aten::no_such_op.default"),
        (Call("aten::clone.default", (3,)), "argument 0"),
        (Call("aten::_softmax.default", (TensorArg((4, 4)), "x", False)), "argument 1"),
        (Call("aten::_to_copy.default", (TensorArg((4, 4), "float32", (1,)),), (("dtype", DtypeArg("bfloat16")),)), "_to_copy"),
    ],
)
def test_a_call_that_cannot_be_is_one_clear_line_that_names_the_op(call: Call, said: str) -> None:
    with pytest.raises(InputError) as error:
        launches_of(call, GPU)
    assert said in str(error.value)
    assert call.op in str(error.value)


def test_warps_ask_for_the_sectors_of_each_operand_by_its_own_strides() -> None:
    x = operand(TensorArg((64, 256, 128)), 0)
    half = operand(TensorArg((64, 128, 256), "bfloat16").transposed(), 1)
    bias = operand(TensorArg((128,)), 1)
    elements = 64 * 256 * 128
    asked = [pointwise((x, other), x, existing=True).facts["sector_bytes"] / elements for other in (half, bias)]
    # Written and read in lines, 4 bytes each; across, a sector for every element; a bias again for every row.
    assert asked == [4 + 4 + 32, 4 + 4 + 4]


def test_a_scan_along_an_outer_axis_has_a_kernel_of_its_own() -> None:
    launches, x = rules_of("reduction"), TensorArg((8, 512, 64))
    kernels = [launches(Call("aten::cumsum.default", (x, axis)))[0].kernel for axis in (1, -2, -1, 2)]
    assert kernels == ["tensor_kernel_scan_outer_dim"] * 2 + ["tensor_kernel_scan_innermost_dim"] * 2


def test_a_scan_reads_and_writes_every_element_once() -> None:
    x = TensorArg((64, 128, 256))
    for axis in range(3):
        (launch,) = rules_of("reduction")(Call("aten::cumprod.default", (x, axis)))
        assert [sum(each.nbytes for each in part) for part in (launch.reads, launch.writes)] == [x.nbytes, x.nbytes]


def test_scans_beside_each_other_take_as_many_sms_whatever_dimension_they_lie_in() -> None:
    def blocks(*shape: int) -> float:
        return rules_of("reduction")(Call("aten::cumprod.default", (TensorArg(shape), 1)))[0].grids[0][0]

    assert blocks(4096, 64, 512) == 4096
    assert blocks(4096, 64, 128) == 1024
    # A block of a single thread still takes one of the places that an SM has for blocks.
    assert blocks(4096, 64, 1) == blocks(4096, 64, 64) == 512


def test_a_softmax_walks_again_over_rows_that_a_block_cannot_keep() -> None:
    def reads(columns: int, op: str = "_log_softmax") -> list[int]:
        x = TensorArg((4096, columns))
        arguments = (x, x, -1, DtypeArg("float32")) if op.endswith("data") else (x, -1, False)
        launch = rules_of("softmax")(Call(f"aten::{op}.default", arguments))[0]
        return [read.since_bytes for read in launch.reads]

    assert reads(1024) == reads(4096) == [0]
    at_work = GPU.sms * GPU.threads_per_sm // 1024
    assert reads(151_936) == [0, *[at_work * 151_936 * 4] * 2]
    assert len(reads(151_936, "_log_softmax_backward_data")) == 3


def test_a_softmax_of_long_rows_over_few_neighbours_is_walked_by_many_threads() -> None:
    def walked(columns: int, inner: int) -> float:
        (launch,) = rules_of("softmax")(Call("aten::_softmax.default", (TensorArg((8, columns, inner)), 1, False)))
        return launch.grids[0][1]

    assert walked(16, 8) == 16 and walked(4096, 512) == 4096
    assert walked(4096, 16) == 64


def test_what_is_only_cut_is_copied_and_not_filled() -> None:
    x = TensorArg((8, 64, 20))
    padded, cut = (kernels(Call("aten::constant_pad_nd.default", (x, sizes, 0.0))) for sizes in ((2, 2), (-2, -2)))
    assert (len(padded), len(cut)) == (2, 1)
