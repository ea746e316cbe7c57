"""Optimisers step as on CUDA: over lists by default, in one kernel or one tensor after the other where they are told so."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn, optim  # noqa: E402

from steptime._capture.capture import capture  # noqa: E402
from steptime._program.program import Phase  # noqa: E402

CLASSES = [
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop,
]  # fmt: skip


def ops_of(kind: Any, **options: Any) -> set[str]:
    """What the optimiser calls."""

    def make() -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("cuda")
        optimizer = kind(model.parameters(), lr=0.1, **options)
        x = torch.randn(2, 8, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    program = capture(make)
    rows = zip(program.ops.name.tolist(), program.ops.phase.tolist(), strict=True)
    return {program.names[name] for name, phase in rows if phase == Phase.OPTIMIZER}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_lists_are_the_default_and_can_be_switched_off(kind: Any) -> None:
    assert any(name.startswith("aten::_foreach_") for name in ops_of(kind))
    assert not any(name.startswith("aten::_foreach_") for name in ops_of(kind, foreach=False))


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if "fused" in inspect.signature(kind).parameters])
def test_a_fused_step_is_one_op(kind: Any) -> None:
    assert f"aten::_fused_{kind.__name__.lower()}_" in ops_of(kind, fused=True)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if "capturable" in inspect.signature(kind).parameters])
def test_a_capturable_step_reads_nothing_back(kind: Any) -> None:
    found = ops_of(kind, capturable=True)
    assert found
    assert not found & {"aten::item", "aten::_local_scalar_dense"}
