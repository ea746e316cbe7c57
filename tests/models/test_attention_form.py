"""Attention: what a call asks for, what it costs by the book, and a form fitted on a few measured rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from steptime._hardware.device import FOLDER, read_device
from steptime._models.engine.constants import constants_of
from steptime._models.engine.stored import pack, unpack
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.fitted import KernelModels, with_copies
from steptime._models.kernels.forms import attention
from steptime._models.kernels.forms.attention import AttentionConstants, efficient_kernel, heads_of, table
from steptime._models.kernels.question import Question
from steptime.errors import InputError
from steptime_lab.fit.engine import regression
from steptime_lab.fit.kernels import attention as fitting
from steptime_lab.fit.kernels.book import short_name
from steptime_lab.measurements.kernels import Row, rows_of
from steptime_lab.measurements.shipped import shipped

H200 = read_device("h200")
_FLASH = "aten::_scaled_dot_product_flash_attention.default"


def _flash(batch: int = 8, length: int = 512, *, keys: int = 0, causal: bool = False, dtype: str = "bfloat16") -> Call:
    query, key = TensorArg((batch, 12, length, 64), dtype), TensorArg((batch, 12, keys or length, 64), dtype)
    return Call(_FLASH, (query, key, key, 0.0, causal, False), written=(0, 1, 2))


def _book(call: Call, *, share: int = 1) -> float:
    return float(
        table([heads_of(call)], [Question(call, share=share)], constants_of(H200, "attention", AttentionConstants))[1][0]
    )


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found = [row for row in rows_of(shipped("kernels"), families=["attention"]) if row.split != "test"]
    return [row for row in found if row.question.share == 1][::8] + [row for row in found if row.question.share == 4][:60]


@pytest.fixture(scope="module")
def form(rows: list[Row]) -> Iterator[attention.AttentionForm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regression, "_STEPS", 100)
        patch.setitem(regression._BLENDED, "rounds", 60)
        yield fitting.fit(rows, 0, H200)


def test_heads_of_queries_may_share_those_of_keys() -> None:
    call = _flash()
    query = call.args[0]
    assert isinstance(query, TensorArg)
    batch, heads, length, dim = query.shape
    shared, odd = (TensorArg((batch, count, length, dim), query.dtype) for count in (heads // 4, heads - 1))
    whole, fewer = (heads_of(replace(call, args=(query, keys, keys, *call.args[3:]))) for keys in (query, shared))
    assert replace(fewer, key_heads=whole.key_heads) == whole
    with pytest.raises(InputError, match="do not fit together"):
        heads_of(replace(call, args=(query, odd, odd, *call.args[3:])))


def test_sizes_masks_and_direction_are_read_from_every_measured_op(rows: list[Row]) -> None:
    for row in rows:
        heads = heads_of(row.question.call)
        assert heads.backward == ("backward" in row.question.call.op)
        assert heads.kind in row.question.call.op
        floats = [value for value in row.question.call.args if isinstance(value, float)]
        assert heads.dropout == any(value > 0 for value in floats)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (_flash(dtype="float32"), "float32"),
        (replace(_flash(), op="aten::mm.default"), "no attention"),
        (replace(_flash(), args=(TensorArg((8, 12, 512, 32), "bfloat16"), *_flash().args[1:])), "do not fit together"),
        (replace(_flash(), args=(TensorArg((8, 512, 64), "bfloat16"), *_flash().args[1:])), "argument 0"),
        (replace(_flash(), args=(TensorArg((8, 12, 0, 64), "bfloat16"), *_flash().args[1:])), "8x12x0x64"),
    ],
)
def test_a_call_that_cannot_be_is_said_in_one_line(call: Call, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        heads_of(call)
    assert "\n" not in str(caught.value)


def test_the_book_is_quadratic_in_length_halved_by_a_causal_mask_and_slower_on_parts() -> None:
    assert _book(_flash(length=4096)) / _book(_flash(length=2048)) == pytest.approx(4, rel=0.15)
    assert _book(_flash(length=4096, causal=True)) / _book(_flash(length=4096)) == pytest.approx(0.5, rel=0.1)
    assert _book(_flash(length=4096), share=4) / _book(_flash(length=4096)) == pytest.approx(4, rel=0.1)


def test_fitted_rows_are_answered_closely(form: attention.AttentionForm, rows: list[Row]) -> None:
    answers = form.answers([row.question for row in rows])
    errors = [abs(answer.time_ns / row.time_ns - 1) for answer, row in zip(answers, rows, strict=True)]
    assert np.median(errors) < 0.12


def test_a_call_launches_what_the_nearest_measured_one_did(form: attention.AttentionForm, rows: list[Row]) -> None:
    answer = form.answers([rows[0].question])[0]
    assert [launch.kernel for launch in answer.launches] == [short_name(name) for name in rows[0].kernel_names]


def test_what_lies_far_outside_grows_like_its_work_and_says_so(form: attention.AttentionForm) -> None:
    near, far = form.answers([Question(_flash(8, 4096)), Question(_flash(8, 4096 * 8))])
    assert not far.inside
    assert 16 < far.time_ns / near.time_ns < 256


def test_a_form_survives_a_file_without_pickling(form: attention.AttentionForm, rows: list[Row]) -> None:
    file = BytesIO()
    np.savez(file, **pack(form))  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file, allow_pickle=False) as kept:
        loaded = unpack(attention.AttentionForm, dict(kept))
    questions = [row.question for row in rows[:20]]
    assert loaded.answers(questions) == form.answers(questions)


def test_head_size_dropout_and_length_say_which_memory_efficient_kernel_runs() -> None:
    measured = [row for row in rows_of(shipped("kernels"), families=["attention"]) if "efficient" in row.question.call.op]
    assert len(measured) > 3000
    for row in measured:
        named = [name.partition("(")[0] for name in row.kernel_names if name.startswith("fmha_cutlass")]
        assert named == [efficient_kernel(heads_of(row.question.call))]


def _efficient(dim: int, strides: tuple[int, ...] | None = None, *, dropout: float = 0.1) -> Call:
    query = TensorArg((512, 16, 64, dim), strides=strides)
    return Call("aten::_scaled_dot_product_efficient_attention.default", (query, query, query, None, True, dropout, False))


def test_tokens_of_all_samples_side_by_side_cost_what_those_of_one_sample_do(form: attention.AttentionForm) -> None:
    dim, width = 32, 16 * 32
    batch_first, tokens_first = (64 * width, dim, width, 1), (width, dim, 512 * width, 1)
    assert heads_of(_efficient(dim, tokens_first)) == heads_of(_efficient(dim, batch_first))
    one, other = form.answers([Question(_efficient(dim, strides)) for strides in (batch_first, tokens_first)])
    assert one == other


def test_a_gradient_of_tokens_of_all_samples_is_copied_before_its_attention() -> None:
    def asked(*strides: int) -> list[str]:
        gradient, query = TensorArg((8, 4, 64, 32), strides=strides), TensorArg((8, 4, 64, 32))
        op = "aten::_scaled_dot_product_efficient_attention_backward.default"
        return [part.call.op for part in with_copies(Question(Call(op, (gradient, *(query,) * 3), written=(0,))))]

    assert asked(64 * 128, 32, 128, 1) == ["aten::_scaled_dot_product_efficient_attention_backward.default"]
    assert asked(128, 32, 8 * 128, 1) == ["aten::copy_.default", *asked(64 * 128, 32, 128, 1)]


def test_heads_beyond_the_fitted_sizes_are_off_by_no_more_than_those_at_the_edge(form: attention.AttentionForm) -> None:
    near, far = (_efficient(dim) for dim in (16, 4))
    ratios = [form.answers([Question(call)])[0].time_ns / _book(call) for call in (near, far)]
    assert ratios[1] == pytest.approx(ratios[0], rel=0.25)
    assert form.answers([Question(far)])[0].launches[0].kernel == "fmha_cutlassF_f32_aligned_64x64_rf_sm80"


def test_no_question_has_no_answer_and_one_alone_has_the_same_as_among_many(
    form: attention.AttentionForm, rows: list[Row]
) -> None:
    assert form.answers([]) == []
    alone, among = form.answers([rows[3].question])[0], form.answers([row.question for row in rows[:10]])[3]
    assert alone.time_ns == pytest.approx(among.time_ns)


@pytest.mark.parametrize(("kind", "summed"), [("cudnn", "fmha_reduce_head"), ("flash", "reduce_kernel")])
def test_gradients_of_keys_that_heads_share_are_summed_over_them(kind: str, summed: str) -> None:
    form = KernelModels.load(FOLDER / "h200.npz").forms["attention"]

    def launches(key_heads: int) -> list[str]:
        query, keys = TensorArg((4, 12, 512, 64), "bfloat16"), TensorArg((4, key_heads, 512, 64), "bfloat16")
        sums, state = TensorArg((4, 12, 512, 1)), TensorArg((), "int64")
        masks, seeds = ((state, state, None), ()) if kind == "cudnn" else ((), (state, state))
        arguments = (query, query, keys, keys, query, sums, *masks, None, None, 512, 512, 0.0, True, *seeds)
        call = Call(f"aten::_scaled_dot_product_{kind}_attention_backward.default", arguments)
        return [launch.kernel for launch in form.answers([Question(call)])[0].launches]

    assert launches(4) == [*launches(12), summed, summed]
