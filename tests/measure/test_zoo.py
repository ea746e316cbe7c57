"""Laws of measuring the zoo: what is timed, and how profiled kernels are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.measure.raw_events import RawEvent
from torch import nn

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Session
from steptime._measurements.store import read
from steptime.errors import InputError
from steptime_lab.measure.command import main
from steptime_lab.measure.zoo import PROFILED, TIMED, _store, chosen, due
from steptime_lab.measure.zoo.profiled import MARK, Around, KernelSum, folded, profiled, sums_of
from steptime_lab.measure.zoo.timed import block_means, timed
from steptime_lab.measurements.sets import ZOO, ZOO_KERNELS
from steptime_lab.workloads.zoo.architecture import CONTIGUOUS, GROUPS, Architecture, Place, Trainee

ALONE = Group(0, 1, "cpu", 1)


def _tiny(at: Place) -> Trainee:
    model, rows = nn.Linear(8, 4), at.floats(16, 8)
    return Trainee(model, lambda: model(rows).square().mean())


TINY = Architecture("tiny", GROUPS[0], "fp32", CONTIGUOUS, "sgd", _tiny, "")


@dataclass
class ShapedEvent(RawEvent):
    sizes: Sequence[Sequence[int]] = ()
    thread: int = 1

    def shapes(self) -> Sequence[Sequence[int]]:
        return self.sizes

    def start_thread_id(self) -> int:
        return self.thread


def test_kernels_are_summed_by_step_op_shapes_and_name() -> None:
    events = [
        ShapedEvent(f"{MARK}0", 0, 100, annotation=True),
        ShapedEvent("Optimizer.step#SGD.step", 10, 40, 1, annotation=True),
        ShapedEvent("aten::add_", 12, 10, 2, sizes=[[4], []]),
        ShapedEvent("cudaLaunchKernel", 13, 2, 50),
        ShapedEvent("aten::add_", 30, 10, 3, sizes=[[4], []]),
        ShapedEvent("cudaLaunchKernel", 31, 2, 51),
        ShapedEvent("aten::mm", 60, 10, 4, sizes=[[2, 3], [3, 2]]),
        ShapedEvent("cudaLaunchKernel", 61, 2, 52),
        ShapedEvent(f"{MARK}1", 200, 100, annotation=True),
        ShapedEvent("add", 500, 7, 50, 2, on_device=True),
        ShapedEvent("add", 510, 8, 51, 3, on_device=True),
        ShapedEvent("gemm", 520, 90, 52, 4, on_device=True),
        ShapedEvent("gemm", 620, 90, 99, 98, on_device=True),  # launched before any step
        ShapedEvent("Stream Sync", 700, 90, 52, 4, on_device=True),
    ]
    first, second = sums_of(events, cuda=True)
    assert [(item.kernel, item.count, item.time_ns) for item in first] == [("gemm", 1, 90.0), ("add", 2, 15.0)]
    assert (first[1].around.op, first[1].around.outermost, first[1].around.shapes) == (
        "aten::add_", "Optimizer.step#SGD.step", "[[4],[]]",
    )  # fmt: skip
    assert first[0].around.outermost == "aten::mm"
    assert second == []


def test_what_takes_next_to_nothing_is_told_without_shapes() -> None:
    small = [KernelSum(Around("aten::add", "aten::add", f"[[{size}]]"), "k", 2, 1.0) for size in range(4)]
    long = KernelSum(Around("aten::mm", "aten::mm", "[[8,8],[8,8]]"), "gemm", 1, 10_000.0)
    first, rest = folded([*small, long])
    assert first == long
    assert rest == KernelSum(Around("aten::add", "aten::add", ""), "k", 8, 4.0)
    assert folded([]) == []


def test_blocks_of_short_steps_are_means_over_all_of_them() -> None:
    assert block_means([10.0] * 20) == [10.0] * 4
    assert block_means([100.0, 102.0]) == [100.0, 102.0]
    assert len(block_means([60.0] * 1000)) <= 60
    assert block_means([0.001] * 3) == [pytest.approx(0.001)]


def test_a_row_of_each_phase_can_be_stored_and_is_then_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptime_lab.measure.zoo.chosen", lambda _: [TINY])
    session = Session.start(tmp_path, recipe(["steptime", "measure", "zoo"], need_gpu=False), 1.0)
    row = timed(TINY, ALONE, small=True, warm_up_s=0.0, seconds=0.01)
    assert (row["parameters"], row["finite"], row["allocated_bytes"]) == (36, True, 0)
    assert due(session, Options(), TIMED) == ["tiny"]
    _store(session, ZOO, row)
    _store(session, ZOO_KERNELS, profiled(TINY, ALONE, small=True))
    assert due(session, Options(), TIMED) == due(session, Options(), PROFILED) == []
    (kernels,) = read(tmp_path, ZOO_KERNELS).to_pylist()
    assert kernels["launches"] == sum(kernels["count"]) > 0
    assert "PowBackward0" in kernels["around"]
    assert any(name.startswith("Optimizer.step#SGD") for name in kernels["around"])
    assert len(kernels["times_ns"]) == 3


def test_weights_that_are_not_finite_are_said() -> None:
    step = TINY.build("cpu")
    assert step.finite()
    with torch.no_grad():
        next(step.model.parameters())[0, 0] = float("nan")
    assert not step.finite()


def test_names_choose_architectures_and_whole_groups() -> None:
    every = chosen(Options())
    assert {each.group for each in chosen(Options(small=True))} == {each.group for each in every}
    assert [each.name for each in chosen(Options(only=("resnet50", TIMED)))] == ["resnet50"]
    assert {each.visit for each in chosen(Options(only=("second visit",)))} == {"second visit"}
    kin = chosen(Options(only=("residual convnets",)))
    assert {each.group for each in kin} == {"residual convnets"}
    assert len(kin) > 1


@pytest.mark.parametrize("flag", ["--seconds", "--warm-up"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1000"])
def test_seconds_are_some(flag: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{flag} .*expected (a time|seconds)"):
        main(["zoo", "-o", str(tmp_path), f"{flag}={value}", "--device", "cpu", "--small"])
