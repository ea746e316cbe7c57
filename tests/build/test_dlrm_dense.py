"""The dense side of a DLRM: a built step has the device ops that PyTorch asks for in the same step, for every choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

from tests.build.test_dlrm_program import as_drawn  # noqa: E402
from tests.slow import slow_unless  # noqa: E402
from tests.support.same_ops import same_device_ops, same_ops  # noqa: E402
from tests.support.waits import needed_by_nobody  # noqa: E402

from steptime._build.dlrm.model import AUTOCAST, DENSE_OPTIMIZERS, EXCHANGE_DTYPES, INTERACTIONS, PREFETCHES, Dlrm, Table  # noqa: E402
from steptime._build.dlrm.plan import Plan  # noqa: E402
from steptime._build.dlrm.step import LocalTables, rank_program  # noqa: E402
from steptime._build.dlrm.workload import dlrm_workload  # noqa: E402
from steptime._capture.ranks import capture_rank  # noqa: E402
from steptime._lookups.generators import Bags, Generator  # noqa: E402
from steptime._models.kernels.from_ops import questions_of  # noqa: E402
from steptime._ops.waits import tensor_waits  # noqa: E402
from steptime._platforms.platform import Platform  # noqa: E402
from steptime._program.program import Program  # noqa: E402
from steptime._sim.modelled.prediction import predict_on  # noqa: E402
from steptime_lab.workloads.case import Case, build  # noqa: E402
from steptime_lab.workloads.networks import dlrm  # noqa: E402
from steptime_lab.workloads.shared_buffers import SharedBuffers  # noqa: E402
from steptime_lab.workloads.torch_arrays import TorchArrays  # noqa: E402

INNER = "not in the recorded program"  # inner ops of a GPU, which a capture does not show
# A remark on the job, and how a capture shows that a table keeps its sparse gradient, which is no part of the dense side.
ELSEWHERE = {
    "## process_group:init ##", "aten::clone", "aten::empty", "aten::resize_", "aten::_indices", "aten::_values",
    "aten::is_coalesced", "aten::_sparse_coo_tensor_unsafe", "aten::_sparse_coo_tensor_with_dims_and_tensors",
}  # fmt: skip
PRECISIONS = ("fp32", "tf32", *AUTOCAST)
CHOICES = list(product(INTERACTIONS, PRECISIONS, DENSE_OPTIMIZERS))
# Interactions do not know of optimisers.
QUICK = [each for each in CHOICES if each[0] == "dot" or each[2] == "sgd"]
EXCHANGES = list(product(INTERACTIONS, PRECISIONS, EXCHANGE_DTYPES))


@dataclass(frozen=True)
class First:
    """The group of a job, as its first rank sees it."""

    ranks: int
    rank: int = 0


def bags(buffers: SharedBuffers, generator: Generator, batch: int, iteration: int) -> Bags:
    """Lookups drawn on the CPU, since their number depends on what is drawn, and then moved."""
    made = generator.bags(batch, iteration, TorchArrays(torch.device("cpu")))
    return Bags(made.indices.to(buffers.device), made.offsets.to(buffers.device))


def model_of(interaction: str = "dot", **changes: Any) -> Dlrm:
    return replace(
        dlrm._small("embedding_bag", "dot" if interaction == "dot" else "cat", 8), interaction=interaction, **changes
    )


@cache
def both(model: Dlrm, ranks: int = 1) -> tuple[Program, Program]:
    """The step of the first rank, built from the model, and captured from PyTorch's."""
    placed = {table.name: at % ranks for at, table in enumerate(model.tables)}
    case = Case("dlrm", "small", model.to_dict(), "fp32", model.batch, ranks, plan=placed)
    with patch.object(SharedBuffers, "bags", bags):
        found = capture_rank(lambda: build(case, First(ranks), torch.device("cuda", 0)), 0, ranks, name="small", warm_up=2)
    dlrm.forget_dense()
    owned = Plan.from_dict(placed, model.tables, ranks).split(model.tables)
    widths = tuple(sum(table.dim for table in tables) for tables in owned)
    return rank_program(model, LocalTables(as_drawn(found.program, model, owned[0])), widths, 0), found.program


@pytest.mark.parametrize("choice", slow_unless(QUICK, CHOICES), ids="-".join)
def test_every_choice_asks_for_the_device_work_that_pytorch_asks_for(choice: tuple[str, str, str]) -> None:
    interaction, precision, optimizer = choice
    ranked: dict[str, Any] = {"cross_rank": 4} if interaction == "dcnv2" else {}
    built, captured = both(model_of(interaction, precision=precision, dense_optimizer=optimizer, **ranked))
    asked = same_device_ops(built, captured, caches=False)
    assert asked.differences == ()
    assert asked.total > 40
    # Around it the same calls in the same order, from Python and from autograd.
    assert {one.name for one in same_ops(built, captured).differences if one.what != INNER} <= ELSEWHERE
    assert not any(work.kind == "unknown" for work in questions_of(built))


@pytest.mark.parametrize("changes", [{}, {"cross_layers": 1}, {"cross_layers": 2, "cross_rank": 8}])
def test_cross_layers_of_any_number_and_rank(changes: dict[str, Any]) -> None:
    built, captured = both(model_of("dcnv2", precision="bf16-autocast", **changes))
    assert same_device_ops(built, captured, caches=False).differences == ()


@pytest.mark.parametrize("choice", slow_unless([each for each in EXCHANGES if each[0] == "dcnv2"], EXCHANGES), ids="-".join)
def test_ranks_exchange_what_pytorch_would_in_any_precision(choice: tuple[str, str, str]) -> None:
    interaction, precision, sent = choice
    built, captured = both(model_of(interaction, precision=precision, exchange_precision=sent), 2)
    assert same_device_ops(built, captured, caches=False).differences == ()
    assert {one.name for one in same_ops(built, captured).differences if one.what != INNER} <= ELSEWHERE
    exchanged = [one for one in built.collectives if one.kind == "all_to_all"]
    assert {one.dtype for one in exchanged} == {EXCHANGE_DTYPES[sent]}
    assert [replace(one, group="", sequence=0) for one in built.collectives] == [
        replace(one, group="", sequence=0) for one in captured.collectives
    ]


def in_order(program: Program) -> list[tuple[int, int, int]]:
    """What is said of streams, and when."""
    return [(order.kind, order.stream, order.of) for order in program.orders]


@pytest.mark.parametrize("ranks", [1, 2])
def test_lookups_of_the_next_batch_go_to_a_stream_of_their_own_as_pytorch_is_told(ranks: int) -> None:
    built, captured = both(model_of("dcnv2", precision="bf16-autocast", prefetch="lookups"), ranks)
    assert same_device_ops(built, captured, caches=False).differences == ()
    assert in_order(built) == in_order(captured)
    assert [one.kind for one in built.collectives] == [one.kind for one in captured.collectives]
    # The exchange of the next batch is waited for where the step ends; where the next begins, nothing comes between.
    assert needed_by_nobody(tensor_waits(built)) == ()


def test_an_exchange_beside_the_dense_part_shortens_a_step_that_waits_for_it() -> None:
    tables = tuple(Table(f"t{at}", 64, Generator(rows=100_000, pooling=4.0, seed=at)) for at in range(8))
    model = Dlrm("wide", 32768, 13, (512, 64), (1024, 512, 1), tables, dense_optimizer="adam_fused")
    platform = Platform.load("2xh200-half-loopback")
    alone, ahead = (
        predict_on(dlrm_workload(replace(model, prefetch=prefetch), 2), platform).step_time_ms for prefetch in PREFETCHES
    )
    assert 0.5 * alone < ahead < 0.98 * alone
