"""Convolutions: what a layer is, which kernels belong to which pass, and a form fitted on a few measured rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from steptime._hardware.device import FOLDER, read_device
from steptime._models.engine.constants import constants_of
from steptime._models.engine.stored import pack, unpack
from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms import convolution
from steptime._models.kernels.forms.convolution.cores import GIVES_FIRST, LAST, PLAIN, code, conversions, launched
from steptime._models.kernels.forms.convolution.passes import (
    BACKWARD,
    BIAS,
    DGRAD,
    FORWARD,
    FPROP,
    WGRAD,
    ConvolutionConstants,
    Pass,
    PassColumns,
    layer_of,
    table,
)
from steptime._models.kernels.question import LaunchTime, Question
from steptime.errors import InputError
from steptime_lab.fit.engine.regression import Training
from steptime_lab.fit.kernels import convolution as fitting
from steptime_lab.fit.kernels.book import short_name
from steptime_lab.fit.kernels.convolution import passes_of, way
from steptime_lab.measurements.kernels import Row, rows_of
from steptime_lab.measurements.shipped import shipped

_TRANSPOSE = "void cudnn::engines_precompiled::nchwToNhwcKernel<float>(float const*)"
_BACK = "void cudnn::engines_precompiled::nhwcToNchwKernel<float>(float const*)"


def _forward(batch: int = 8, inputs: int = 64, outputs: int = 128, *, side: int = 28, tap: int = 3, groups: int = 1) -> Call:
    image = TensorArg((batch, inputs, side, side), "bfloat16")
    weight = TensorArg((outputs, inputs // groups, tap, tap), "bfloat16")
    return Call(FORWARD, (image, weight, None, (1, 1), (tap // 2,) * 2, (1, 1), False, (0, 0), groups))


def _backward(asked: tuple[bool, bool, bool] = (True, True, False)) -> Call:
    image, weight = TensorArg((8, 64, 28, 28)), TensorArg((128, 64, 3, 3))
    geometry: tuple[Argument, ...] = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    return Call(BACKWARD, (TensorArg((8, 128, 28, 28)), image, weight, (128,), *geometry, asked))


DEVICE = constants_of(read_device("h200"), "convolution", ConvolutionConstants)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found = [row for row in rows_of(shipped("kernels"), families=["convolution"]) if row.split != "test"]
    return [row for row in found if row.question.share == 1][:400:2] + [row for row in found if row.question.share == 8][:60]


@pytest.fixture(scope="module")
def form(rows: list[Row]) -> Iterator[convolution.ConvolutionForm]:
    with pytest.MonkeyPatch.context() as patch:
        quick = {"rounds": 60, "training": Training(steps=60)}
        patch.setattr(fitting, "_BLENDS", {name: {**settings, **quick} for name, settings in fitting._BLENDS.items()})
        yield fitting.fit(rows, 0, read_device("h200"))


def _turned(*, backward: bool = False) -> Call:
    """From 14 x 14 to 28 x 28."""
    x, weight, y = TensorArg((8, 128, 14, 14)), TensorArg((128, 64, 2, 2)), TensorArg((8, 64, 28, 28))
    geometry: tuple[Argument, ...] = ((2, 2), (0, 0), (1, 1), True, (0, 0), 1)
    if backward:
        return Call(BACKWARD, (y, x, weight, (64,), *geometry, (True, True, True)))
    return Call(FORWARD, (x, weight, TensorArg((64,)), *geometry))


def test_a_transposed_layer_is_the_other_one_the_other_way_round(form: convolution.ConvolutionForm) -> None:
    image, weight, y = TensorArg((8, 64, 28, 28)), TensorArg((128, 64, 2, 2)), TensorArg((8, 128, 14, 14))
    geometry: tuple[Argument, ...] = ((2, 2), (0, 0), (1, 1), False, (0, 0), 1)
    plain = layer_of(Call(FORWARD, (image, weight, None, *geometry)))
    forward, backward = layer_of(_turned()), layer_of(_turned(backward=True))
    sizes = ("batch", "inputs", "outputs", "taps", "image", "result", "stride", "groups")
    for name in sizes:
        assert getattr(forward, name) == getattr(backward, name) == getattr(plain, name), name
    assert (forward.passes, backward.passes) == ((DGRAD, BIAS), (FPROP, WGRAD, BIAS))
    asked = Call(BACKWARD, (y, image, weight, None, *geometry, (True, False, False)))
    turned = _turned()
    unbiased = replace(turned, args=(*turned.args[:2], None, *turned.args[3:]))
    there, back = form.answers([Question(asked), Question(unbiased)])
    # But for what was seen of transposed calls themselves.
    assert there.time_ns == pytest.approx(back.time_ns, rel=0.1)


def test_depthwise_kernels_of_aten_add_the_bias_themselves() -> None:
    call = _forward(inputs=64, outputs=64, groups=64)
    biased = layer_of(replace(call, args=(*call.args[:2], TensorArg((64,), "bfloat16"), *call.args[3:])))
    bias = Pass(biased, BIAS, Question(call))
    own, other = LaunchTime("conv_depthwise2d_forward_kernel_generic", 1.0), LaunchTime("sm90_xmma_fprop", 1.0)
    assert convolution.adds_bias_itself(bias, [own])
    assert not convolution.adds_bias_itself(bias, [other])
    assert not convolution.adds_bias_itself(Pass(biased, FPROP, Question(call)), [own])


def test_kernels_of_a_transposed_backward_call_belong_to_their_passes() -> None:
    names = [_TRANSPOSE, "sm90_xmma_fprop_implicit_gemm", _BACK, _TRANSPOSE, "sm90_xmma_wgrad_implicit_gemm"]
    assert passes_of(names, replace(layer_of(_turned(backward=True)), passes=(FPROP, WGRAD))) == {
        FPROP: [0, 1, 2],
        WGRAD: [3, 4],
    }


def test_a_layer_has_the_result_that_its_geometry_gives() -> None:
    layer = layer_of(_forward(side=29, tap=5))
    assert layer.result == (29, 29)
    assert layer.passes == (FPROP,)
    assert (layer.outputs, layer.inputs // layer.groups, math.prod(layer.taps)) == (128, 64, 25)


def test_a_backward_call_has_the_passes_that_its_mask_asks_for() -> None:
    assert layer_of(_backward()).passes == (DGRAD, WGRAD)
    assert layer_of(_backward((False, True, True))).passes == (WGRAD, BIAS)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (_forward(inputs=64, groups=3), "channels do not divide"),
        (replace(_forward(), op="aten::mm.default"), "no convolution"),
        (replace(_forward(), args=_forward().args[:4]), "arguments"),
        (
            replace(
                _forward(),
                args=(TensorArg((8, 64, 1, 1), "bfloat16"), TensorArg((8, 64, 9, 9), "bfloat16"), *_forward().args[2:]),
            ),
            "result",
        ),
        (replace(_forward(), args=(TensorArg((8, 64, 28, 28), "int64"), *_forward().args[1:])), "int64"),
        (replace(_backward(), args=(TensorArg((8, 128, 27, 28)), *_backward().args[1:])), "gradient"),
    ],
)
def test_a_call_that_cannot_be_is_said_in_one_line(call: Call, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        layer_of(call)
    assert "\n" not in str(caught.value)


def test_kernels_of_a_backward_call_are_split_where_the_weight_begins() -> None:
    dgrad, wgrad = "sm90_xmma_dgrad_implicit_gemm_x_tilesize128x64", "sm90_xmma_wgrad_implicit_gemm_x_tilesize128x64"
    names = [_TRANSPOSE, _TRANSPOSE, dgrad, _BACK, _TRANSPOSE, _TRANSPOSE, wgrad, _BACK]
    assert passes_of(names, layer_of(_backward())) == {DGRAD: [0, 1, 2, 3], WGRAD: [4, 5, 6, 7]}


def test_a_bias_is_the_last_kernel_where_it_is_asked_for() -> None:
    names = ["sm90_xmma_wgrad_implicit_gemm", "void at::native::reduce_kernel<512>(int)"]
    assert passes_of(names, layer_of(_backward((False, True, True)))) == {WGRAD: [0], BIAS: [1]}


def test_short_names_have_no_tiles_and_no_templates() -> None:
    assert short_name("sm90_xmma_fprop_implicit_gemm_bf16_tilesize128x64x32_kernel") == "sm90_xmma_fprop"
    assert short_name(_TRANSPOSE) == "nchwToNhwcKernel"
    assert (
        short_name("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_nt_align4>(P)")
        == "cutlass_80_tensorop_s1688gemm"
    )


def test_ways_are_told_apart_by_kernels_and_by_turns_over_groups() -> None:
    products, direct = ["nchwToNhwcKernel", "sm90_xmma_fprop"], ["conv2d_grouped_direct_kernel"]
    turns = ["Memset", "sm90_xmma_fprop", "Memset", "sm90_xmma_fprop"]
    assert len({way(products, 4), way(direct, 4), way(turns, 4)}) == 3
    assert way(products, 1) == way(turns, 1) != way(["sm80_xmma_fprop"], 1)
    assert way(["sm80_xmma_fprop"], 4) == way(products, 4)


def test_every_measured_call_is_split_into_the_passes_it_asks_for(rows: list[Row]) -> None:
    for row in rows:
        layer = layer_of(row.question.call)
        pieces = passes_of(row.kernel_names, layer)
        assert set(layer.passes) - {BIAS} <= set(pieces)
        assert sorted(place for places in pieces.values() for place in places) == list(range(len(row.kernel_names)))


@pytest.mark.parametrize("name", [FPROP, DGRAD, WGRAD])
def test_the_book_grows_with_the_batch_and_with_fewer_sms(name: str) -> None:
    layers = [layer_of(_forward(batch)) for batch in (16, 64, 256)]
    _, base = table(PassColumns([Pass(layer, name, Question(_forward())) for layer in layers], DEVICE))
    assert base[0] < base[1] < base[2]
    assert base[2] / base[1] == pytest.approx(4, rel=0.3)
    shared = Question(_forward(), share=4, others="same")
    assert table(PassColumns([Pass(layers[2], name, shared)], DEVICE))[1][0] > 2 * base[2]


def test_fitted_rows_are_answered_closely(form: convolution.ConvolutionForm, rows: list[Row]) -> None:
    answers = form.answers([row.question for row in rows])
    errors = [abs(answer.time_ns / row.time_ns - 1) for answer, row in zip(answers, rows, strict=True)]
    assert np.median(errors) < 0.15


def test_a_call_launches_what_the_nearest_measured_one_did(form: convolution.ConvolutionForm, rows: list[Row]) -> None:
    answer = form.answers([rows[0].question])[0]
    assert [launch.kernel for launch in answer.launches] == [short_name(name) for name in rows[0].kernel_names]
    assert all(launch.time_ns > 0 for launch in answer.launches)


def test_what_lies_far_outside_grows_like_its_work_and_says_so(form: convolution.ConvolutionForm) -> None:
    near, far = form.answers([Question(_forward(256)), Question(_forward(256 * 64))])
    assert not far.inside
    assert 16 < far.time_ns / near.time_ns < 256


def test_a_benchmarked_choice_was_never_measured(form: convolution.ConvolutionForm) -> None:
    assert not form.answers([Question(_forward(), benchmark=True)])[0].inside


def test_a_form_survives_a_file_without_pickling(form: convolution.ConvolutionForm, rows: list[Row]) -> None:
    file = BytesIO()
    np.savez(file, **pack(form))  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file, allow_pickle=False) as kept:
        loaded = unpack(convolution.ConvolutionForm, dict(kept))
    questions = [row.question for row in rows[:20]]
    assert loaded.answers(questions) == form.answers(questions)


def test_no_question_has_no_answer_and_one_alone_has_the_same_as_among_many(
    form: convolution.ConvolutionForm, rows: list[Row]
) -> None:
    assert form.answers([]) == []
    alone, among = form.answers([rows[3].question])[0], form.answers([row.question for row in rows[:10]])[3]
    assert alone.time_ns == pytest.approx(among.time_ns)


@pytest.mark.parametrize(
    ("channels", "taps", "name", "layout", "expected"),
    [
        (64, 3, FPROP, LAST, 3),  # image, filters, result
        (64, 1, FPROP, LAST, 2),  # filters of one tap lie alike in both orders
        (3, 3, FPROP, LAST, 5),  # memory is cleared for the channels that are added to image and filters
        (64, 3, FPROP, GIVES_FIRST, 2),
        (3, 3, WGRAD, LAST, 4),
        (64, 1, WGRAD, LAST, 2),
        (3, 3, DGRAD, LAST, 4),
        (64, 3, WGRAD, PLAIN, 0),
    ],
)
def test_tensors_are_moved_and_padded_to_what_a_core_takes(
    channels: int, taps: int, name: str, layout: int, expected: int
) -> None:
    x, weight = TensorArg((8, channels, 28, 28), "bfloat16"), TensorArg((64, channels, taps, taps), "bfloat16")
    layer = layer_of(Call(FORWARD, (x, weight, None, (1, 1), (taps // 2,) * 2, (1, 1), False, (0, 0), 1)))
    assert conversions(layer, name, layout) == expected
    assert launched(layer, name, code(layout, 2)) == expected + 2


def test_the_memset_of_a_sum_over_blocks_belongs_to_the_bias() -> None:
    call = _turned(backward=True)
    found = passes_of(
        [_TRANSPOSE, "sm90_xmma_fprop", "sm90_xmma_wgrad", "Memset (Device)", "void at::native::reduce_kernel<512>(int)"],
        layer_of(call),
    )
    assert found[BIAS] == [3, 4]


def test_most_measured_layers_launch_as_many_kernels_as_predicted() -> None:
    """Those of the split `test`, which nothing was fitted to."""
    unseen = [row for row in rows_of(shipped("kernels"), families=["convolution"], shares=[1]) if row.split == "test"]
    unseen = [row for row in unseen if layer_of(row.question.call).groups == 1 and not row.question.warm][:600]
    answers = KernelModels.load(FOLDER / "h200.npz").forms["convolution"].answers([row.question for row in unseen])
    off = [abs(len(answer.launches) - len(row.kernel_names)) for answer, row in zip(answers, unseen, strict=True)]
    assert np.mean(np.asarray(off) == 0) > 0.7
