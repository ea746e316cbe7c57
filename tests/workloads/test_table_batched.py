from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from steptime.errors import InputError
from steptime_lab.workloads.table_batched import plain
from steptime_lab.workloads.table_batched.layout import Layout
from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup

RATE, EPS = 0.1, 1e-6


@dataclass(frozen=True)
class Case:
    name: str
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    longest: tuple[int, ...]  # bags of a table have 0 to so many lookups
    batch: int = 5
    dtype: torch.dtype = torch.float32
    weighted: bool = False
    optimizer: str = "sgd"
    index_dtype: torch.dtype = torch.int64
    hot: float = 0.0  # share of lookups that go to row 0


CASES = (
    Case("one_table", (7,), (4,), (3,)),
    Case("mixed_sizes", (50, 3, 1000, 11), (16, 128, 32, 64), (4, 9, 0, 2)),
    Case("mixed_sizes_adagrad", (50, 3, 1000, 11), (16, 64, 32, 8), (3, 9, 0, 2), batch=3, optimizer="rowwise_adagrad"),
    Case("dims_not_powers", (20, 30), (12, 100), (5, 5), weighted=True),
    Case("dims_not_powers_adagrad", (20, 30), (12, 52), (3, 3), weighted=True, optimizer="rowwise_adagrad"),
    Case("wide_rows", (9, 9), (520, 1028), (3, 3), batch=3),
    Case("wide_rows_adagrad", (9,), (264,), (3,), batch=2, optimizer="rowwise_adagrad"),
    Case("weighted_int32", (40, 5), (8, 8), (6, 6), weighted=True, index_dtype=torch.int32),
    Case("half", (40, 5), (16, 32), (3, 3), dtype=torch.float16, optimizer="rowwise_adagrad"),
    Case("brain", (40, 5), (16, 32), (6, 6), dtype=torch.bfloat16, weighted=True),
    Case("runs_over_many_chunks", (2, 500), (4, 8), (80, 80), batch=16, hot=0.5),
    Case("one_row_only", (1, 1), (16, 8), (60, 30), batch=4, optimizer="rowwise_adagrad"),
    Case("all_empty", (5, 6), (4, 8), (0, 0)),
)


def drawn(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    lengths = torch.cat([torch.randint(0, longest + 1, (case.batch,)) for longest in case.longest])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    parts = []
    for table, rows in enumerate(case.rows):
        count = int(lengths[table * case.batch : (table + 1) * case.batch].sum())
        parts.append(torch.where(torch.rand(count) < case.hot, 0, torch.randint(0, rows, (count,))))
    indices = torch.cat(parts).to(case.index_dtype)
    return indices, offsets, torch.rand(indices.numel()) + 0.5 if case.weighted else None


def expected(
    layout: Layout, weights: torch.Tensor, state: torch.Tensor, case: Case, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, weights after and state after, in float64, from dense gradients of `nn.EmbeddingBag`."""
    indices, offsets, scales = drawn(case)
    outputs, after, states = [], weights.double(), state.double()
    for table in range(layout.tables):
        own = offsets[table * case.batch : (table + 1) * case.batch + 1]
        part = slice(int(own[0]), int(own[-1]))
        bag = nn.EmbeddingBag.from_pretrained(
            layout.view(weights, table).double().clone(), freeze=False, mode="sum", include_last_offset=True
        )
        out = bag(indices[part].long(), own - own[0], None if scales is None else scales[part].double())
        start = layout.column_starts[table]
        out.backward(gradient[:, start : start + layout.dims[table]].double())
        dense = bag.weight.grad
        assert dense is not None
        if case.optimizer == "rowwise_adagrad":
            rows = slice(layout.state_starts[table], layout.state_starts[table] + layout.rows[table])
            states[rows] += dense.square().mean(1)
            dense = dense / (states[rows].sqrt() + EPS)[:, None]
        layout.view(after, table).sub_(RATE * dense)
        outputs.append(out.detach())
    return torch.cat(outputs, 1), after, states


def check(implementation: ModuleType, case: Case) -> None:
    layout = Layout(case.rows, case.dims, torch.device("cpu"))
    indices, offsets, scales = drawn(case)
    weights = torch.randn(layout.elements).to(case.dtype)
    state = torch.rand(sum(case.rows))
    gradient = torch.randn(case.batch, layout.columns)
    out, after, states = expected(layout, weights, state, case, gradient)
    sums = implementation.forward(weights, layout, indices, offsets, scales)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), out, rtol=1e-5, atol=1e-5)
    own_state = state if case.optimizer == "rowwise_adagrad" else None
    implementation.backward(weights, own_state, layout, (indices, offsets, scales), gradient, (RATE, EPS))
    # Sums of a thousand fp32 gradients; rows of 16 bits are rounded once, when they are stored.
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}[case.dtype]
    torch.testing.assert_close(weights.double(), after, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.double(), states, rtol=1e-5, atol=1e-5)


def interpreted(names: list[str]) -> None:
    """Runs in a process of its own: Triton decides whether it interprets when it is imported."""
    from steptime_lab.workloads.table_batched import launch as table_batched_launch

    for case in CASES:
        if case.name in names:
            check(table_batched_launch, case)
            sys.stdout.write(f"held {case.name}\n")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_plain_lookup_agrees_with_dense_embedding_bags(case: Case) -> None:
    check(plain, case)


@pytest.mark.slow
def test_the_triton_kernels_agree_with_dense_embedding_bags() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    names = [case.name for case in CASES]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, __file__, *names],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1::2] == names


@pytest.mark.slow
def test_the_triton_kernels_compile_for_a_hopper_gpu_with_wide_accesses() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, __file__, "--compile"],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loads = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    # Two quads a lane: four rows forward; four gradients and four rows in an update.
    assert loads == {"table_batched_forward": 8, "table_batched_linearize": 0, "table_batched_update": 16}


def compiled() -> None:
    """Compiles each kernel for fp32 rows, without a GPU, and says how many loads of 16 bytes it has."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from steptime_lab.workloads.table_batched import kernels

    constants: dict[str, tuple[int, dict[str, object]]] = {
        "table_batched_forward": (2, {"QUADS": 128}),
        "table_batched_linearize": (4, {"BAGS": 32, "LANES": 16, "SHIFT": 16}),
        "table_batched_update": (1, {"QUADS": 64, "CHUNK": 32, "FIRST": True, "ADAGRAD": False, "SHIFT": 16}),
    }
    types = dict.fromkeys(("weights", "scales", "out", "source", "state", "partials"), "*fp32")
    types |= dict.fromkeys(("indices", "offsets", "first_program", "meta", "infos", "out_infos"), "*i64")
    types |= {"table_of": "*i32", "keys": "*i32", "out_keys": "*i32", "rate": "fp32", "eps": "fp32"}
    for name, (warps, values) in constants.items():
        kernel = getattr(kernels, name)
        signature = {word: "constexpr" if word in values else types.get(word, "i32") for word in kernel.arg_names}
        aligned = {
            (place,): [["tt.divisibility", 16]] for place, word in enumerate(kernel.arg_names) if signature[word][0] == "*"
        }
        fixed = {(kernel.arg_names.index(word),): value for word, value in values.items()}
        source = ASTSource(kernel, signature, fixed, aligned)
        made = triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        sys.stdout.write(f"{name} {made.asm['ptx'].count('ld.global.v4.b32')}\n")


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_a_training_step_updates_rows_in_the_backward_pass_alone(optimizer: str) -> None:
    case = Case("step", (10, 20), (8, 4), (4, 4), optimizer=optimizer)
    indices, offsets, _ = drawn(case)
    lookup = TableBatchedLookup(case.rows, case.dims, optimizer=optimizer, learning_rate=RATE, eps=EPS)
    before = lookup.weights.clone()
    dense = nn.Linear(12, 1)
    loss = dense(lookup(indices, offsets)).sum()
    assert torch.equal(lookup.weights, before)
    loss.backward()
    gradient = dense.weight.detach().expand(case.batch, -1)
    _, after, _ = expected(lookup.layout, before, torch.zeros(30), case, gradient)
    torch.testing.assert_close(lookup.weights.double(), after, rtol=1e-5, atol=1e-5)
    assert list(lookup.parameters()) == []
    assert dense.weight.grad is not None


def test_weights_can_be_a_view_of_a_larger_buffer() -> None:
    buffer = torch.zeros(1000)
    lookup = TableBatchedLookup((4,), (8,), weights=buffer[64:])
    lookup.table(0).fill_(1.0)
    assert buffer[64:96].sum() == 32 and buffer.sum() == 32


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TableBatchedLookup((4,), (6,)), "dim 6; expected a multiple of 4"),
        (lambda: TableBatchedLookup((0,), (8,)), "0 rows"),
        (lambda: TableBatchedLookup((4, 5), (8,)), "2 row counts and 1 dims"),
        (lambda: TableBatchedLookup((4,), (8,), optimizer="adam"), "optimizer is 'adam'"),
        (lambda: TableBatchedLookup((4,), (8,), weights=torch.zeros(8)), "at least 64 elements"),
        (lambda: TableBatchedLookup((4, 4), (8, 8))(torch.zeros(0), torch.zeros(4)), "4 offsets for 2 tables"),
    ],
)
def test_what_cannot_be_a_lookup_is_said_in_one_line(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


if __name__ == "__main__":
    compiled() if sys.argv[1:] == ["--compile"] else interpreted(sys.argv[1:])
