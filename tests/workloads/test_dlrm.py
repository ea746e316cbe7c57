"""A sharded DLRM trains exactly as one that is whole in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import Plan
from steptime.errors import InputError
from steptime_lab.workloads.case import Case, build
from steptime_lab.workloads.exchange import ColumnExchange
from steptime_lab.workloads.networks import dlrm
from steptime_lab.workloads.shared_buffers import shared_buffers

RANKS = 2
STEPS = 3
LEARNING_RATE = 0.05
CPU = torch.device("cpu")

PLANS = {
    "alternating": {"t0": 0, "t1": 1, "t2": 0, "t3": 1, "t4": 0},
    "lopsided": {"t0": 1, "t1": 1, "t2": 0, "t3": 1, "t4": 1},
    "one_rank_without_tables": dict.fromkeys(("t0", "t1", "t2", "t3", "t4"), 1),
}
ROWS, COPY = {"kind": "row_wise"}, {"kind": "data_parallel"}
DIVIDED: dict[str, dict[str, Any]] = {
    "by_rows": {"t0": ROWS, "t1": 1, "t2": ROWS, "t3": 0, "t4": 1},
    "copied": {"t0": COPY, "t1": 1, "t2": 0, "t3": COPY, "t4": 0},
    "no_table_on_a_rank": {"t0": ROWS, "t1": COPY, "t2": COPY, "t3": ROWS, "t4": ROWS},
    "by_columns": {"t0": 0, "t1": [1, 0], "t2": [0, 1], "t3": ROWS, "t4": COPY},
}


@dataclass(frozen=True)
class Alone:
    """A group of one."""

    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class OneOfTwo:
    """A group of two, joined by the default process group."""

    rank: int
    ranks: int = RANKS


def _cases() -> dict[str, Case]:
    cases = {}
    for lookup in ("embedding_bag", "table_batched"):
        adagrad = replace(dlrm._small(lookup, "dot", 12), optimizer="rowwise_adagrad").to_dict()
        cases[f"{lookup}-adagrad"] = Case("dlrm", lookup, adagrad, "fp32", 12, RANKS, plan=PLANS["alternating"])
        for interaction in ("dot", "cat"):
            for plan_name, plan in PLANS.items():
                name = f"{lookup}-{interaction}-{plan_name}"
                config = replace(dlrm._small(lookup, interaction, 12), loss="mse" if interaction == "cat" else "bce").to_dict()
                cases[name] = Case("dlrm", name, config, "fp32", 12, RANKS, plan=plan)
        for plan_name, plan in DIVIDED.items():
            for optimizer in ("sgd", "rowwise_adagrad"):
                # Slices are no whole vectors; other plans meet by dot.
                interaction = "cat" if plan_name == "by_columns" or optimizer == "sgd" else "dot"
                config = replace(dlrm._small(lookup, interaction, 12), optimizer=optimizer).to_dict()
                end = "-adagrad" if optimizer != "sgd" else ""
                cases[f"{lookup}-{plan_name}{end}"] = Case("dlrm", plan_name, config, "fp32", 12, RANKS, plan=plan)
    return cases


def _state(step: dlrm.DlrmStep) -> dict[str, Any]:
    return {
        "tables": [weight.clone() for weight in step.tables.weights()],
        "bottom": [weight.detach().clone() for weight in step.dense.bottom.parameters()],
        "top": [weight.detach().clone() for weight in step.dense.top.parameters()],
    }


def _train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    dlrm.LEARNING_RATE = LEARNING_RATE
    for name, case in _cases().items():
        step = build(case, OneOfTwo(rank), CPU)
        assert isinstance(step, dlrm.DlrmStep)
        before = _state(step)
        for _ in range(STEPS):
            step()
        seen = {"before": before, "after": _state(step), "inputs": step.inputs, "labels": step.labels}
        torch.save(seen, f"{folder}/{name}-{rank}.pt")
        step.close()
    dist.barrier()  # nobody leaves while the other still talks
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        spawn(_train, (str(folder),), nprocs=RANKS)  # type: ignore[no-untyped-call]
    yield folder


def _whole_tables(case: Case, seen: list[dict[str, Any]], when: str) -> list[tuple[Table, Any]]:
    """Every table or slice of one as the ranks hold it, in the order in which the top MLP sees their columns."""
    model = Dlrm.from_dict(case.config)
    assert case.plan is not None
    plan = Plan.from_dict(case.plan, model.tables, RANKS)
    held = [iter(rank[when]["tables"]) for rank in seen]
    found = [(table, next(held[rank])) for rank, tables in enumerate(plan.split(model.tables)) for table in tables]
    for table in plan.of_kind(model.tables, "row_wise"):
        found.append((table, torch.cat([next(rank) for rank in held])[: table.rows]))
    for table in plan.of_kind(model.tables, "data_parallel"):
        first, *others = (next(rank) for rank in held)
        assert all((other - first).abs().max() < 1e-6 for other in others)  # copies stay alike
        found.append((table, first))
    return found


def _plain(case: Case, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole model in one process, from the same weights, on the samples of all ranks, in plain operations."""
    model = Dlrm.from_dict(case.config)
    order, tables = zip(
        *((table, rows.clone().requires_grad_()) for table, rows in _whole_tables(case, seen, "before")), strict=True
    )
    bottom, top = ([weight.clone().requires_grad_() for weight in seen[0]["before"][part]] for part in ("bottom", "top"))
    squares = {weight: torch.zeros(len(weight), 1) for weight in tables if model.optimizer != "sgd"}
    for number in range(STEPS):
        inputs, labels = (torch.cat([rank[what][number] for rank in seen]) for what in ("inputs", "labels"))
        pooled = []
        for table, weight in zip(order, tables, strict=True):
            bags = table.generator.bags(case.batch, number)
            pooled.append(
                torch.stack([weight[bags.indices[a:b]].sum(0) for a, b in zip(bags.offsets, bags.offsets[1:], strict=False)])
            )
        dense = inputs
        for weight, bias in zip(bottom[::2], bottom[1::2], strict=True):
            dense = torch.relu(dense @ weight.T + bias)
        if model.interaction == "dot":
            vectors = torch.stack([dense, *pooled], 1)
            pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(vectors.shape[1]) for j in range(i)]
            seen_by_top = torch.cat([dense, torch.stack(pairs, 1)], 1)
        else:
            seen_by_top = torch.cat([dense, *pooled], 1)
        for layer, (weight, bias) in enumerate(zip(top[::2], top[1::2], strict=True)):
            seen_by_top = (torch.relu(seen_by_top) if layer else seen_by_top) @ weight.T + bias
        said = torch.sigmoid(seen_by_top)
        if model.loss == "mse":
            loss = (said - labels).square().mean()
        else:
            loss = -(labels * said.log() + (1 - labels) * (1 - said).log()).mean()
        weights = [*tables, *bottom, *top]
        with torch.no_grad():
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                if weight in squares:
                    squares[weight] += gradient.square().mean(1, keepdim=True)
                    gradient /= squares[weight].sqrt() + 1e-8  # noqa: PLW2901
                weight.sub_(LEARNING_RATE * gradient)
    return {"tables": tables, "bottom": bottom, "top": top}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(_cases()))
def test_sharded_training_equals_training_in_one_process(trained: Path, name: str) -> None:
    seen = [torch.load(trained / f"{name}-{rank}.pt", weights_only=True) for rank in range(RANKS)]
    expected = _plain(_cases()[name], seen)
    before, learned = ([rows for _, rows in _whole_tables(_cases()[name], seen, when)] for when in ("before", "after"))
    assert all((now != then).any() for now, then in zip(learned, before, strict=True))
    # Adagrad's small constant does not scale with the gradient, which is `RANKS` times as large where ranks are several.
    tolerance = 1e-4 if name.endswith("adagrad") else 2e-6
    torch.testing.assert_close(learned, [weight.detach() for weight in expected["tables"]], rtol=1e-5, atol=tolerance)
    for part in ("bottom", "top"):
        for rank in seen:
            now = [weight.detach() for weight in expected[part]]
            torch.testing.assert_close(rank["after"][part], now, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("case", dlrm.small_cases(1), ids=lambda case: case.name)
def test_a_single_rank_trains_every_weight(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlrm, "LEARNING_RATE", LEARNING_RATE)
    monkeypatch.setattr(dlrm, "_DENSE", type(dlrm._DENSE)())
    step = dlrm.build(case, Alone(), CPU)
    before = _state(step)
    step()
    after = _state(step)
    for part in before:
        assert all((now != then).any() for now, then in zip(after[part], before[part], strict=True)), part


def test_lookup_statistics_are_those_of_the_local_tables() -> None:
    case = dlrm.small_cases(1)[0]
    step = dlrm.build(case, Alone(), CPU)
    model = Dlrm.from_dict(case.config)
    for iteration in range(step.batches):
        statistics = step.lookups(iteration)
        assert [one.rows for one in statistics] == [table.rows for table in model.tables]
        assert [one.lookups for one in statistics] == [
            len(table.generator.bags(case.batch, iteration).indices) for table in model.tables
        ]


def test_later_cases_find_weights_and_dense_part_of_earlier_ones() -> None:
    case = dlrm.small_cases(1)[0]
    first = dlrm.build(case, Alone(), CPU)
    places = [weight.data_ptr() for weight in first.tables.weights()]
    dense = first.dense
    first.close()
    second = dlrm.build(case, Alone(), CPU)
    assert [weight.data_ptr() for weight in second.tables.weights()] == places
    assert second.dense is dense


def test_spare_bytes_are_what_other_cases_left_in_the_shared_buffers() -> None:
    case = dlrm.small_cases(1)[1]
    step = dlrm.build(case, Alone(), CPU)
    spare = step.spare_bytes
    assert spare >= 0
    shared_buffers(CPU).floats("of another case", 1000)
    assert step.spare_bytes == spare + 4000


def test_the_bottom_mlp_runs_between_start_and_end_of_the_exchange_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def all_to_all_single(output: torch.Tensor, given: torch.Tensor, *_: object, async_op: bool) -> SimpleNamespace:
        assert async_op
        events.append("start")
        output.copy_(given)
        return SimpleNamespace(wait=lambda: events.append("wait"))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    exchange = ColumnExchange([4], 0, 3)
    pooled, dense = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    received = exchange.start(pooled)
    events.append("bottom")
    below = dense * 2
    below.register_hook(lambda _gradient: events.append("bottom"))  # type: ignore[no-untyped-call]
    (blocks,) = exchange.finish(received)
    (blocks * below).sum().backward()  # type: ignore[no-untyped-call]
    assert events == ["start", "bottom", "wait"] * 2
    assert pooled.grad is not None
    torch.testing.assert_close(pooled.grad, below)


@pytest.mark.parametrize("plan", [None, {"t0": 0}, {**PLANS["alternating"], "t2": 2}])
def test_a_plan_that_leaves_a_table_without_a_rank_is_refused(plan: dict[str, int] | None) -> None:
    case = replace(_cases()["embedding_bag-dot-alternating"], plan=plan)
    with pytest.raises(InputError, match="plan"):
        dlrm.build(case, OneOfTwo(0), CPU)


def test_lookups_ahead_see_rows_before_the_step_between_updates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlrm, "LEARNING_RATE", LEARNING_RATE)
    model = replace(dlrm._small("table_batched", "cat", 8), prefetch="lookups")
    step = build(Case("dlrm", "ahead", model.to_dict(), "fp32", 8, 1), Alone(), CPU)
    assert isinstance(step, dlrm.DlrmStep) and step.ahead is not None
    before = [weight.clone() for weight in step.tables.weights()]
    step()
    assert step.ahead.started is not None
    after = step.tables.weights()
    assert any((now != then).any() for now, then in zip(after, before, strict=True))
    bags = [table.generator.bags(8, 1) for table in model.tables]
    stale = [
        torch.stack([weight[found.indices[a:b]].sum(0) for a, b in zip(found.offsets, found.offsets[1:], strict=False)])
        for weight, found in zip(before, bags, strict=True)
    ]
    torch.testing.assert_close(step.ahead.started[0].detach(), torch.cat(stale, 1))
    step.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lookup": "fbgemm"}, 'lookup = "fbgemm"'),
        ({"optimizer": "adam"}, 'optimizer = "adam"'),
        ({"cuda_graph": True}, "cuda_graph"),
    ],
)
def test_what_can_only_be_predicted_is_not_trained_as_something_else(changes: dict[str, Any], said: str) -> None:
    case = dlrm.small_cases(1)[0]
    with pytest.raises(InputError, match=f"no network here trains {said}"):
        build(replace(case, config={**case.config, **changes}), Alone(), CPU)
