from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from steptime._hardware.device import FOLDER, read_device
from steptime._models.engine.splits import Residuals
from steptime._models.estimate import Source
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._platforms.device import Device
from steptime.errors import InputError


class Shares:
    """A form that takes a microsecond per part, and longer beside company; it counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        self.asked += len(questions)
        return [
            Answer((LaunchTime("kernel", 1e3 * question.share * (1 + (question.others == "same"))),)) for question in questions
        ]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {}


RESIDUALS = Residuals.of(["elementwise"] * 100, np.full(100, 1e3), np.linspace(900, 1100, 100))
ADD = Question(Call("aten::add.Tensor", (TensorArg((4,)), TensorArg((4,)))))
UNHEARD = Question(Call("aten::never_heard_of.default", (TensorArg((1 << 20,)),)))


def device(name: str, form: Shares) -> Device:
    return Device(read_device(name), KernelModels({"launched": form}, RESIDUALS, {}))


def test_a_part_is_asked_as_that_part_beside_others_that_do_the_same() -> None:
    whole, quarter = device("h200", Shares()), device("h200-quarter", Shares())
    assert whole.estimates([ADD])[0].estimate.time_ns == 1e3
    assert quarter.estimates([ADD])[0].estimate.time_ns == 8e3


def test_an_estimate_lies_in_its_interval_and_says_that_it_is_fitted() -> None:
    found = device("h200", Shares()).estimates([ADD])[0]
    assert found.estimate.source is Source.FITTED
    assert found.estimate.low_ns < found.estimate.time_ns < found.estimate.high_ns
    assert found.family == "elementwise"
    assert sum(launch.time_ns for launch in found.launches) == found.estimate.time_ns


def test_a_users_device_has_its_models_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text((FOLDER / "h200.toml").read_text().replace('models = "h200"', 'models = "mine"'))
    with pytest.raises(InputError, match=r"mine\.npz: no such file; `steptime fit` writes one"):
        Device.load(str(tmp_path / "mine.toml"))
    (tmp_path / "mine.npz").write_bytes((FOLDER / "h200.npz").read_bytes())
    mine, shipped = Device.load(str(tmp_path / "mine.toml")), Device.load("h200")
    assert mine.estimates([ADD])[0].estimate == shipped.estimates([ADD])[0].estimate


def test_a_question_is_put_to_the_models_once() -> None:
    form = Shares()
    one = device("h200", form)
    assert len(one.estimates([ADD, ADD])) == 2
    one.estimates([ADD])
    assert form.asked == 1


def test_an_op_without_a_model_is_never_free_and_says_why() -> None:
    found = device("h200", Shares()).estimates([UNHEARD])[0]
    assert found.estimate.source is Source.FALLBACK
    assert found.estimate.time_ns > 1e3
    assert not found.estimate.inside
    assert "no family has aten::never_heard_of" in found.why


def test_strict_refuses_what_no_model_answers_and_names_its_share() -> None:
    with pytest.raises(InputError, match=r"aten::never_heard_of\.default has no fitted model on h200 .* of the device time"):
        device("h200", Shares()).estimates([ADD, UNHEARD], strict=True)
    assert device("h200", Shares()).estimates([ADD], strict=True)
