"""Which layouts there are, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import divisors
from steptime._plan.space import Choices, layouts_of
from steptime.errors import InputError

MODEL = Transformer(
    layers=4, width=256, heads=8, sequence=128, vocabulary=1024, batch=16, precision="bf16", positions="rotary",
    norm="rms_norm", activation="swiglu", tied_head=False,
)  # fmt: skip


def test_every_layout_multiplies_to_the_gpus_and_keeps_the_batch() -> None:
    layouts = layouts_of(MODEL, 8).layouts
    assert len(set(layouts)) == len(layouts) > 50
    for layout in layouts:
        config = layout.of(MODEL)
        assert config.ranks == 8
        assert config.local_batch == layout.micro_batch
        assert config.batch == MODEL.batch


def test_layouts_that_do_not_divide_are_counted_by_their_reason() -> None:
    refused = layouts_of(replace(MODEL, heads=2), 8).refused
    assert any("heads 2 does not divide by parallel.tensor" in reason for reason in refused)
    assert all(count > 0 for count in refused.values())


def test_what_is_fixed_stays() -> None:
    layouts = layouts_of(MODEL, 8, Choices(tensor=[2], fsdp=[1], pipeline=[1], recompute=["full"], micro_batch=[2])).layouts
    assert {layout.parallel.tensor for layout in layouts} == {2}
    assert {(layout.parallel.fsdp, layout.recompute, layout.micro_batch) for layout in layouts} == {(1, "full", 2)}


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (Choices(tensor=[3]), "--tensor 3 does not divide 8 GPUs; give one of 1, 2, 4, 8"),
        (Choices(pipeline=[16]), "--pipeline 16 does not divide 8 GPUs"),
        (Choices(tensor=[8], pipeline=[8]), "no layout on 8 GPUs"),
    ],
)
def test_what_does_not_divide_names_what_does(choices: Choices, said: str) -> None:
    with pytest.raises(InputError, match=said):
        layouts_of(MODEL, 8, choices)


def test_a_batch_that_replicas_do_not_divide_names_those_that_do() -> None:
    with pytest.raises(InputError, match=r"replicas may be 1, 3"):
        layouts_of(replace(MODEL, batch=3), 8, Choices(tensor=[1], pipeline=[1], context=[1]))


@pytest.mark.parametrize(
    "wrong",
    [{"tensor": []}, {"tensor": [0]}, {"zero": [3]}, {"recompute": ["some"]}, {"micro_batch": [-1]}],
)
def test_what_cannot_be_chosen_is_refused(wrong: dict[str, list[int]]) -> None:
    with pytest.raises(InputError):
        Choices(**wrong)  # type: ignore[arg-type]


def test_divisors_come_in_order() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
