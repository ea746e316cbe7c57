"""Laws of fused layers: the products of unfused ones, fewer kernels and bytes, gradients summed in fp32 where they stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.build.test_transformer import LLAMA, SMALL, multiplied, ops, program
from tests.support.waits import needed_by_nobody

from steptime._build.transformer.parallelism import Parallelism
from steptime._models.kernels.from_ops import questions_of
from steptime._models.memory.peak import peak_memory
from steptime._ops.waits import tensor_waits
from steptime._program.program import Phase, Tensor
from steptime._units import dtype_bytes

MIXED: dict[str, Any] = {**LLAMA, "precision": "bf16", "optimizer": "adamw_fused"}
GPT: dict[str, Any] = {**SMALL, "precision": "fp16", "attention": "unfused", "dropout": 0.1, "optimizer": "adamw_fused"}
LAYOUTS = {
    "alone": Parallelism(),
    "data": Parallelism(data=4),
    "fsdp": Parallelism(fsdp=4),
    "tensor": Parallelism(tensor=2),
    "sequence": Parallelism(tensor=2, sequence=True),
    "pipeline": Parallelism(pipeline=3),
}


@pytest.mark.parametrize("model", [MIXED, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_layers_multiply_as_much_in_fewer_kernels(model: dict[str, Any], layout: str) -> None:
    plain, fused = (program(**model, parallel=LAYOUTS[layout], fused=each) for each in (False, True))
    assert multiplied(fused, Phase.FORWARD) == multiplied(plain, Phase.FORWARD)
    assert multiplied(fused) == multiplied(plain)
    works = [questions_of(made) for made in (fused, plain)]
    assert len(works[0]) < len(works[1])
    assert not any(work.kind == "unknown" for work in works[0])
    assert not needed_by_nobody(tensor_waits(fused))


def test_a_layer_has_the_kernels_of_transformer_engine() -> None:
    """One of each way for norms, rotary positions of queries and keys, the gate; sums with residuals need none backward."""
    two, one = (Counter(names(program(**{**MIXED, "layers": layers}, fused=True))) for layers in (2, 1))
    more = {name.removeprefix("transformer_engine::"): count for name, count in (two - one).items() if "engine::" in name}
    expected = {"rmsnorm_fwd": 2, "rmsnorm_bwd": 2, "fused_rope_forward": 2, "fused_rope_backward": 2}
    assert {key: more[key] for key in expected} == expected
    assert (more["swiglu"], more["dswiglu"], more["dropout_add"]) == (1, 1, 2)


def names(made: Any) -> list[str]:
    return [made.names[row] for row in made.ops.name]


def test_keys_and_values_are_not_repeated_for_their_queries() -> None:
    ((_, inputs, _), *_) = ops(program(**MIXED, fused=True), "aten::_scaled_dot_product_cudnn_attention")
    assert [each.shape[1] for each in inputs[:3]] == [4, 2, 2]


def test_gradients_are_summed_in_fp32_by_the_products_themselves() -> None:
    """Over all micro-batches: nothing but norms and the embedding is added by a kernel of its own."""
    made = program(**{**MIXED, "gradient_accumulation": 2}, fused=True)
    written = [outputs[0] for _, _, outputs in ops(made, "aten::mm") if outputs[0].dtype == "float32"]
    sums = Counter(each.storage for each in written)
    assert set(sums.values()) == {2}
    assert len(sums) == 3 * 4 + 1
    added = {inputs[0].storage for _, inputs, _ in ops(made, "aten::add_") if inputs[0].dtype == "float32"}
    assert len(added) == 2 * 3 + 2
    (cleared,) = [inputs[0] for _, inputs, _ in ops(made, "aten::_foreach_zero_")]
    assert {each.storage for each in cleared} == set(sums) | added


def test_what_data_parallel_ranks_sum_is_every_gradient_once_in_fp32() -> None:
    made = program(**MIXED, parallel=Parallelism(data=4), fused=True)
    (weights,) = [inputs[0] for _, inputs, _ in ops(made, "aten::_fused_adamw_")]
    summed = sum(each.bytes_in for each in made.collectives if each.kind == "all_reduce")
    assert summed == sum(each.numel * dtype_bytes("float32") for each in weights)
    assert all(isinstance(each, Tensor) and each.dtype == "float32" for each in weights)


def test_fused_layers_keep_less() -> None:
    plain, fused = (
        peak_memory(program(**{**MIXED, "batch": 64, "layers": 6, "sequence": 128}, fused=each)) for each in (False, True)
    )
    assert fused.allocated < plain.allocated
