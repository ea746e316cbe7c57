"""Sparse gradients of tables as captured: what PyTorch calls for them on CUDA, and what the models say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from steptime.errors import InputError  # noqa: E402

# PyTorch's own, of tensors that optimisers make.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
RECORDED = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm" / "rank3.et.json.gz"
ROWS, DIM, LOOKUPS = 5_000, 16, 640


def training(optimizer: Callable[[Any], Any], *, known: bool = False, backwards: int = 1, **table: Any) -> Program:
    """A step over a table of which rows are looked up one by one; `known`: the script itself wrote down which."""

    def make() -> Callable[[], None]:
        rows = nn.Embedding(ROWS, DIM, sparse=True, **table).cuda()
        update = optimizer(list(rows.parameters()))
        wanted = torch.arange(LOOKUPS) % 100
        index = wanted.cuda() if known else torch.randint(0, ROWS, (LOOKUPS,), device="cuda")

        def step() -> None:
            update.zero_grad()
            for _ in range(backwards):
                (2 * rows(index)).square().sum().backward()
            update.step()

        return step

    return capture(make)


def inside(program: Program, name: str, number: int = 0) -> list[str]:
    table = op_table(program)
    row = [row for row, each in enumerate(table.names) if each == name][number]
    return table.names[row : table.last[row] + 1]


def shapes(program: Program, name: str, argument: int = 0) -> list[tuple[int, ...]]:
    table = op_table(program)
    return [table.arguments[row].inputs[argument].shape for row, each in enumerate(table.names) if each == name]


def issued(program: Program) -> ModelledStep:
    return modelled(Workload((program,), 1), Platform.load("1xh200"))


def launches(program: Program) -> Counter[str]:
    """By op, how many launches."""
    names = op_table(program).names
    return Counter(names[op] for op in program.calls.op[program.works.call].tolist())


def test_bags_with_sgd_are_as_recorded_on_a_gpu() -> None:
    def make() -> Callable[[], None]:
        bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True).cuda()
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.01)
        index = torch.randint(0, ROWS, (LOOKUPS,), device="cuda")
        offsets = torch.arange(0, LOOKUPS, 10, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            bag(index, offsets).square().sum().backward()
            optimizer.step()

        return step

    ours, recorded = capture(make), load([RECORDED]).programs[0]
    assert inside(ours, "aten::add_", -1) == inside(recorded, "aten::add_", -1)
    made = "aten::embedding_sparse_backward"
    assert inside(ours, made) == inside(recorded, made)
    counted = launches(issued(ours).programs[0].program)
    assert counted["aten::add_"] == counted["aten::_embedding_bag_backward"] == 1


def test_sgd_adds_rows_as_they_are() -> None:
    program = training(lambda weights: torch.optim.SGD(weights, lr=0.1))
    assert shapes(program, "aten::index_add_", 2) == [(LOOKUPS, DIM)]
    step = issued(program)
    assert launches(step.programs[0].program)["aten::add_"] == 1
    assert not any("no model" in each for each in step.warnings)


@pytest.mark.parametrize(
    ("optimizer", "added"),
    [(torch.optim.SparseAdam, 3), (torch.optim.Adagrad, 2)],
)
def test_rows_are_summed_before_an_update_that_is_not_linear(optimizer: Callable[[Any], Any], added: int) -> None:
    """One kernel sums, after sorts of which the host reads back how many rows are left: 100 different ones here."""
    program = training(optimizer, known=True)
    assert shapes(program, "aten::index_add_", 2) == [(100, DIM)] * added
    assert shapes(program, "aten::index", 0) == [(ROWS, DIM)] * (added - 1)  # states of rows that are met
    step = issued(program)
    played = step.programs[0].program
    counted = launches(played)
    assert counted["aten::coalesce"] == 8  # four to sort 640, three to find equal ones, one sum
    assert counted["aten::index_add_"] == added
    assert "aten::copy_" not in counted  # a table is never copied to itself
    assert (played.calls.kind == CallKind.BLOCKING_COPY).sum() == 1
    assert not any("no model" in each for each in step.warnings)


def test_how_many_rows_are_distinct_is_said_where_lookups_are_not_known() -> None:
    program = training(torch.optim.SparseAdam)
    expected = round(ROWS * (1 - (1 - 1 / ROWS) ** LOOKUPS))
    assert shapes(program, "aten::index_add_", 2)[0] == (expected, DIM)


def test_gradients_of_two_passes_are_put_side_by_side() -> None:
    program = training(lambda weights: torch.optim.SGD(weights, lr=0.1), backwards=2)
    assert shapes(program, "aten::index_add_", 2) == [(2 * LOOKUPS, DIM)]
    assert inside(program, "aten::add_").count("aten::cat") == 2


def test_rows_of_padding_have_no_gradient() -> None:
    program = training(lambda weights: torch.optim.SGD(weights, lr=0.1), known=True, padding_idx=0)
    assert shapes(program, "aten::index_add_", 2) == [(LOOKUPS - 7, DIM)]


def test_norms_of_sparse_gradients_are_refused_as_pytorch_refuses_them() -> None:
    def make() -> Callable[[], None]:
        rows = nn.Embedding(ROWS, DIM, sparse=True).cuda()
        index = torch.zeros(LOOKUPS, dtype=torch.int64, device="cuda")

        def step() -> None:
            rows(index).sum().backward()
            nn.utils.clip_grad_norm_(rows.parameters(), 1.0)

        return step

    with pytest.raises(InputError, match=r"Could not run 'aten::_foreach_norm'.*SparseCUDA"):
        capture(make)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("rows", [False, True])
def test_sparse_matrices_are_refused_with_the_way_out(rows: bool) -> None:
    def make() -> Callable[[], Any]:
        dense = torch.eye(8)
        matrix = (dense.to_sparse_csr() if rows else dense.to_sparse()).to("cuda")
        x = torch.randn(8, 4, device="cuda")
        return lambda: torch.sparse.mm(matrix, x)

    with pytest.raises(InputError, match="gradients of embedding tables alone"):
        capture(make)
