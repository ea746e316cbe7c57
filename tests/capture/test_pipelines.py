"""Pipelines of `torch.distributed.pipelining`, captured as they are called: stages differ, and meet without a deadlock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import (  # noqa: E402
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from steptime._capture.ranks import capture_ranks  # noqa: E402
from steptime._models.host.columns import Piece, host_columns  # noqa: E402
from steptime._platforms.platform import Platform  # noqa: E402
from steptime._program.workload import Workload  # noqa: E402
from steptime._sim.modelled.step import modelled  # noqa: E402
from steptime.errors import InputError  # noqa: E402

WIDTH, SAMPLES, MICRO_BATCHES = 64, 16, 4


def pipeline(kind: type, chunks: int = 1) -> Any:
    """Linear layers, one a stage: nobody is told the shapes of what comes."""

    def make() -> Any:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        device = torch.device("cuda")
        parts = [nn.Linear(WIDTH, WIDTH, device=device) for _ in range(chunks)]
        stages = [PipelineStage(part, rank + at * ranks, ranks * chunks, device) for at, part in enumerate(parts)]
        schedule = kind(stages if chunks > 1 else stages[0], MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(nn.ModuleList(parts).parameters(), lr=0.1)
        x = torch.randn(SAMPLES, WIDTH, device=device)

        def step() -> None:
            optimizer.zero_grad()
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == ranks - 1 else {}))
            optimizer.step()

        return step

    return make


def messages(workload: Workload) -> list[Counter[tuple[str, tuple[int, ...]]]]:
    return [Counter((each.kind, each.ranks) for each in program.collectives) for program in workload.programs]


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks"), [(ScheduleGPipe, 2, 1), (Schedule1F1B, 3, 1), (ScheduleInterleaved1F1B, 2, 2)]
)
def test_stages_send_what_the_next_receives_and_play_to_the_end(kind: type, ranks: int, chunks: int) -> None:
    workload = capture_ranks(pipeline(kind, chunks), ranks=ranks)
    assert len(workload.programs) == ranks
    sent = messages(workload)
    for rank in range(ranks - 1):
        one, other = sent[rank], sent[rank + 1]
        assert one["send", (rank, rank + 1)] == other["recv", (rank, rank + 1)] >= MICRO_BATCHES
        assert one["recv", (rank, rank + 1)] == other["send", (rank, rank + 1)] >= MICRO_BATCHES
    sizes = {each.bytes_in for program in workload.programs for each in program.collectives}
    assert sizes == {SAMPLES // MICRO_BATCHES * WIDTH * 4}
    platform = Platform.load("4xh200-nvlink" if ranks > 2 else "2xh200-nvlink")
    steady = modelled(workload, platform).play().steady
    assert float(steady.period_ns[0]) > 0


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_the_host_pays_for_every_backward_pass(kind: type) -> None:
    """GPipe's passes lie within labels, those of 1F1B do not."""
    program = capture_ranks(pipeline(kind), ranks=2).programs[1]
    assert sorted(thread.role for thread in program.threads) == ["backward", "main"]
    pieces = Counter(host_columns(program, Platform.load("2xh200-nvlink").host).piece.tolist())
    assert pieces[Piece.BACKWARD_CALL] == MICRO_BATCHES
    assert pieces[Piece.NODE] > 2 * MICRO_BATCHES


def test_an_object_that_nobody_sends_is_said() -> None:
    def make() -> Any:
        dist.recv_object_list([None], src=1 - dist.get_rank())
        return lambda: None

    with pytest.raises(InputError, match=r"rank 0 receives an object .* that no rank sends it"):
        capture_ranks(make, ranks=2, name="waiting")


def test_kernels_of_stages_are_faster_while_other_parts_of_the_gpu_idle() -> None:
    workload = capture_ranks(pipeline(ScheduleGPipe), ranks=2)
    shared = modelled(workload, Platform.load("2xh200-half-loopback"))
    assert [len(ratio) for ratio in shared.beside_idle] == [len(issued.estimates) for issued in shared.programs]
    works = [len(issued.draws) for issued in shared.programs]
    assert all((ratio[count:] == 1.0).all() for ratio, count in zip(shared.beside_idle, works, strict=True))
    assert all(ratio.mean() < 1.0 for ratio in shared.beside_idle)
    steady = shared.play().steady
    alone = replace(shared, beside_idle=()).play().steady
    assert float(steady.period_ns[0]) <= float(alone.period_ns[0])
    assert not modelled(workload, Platform.load("2xh200-nvlink")).beside_idle
