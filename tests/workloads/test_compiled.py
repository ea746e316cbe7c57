"""Laws of the compiled set: what is in it, and that its steps train eager and compiled, and can be captured."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.slow import slow_unless

import steptime
from steptime_lab.workloads.compiled import DEFAULT, GRAPHS, architectures, cases
from steptime_lab.workloads.compiled.case import CHECKPOINTED, LAYER_KINDS, MODES, OPTIMIZERS, PRECISIONS, WATCHED, WHAT
from steptime_lab.workloads.zoo import architectures as zoo

_QUICK = ("sine_layers", "field_factors", "skipping_net")


def test_there_are_forty_cases_of_25_architectures_in_both_modes_and_on_one_two_and_four_ranks() -> None:
    every = cases().values()
    assert len(every) >= 44
    assert len({each.architecture for each in every}) >= 25
    ranks = Counter(each.ranks for each in every)
    assert ranks[1] >= 40
    assert min(ranks[2], ranks[4]) >= 2
    modes = Counter(each.mode for each in every)
    assert min(modes[DEFAULT], modes[GRAPHS]) >= 15


def test_everything_that_a_case_can_say_is_said_by_some() -> None:
    every = cases().values()
    assert {each.precision for each in every} == set(PRECISIONS)
    assert {each.optimizer for each in every} == set(OPTIMIZERS)
    assert {each.what for each in every} == set(WHAT)
    assert {each.mode for each in every} == set(MODES)
    assert {each.layers for each in every} == set(LAYER_KINDS)


def test_graphs_are_of_one_rank() -> None:
    assert all(each.ranks == 1 for each in cases().values() if each.mode == GRAPHS)


def test_no_architecture_is_one_of_the_zoo() -> None:
    assert not set(architectures()) & set(zoo())


@pytest.mark.parametrize("name", slow_unless(_QUICK, sorted(architectures()), one_in=4))
def test_a_small_one_trains_on_a_cpu(name: str) -> None:
    case = next(each for each in cases().values() if each.architecture == name and each.ranks == 1)
    step = case.build("cpu", compiled=False, small=True)
    step()
    step()


# Dynamo itself looks at gradients of what is no leaf, which PyTorch warns about.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [CHECKPOINTED, WATCHED])
def test_dynamo_calls_a_backend_for_a_compiled_step_and_not_for_an_eager_one(kind: str) -> None:
    case = next(each for each in cases().values() if each.layers == kind and each.ranks == 1)
    graphs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        case.build("cpu", compiled=compiled, small=True, backend="eager")()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == 0
    assert graphs[1] >= (2 if kind == WATCHED else 1)


@pytest.mark.parametrize("name", slow_unless(("sine_layers-tf32-adamw-step",), sorted(cases()), one_in=8))
def test_every_one_is_captured_eager(name: str) -> None:
    case = cases()[name]
    workload = steptime.capture(case.eager, ranks=case.ranks)
    assert len(workload.programs[0].ops) > 30
    assert workload.description.parameters
