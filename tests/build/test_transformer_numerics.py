"""A config's precisions mean the same however ranks share the model, and its program computes, keeps and sends in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.build.test_transformer import LLAMA, ops, program

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import Lora
from steptime._program.program import Program, Tensor
from steptime.errors import InputError

LAYOUTS = {
    "alone": Parallelism(),
    "data": Parallelism(data=2),
    "fsdp": Parallelism(fsdp=2),
    "hsdp": Parallelism(data=2, fsdp=2),
    "zero 1": Parallelism(data=2, zero=1),
    "zero 2": Parallelism(data=2, zero=2),
    "tensor": Parallelism(data=2, tensor=2),
    "pipeline": Parallelism(data=2, pipeline=3),
}
CHOICES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "autocast": {"precision": "bf16-autocast"},
    "bf16": {"precision": "bf16"},
    "bf16, reduced in bf16": {"precision": "bf16", "grad_reduce_in_fp32": False},
    "pure bf16": {"precision": "bf16", "states": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16, reduced in fp32": {"precision": "fp16", "grad_reduce_in_fp32": True},
    "fp8": {"precision": "fp8"},
}
LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OF_COPIES = ("data", "fsdp", "expert_data")


def config(layout: str, choice: str, **changes: Any) -> Transformer:
    chosen = dict(CHOICES[choice])
    wide = chosen.pop("grad_reduce_in_fp32", None)
    parallel = replace(LAYOUTS[layout], grad_reduce_in_fp32=wide)
    return Transformer(**{**LLAMA, "optimizer": "adamw_fused", "parallel": parallel, **chosen, **changes})


def updated(made: Program) -> tuple[set[str], set[str], set[str]]:
    """Dtypes of what the optimiser updates, of the gradients that it takes and of its moments."""
    ((_, inputs, _),) = ops(made, "aten::_fused_adamw_")
    weights, gradients, first, second = ({each.dtype for each in column} for column in inputs[:4])
    assert first == second
    return weights, gradients, first


def reduced(made: Program) -> set[str]:
    """Dtypes in which ranks that hold the same parameters sum their gradients."""
    summing = ("all_reduce", "reduce_scatter")
    return {each.dtype for each in made.collectives if each.kind in summing and each.group not in ("tensor", "embedding")}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_program_computes_keeps_and_sends_in_the_precisions_that_are_named(layout: str, choice: str, fused: bool) -> None:
    if fused and choice == "autocast":
        pytest.skip("fused layers are not for autocast")
    model = config(layout, choice, fused=fused)
    assert (
        model.numerics == replace(model, parallel=Parallelism(grad_reduce_in_fp32=model.parallel.grad_reduce_in_fp32)).numerics
    )
    states, sums = LONG[model.numerics["optimizer_states"]], LONG[model.numerics["sums_of_gradients"]]
    for made in build(model).programs:
        weights, gradients, moments = updated(made)
        assert weights == gradients == moments == {states}
        assert reduced(made) <= {sums}
        assert reduced(made) or layout == "alone"
        products = {tensor.dtype for _, inputs, _ in ops(made, "aten::mm") for tensor in inputs if isinstance(tensor, Tensor)}
        if choice not in ("autocast", "fp8"):
            assert products == {LONG[model.numerics["parameters"]]}


def test_pure_bf16_is_an_explicit_choice_and_has_neither_masters_nor_wide_gradients() -> None:
    assert config("data", "bf16").numerics["master_weights"] == "fp32"
    pure = config("data", "pure bf16")
    assert set(pure.numerics.values()) == {"bf16", "none"}
    for _, inputs, _ in ops(build(pure).programs[0], "aten::_fused_adamw_"):
        assert {each.dtype for column in inputs[:4] for each in column} == {"bfloat16"}


def test_products_of_eight_bits_are_named_with_the_recipe_that_was_assumed() -> None:
    products = {each: Transformer(**{**LLAMA, "precision": each}).numerics["products"] for each in ("fp8", "mxfp8", "tf32")}
    assert products == {"fp8": "fp8 (delayed)", "mxfp8": "mxfp8", "tf32": "tf32"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "fp32", "states": "bf16"}, "states = 'bf16' goes with parameters in bf16; precision is 'fp32'"),
        ({"precision": "fp16", "states": "bf16"}, "states = 'bf16' goes with parameters in bf16; precision is 'fp16'"),
        ({"precision": "bf16", "states": "fp16"}, "states is 'fp16'; expected fp32 or bf16"),
        (
            {"precision": "bf16", "states": "bf16", "parallel": Parallelism(grad_reduce_in_fp32=True)},
            "leave out parallel.grad_reduce_in_fp32, or give states = 'fp32'",
        ),
    ],
)
def test_states_that_parameters_cannot_have_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Transformer(**{**LLAMA, **changes})


# Vocabularies


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 1000),
        ({"fused": True}, 1024),
        ({"parallel": Parallelism(tensor=2)}, 1024),
        ({"fused": True, "kv_heads": 4, "parallel": Parallelism(tensor=4)}, 1024),
        ({"fused": True, "pad_vocab": 1}, 1000),
        ({"pad_vocab": 64}, 1024),
        ({"pad_vocab": 1, "vocabulary": 1001, "parallel": Parallelism(tensor=2)}, 1002),
    ],
)
def test_vocabularies_are_padded_as_their_framework_pads_them_or_as_the_config_says(changes: dict[str, Any], rows: int) -> None:
    model = Transformer(**{**LLAMA, "vocabulary": 1000, "precision": "bf16", **changes})
    assert model.vocabulary_rows == rows
    split = rows // model.parallel.tensor
    ((_, inputs, _),) = ops(program(**{**LLAMA, "vocabulary": 1000, "precision": "bf16", **changes}), "aten::embedding")
    assert inputs[0].shape[0] == split
    assert build(model).description.parameters == build(replace(model, parallel=Parallelism())).description.parameters


# Adapters beside products of few bits


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_adapters_stand_beside_products_of_few_bits(precision: str) -> None:
    values = {**LLAMA, "projections": "separate", "optimizer": "adamw_fused", "lora": Lora(rank=8)}
    step, plain = (build(Transformer(**{**values, "precision": each})).programs[0] for each in (precision, "bf16"))
    (scaled,), (usual,) = (list(ops(made, "aten::_fused_adamw_")) for made in (step, plain))
    assert [each.shape for each in scaled[1][0]] == [each.shape for each in usual[1][0]]
    # Forward and the input's gradient; weights of the base get none. The first layer's input needs none either.
    layers = LLAMA["layers"]
    assert 7 * layers < len(list(ops(step, "aten::_scaled_mm"))) <= 2 * 7 * layers
