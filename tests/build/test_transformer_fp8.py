"""Laws of products in eight and four bits: which they are, what is cast how often, what ranks gather, what is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.build.test_transformer import LLAMA, multiplied, ops, program
from tests.support.waits import needed_by_nobody

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.fp8 import RECIPES
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import Experts
from steptime._models.kernels.from_ops import questions_of
from steptime._models.memory.peak import peak_memory
from steptime._ops.operations import operations_of
from steptime._ops.waits import tensor_waits
from steptime._program.program import Program, Tensor

MODEL: dict[str, Any] = {**LLAMA, "optimizer": "adamw_fused", "fused": True}
LAYOUTS = {
    "alone": Parallelism(),
    "data": Parallelism(data=2),
    "fsdp": Parallelism(fsdp=4),
    "tensor": Parallelism(tensor=2),
    "sequence": Parallelism(tensor=2, sequence=True),
    "pipeline": Parallelism(pipeline=3),
}


def made(recipe: str, **changes: Any) -> Program:
    precision = {"precision": recipe} if recipe in ("mxfp8", "nvfp4") else {"precision": "fp8", "fp8_recipe": recipe}
    return program(**{**MODEL, **precision, **changes})


def scaled(step: Program) -> int:
    """Multiplications of the products of few bits: operands lie along what is summed."""
    total = 0
    for _, (left, right, *_), _ in ops(step, "aten::_scaled_mm"):
        packed = 2 if left.dtype == "float4x2" else 1
        assert left.shape[1] == right.shape[0]
        assert left.strides[1] == right.strides[0] == 1
        total += left.shape[0] * left.shape[1] * packed * right.shape[1]
    return total


def casts(step: Program) -> Counter[tuple[int, ...]]:
    return Counter(inputs[0].shape for _, inputs, _ in ops(step, "transformer_engine::quantize", "torchao::quantize"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_products_of_layers_and_no_others_are_of_few_bits(recipe: str, layout: str) -> None:
    parallel = LAYOUTS[layout]
    step, plain = made(recipe, parallel=parallel), program(**{**MODEL, "precision": "bf16", "parallel": parallel})
    assert scaled(step) + multiplied(step) == multiplied(plain)
    head = 0 if parallel.pipeline > 1 else 3 * 16 * 32 * 256 * 64 // (parallel.replicas * parallel.tensor)
    assert multiplied(step) == head
    assert not any(work.kind == "unknown" for work in questions_of(step))
    assert not needed_by_nobody(tensor_waits(step))


def test_weights_are_cast_once_in_a_step_whatever_its_micro_batches() -> None:
    weights = {(128, 64): 3, (64, 64): 3, (512, 64): 3, (64, 256): 3}  # queries with keys and values, output, gate and up, down
    for accumulated in (1, 4):
        step = made("delayed", gradient_accumulation=accumulated, batch=24)
        rows = 24 * 32 // accumulated
        assert {shape: count for shape, count in casts(step).items() if shape[0] != rows} == weights
    again = casts(made("delayed", parallel=Parallelism(fsdp=4), batch=24))
    assert {shape: again[shape] for shape in weights} == {shape: 2 * count for shape, count in weights.items()}


def test_torchao_casts_before_every_product() -> None:
    """Two operands of each of the three products of 12 layers; of gradients one each way."""
    step = made("rowwise")
    assert casts(step).total() == 2 * len(list(ops(step, "aten::_scaled_mm")))


@pytest.mark.parametrize(("recipe", "passes"), [("delayed", 0), ("current", 1), ("blockwise", 0), ("nvfp4", 1), ("mxfp8", 0)])
def test_some_recipes_look_for_the_largest_value_first(recipe: str, passes: int) -> None:
    step = made(recipe)
    assert len(list(ops(step, "transformer_engine::compute_amax"))) == passes * casts(step).total()


def test_sequence_parallel_ranks_gather_half_the_bytes_for_products() -> None:
    parallel = Parallelism(tensor=2, sequence=True)
    plain = program(**{**MODEL, "precision": "bf16", "parallel": parallel})
    step = made("current", parallel=parallel)
    gathered = [sum(each.bytes_in for each in run.collectives if each.kind == "all_gather") for run in (plain, step)]
    forward_and_again = 2 * 2 * 3 * 16 * 32 // 2 * 64  # two halves of three layers, twice, a byte less for each element
    assert gathered[0] - gathered[1] == forward_and_again


def test_what_is_kept_for_backward_is_smaller() -> None:
    large = {"batch": 64, "layers": 6, "sequence": 256, "vocabulary": 64}
    plain = peak_memory(program(**{**MODEL, "precision": "bf16", **large})).allocated
    eight, four = (peak_memory(made(recipe, **large)).allocated for recipe in ("current", "nvfp4"))
    assert four < eight < plain


def test_a_sample_of_layers_has_the_memory_of_all() -> None:
    """Weights that were cast stay for the step, those of layers that a program repeats too."""
    few, many = (build(Transformer(**{**MODEL, "precision": "fp8", "layers": layers})).programs[0] for layers in (12, 24))
    plain = [build(Transformer(**{**MODEL, "precision": "bf16", "layers": layers})).programs[0] for layers in (12, 24)]
    copies = (peak_memory(many).allocated - peak_memory(few).allocated) - (
        peak_memory(plain[1]).allocated - peak_memory(plain[0]).allocated
    )
    weights = 12 * (128 * 64 + 64 * 64 + 512 * 64 + 64 * 256)
    kept = 12 * 16 * 32 * (64 + 64 + 64 + 256)  # inputs of the four, at a byte less for each element
    assert copies == pytest.approx(2 * weights - kept, rel=0.1)


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4", "rowwise"])
@pytest.mark.parametrize("parallel", [Parallelism(), Parallelism(data=4, expert=4)], ids=["alone", "expert"])
def test_products_of_experts_are_of_few_bits_too(recipe: str, parallel: Parallelism) -> None:
    """All but the router's and the head's; gradients of their weights are summed where they stay."""
    experts = Experts(count=8, top_k=2, width=32)
    step = made(recipe, experts=experts, parallel=parallel)
    assert not list(ops(step, "aten::_grouped_mm"))
    grouped = list(ops(step, "aten::_scaled_grouped_mm"))
    assert len(grouped) == 3 * 2 * 3
    assert sum(outputs[0].dtype == "float32" for _, _, outputs in grouped) == 3 * 2
    asked = [work for work in questions_of(step) if work.name == "aten::_scaled_grouped_mm"]
    assert len(asked) == len(grouped) and all(work.question is not None for work in asked)
    plain = program(**{**MODEL, "precision": "bf16", "experts": experts, "parallel": parallel})
    assert sum(map(operations, ops(step, "aten::_scaled_grouped_mm"))) == sum(map(operations, ops(plain, "aten::_grouped_mm")))


def operations(op: tuple[int, tuple[Any, ...], tuple[Any, ...]]) -> float:
    name = "aten::_grouped_mm" if len(op[1]) == 5 else "aten::_scaled_grouped_mm"
    return operations_of(name, op[1], [each for each in op[1] if isinstance(each, Tensor)])
