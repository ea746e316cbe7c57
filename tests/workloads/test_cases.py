"""The cases to measure: complete, unique, plain data."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from steptime._build.dlrm.model import DENSE_OPTIMIZERS, EXCHANGE_DTYPES, Dlrm
from steptime._build.dlrm.plan import Plan
from steptime._build.dlrm.workload import check_kinds
from steptime.errors import InputError
from steptime_lab.measure.steps import cases_of
from steptime_lab.workloads.case import Case, build, workloads
from steptime_lab.workloads.cases import RANKS, shrunk, small_cases, step_cases
from steptime_lab.workloads.divided_cases import divided_cases
from steptime_lab.workloads.networks.dlrm import DlrmStep
from steptime_lab.workloads.published import published_models
from steptime_lab.workloads.recommender_cases import recommender_cases

EVERY = [case for ranks in RANKS for case in (*step_cases(ranks), *small_cases(ranks))]


@dataclass(frozen=True)
class Alone:
    """A group of one."""

    rank: int = 0
    ranks: int = 1


def test_names_are_unique_and_safe_as_file_names() -> None:
    assert max(Counter(case.name for case in EVERY).values()) == 1
    assert all(re.fullmatch(r"[a-z0-9-]+", case.name) for case in EVERY)


def test_a_case_survives_json() -> None:
    assert [Case.from_dict(json.loads(case.to_json())) for case in EVERY] == EVERY


def test_the_same_cases_come_every_time() -> None:
    assert [case.to_json() for case in step_cases(4)] == [case.to_json() for case in step_cases(4)]


def test_every_workload_has_a_small_case_on_any_number_of_ranks() -> None:
    assert set(workloads()) == {"dlrm", "large", "bert", "gpt2", "xlnet", "resnet50", "inception_v3"}
    for ranks in RANKS:
        assert {case.workload for case in small_cases(ranks)} == set(workloads())


@pytest.mark.parametrize("ranks", [2, 4])
def test_twenty_random_tasks_at_four_batches_come_first(ranks: int) -> None:
    first = step_cases(ranks)[:80]
    assert {case.workload for case in first} == {"dlrm"}
    assert len({(case.task, case.batch) for case in first}) == 80
    assert len({case.task for case in first}) == 20
    # Every task has been seen once before any is seen at a second batch.
    assert len({case.batch for case in first[:20]}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_transformers_at_three_batches_in_fp32_and_one_in_bf16(ranks: int) -> None:
    for name in ("bert", "gpt2", "xlnet"):
        cases = [case for case in step_cases(ranks) if case.workload == name]
        assert len({case.batch for case in cases if case.precision == "fp32"}) == 3
        assert [case.precision for case in cases].count("bf16") == 1


def test_convnets_at_three_batches_on_one_rank() -> None:
    for name in ("resnet50", "inception_v3"):
        cases = [case for case in step_cases(1) if case.workload == name and case.precision == "fp32"]
        assert sorted(case.batch for case in cases) == [16, 32, 64]


def test_every_dlrm_can_be_built_again_and_every_table_has_a_rank() -> None:
    for case in EVERY:
        if case.workload != "dlrm":
            continue
        model = Dlrm.from_dict(case.config)
        assert model.to_dict() == case.config
        assert case.plan is not None
        assert sorted(case.plan) == sorted(table.name for table in model.tables)
        assert all(0 <= rank < case.ranks for rank in case.plan.values())
        if model.interaction == "dot":
            assert {table.dim for table in model.tables} == {model.bottom[-1]}


def test_both_lookups_are_among_the_cases_of_four_ranks() -> None:
    assert {case.config["lookup"] for case in step_cases(4) if case.workload == "dlrm"} == {"embedding_bag", "table_batched"}


def test_published_models_have_their_published_sizes() -> None:
    models = published_models()
    assert set(models) == {"default", "ddp", "mlperf", "open_source", "test"}
    assert [len(models[name].tables) for name in ("default", "ddp", "mlperf", "open_source", "test")] == [8, 8, 26, 6, 1]
    assert all(model.top[-1] == 1 for model in models.values())


def test_a_number_of_ranks_without_cases_is_refused() -> None:
    with pytest.raises(InputError, match="3 ranks"):
        step_cases(3)


@pytest.mark.parametrize(
    ("change", "said"), [({"precision": "fp8"}, "fp8"), ({"batch": 6}, "evenly"), ({"ranks": 0}, "evenly")]
)
def test_a_case_that_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Case.from_dict({**small_cases(4)[0].to_dict(), **change})


def test_an_unknown_workload_or_a_group_of_another_size_is_refused() -> None:
    case = small_cases(1)[0].to_dict()
    with pytest.raises(InputError, match=r"no workload is called 'alexnet'; there are .*bert"):
        build(Case.from_dict({**case, "workload": "alexnet"}), Alone(), torch.device("cpu"))
    with pytest.raises(InputError, match="2 ranks"):
        build(Case.from_dict({**case, "ranks": 2, "batch": 2}), Alone(), torch.device("cpu"))


def test_every_way_to_divide_tables_is_tried_on_the_same_model() -> None:
    cases = [case for ranks in (2, 4, 8) for case in divided_cases(ranks)]
    assert len({case.name for case in cases}) == len(cases) >= 20
    kinds: Counter[str] = Counter()
    for case in cases:
        model = Dlrm.from_dict(case.config)
        assert case.plan is not None
        plan = Plan.from_dict(case.plan, model.tables, case.ranks)
        check_kinds(model, plan)
        kinds.update(set(plan.kinds().values()))
        assert (set(plan.kinds().values()) == {"table_wise"}) == (case.rule == "whole")
    assert all(kinds[kind] >= 4 for kind in ("column_wise", "row_wise", "data_parallel"))
    assert not {case.name for case in step_cases(4)} & {case.name for case in cases}


def test_held_out_cases_are_timed_only_by_name() -> None:
    usual = {case.name for case in cases_of(4, small=False, only=())}
    assert not any(name.startswith("divided") for name in usual)
    assert {case.name for case in cases_of(4, small=False, only=("timed", "divided"))} == {
        case.name for case in divided_cases(4)
    }
    assert len(cases_of(2, small=False, only=("divided-bags-rows-r2",))) == 1


def test_recommenders_mix_precisions_interactions_optimisers_and_exchanges() -> None:
    cases = [case for ranks in (1, 2, 4) for case in recommender_cases(ranks)]
    models = [Dlrm.from_dict(case.config) for case in cases]
    assert len({case.name for case in cases}) == len(cases) == 20
    mixed = {(model.precision, model.interaction, case.ranks) for case, model in zip(cases, models, strict=True)}
    assert mixed == {
        (precision, how, ranks) for precision in ("tf32", "bf16-autocast") for how in ("dot", "dcnv2") for ranks in (1, 2, 4)
    }
    assert {model.dense_optimizer for model in models} == set(DENSE_OPTIMIZERS)
    assert {model.exchange_precision for model in models} == set(EXCHANGE_DTYPES)


@pytest.mark.parametrize("case", recommender_cases(1), ids=lambda case: case.name)
def test_recommenders_train_on_a_cpu_once_they_are_shrunk(case: Case) -> None:
    step = build(shrunk(case), Alone(), torch.device("cpu"))
    assert isinstance(step, DlrmStep)
    before = [weight.detach().clone() for weight in step.dense.top.parameters()]
    for _ in range(2):
        step()
    assert all(torch.isfinite(weight).all() for weight in step.dense.top.parameters())
    assert any((now != then).any() for now, then in zip(step.dense.top.parameters(), before, strict=True))
    step.close()
