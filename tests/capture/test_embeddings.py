"""Tables of rows as captured: what their gradients are made of on CUDA, and what the models then say about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from steptime._capture.capture import capture  # noqa: E402
from steptime._ops.table import op_table  # noqa: E402
from steptime._platforms.platform import Platform  # noqa: E402
from steptime._program.load import load  # noqa: E402
from steptime._program.program import CallKind, Program  # noqa: E402
from steptime._program.workload import Workload  # noqa: E402
from steptime._sim.modelled.step import ModelledStep, modelled  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
_DENSE = "aten::_embedding_bag_dense_backward"
# What kernels do for themselves inside an op is not captured.
_WITHIN = ("aten::resize_", "aten::fill_")


def bags(*sparse: bool, lookups: int = 2048, batches: tuple[int, ...] = (256,), rows: int = 10_000) -> Program:
    def make() -> Callable[[], None]:
        tables = nn.ModuleList(nn.EmbeddingBag(rows, 32, mode="sum", sparse=each) for each in sparse).to("cuda")
        optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
        indices = torch.zeros(lookups, dtype=torch.long, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            for number, table in enumerate(tables):
                batch = batches[number % len(batches)]
                table(indices, torch.arange(0, lookups, lookups // batch, device="cuda")).sum().backward()
            optimizer.step()

        return step

    return capture(make)


def inside(program: Program, name: str) -> list[str]:
    table = op_table(program)
    row = table.names.index(name)
    return [each for each in table.names[row + 1 : table.last[row] + 1] if each not in _WITHIN]


def test_a_dense_gradient_of_bags_is_made_as_in_a_recorded_step() -> None:
    recorded = load([EXAMPLES / "dlrm_overlap4" / "rank0.kineto.json.gz"]).programs[0]
    assert inside(bags(False), _DENSE) == inside(recorded, _DENSE)


def issued(program: Program) -> ModelledStep:
    return modelled(Workload((program,), 1), Platform.load("1xh200"))


@pytest.mark.parametrize(("lookups", "launches"), [(2048, 12), (8192, 31)])
def test_a_dense_gradient_of_bags_sorts_and_waits_for_nothing(lookups: int, launches: int) -> None:
    """As many launches as were measured, and no call of the host that waits."""
    program = issued(bags(False, lookups=lookups)).programs[0].program
    assert not (program.calls.kind == CallKind.BLOCKING_COPY).any()
    names = [program.names[program.ops.name[op]] if op >= 0 else "" for op in program.calls.op[program.works.call].tolist()]
    assert names.count("aten::_embedding_bag_backward") == launches


def test_tables_called_differently_are_asked_for_each() -> None:
    found = issued(bags(False, False, batches=(256, 64)))
    assert any("its 2 tables" in warning for warning in found.warnings)
