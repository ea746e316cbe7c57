"""DistributedDataParallel captured without processes launches what it launches on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.capture.recorded_ranks import RANKS, recorded  # noqa: E402
from tests.support.same_ops import same_device_ops  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from steptime._capture.ranks import capture_ranks  # noqa: E402
from steptime._ops.waits import REDUCER, tensor_waits  # noqa: E402
from steptime._program.program import Phase, Program  # noqa: E402
from steptime.errors import InputError  # noqa: E402

Step = Callable[[], None]


def perceptron() -> nn.Module:
    widths = (512, 1024, 1024, 1024, 16)
    layers = [layer for ins, outs in pairwise(widths) for layer in (nn.Linear(ins, outs), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).cuda()


def training(module: nn.Module, inputs: Any, optimizer: Any = None, **options: Any) -> Step:
    model = DistributedDataParallel(module, device_ids=[0], **options)
    optimizer = optimizer or torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def perceptron_step(**options: Any) -> Step:
    return training(perceptron(), torch.randn(32, 512, device="cuda"), **options)


def convolution_step() -> Step:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).cuda()
    return training(module, torch.randn(4, 3, 8, 8, device="cuda"), torch.optim.SGD(module.parameters(), lr=0.1))


def accumulating_step() -> Step:
    model = DistributedDataParallel(perceptron(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(32, 512, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with model.no_sync():
            model(inputs).square().mean().backward()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


CASES: dict[str, Callable[[], Step]] = {
    "ddp": perceptron_step,
    "ddp_view": lambda: perceptron_step(gradient_as_bucket_view=True),
    "ddp_unused": lambda: perceptron_step(find_unused_parameters=True),
    "ddp_static": lambda: perceptron_step(static_graph=True),
    "ddp_buffers": convolution_step,
    "ddp_accumulate": accumulating_step,
}


def program_of(function: Callable[[], Step], ranks: int = RANKS, warm_up: int = 1) -> Program:
    return capture_ranks(function, ranks=ranks, alike=True, warm_up=warm_up).programs[0]


def names(program: Program) -> Counter[str]:
    return Counter(program.names[name] for name in program.ops.name.tolist())


@pytest.mark.parametrize("name", CASES)
def test_device_ops_and_collectives_are_those_of_the_recorded_step(name: str) -> None:
    # The fifth step, whose number Adam divides by.
    found, truth = program_of(CASES[name], warm_up=4), recorded(name)
    same = same_device_ops(found, truth, caches=False)
    assert same.fraction == 1, same.differences[:5]
    assert [(each.kind, each.bytes_in, each.ranks) for each in found.collectives] == [
        (each.kind, each.bytes_in, each.ranks) for each in truth.collectives
    ]


def test_compute_waits_for_buckets_once_backward_is_over() -> None:
    program = program_of(perceptron_step)
    for each in tensor_waits(program):
        around = program.names[program.ops.name[program.ops.parent[each.needed_by]]]
        assert each.reason == REDUCER or around.endswith("copy_bucket_to_grad")
        assert program.ops.phase[each.launched_by] == Phase.BACKWARD


def test_buckets_follow_the_order_in_which_gradients_become_ready() -> None:
    class Reversed(nn.Module):
        """Registers first what it uses last."""

        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(700, 700), nn.Linear(600, 700)

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x))

    program = program_of(lambda: training(Reversed().cuda(), torch.randn(8, 600, device="cuda")), ranks=2)
    # The gradients of `last` are ready first and fill the first bucket of 1 MiB.
    assert [each.bytes_in for each in program.collectives] == [4 * 701 * 700, 4 * 601 * 700]


def test_a_comm_hook_reduces_in_place_of_the_all_reduce() -> None:
    def step() -> Step:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model = DistributedDataParallel(perceptron(), device_ids=[0])
        model.register_comm_hook(None, fp16_compress_hook)
        inputs = torch.randn(32, 512, device="cuda")
        return lambda: model(inputs).sum().backward()

    assert {each.dtype for each in program_of(step).collectives} == {"float16"}


def test_sparse_gradients_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="sparse"):
        program_of(lambda: training(nn.EmbeddingBag(100, 8, sparse=True).cuda(), torch.zeros(4, 2, dtype=torch.int64)))


def test_ranks_that_join_tell_each_other_before_every_pass_and_ask_at_the_end() -> None:
    """(torch/distributed/algorithms/join.py) All ranks have as many inputs here, so that none goes on for the others."""

    def make() -> Step:
        model = DistributedDataParallel(perceptron(), device_ids=[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(32, 512, device="cuda")

        def step() -> None:
            with model.join():
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

        return step

    program = program_of(make)
    small = [each for each in program.collectives if (each.bytes_in or 0) <= 8]
    assert [each.kind for each in small] == ["all_reduce"] * 4
    assert len(program.collectives) > len(small)
