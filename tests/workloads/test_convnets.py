"""The convnets train; without torchvision one line says so. Where it is missing, small networks of the same form stand in."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from steptime.errors import InputError
from steptime_lab.workloads import convnets
from steptime_lab.workloads.case import build, workload
from steptime_lab.workloads.training import ModelStep

CPU = torch.device("cpu")
NAMES = ("resnet50", "inception_v3")


@dataclass(frozen=True)
class Alone:
    """A group of one."""

    rank: int = 0
    ranks: int = 1


class TwoHeads(nn.Module):
    """Says two things while it trains, as Inception does."""

    def __init__(self, classes: int, image: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3 * image * image, classes) for _ in range(2))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What either head says."""
        first, second = (head(images.flatten(1)) for head in self.heads)
        return first, second


def _step(name: str) -> ModelStep:
    step = build(workload(name).small(1)[0], Alone(), CPU)
    assert isinstance(step, ModelStep)
    return step


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    asked: dict[str, Any] = {}

    def resnet50(**options: Any) -> nn.Module:
        asked.update(options)
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 33 * 33, options["num_classes"]))

    def inception_v3(**options: Any) -> nn.Module:
        asked.update(options)
        return TwoHeads(options["num_classes"], 75)

    monkeypatch.setattr(convnets, "import_module", lambda _name: SimpleNamespace(resnet50=resnet50, inception_v3=inception_v3))
    return asked


@pytest.mark.parametrize("name", NAMES)
def test_a_step_moves_every_weight_and_downloads_none(name: str, stand_ins: dict[str, Any]) -> None:
    step = _step(name)
    before = [weight.detach().clone() for weight in step.model.parameters()]
    step()
    assert all((now != then).any() for now, then in zip(step.model.parameters(), before, strict=True))
    assert stand_ins["weights"] is None


def test_the_second_head_counts_for_less() -> None:
    model, images, labels = TwoHeads(3, 2), torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    first, second = (functional.cross_entropy(said, labels) for said in model(images))
    loss = convnets._loss(model, {"images": images, "labels": labels})
    torch.testing.assert_close(loss, first + 0.4 * second)


@pytest.mark.parametrize("name", NAMES)
def test_without_torchvision_one_line_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise ImportError("no such module")

    monkeypatch.setattr(convnets, "import_module", fail)
    with pytest.raises(InputError, match=rf"{name} .* install torchvision"):
        _step(name)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_the_real_network_trains(name: str) -> None:
    step = _step(name)
    before = [weight.detach().clone() for weight in step.model.parameters()]
    step()
    assert any((now != then).any() for now, then in zip(step.model.parameters(), before, strict=True))
