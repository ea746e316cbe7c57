"""Collectives that a step calls itself, and which ranks of a job are captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from tests.capture.recorded_ranks import RANKS, recorded  # noqa: E402
from tests.slow import slow_beyond  # noqa: E402
from tests.support.same_ops import same_device_ops  # noqa: E402
from torch.distributed import _functional_collectives as functional  # noqa: E402

from steptime._capture.log import CommLog, Streams  # noqa: E402
from steptime._capture.ranks import capture_ranks  # noqa: E402
from steptime._lookups.generators import Bags  # noqa: E402
from steptime._ops.waits import WAIT, tensor_waits  # noqa: E402
from steptime._program.program import CallKind, Program  # noqa: E402
from steptime.errors import InputError  # noqa: E402
from steptime_lab.measurements.shipped import program_of, shipped_programs  # noqa: E402
from steptime_lab.workloads import shared_buffers  # noqa: E402
from steptime_lab.workloads.case import Case, build  # noqa: E402
from steptime_lab.workloads.cases import step_cases  # noqa: E402
from steptime_lab.workloads.networks import dlrm  # noqa: E402
from steptime_lab.workloads.torch_arrays import TorchArrays  # noqa: E402

Step = Callable[[], None]


def every_collective() -> Step:
    """The calls of `recorded/collectives.et.json.gz`, in its order."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    x, y, z = (torch.randn(64 * count, device="cuda") for count in (1, ranks, ranks))

    def parts(tensor: Any) -> list[Any]:
        return [part.clone() for part in tensor.chunk(ranks)]

    def step() -> None:
        dist.all_reduce(x, async_op=True).wait()
        dist.all_reduce(x)
        dist.all_gather_into_tensor(y, x)
        dist.all_gather_into_tensor(y, x, async_op=True).wait()
        dist.reduce_scatter_tensor(x, y)
        dist.reduce_scatter_tensor(x, y, async_op=True).wait()
        dist.all_to_all_single(y, z)
        dist.all_to_all_single(y, z, async_op=True).wait()
        dist.all_to_all_single(y, z, [64] * ranks, [64] * ranks)
        dist.all_to_all(list(y.chunk(ranks)), parts(z))
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather(parts(y), x)
        dist.reduce_scatter(x, parts(y))
        dist.barrier()
        dist.send(x, rank + 1)
        functional.all_gather_tensor(x, 0, world) * 2
        functional.all_reduce(x, "sum", world) + 1
        functional.reduce_scatter_tensor(y, "sum", 0, world) + 1
        functional.all_to_all_single(y, None, None, world) + 1
        dist.gather(x, parts(y), 0)
        dist.scatter(x, parts(y), 0)

    return step


@cache
def collectives() -> Program:
    return capture_ranks(every_collective, ranks=RANKS, alike=True).programs[0]


def said(program: Program) -> list[tuple[Any, ...]]:
    return [
        (each.kind, each.ranks, each.bytes_in, each.bytes_out, each.dtype, each.in_splits, each.out_splits, each.root)
        for each in program.collectives
    ]


def coalesced(program: Program) -> list[int]:
    """Of sends and receives, those that were recorded in one batch: batches are not captured."""
    between_two = [at for at, each in enumerate(program.collectives) if each.kind in ("send", "recv")]
    return between_two[1:]


def test_every_collective_says_what_it_says_on_a_gpu() -> None:
    truth = recorded("collectives")
    assert said(collectives()) == [each for at, each in enumerate(said(truth)) if at not in coalesced(truth)]


def test_waits_are_where_they_are_on_a_gpu() -> None:
    def waits(program: Program) -> list[tuple[str, str]]:
        found = program.calls.kind == CallKind.STREAM_WAIT
        above = [program.ops.parent[op] for op in program.calls.op[found].tolist()]
        works = program.works.collective[program.calls.awaits[found]].tolist()
        return [
            (program.collectives[work].kind, program.names[program.ops.name[parent]] if parent >= 0 else "")
            for work, parent in zip(works, above, strict=True)
            if work not in coalesced(program)
        ]

    assert waits(collectives()) == waits(recorded("collectives"))


def test_lists_of_tensors_are_copied_to_and_from_one_piece_of_memory() -> None:
    same = same_device_ops(collectives(), recorded("collectives"), caches=False)
    # A batch of sends and receives, and the number of a send, which counts those since the process began.
    other = [each for each in same.differences if "True)" not in each.what and each.captured >= 0]
    assert not other, other


def test_compute_waits_on_another_stream_only_once_it_is_told_to() -> None:
    log = CommLog()
    streams = Streams(log)
    side, event = streams.answers()["Stream"](), streams.answers()["Event"]()
    with streams.answers()["stream"](side):
        launch = log.launched("0", 0)
        streams.launched_in_order(launch)
        event.record()
    assert launch.number not in streams.default.behind
    streams.default.wait_event(event)
    assert launch.number in streams.default.behind


def buffers_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are looked up decides the sizes of tensors: they are drawn where there is memory."""

    class Drawn(shared_buffers.SharedBuffers):
        def bags(self, generator: Any, batch: int, iteration: int) -> Bags:
            made = generator.bags(batch, iteration, TorchArrays(torch.device("cpu")))
            return Bags(made.indices.cuda(), made.offsets.cuda())

    monkeypatch.setattr(dlrm, "shared_buffers", Drawn)


class OwnRank:
    """The group as the rank that is being captured sees it."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        return dist.get_world_size()


def built(case: Case) -> Callable[[], Any]:
    def make() -> Any:
        dlrm.forget_dense()
        return build(case, OwnRank(), torch.device("cuda", 0))

    return make


@pytest.mark.parametrize("name", slow_beyond(1, ["dlrm-t00-b1024-r2", "dlrm-t00-b1024-r4"]))
def test_every_rank_of_a_sharded_dlrm_does_what_was_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers_of_the_cpu(monkeypatch)
    ranks = int(name[-1])
    case = next(case for case in step_cases(ranks) if case.name == name)
    shipped = shipped_programs(name)
    found = capture_ranks(built(case), ranks=ranks, name=name)
    assert not found.owners
    assert any("do different things" in warning for warning in found.warnings)
    for program in found.programs:
        truth = program_of(shipped, shipped.owners[program.rank])
        same = same_device_ops(program, truth, caches=False)
        # How many rows are looked up depends on which of the batches was recorded.
        other = [each for each in same.differences if not each.name.startswith("TableBatchedLookup")]
        assert len(other) <= 0.01 * same.total, other[:5]
        assert said(program) == said(truth)


def test_an_exchange_in_autograd_is_waited_for_where_the_step_says(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers_of_the_cpu(monkeypatch)
    case = next(case for case in dlrm.small_cases(2) if "table-batched" in case.name)
    program = capture_ranks(built(case), ranks=2, alike=True).programs[0]
    exchanges = [each for each in tensor_waits(program) if program.collectives[each.collective].kind == "all_to_all"]
    around = [program.names[program.ops.name[program.ops.parent[each.needed_by]]] for each in exchanges]
    assert [each.reason for each in exchanges] == [WAIT, WAIT]
    assert around == ["_Finish", "_StartBackward"]


def plain_step() -> Step:
    dist.init_process_group("nccl")  # as scripts do
    rows = 8 + dist.get_rank() // 2
    model = torch.nn.Linear(rows, 4, device="cuda")
    inputs = torch.randn(2, rows, device="cuda")
    return lambda: model(inputs).sum().backward()


def test_ranks_that_differ_have_programs_of_their_own() -> None:
    found = capture_ranks(plain_step, ranks=4)
    assert (found.ranks, found.owners) == ((0, 1, 2, 3), ())
    assert "ranks 0 and 3 do different things" in found.warnings[0]


def test_no_rank_at_all_is_one_line() -> None:
    with pytest.raises(InputError, match="0 ranks cannot be captured"):
        capture_ranks(plain_step, ranks=0)
