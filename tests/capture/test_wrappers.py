"""What training code has beside plain modules: second derivatives, hooks of DDP, wrappers that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

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


def test_attention_is_derived_twice_where_it_is_plain() -> None:
    """As in PyTorch, whose fused kernels have no second derivative."""

    def make(backend: Any) -> Callable[[], None]:
        attention = nn.MultiheadAttention(32, 4, batch_first=True).cuda()
        x = torch.randn(2, 8, 32, device="cuda", requires_grad=True)

        def loss() -> Any:
            with torch.nn.attention.sdpa_kernel(backend):
                mixed, _ = attention(x, x, x, need_weights=False)
            (gradient,) = torch.autograd.grad(mixed.sum(), x, create_graph=True)
            return gradient.square().sum()

        return stepping(attention, loss)

    kinds = torch.nn.attention.SDPBackend
    names = op_table(capture(lambda: make(kinds.MATH))).names
    assert names.count("aten::_softmax_backward_data") >= 2
    with pytest.raises(InputError, match="derivative for aten::_scaled_dot_product_efficient_attention_backward"):
        capture(lambda: make(kinds.EFFICIENT_ATTENTION))


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


def test_scripted_and_traced_modules_run_eagerly_and_that_is_said() -> None:
    def make() -> Callable[[], None]:
        x = torch.randn(4, 32, device="cuda")
        model = nn.Sequential(torch.jit.script(nn.Linear(32, 32)), torch.jit.trace(nn.Linear(32, 8), x)).to("cuda")
        return stepping(model, lambda: model(x).sum())

    program, messages = captured_step(make)
    assert op_table(program).names.count("aten::addmm") == 2
    assert any("torch.jit is not honoured" in message for message in messages)


def test_batch_norm_over_all_ranks_gathers_statistics_and_reduces_their_gradients() -> None:
    def make() -> Callable[[], None]:
        plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
        model = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(plain).to("cuda"))  # type: ignore[no-untyped-call]
        x = torch.randn(4, 3, 8, 8, device="cuda")
        return stepping(model, lambda: model(x).sum())

    (program,) = capture_ranks(make, ranks=2, alike=True).programs
    names = op_table(program).names
    for name in ("stats", "gather_stats_with_counts", "elemt", "backward_reduce", "backward_elemt"):
        assert names.count(f"aten::batch_norm_{name}") == 1
    kinds = [each.kind for each in program.collectives]
    assert kinds.count("all_gather") == 1
    assert kinds.count("all_reduce") == 2  # of the norm's gradients, and of DDP's bucket


class Accelerated:
    """A wrapper in the manner of training libraries: it prepares, casts, scales, accumulates and clips."""

    def __init__(self, every: int) -> None:
        self.every, self.count = every, 0
        self.scaler = torch.amp.GradScaler("cuda")

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        moved = model.to("cuda")
        forward = moved.forward
        moved.forward = torch.autocast("cuda", torch.float16)(forward)
        return moved, optimizer

    def backward(self, loss: Any) -> None:
        self.count += 1
        self.scaler.scale(loss / self.every).backward()

    def step(self, model: Any, optimizer: Any) -> None:
        if self.count % self.every:
            return
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


def test_a_wrapper_that_casts_scales_and_accumulates_is_captured() -> None:
    def make() -> Callable[[], None]:
        helper, model = Accelerated(2), mlp()
        model, optimizer = helper.prepare(model, torch.optim.AdamW(model.parameters()))
        x = torch.randn(4, 32, device="cuda")

        def step() -> None:
            for _ in range(2):
                helper.backward(model(x).sum())
                helper.step(model, optimizer)

        return step

    names = op_table(capture(make)).names
    assert sum(name.startswith("Optimizer.step") for name in names) == 1
    assert names.count("aten::_amp_foreach_non_finite_check_and_unscale_") == 1


@pytest.mark.parametrize(("dtype", "kernel"), [("float32", "efficient"), ("bfloat16", "flash")])
def test_flexible_attention_is_attention_over_the_blocks_that_its_mask_leaves(dtype: str, kernel: str) -> None:
    def make() -> Any:
        shape, options = (2, 4, 512, 32), {"device": "cuda", "dtype": getattr(torch, dtype), "requires_grad": True}
        query, key, value = (torch.randn(shape, **options) for _ in range(3))
        mask = create_block_mask(lambda _, __, row, column: row >= column, None, None, 512, 512, device="cuda")
        compiled = torch.compile(flex_attention)
        return lambda: compiled(query, key, value, block_mask=mask).sum().backward()

    program, said = captured_step(make)
    table = op_table(program)
    for way, place in (("", 1), ("_backward", 2)):
        rows = [row for row, name in enumerate(table.names) if name == f"aten::_scaled_dot_product_{kernel}_attention{way}"]
        assert [table.arguments[row].inputs[place].shape for row in rows] == [(2, 4, 320, 32)]  # 10 of 16 blocks
    assert "aten::item" not in table.names
    assert any("62% of all scores" in each for each in said)
