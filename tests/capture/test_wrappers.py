"""What training code has beside plain modules: second derivatives, hooks of DDP, wrappers that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402

from steptime._capture.capture import capture, captured_step  # noqa: E402
from steptime._capture.ranks import capture_ranks  # noqa: E402
from steptime._ops.table import op_table  # noqa: E402
from steptime.errors import InputError  # noqa: E402


def mlp() -> Any:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)).to("cuda")


def stepping(model: Any, loss: Callable[[], Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()),
        lambda: (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(0.2)),
        lambda: (nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU()),
        lambda: (nn.Conv2d(3, 8, 3), nn.LayerNorm((8, 6, 6)), nn.GELU()),
    ],
)
def test_a_penalty_on_gradients_goes_backward_twice(layers: Callable[[], Any]) -> None:
    def make() -> Callable[[], None]:
        model = nn.Sequential(*layers(), nn.Flatten(), nn.Linear(8 * 36, 1)).to("cuda")

        def loss() -> Any:
            x = torch.randn(4, 3, 8, 8, device="cuda", requires_grad=True)
            score = model(x).sum()
            (gradient,) = torch.autograd.grad(score, x, create_graph=True)
            return (gradient.flatten(1).norm(dim=1) - 1).pow(2).mean() + score

        return stepping(model, loss)

    # Forward, twice its own backward pass, and the backward pass of that.
    assert op_table(capture(make)).names.count("aten::convolution_backward") >= 2


@pytest.mark.parametrize(("hook", "dtype"), [("bf16_compress_hook", "bfloat16"), ("fp16_compress_hook", "float16")])
def test_hooks_of_ddp_send_in_half_precision(hook: str, dtype: str) -> None:
    def make() -> Callable[[], None]:
        model = nn.parallel.DistributedDataParallel(mlp())
        model.register_comm_hook(None, getattr(default_hooks, hook))
        x = torch.randn(4, 32, device="cuda")
        return stepping(model, lambda: model(x).sum())

    (program,) = capture_ranks(make, ranks=2, alike=True).programs
    assert {each.dtype for each in program.collectives} == {dtype}


def test_compiling_is_said_not_to_be_honoured() -> None:
    def make() -> Callable[[], None]:
        model, x = torch.compile(mlp()), torch.randn(4, 32, device="cuda")
        return stepping(model, lambda: model(x).sum())

    _, messages = captured_step(make)
    assert any("torch.compile is not honoured" in message for message in messages)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.DataParallel(mlp()), "nn.DataParallel: .* wrap the model in nn.parallel.DistributedDataParallel"),
        (lambda: torch.cuda.make_graphed_callables(mlp(), ()), "CUDA graphs: what a graph replays is not captured"),
    ],
)
def test_what_is_not_captured_is_refused_with_the_way_out(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        capture(make)
