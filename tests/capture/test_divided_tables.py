"""Steps with tables divided by rows and columns and copied: what is written is what the lab's network does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.capture.test_groups import built, said  # noqa: E402
from tests.support.same_ops import same_device_ops  # noqa: E402

from steptime._build.dlrm.model import Dlrm, Table  # noqa: E402
from steptime._build.dlrm.plan import DATA_PARALLEL, ROW_WISE, Plan  # noqa: E402
from steptime._build.dlrm.step import LocalTables, rank_program  # noqa: E402
from steptime._build.dlrm.tables import LocalTable  # noqa: E402
from steptime._capture.ranks import capture_ranks  # noqa: E402
from steptime._lookups.generators import Bags  # noqa: E402
from steptime._ops.waits import tensor_waits  # noqa: E402
from steptime._program.program import Program  # noqa: E402
from steptime_lab.workloads import divided_tables, shared_buffers  # noqa: E402
from steptime_lab.workloads.case import Case  # noqa: E402
from steptime_lab.workloads.divided_tables import rows_of, samples_of  # noqa: E402
from steptime_lab.workloads.networks import dlrm  # noqa: E402
from steptime_lab.workloads.torch_arrays import TorchArrays  # noqa: E402

RANKS, BATCH = 2, 16
RECORDED = 1  # the first iteration warms up
CPU = torch.device("cpu")
ROWS, COPY = {"kind": ROW_WISE}, {"kind": DATA_PARALLEL}
PLANS: dict[str, dict[str, Any]] = {
    "every kind": {"t0": 0, "t1": [1, 0], "t2": [0, 1], "t3": ROWS, "t4": COPY},
    "no table on a rank": {"t0": ROWS, "t1": COPY, "t2": COPY, "t3": ROWS, "t4": ROWS},
}


def drawn(table: Table) -> Bags:
    return table.generator.bags(BATCH, RECORDED, TorchArrays(CPU))


def local(tables: Sequence[Table], kept: Callable[[Bags], Bags], ranks: int = 1) -> tuple[LocalTable, ...]:
    """Tables with what the recorded iteration draws of them; `ranks` share their rows."""
    found = [kept(drawn(table)).indices for table in tables]
    pairs = zip(tables, found, strict=True)
    return tuple(LocalTable(-(-table.rows // ranks), table.dim, rows.numel(), rows.unique().numel()) for table, rows in pairs)


def written(model: Dlrm, plan: Plan, rank: int) -> Program:
    owned = plan.split(model.tables)
    widths = tuple(sum(table.dim for table in tables) for tables in owned)
    by_rows = plan.of_kind(model.tables, ROW_WISE)
    shares = [local([table], partial(rows_of, rank=rank, count=-(-table.rows // RANKS)), RANKS)[0] for table in by_rows]
    copied = local(plan.of_kind(model.tables, DATA_PARALLEL), lambda bags: samples_of(bags, rank, BATCH // RANKS))
    return rank_program(model, LocalTables(local(owned[rank], lambda bags: bags), tuple(shares), copied), widths, rank)


@pytest.fixture
def drawn_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are looked up decides the sizes of tensors: they are drawn where there is memory."""

    class Buffers(shared_buffers.SharedBuffers):
        def bags(self, generator: Any, batch: int, iteration: int) -> Bags:
            return generator.bags(batch, iteration, TorchArrays(CPU))  # type: ignore[no-any-return]

    draw = divided_tables.RankTables._drawn

    def on_the_device(self: Any, *which: Any) -> list[list[Bags]]:
        return [[Bags(bags.indices.cuda(), bags.offsets.cuda()) for bags in iteration] for iteration in draw(self, *which)]

    monkeypatch.setattr(dlrm, "shared_buffers", Buffers)
    monkeypatch.setattr(divided_tables.RankTables, "_drawn", on_the_device)


@pytest.mark.usefixtures("drawn_on_the_cpu")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("lookup", "optimizer"), [("table_batched", "sgd"), ("table_batched", "rowwise_adagrad"), ("embedding_bag", "sgd")]
)
def test_what_is_written_of_divided_tables_is_what_the_network_does(plan: str, lookup: str, optimizer: str) -> None:
    model = replace(dlrm._small(lookup, "cat", BATCH), optimizer=optimizer)
    case = Case("dlrm", "divided", model.to_dict(), "fp32", BATCH, RANKS, plan=PLANS[plan])
    placed = Plan.from_dict(PLANS[plan], model.tables, RANKS)
    for captured in capture_ranks(built(case), ranks=RANKS).programs:
        ours = written(model, placed, captured.rank)
        assert same_device_ops(ours, captured, caches=False).differences == ()
        assert said(ours) == said(captured)
        waits = ([(each.collective, each.reason) for each in tensor_waits(program)] for program in (ours, captured))
        assert next(waits) == next(waits)
