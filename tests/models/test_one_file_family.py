"""A family is added by adding its file: found, its ops asked about in a program, its launches used, its sweep measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.models.launching import GPU
from tests.models.test_issued import Trace, gpu

from steptime._hardware.device import FOLDER
from steptime._models.kernels import families as package
from steptime._models.kernels.family import families, family_of, launches_of
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.from_ops import questions_of

FILE = '''
"""A library's own activation."""

from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import fresh
from steptime._models.kernels.launches.iterator import pointwise
from steptime._models.kernels.sweep import KernelSweep


def _draw(draw):
    return {"x": draw.activation()}


def _launches(call):
    x = call.tensor(0)
    return [pointwise((x,), fresh(x.shape, x.dtype), tag=x.dtype)]


FAMILY = Family(
    name="squared_relu",
    sweep=KernelSweep((1, _draw, "mylib::squared_relu(*x, 0.5)")),
    rules=_launches,
    declares="mylib::squared_relu.default T f=1.0",
)
'''


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of families with one more file."""
    (tmp_path / "squared_relu.py").write_text(FILE, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    families.cache_clear()
    family_of.cache_clear()
    yield
    families.cache_clear()
    family_of.cache_clear()


@pytest.mark.usefixtures("added")
def test_a_family_is_added_by_one_file() -> None:
    assert family_of("mylib::squared_relu.default") == "squared_relu"
    calls = list(families()["squared_relu"].sweep(np.random.default_rng(0), 20))
    assert {call.op for call in calls} == {"mylib::squared_relu.default"}
    assert [launch.kernel for launch in launches_of(calls[0], GPU)] == ["vectorized_elementwise_kernel"]
    trace = Trace()
    trace.op("mylib::squared_relu", gpu([4096, 4096], 3), 0.5, outputs=(gpu([4096, 4096], 4),))
    (question,) = [work.question for work in trace.works()]
    assert question is not None and question.call.op == "mylib::squared_relu.default"
    (answered,) = KernelModels.load(FOLDER / "h200.npz").ask([question])
    assert answered.family == "squared_relu" and answered.answer is not None
    # 128 MiB at no more than the memory's bandwidth, and not many times longer.
    assert 2 * 4 * 4096**2 / 4800 < answered.answer.time_ns + 50e6 / 4800 < 100_000


def test_without_its_file_there_is_no_such_family() -> None:
    assert family_of("mylib::squared_relu.default") == ""
    assert questions_of(Trace().program()) == []
