"""Laws of the zoo: what is in it, and that its steps train and can be captured."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.slow import slow_unless

import steptime
from steptime_lab.workloads.zoo import GROUPS, architectures
from steptime_lab.workloads.zoo.architecture import CHANNELS_LAST, OPTIMIZERS, PRECISIONS

# Captured in seconds; the others in `make test-slow`.
_QUICK = ("matrix_factors",)
# What a capture refuses: sparse gradients.
REFUSED = {"dlrm_sparse"}
# Run in a second each, forward, backward and update.
_TRAINED = ("resnet20", "lstm_cells", "matrix_factors", "policy_gradient", "molecules", "hash_grid", "interest_network")


def test_there_are_sixty_in_ten_groups_of_five_or_more() -> None:
    counts = Counter(each.group for each in architectures().values())
    assert sum(counts.values()) >= 60
    assert tuple(counts) == GROUPS
    assert min(counts.values()) >= 5


def test_precisions_optimisers_and_layouts_are_mixed() -> None:
    every = architectures().values()
    assert {each.precision for each in every} == set(PRECISIONS)
    assert {each.optimizer for each in every} == set(OPTIMIZERS)
    assert sum(each.layout == CHANNELS_LAST for each in every) >= 5
    assert all(each.about.endswith(".") for each in every)


@pytest.mark.parametrize("name", _TRAINED)
def test_a_small_one_trains_on_a_cpu(name: str) -> None:
    step = architectures()[name].build("cpu", small=True)
    before = [weight.detach().clone() for weight in step.model.parameters()]
    step()
    step()
    assert step.finite()
    assert any(not torch.equal(old, new) for old, new in zip(before, step.model.parameters(), strict=True))


@pytest.mark.parametrize("name", slow_unless(_QUICK, sorted(set(architectures()) - REFUSED), one_in=6))
def test_every_one_is_captured_with_all_of_its_parameters(name: str) -> None:
    workload = steptime.capture(architectures()[name].build)
    assert len(workload.programs[0].ops) > 50
    assert workload.description.parameters
