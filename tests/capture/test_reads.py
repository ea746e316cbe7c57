"""What the host reads of a simulated GPU: a value that is said, and a wait that costs what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import steptime  # noqa: E402
from steptime._program.workload import Workload  # noqa: E402

READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss.detach()),
    "int": lambda loss: int(loss.detach()),
    "cpu": lambda loss: loss.detach().cpu(),
    "tolist": lambda loss: loss.detach().view(1).tolist(),
    "numpy": lambda loss: loss.detach().cpu().numpy(),
    "repr": repr,
    "format": lambda loss: f"{loss:.3f}",
    "bool": lambda loss: bool(loss.detach() > 0.5),
    "isfinite": lambda loss: bool(torch.isfinite(loss.detach()).all()),
    "equal": lambda loss: torch.equal(loss.detach(), loss.detach()),
}


def captured(read: Callable[[Any], Any], *, layers: int = 4, width: int = 64) -> Workload:
    def make() -> Callable[[], None]:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, width, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            read(loss)

        return step

    return steptime.capture(make)


@pytest.mark.parametrize("name", READS)
def test_a_read_is_captured_and_said_and_never_makes_a_step_faster(name: str) -> None:
    workload = captured(READS[name])
    assert any("test_reads.py" in said and ("reads a value" in said or "decides by" in said) for said in workload.warnings)
    without = steptime.predict(captured(lambda _: None), "1xh200").step_time_ms
    assert steptime.predict(workload, "1xh200").step_time_ms > without


def test_a_host_that_reads_every_step_does_not_run_ahead() -> None:
    """Bound by the device, the step waits for the device and then for the host, that has nothing enqueued."""
    plain = steptime.predict(captured(lambda _: None, layers=8, width=4096), "1xh200")
    read = steptime.predict(captured(READS["item"], layers=8, width=4096), "1xh200")
    assert read.step_time_ms > plain.step_time_ms * 1.01


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda x: torch.isfinite(x).all(), True),
        (lambda x: torch.isnan(x).any(), False),
        (lambda x: torch.isinf(x).any(), False),
        (lambda x: x.sum() > 1e6, False),
        (lambda x: ~(x.sum() > 1e6), True),
        (lambda x: (x.abs() < float("inf")).all() & (x != float("inf")).all(), True),
    ],
)
def test_checks_are_told_that_all_is_well(ask: Callable[[Any], Any], expected: bool) -> None:
    told: list[bool] = []

    def step() -> None:
        weight = torch.ones(4, device="cuda", requires_grad=True)
        weight.sum().backward()
        told.append(bool(ask(weight.detach())))

    steptime.capture(step)
    assert set(told) == {expected}


def test_norms_are_clipped_and_scaled_as_scripts_do() -> None:
    def make() -> Callable[[], None]:
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")

        def step() -> None:
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(2, 8, device="cuda")).sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(optimizer)
            scaler.update()

        return step

    program = steptime.capture(make).programs[0]
    names = [program.names[row] for row in program.ops.name]
    assert names.count("aten::_local_scalar_dense") >= 2  # the clip's check and the scaler's
    assert "aten::_fused_adamw_" in names or "aten::_foreach_addcdiv_" in names
