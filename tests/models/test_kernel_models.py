from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._models.engine.archive import Archive, write_archive
from steptime._models.engine.splits import FIT, OUTSIDE, TEST, VALIDATION, Residuals, size_of, split_of
from steptime._models.engine.stored import pack, unpack
from steptime._models.kernels.call import Call, TensorArg, flop_of, moved_bytes
from steptime._models.kernels.fitted import KernelModels, with_copies
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime.errors import InputError

COPY, CONVOLUTION = "aten::copy_.default", "aten::convolution.default"


class Bytes:
    """A form that takes a nanosecond a byte and refuses empty calls."""

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        for question in questions:
            if not question.call.nbytes:
                raise InputError(f"{question.call.op} has no bytes")
        return [Answer((LaunchTime("bytes", float(question.call.nbytes)),)) for question in questions]


def asked(op: str, *shapes: tuple[int, ...], dtype: str = "float32") -> Question:
    return Question(Call(op, tuple(TensorArg(shape, dtype) for shape in shapes)))


RESIDUALS = Residuals.of(["elementwise"] * 100, np.full(100, 1e3), np.linspace(900, 1100, 100))


def test_one_question_that_cannot_be_answered_does_not_cost_the_others_theirs() -> None:
    models = KernelModels({"launched": Bytes()}, RESIDUALS, {})
    empty, full = asked("aten::add.Tensor", (0,), (0,)), asked("aten::add.Tensor", (4,), (4,))
    found = models.ask([full, empty, full])
    assert [one.answer is not None for one in found] == [True, False, True]
    assert found[1].why == "aten::add.Tensor has no bytes"
    assert found[0].answer is not None
    assert found[0].answer.time_ns == 32


def test_an_op_of_no_family_and_a_family_without_a_form_are_told_apart() -> None:
    models = KernelModels({"launched": Bytes()}, RESIDUALS, {})
    nobody, unfitted = models.ask([asked("aten::never_heard_of.default", (1,)), asked("aten::mm.default", (2, 2), (2, 2))])
    assert nobody.answer is None
    assert "no family has aten::never_heard_of" in nobody.why
    assert unfitted.answer is None
    assert unfitted.why == "matmul is not fitted"


def convolution(x: TensorArg, weight: TensorArg) -> Question:
    return Question(Call("aten::convolution.default", (x, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)))


def test_what_a_convolution_cannot_take_as_it_lies_is_copied_first() -> None:
    part = TensorArg((8, 32, 7, 7), strides=(64 * 49, 49, 7, 1))
    assert [one.call.op for one in with_copies(convolution(part, TensorArg((16, 32, 1, 1))))] == [COPY, CONVOLUTION]
    # Filters of one tap tell by their strides that channels come last: a contiguous image is brought into that order.
    x, last = TensorArg((8, 32, 7, 7)), TensorArg((16, 32, 1, 1)).channels_last()
    copy, asked_for = with_copies(convolution(x, last))
    assert copy.call.args == (x.channels_last(), x)
    assert asked_for.call.args[:2] == (x.channels_last(), last)
    assert (
        len(with_copies(convolution(x.channels_last(), last))) == len(with_copies(convolution(x, TensorArg(last.shape)))) == 1
    )


@given(st.booleans(), st.booleans())
def test_a_gradient_with_gaps_is_copied_for_each_result_that_is_asked_for(of_image: bool, of_filters: bool) -> None:
    y, x, weight = TensorArg((8, 16, 7, 7), strides=(32 * 49, 49, 7, 1)), TensorArg((8, 32, 7, 7)), TensorArg((16, 32, 1, 1))
    geometry = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    args = (y, x, weight, None, *geometry, (of_image, of_filters, False))
    parts = with_copies(Question(Call("aten::convolution_backward.default", args)))
    assert [part.call.op for part in parts[:-1]] == [COPY] * (of_image + of_filters)
    models = KernelModels({"launched": Bytes(), "convolution": Bytes()}, RESIDUALS, {})
    answer = models.ask([Question(Call("aten::convolution_backward.default", args))])[0].answer
    assert answer is not None
    assert len(answer.launches) == len(parts)


def test_a_depthwise_layer_goes_by_its_image_and_filters_and_copies_a_gradient_once() -> None:
    x, weight = TensorArg((8, 32, 14, 14)), TensorArg((32, 1, 7, 7))
    args = (x.channels_last(), x, weight, None, (1, 1), (3, 3), (1, 1), False, (0, 0), 32, (True, True, False))
    copy, asked_for = with_copies(Question(Call("aten::convolution_backward.default", args)))
    assert copy.call.args == (x, x.channels_last())
    assert asked_for.call.args[:3] == (x, x, weight)


def test_residuals_hold_nine_of_ten_and_survive_a_file(tmp_path: Path) -> None:
    measured = np.exp(np.random.default_rng(0).normal(0, 0.1, 4000)) * 1e3
    residuals = Residuals.of(["norm"] * 4000, np.full(4000, 1e3), measured)
    quantiles = residuals.of_answer("norm", 1e3)
    inside = (np.log(measured / 1e3) >= quantiles[0]) & (np.log(measured / 1e3) <= quantiles[-1])
    assert inside.mean() == pytest.approx(0.9, abs=0.01)
    write_archive(tmp_path / "one.npz", {"seed": 3}, {"residuals": pack(residuals)})
    archive = Archive.open(tmp_path / "one.npz")
    assert archive.recipe == {"seed": 3}
    again = unpack(Residuals, archive.part("residuals"))
    assert np.array_equal(again.of_answer("norm", 1e3), quantiles)
    assert np.array_equal(again.of_answer("a family without rows", 1e3), residuals.every)


def test_what_lies_beyond_the_measured_rows_is_at_least_as_uncertain_as_all_such_rows() -> None:
    near, far = np.linspace(0.9, 1.1, 100), np.linspace(0.5, 3.0, 100)
    residuals = Residuals.of(["norm"] * 100 + [OUTSIDE] * 100, np.full(200, 1e3), 1e3 * np.concatenate([near, far]))
    known, beyond = (residuals.interval_ns("norm", 1e6, inside=inside) for inside in (True, False))
    assert known == residuals.interval_ns("norm", 1e6)
    assert beyond[0] < known[0] < 1e6 < known[1] < beyond[1]
    assert RESIDUALS.interval_ns("elementwise", 1e6, inside=False) == RESIDUALS.interval_ns("elementwise", 1e6)


def test_the_same_parts_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_archive(tmp_path / name, {"x": 1}, {"part": {"values": np.arange(5.0)}})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"not an archive at all"])
def test_a_broken_file_of_models_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.npz"
    file.write_bytes(content)
    with pytest.raises(InputError, match="fit again"):
        KernelModels.load(file)


def test_a_file_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "evil.npz"
    np.savez(file, recipe=np.asarray([object()], dtype=object))
    with pytest.raises(InputError, match="not a readable file"):
        KernelModels.load(file)


@given(st.text(max_size=30))
def test_a_call_lies_on_one_side_of_the_split_only_and_always_the_same(text: str) -> None:
    assert split_of(text) in (FIT, VALIDATION, TEST)
    assert split_of(text) == split_of(text)


def test_seven_of_ten_calls_are_fitted_and_the_rest_halved() -> None:
    counts = dict.fromkeys((FIT, VALIDATION, TEST), 0)
    for number in range(4000):
        counts[split_of(f"call {number}")] += 1
    assert counts[FIT] / 4000 == pytest.approx(0.70, abs=0.03)
    assert counts[TEST] / 4000 == pytest.approx(0.15, abs=0.02)


def test_a_product_does_two_operations_per_multiplied_pair() -> None:
    call = asked("aten::mm.default", (3, 5), (5, 7)).call
    assert flop_of(call) == 2 * 3 * 5 * 7
    assert moved_bytes(call) == 4 * (15 + 35 + 21)


def test_sizes_are_told_apart_by_their_edges() -> None:
    assert [size_of(time_ns) for time_ns in (1e3, 5e3, 5.1e3, 1e9)] == [0, 0, 1, 2]
