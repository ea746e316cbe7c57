"""The form of kernels whose launches follow from rules: fitted to a sample of measured rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steptime._hardware.device import read_device
from steptime._models.engine.constants import constants_of
from steptime._models.engine.splits import TEST, VALIDATION
from steptime._models.engine.stored import pack, unpack
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.family import launches_of
from steptime._models.kernels.forms.launched import LaunchedForm
from steptime._models.kernels.forms.launched.terms import TERMS, LaunchColumns, LaunchConstants, shares_of, terms, traffic
from steptime._models.kernels.launches import FACTS
from steptime._models.kernels.question import Question
from steptime.errors import InputError
from steptime_lab.fit.kernels import launched as fitting
from steptime_lab.fit.kernels.launched import starting_scales
from steptime_lab.measurements.kernels import Row, rows_of
from steptime_lab.measurements.shipped import shipped

pytest.importorskip("lightgbm")

_EVERY = 4
H200 = read_device("h200")
DEVICE = constants_of(H200, "launched", LaunchConstants)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Some rows of two families on whole GPUs and on parts."""
    table = shipped("kernels")
    found = rows_of(table.take(np.arange(0, table.num_rows, _EVERY)), families=["activation", "fill"])
    return [row for row in found if row.split != TEST]


@pytest.fixture(scope="module")
def form(rows: list[Row]) -> LaunchedForm:
    return fitting.fit(rows, 0, H200)


def relu(elements: int, dtype: str = "float32") -> Question:
    return Question(Call("aten::relu.default", (TensorArg((elements,), dtype),)))


def test_rows_it_was_not_fitted_to_are_predicted_within_a_tenth(form: LaunchedForm, rows: list[Row]) -> None:
    asked = [row for row in rows if row.split == VALIDATION and row.question.share == 1]
    answers = form.answers([row.question for row in asked])
    off = [abs(answer.time_ns / row.time_ns - 1) for answer, row in zip(answers, asked, strict=True)]
    assert len(off) > 50
    assert np.median(off) < 0.1


def test_the_same_rows_and_seed_give_the_same_form(form: LaunchedForm, rows: list[Row]) -> None:
    again = pack(fitting.fit(rows, 0, H200))
    own = pack(form)
    assert own.keys() == again.keys()
    assert all(np.array_equal(own[name], again[name]) for name in own)


def test_weights_of_a_kernel_fitted_alone_are_those_fitted_with_all(form: LaunchedForm, rows: list[Row]) -> None:
    whole = [row for row in rows if row.question.share == 1]
    alone = fitting.with_kernels(form.whole, whole, ["vectorized_elementwise_kernel"])
    assert sorted(alone.groups) == sorted(form.whole.groups)
    weights = dict(zip(form.whole.groups, form.whole.weights, strict=True))
    for name, found in zip(alone.groups, alone.weights, strict=True):
        np.testing.assert_allclose(found, weights[name], rtol=1e-4, atol=1e-6)


def test_a_form_made_from_its_arrays_gives_the_same_answers(form: LaunchedForm, rows: list[Row]) -> None:
    questions = [row.question for row in rows[::5]]
    arrays = pack(form)
    assert all(array.dtype.kind in "fiuU" for array in arrays.values())
    assert unpack(LaunchedForm, arrays).answers(questions) == form.answers(questions)


def test_answers_do_not_depend_on_what_is_asked_beside(form: LaunchedForm, rows: list[Row]) -> None:
    questions = [row.question for row in rows[::9]]
    arrays = pack(form)
    together = unpack(LaunchedForm, arrays).answers(questions + questions[:3])
    alone = unpack(LaunchedForm, arrays)
    assert together[: len(questions)] == [alone.answers([question])[0] for question in questions]
    assert together[len(questions) :] == together[:3]


def test_no_question_has_no_answer(form: LaunchedForm) -> None:
    assert form.answers([]) == []


def test_far_outside_the_fitted_sizes_time_grows_with_bytes_and_says_so(form: LaunchedForm) -> None:
    usual, large, larger = form.answers([relu(1 << 20), relu(1 << 31), relu(1 << 32)])
    assert usual.inside
    assert not large.inside
    assert larger.time_ns / large.time_ns == pytest.approx(2.0, rel=0.05)
    # Eight bytes per element, less what L2 holds, at somewhere between a half and all of 4.8 TB/s, the datasheet's rate.
    assert (8 * 2**32 - 60e6) / 4800 <= larger.time_ns < 8 * 2**32 / 2400


def test_a_kernel_never_measured_costs_at_least_its_bytes_and_is_outside(form: LaunchedForm) -> None:
    x = TensorArg((4096, 4096))
    answer = form.answers([Question(Call("aten::cumsum.default", (x, 1)))])[0]
    assert not answer.inside
    assert answer.time_ns > 2 * x.nbytes / 4800


def test_fewer_sms_are_never_faster_beside_parts_that_do_the_same(form: LaunchedForm) -> None:
    question = relu(1 << 24)
    times = [
        form.answers([replace(question, share=share, others="none" if share == 1 else "same")])[0].time_ns
        for share in (1, 2, 4, 8)
    ]
    assert times == sorted(times)
    assert 1.5 < times[-1] / times[0] < 16


def test_settings_that_cannot_be_are_one_clear_line(form: LaunchedForm) -> None:
    with pytest.raises(InputError, match="share 0"):
        form.answers([replace(relu(64), share=0)])
    with pytest.raises(InputError, match="'noisy'"):
        form.answers([replace(relu(64), share=2, others="noisy")])


def test_a_part_that_is_the_whole_scales_nothing() -> None:
    shares = shares_of(DEVICE.sms, np.ones(3), np.array([0, 1, 2]), starting_scales())
    assert np.array_equal(shares.memory, np.ones(3))
    assert np.array_equal(shares.sms, np.full(3, 132.0))


def test_what_was_written_just_before_comes_from_cache_until_it_no_longer_fits() -> None:
    columns = LaunchColumns(tuple(FACTS))
    shares = shares_of(DEVICE.sms, np.ones(1), np.zeros(1, dtype=np.int64), starting_scales())
    for elements, kept in ((1 << 18, 1.0), (1 << 26, 0.0)):
        call = relu(elements).call
        moved = traffic(np.asarray(columns.rows(call, launches_of(call, DEVICE.gpu), warm=True)), DEVICE, shares)
        assert moved.cache_bytes[0] == kept * 4 * elements
        assert moved.memory_bytes[0] == (1 - kept) * 4 * elements


def test_terms_are_never_negative_and_always_as_many(rows: list[Row]) -> None:
    columns = LaunchColumns(tuple(FACTS))
    for row in rows[::17]:
        numbers = np.asarray(columns.rows(row.question.call, launches_of(row.question.call, DEVICE.gpu), row.question.warm))
        shares = shares_of(DEVICE.sms, np.full(len(numbers), 4.0), np.full(len(numbers), 2), starting_scales())
        found = terms(columns, numbers, traffic(numbers, DEVICE, shares), DEVICE, shares)
        assert found.shape == (len(numbers), TERMS)
        assert (found >= 0).all()
