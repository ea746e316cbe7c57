"""Laws of what norms launch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.launching import rules_of

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.launches import HOT, MEMSET, REDUCE, STRIDED, VECTORIZED
from steptime.errors import InputError

launches = rules_of("norm")


def kernels(op: str, *args: Argument) -> list[str]:
    return [launch.kernel for launch in launches(Call(op, args))]


def layer_norm(rows: int, columns: int, *, backward: bool = False, rms: bool = False) -> Call:
    x, each, weight = TensorArg((rows, columns)), TensorArg((rows, 1)), TensorArg((columns,))
    if not backward:
        return Call("aten::native_layer_norm.default", (x, (columns,), weight, weight, 1e-5))
    if rms:
        return Call("aten::_fused_rms_norm_backward.default", (x, x, (columns,), each, weight, (True, True)))
    args = (x, x, (columns,), each, each, weight, weight, (True, True, True))
    return Call("aten::native_layer_norm_backward.default", args)


def images(samples: int, channels: int, side: int, dtype: str = "float32", *, last: bool = False) -> TensorArg:
    strides = (channels * side * side, 1, side * channels, channels) if last else None
    return TensorArg((samples, channels, side, side), dtype, strides)


def cudnn(x: TensorArg) -> list[str]:
    weight = TensorArg((x.shape[1],))
    return kernels("aten::cudnn_batch_norm.default", x, weight, weight, weight, weight, True, 0.1, 1e-5)


@given(st.integers(1, 256), st.integers(1, 512), st.integers(2, 150))
def test_the_normalising_blocks_fill_sms_by_their_threads(samples: int, channels: int, side: int) -> None:
    x, weight = images(samples, channels, side, "bfloat16"), TensorArg((channels,))
    args = (x, weight, weight, weight, weight, True, 0.1, 1e-5)
    launch = launches(Call("aten::native_batch_norm.default", args))[-1]
    (full, serial), (blocks, _), *_ = launch.grids
    assert 64 <= full / blocks * 2048 <= 512
    assert full * 2048 * serial >= samples * channels * side * side


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_rows_of_whole_vectors_take_one_kernel_and_others_two(rows: int, columns: int) -> None:
    assert len(launches(layer_norm(rows, columns))) == (1 if columns % 4 == 0 else 2)


def test_weight_gradients_of_very_many_rows_are_summed_in_parts() -> None:
    few = launches(layer_norm(65_536, 384, backward=True))
    many = launches(layer_norm(65_537, 384, backward=True))
    assert [launch.kernel for launch in few[1:]] == ["GammaBetaBackwardCUDAKernelTemplate"]
    assert [launch.kernel for launch in many[2:]] == [MEMSET, REDUCE] * 2, "weight and bias"
    assert [launch.kernel for launch in launches(layer_norm(65_537, 384, backward=True, rms=True))[2:]] == [MEMSET, REDUCE]
    assert len(launches(layer_norm(65_537, 4096, backward=True))) == 2, "many columns are enough blocks"
    assert many[1].grids[0][1] < few[1].grids[0][1], "parts are shorter"


def test_cudnn_reads_a_channel_once_where_it_fits_and_pairs_of_halves_fit_twice() -> None:
    assert cudnn(images(8, 64, 56)) == ["bn_fw_tr_1C11_singleread"]
    assert cudnn(images(16, 64, 56)) == ["bn_fw_tr_1C11_kernel_NCHW"]
    assert cudnn(images(16, 64, 49, "float16")) == ["bn_fw_tr_1C11_kernel_NCHW"]
    assert cudnn(images(12, 64, 56, "float16")) == ["bn_fw_tr_1C11_singleread_spec"]


def test_channels_side_by_side_are_normed_by_one_kernel_both_ways_and_backward_reads_one_tensor_more() -> None:
    x, weight = images(16, 64, 56, "float16", last=True), TensorArg((64,))
    forward, backward = (
        launches(Call("aten::cudnn_batch_norm.default", (x, weight, weight, weight, weight, True, 0.1, 1e-5))),
        launches(Call("aten::cudnn_batch_norm_backward.default", (x, x, weight, weight, weight, weight, weight, 1e-5, None))),
    )
    assert [launch.kernel for launch in forward] == [MEMSET, "batchnorm_fwtr_nhwc_semiPersist"]
    assert [launch.kernel for launch in backward] == [MEMSET, "batchnorm_bwtr_nhwc_semiPersist"]
    assert [len(launch.reads) for launch in (forward[-1], backward[-1])] == [1, 2]


def test_an_instance_norm_has_neither_weights_nor_running_statistics() -> None:
    x = images(1, 512, 32, "bfloat16")
    usual = kernels("aten::native_batch_norm.default", x, *(TensorArg((512,)),) * 4, True, 0.1, 1e-5)
    instance = kernels("aten::native_batch_norm.default", x, None, None, None, None, True, 0.1, 1e-5)
    assert (instance[0], instance[2]) == (usual[0], usual[2])
    assert instance[1] == VECTORIZED
    mask = (True, False, False)
    assert kernels("aten::native_batch_norm_backward.default", x, x, None, None, None, None, None, True, 1e-5, mask)


def test_contiguous_planes_of_one_element_are_not_taken_for_channels_last() -> None:
    assert cudnn(images(16, 768, 1)) == ["bn_fw_tr_1C11_singleread"]
    assert cudnn(images(16, 768, 2, last=True)) == [MEMSET, "batchnorm_fwtr_nhwc_semiPersist"]


def test_group_norms_of_rows_have_no_planes_to_sum_over() -> None:
    def names(*shape: int) -> tuple[list[str], list[str]]:
        x, weight, each = TensorArg(shape), TensorArg((24,)), TensorArg((8, 4))
        sizes = (8, 24, math.prod(shape[2:]), 4)
        calls = (
            Call("aten::native_group_norm.default", (x, weight, weight, *sizes, 1e-5)),
            Call("aten::native_group_norm_backward.default", (x, x, each, each, weight, *sizes, (True, True, True))),
        )
        forward, backward = ([launch.kernel for launch in launches(call)] for call in calls)
        return forward, backward

    (forward, backward), (of_planes, back_of_planes) = names(8, 24), names(8, 24, 5, 5)
    assert (len(forward), len(backward), len(of_planes), len(back_of_planes)) == (2, 3, 3, 5)
    assert set(forward) < set(of_planes) | {STRIDED}
    assert backward == ["Compute1dBackwardFusedParamsCUDAKernel", STRIDED, "GammaBeta1dBackwardCUDAKernel1"]


def test_sums_of_a_group_norm_of_rows_read_its_elements_and_are_timed_as_those_of_planes() -> None:
    x, weight, each = TensorArg((512, 64)), TensorArg((64,)), TensorArg((512, 4))
    call = Call("aten::native_group_norm_backward.default", (x, x, each, each, weight, 512, 64, 1, 4, (True, True, True)))
    sums, _, weights = launches(call)
    assert [sum(read.nbytes for read in launch.reads) for launch in (sums, weights)] == [2 * x.nbytes] * 2
    assert (sums.timed_as, weights.timed_as) == ("ComputeBackwardFusedParamsCUDAKernel", "GammaBetaBackwardCUDAKernel2")
    # A warp for each group of a sample; 32 samples of 32 channels at a time.
    assert list(sums.grids)[1] == (512 * 4, 1.0)
    assert list(weights.grids) == [(1.0, 16), (2, 1.0)]


@pytest.mark.parametrize(
    "call",
    [
        Call("aten::native_layer_norm.default", (TensorArg((8, 10)), (4,))),
        Call("aten::native_group_norm.default", (TensorArg((2, 6, 4)), None, None, 2, 6, 4, 4, 1e-5)),
        Call("aten::cudnn_batch_norm.default", (TensorArg((8,)),)),
        Call("aten::relu.default", (TensorArg((8,)),)),
    ],
)
def test_a_norm_that_cannot_be_is_one_clear_line(call: Call) -> None:
    with pytest.raises(InputError, match=call.op):
        launches(call)


def test_rows_that_lie_otherwise_are_copied_first_and_read_from_the_copy() -> None:
    x, columns = TensorArg((8, 768, 64)).transposed(), 768
    weight, each = TensorArg((columns,)), TensorArg((8, 64, 1))
    plain = replace(x, strides=None)
    forward = launches(Call("aten::native_layer_norm.default", (x, (columns,), weight, weight, 1e-5)))
    assert [launch.kernel for launch in forward] == [STRIDED, "vectorized_layer_norm_kernel"]
    assert forward[1].reads[0].origin == HOT
    args = ((columns,), each, each, weight, weight, (True, True, True))
    name = "aten::native_layer_norm_backward.default"
    assert launches(Call(name, (plain, x, *args)))[0].kernel == STRIDED
    both = launches(Call(name, (x, x, *args)))
    assert [launch.kernel for launch in both[:2]] == [STRIDED] * 2
    assert both[2:] != launches(Call(name, (plain, plain, *args)))
    assert [launch.kernel for launch in both[2:]] == kernels(name, plain, plain, *args)


@pytest.mark.parametrize(("mask", "count"), [((True, True, True), 2), ((True, False, False), 1), ((False, True, True), 1)])
def test_gradients_that_nobody_wants_are_not_computed(mask: tuple[bool, ...], count: int) -> None:
    x, each, weight = TensorArg((64, 768)), TensorArg((64, 1)), TensorArg((768,))
    assert len(kernels("aten::native_layer_norm_backward.default", x, x, (768,), each, each, weight, weight, mask)) == count


def test_weights_to_be_standardised_are_normed_without_weights_or_statistics_of_their_own() -> None:
    x, weight = TensorArg((1, 64, 147)), TensorArg((64,))
    nothing = kernels("aten::native_batch_norm.default", x, None, None, None, None, True, 0.0, 1e-5)
    layer = kernels("aten::native_batch_norm.default", x, weight, weight, weight, weight, True, 0.1, 1e-5)
    assert (nothing[0], nothing[-1], len(nothing)) == (layer[0], layer[-1], len(layer))
    assert kernels(
        "aten::native_batch_norm_backward.default", x, x, None, None, None, weight, weight, True, 1e-5, (True, False)
    )
