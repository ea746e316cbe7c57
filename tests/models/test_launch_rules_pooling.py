"""Laws of what pooling launches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.launching import rules_of

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.launches import STRIDED, VECTORIZED, Launch
from steptime.errors import InputError

launches = rules_of("pooling")

SIDES = st.integers(7, 147)


def images(samples: int, channels: int, side: int, *, last: bool = False, gap: int = 0) -> TensorArg:
    strides = (channels * side * side + gap, side * side, side, 1) if gap else None
    strides = (channels * side * side, 1, side * channels, channels) if last else strides
    return TensorArg((samples, channels, side, side), strides=strides)


def test_a_stride_that_is_not_given_is_the_window() -> None:
    x = images(4, 16, 30)
    said = launches(Call("aten::avg_pool2d.default", (x, (3, 3), (3, 3), (0, 0))))
    assert launches(Call("aten::avg_pool2d.default", (x, (3, 3)))) == said
    assert said[0].writes[0].shape == (4, 16, 10, 10)


@given(st.integers(8, 60), st.integers(2, 5), st.integers(1, 4), st.integers(0, 1), st.booleans())
def test_outputs_are_those_that_torch_has(side: int, window: int, stride: int, padding: int, rounded_up: bool) -> None:
    torch = pytest.importorskip("torch", reason="sides are checked against torch's own")
    args = ((window, window), (stride, stride), (padding, padding), (1, 1), rounded_up)
    own = launches(Call("aten::max_pool2d_with_indices.default", (images(2, 3, side), *args)))[0].writes[0].shape
    real, _ = torch.ops.aten.max_pool2d_with_indices.default(torch.empty((2, 3, side, side), device="meta"), *args)
    assert own == tuple(real.shape)


@given(st.integers(1, 8), st.integers(2, 256), SIDES, st.booleans())
def test_twice_the_samples_are_twice_the_work(samples: int, channels: int, side: int, last: bool) -> None:
    def work(count: int) -> float:
        (launch,) = launches(Call("aten::_adaptive_avg_pool2d.default", (images(count, channels, side, last=last), (6, 6))))
        blocks, serial = launch.grids[0]
        return blocks * serial

    assert work(2 * samples) == pytest.approx(2 * work(samples))


@given(st.integers(2, 512), SIDES)
def test_tiles_of_channels_last_cover_every_place_and_channel(channels: int, side: int) -> None:
    x = images(1, channels, side, last=True)
    (launch,) = launches(Call("aten::max_pool2d_with_indices.default", (x, (3, 3), (1, 1), (1, 1))))
    blocks, serial = launch.grids[0]
    assert blocks * 1024 * serial / 9 >= channels * side * side


def test_a_gradient_with_holes_is_packed_before_it_is_spread() -> None:
    x, index = images(4, 16, 17), TensorArg((4, 16, 8, 8), "int64", high=289)
    args = (x, (3, 3), (2, 2), (0, 0), (1, 1), False, index)
    for gap, before in ((0, []), (64, [STRIDED])):
        call = Call("aten::max_pool2d_with_indices_backward.default", (images(4, 16, 8, gap=gap), *args))
        assert [launch.kernel for launch in launches(call)] == [*before, VECTORIZED, "max_pool_backward_nchw"]


@pytest.mark.parametrize(
    "call",
    [
        Call("aten::max_pool2d_with_indices.default", (images(4, 16, 7), (9, 9), (1, 1))),
        Call("aten::_adaptive_avg_pool2d.default", (images(4, 16, 7), (0, 0))),
        Call("aten::avg_pool2d.default", (TensorArg((16, 7)), (3, 3))),
    ],
)
def test_windows_that_do_not_fit_are_one_clear_line(call: Call) -> None:
    with pytest.raises(InputError, match=call.op):
        launches(call)


@pytest.mark.parametrize("rounded_up", [False, True])
def test_volumes_have_the_outputs_that_torch_has_and_a_thread_for_each(rounded_up: bool) -> None:
    torch = pytest.importorskip("torch", reason="sides are checked against torch's own")
    shape, args = (2, 3, 9, 20, 21), ((3, 3, 2), (2, 1, 2), (1, 1, 0), (1, 1, 1), rounded_up)
    (launch,) = launches(Call("aten::max_pool3d_with_indices.default", (TensorArg(shape), *args)))
    real, _ = torch.ops.aten.max_pool3d_with_indices.default(torch.empty(shape, device="meta"), *args)
    assert launch.elements == launch.writes[0].numel == real.numel()
    gradient, index = TensorArg(tuple(real.shape)), TensorArg(tuple(real.shape), "int64", high=9 * 20 * 21)
    _, back = launches(Call("aten::max_pool3d_with_indices_backward.default", (gradient, TensorArg(shape), *args, index)))
    assert back.elements == TensorArg(shape).numel


def test_windows_of_images_are_unfolded_sample_after_sample() -> None:
    def unfolded(*shape: int, dilation: int = 1) -> list[Launch]:
        return launches(Call("aten::im2col.default", (TensorArg(shape), (14, 7), (dilation, dilation), (0, 0), (14, 7))))

    each, *others = unfolded(6, 3, 224, 112)
    assert len(others) == 5 and each.writes[0].numel == 3 * 224 * 112
    assert each.grids[0][1] == 14 * 7  # a thread walks its window
    assert unfolded(6, 3, 224, 112, dilation=2)[0].elements == 3 * 15 * 15
    with pytest.raises(InputError, match="no batch of images"):
        unfolded(3, 224, 112)


def test_windows_are_added_up_by_one_kernel_over_the_image() -> None:
    columns, sides = TensorArg((6, 3 * 9, 56 * 56)), ((56, 56), (3, 3), (1, 1), (1, 1), (1, 1))
    (launch,) = launches(Call("aten::col2im.default", (columns, *sides)))
    assert launch.elements == 6 * 3 * 56 * 56
    assert launch.facts["reuse"] == 9
    with pytest.raises(InputError, match="no columns of windows"):
        launches(Call("aten::col2im.default", (TensorArg((6, 27)), *sides)))
