"""Numbers that a script writes down are known on the device that is not there; what comes of weights is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from steptime._capture.capture import capture, captured_step
from steptime._capture.device import pretended
from steptime._capture.log import CommLog
from steptime._capture.record import Recorder
from steptime._program.program import Program

Step = Callable[[], object]


def names(program: Program) -> set[str]:
    return {program.names[name] for name in program.ops.name.tolist()}


def padded() -> torch.Tensor:
    mask = torch.ones(4, 32, dtype=torch.long)
    mask[1:, -5:] = 0
    return mask


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda mask: bool(mask.bool().all()), False),
        (lambda mask: int(mask.sum()), 113),
        (lambda mask: torch.nonzero(mask).shape[0], 113),
        (lambda mask: torch.randn(4, 32, device="cuda")[mask == 0].shape[0], 15),
        (lambda mask: mask.masked_fill(mask == 0, 7).max().item(), 7),
        (lambda mask: (mask.clone().fill_(3)[:, 1:] * 2).cpu().unique().tolist(), [6]),
        (lambda mask: torch.arange(8, device=mask.device).flip(0)[0].item(), 7),
        (lambda mask: mask.sum(1).tolist(), [32, 27, 27, 27]),
    ],
)
def test_what_follows_from_a_mask_is_what_it_is_on_the_cpu(ask: Callable[[torch.Tensor], Any], expected: Any) -> None:
    with pretended(CommLog()), Recorder():
        assert ask(padded().to("cuda")) == expected


def test_a_write_through_a_view_is_seen_and_one_of_unknown_values_forgets() -> None:
    with pretended(CommLog()), Recorder() as recorder:
        ids = torch.zeros(4, 8, dtype=torch.long, device="cuda")
        ids[:, 0] = 5
        assert ids.sum().item() == 20
        ids[:, 1] = torch.randn(4, device="cuda").long()
        assert recorder.known.values(ids) is None


def test_a_mask_to_be_added_is_known_as_the_mask_is_and_large_numbers_of_a_batch_are_not() -> None:
    def make() -> Callable[[], None]:
        mask, image = torch.ones(4, 256).to("cuda"), torch.zeros(4, 256, 256).to("cuda")

        def step() -> None:
            added = (1.0 - mask[:, None, :].expand(4, 256, 256).to(torch.float64)) * -1e9
            seen.append((bool((added < 0).any()), bool((image > 0).any())))

        return step

    seen: list[tuple[bool, bool]] = []
    capture(make)
    assert set(seen) == {(False, True)}


def test_numbers_put_by_an_unknown_index_are_as_many_as_it_has() -> None:
    def make() -> Step:
        scores = nn.Linear(8, 64, device="cuda")(torch.randn(8, device="cuda"))

        def step() -> None:
            chosen, others = torch.zeros(64, dtype=torch.uint8, device="cuda"), torch.zeros(64, dtype=torch.bool, device="cuda")
            chosen[scores.argsort()[:5]] = 1
            others[scores.argsort()[:7]] = True
            counts.append((torch.where(chosen)[0].numel(), torch.where(others)[0].numel()))

        return step

    counts: list[tuple[int, int]] = []
    _, said = captured_step(make)
    assert set(counts) == {(5, 7)}
    assert any("puts 5 numbers where values of the device say" in each for each in said)


def test_what_weights_decide_picks_everything_and_is_said() -> None:
    def make() -> Step:
        layer, x = nn.Linear(8, 8).cuda(), torch.randn(16, 8, device="cuda")

        def step() -> None:
            y = layer(x)
            y[y > 0].sum().backward()

        return step

    program, said = captured_step(make)
    assert any("selects by values on the GPU" in line for line in said)
    assert "aten::nonzero" in names(program)


def test_constructors_may_draw_within_bounds_and_run_their_model() -> None:
    class Probed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
            nn.init.trunc_normal_(next(self.body.parameters()), std=0.02)
            device = next(self.body.parameters()).device
            self.head = nn.Linear(self.body(torch.zeros(1, 3, 8, 8, device=device)).shape[1], 2)

    def make() -> Step:
        model, x = Probed().to("cuda"), torch.randn(2, 3, 8, 8, device="cuda")
        return lambda: model.head(model.body(x).mean((2, 3))).sum().backward()

    assert "aten::addmm" in names(capture(make))
