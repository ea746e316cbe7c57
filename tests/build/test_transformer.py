"""Laws of built Transformers: what is computed, what is communicated, and how parallelism divides both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.waits import needed_by_nobody

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism, groups_of
from steptime._models.kernels.from_ops import questions_of
from steptime._models.memory.lifetimes import MemoryKind
from steptime._models.memory.peak import peak_memory
from steptime._ops.waits import tensor_waits
from steptime._program.program import Phase, Program, Tensor
from steptime._units import MIB, dtype_bytes

SMALL: dict[str, Any] = {"layers": 3, "width": 64, "heads": 4, "sequence": 32, "vocabulary": 256, "batch": 16}
LLAMA: dict[str, Any] = {
    **SMALL, "kv_heads": 2, "norm": "rms_norm", "activation": "swiglu", "positions": "rotary", "tied_head": False,
}  # fmt: skip
KINDS = {
    "gpt": {},
    "gpt2": {"activation": "gelu_new", "weights": "in_out", "head": "tokens", "mask": "padding", "dropout": 0.1},
    "bert": {"norm_place": "after", "projections": "separate", "segments": 2, "head": "sequence", "causal": False},
    "llama": LLAMA,
    "autocast": {"precision": "bf16-autocast", "dropout": 0.1},
    "pure": {"precision": "bf16", "optimizer": "adamw_fused"},
    "sgd": {"optimizer": "sgd"},
    "flash": {"precision": "bf16", "attention": "flash"},
    "megatron": {"precision": "fp16", "attention": "unfused", "dropout": 0.1, "optimizer": "adamw_fused"},
    "data": {"parallel": Parallelism(data=4)},
    "fsdp": {"precision": "bf16", "parallel": Parallelism(fsdp=4)},
    "tensor": {"parallel": Parallelism(tensor=2)},
    "all": {"precision": "bf16", "parallel": Parallelism(data=2, fsdp=2, tensor=2)},
}


def test_tf32_is_fp32_with_products_in_tf32() -> None:
    plain, fast = program(), program(precision="tf32")
    assert [(each.inputs, each.outputs) for each in fast.signatures] == [
        (each.inputs, each.outputs) for each in plain.signatures
    ]
    asked = [work.question for work in questions_of(fast) if work.question is not None]
    assert {each.call.op.partition(".")[0] for each in asked if each.tf32} == {"aten::mm", "aten::addmm"}
    assert not any(work.question.tf32 for work in questions_of(plain) if work.question is not None)


def program(**changes: Any) -> Program:
    return build(Transformer(**{**SMALL, **changes})).programs[0]


def ops(made: Program, *names: str) -> Iterator[tuple[int, tuple[Any, ...], tuple[Any, ...]]]:
    for row in range(len(made.ops)):
        if made.names[made.ops.name[row]] in names:
            signature = made.signatures[made.ops.signature[row]]
            yield row, signature.inputs, signature.outputs


def multiplied(made: Program, phase: Phase | None = None) -> int:
    """Multiplications of all products with weights."""
    total = 0
    for row, inputs, _ in ops(made, "aten::mm", "aten::addmm"):
        matrices = [each for each in inputs if isinstance(each, Tensor)][-2:]
        if made.ops.parent[row] >= 0 and made.names[made.ops.name[made.ops.parent[row]]] == made.names[made.ops.name[row]]:
            continue  # under autocast an op is shown twice
        if phase is None or made.ops.phase[row] == phase:
            total += math.prod(matrices[0].shape) * matrices[1].shape[1]
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_known_to_the_models_of_kernels(kind: str) -> None:
    """Only what combines two masks has no model, where the vocabulary is split."""
    works = questions_of(program(**KINDS[kind]))
    assert {work.name for work in works if work.kind == "unknown"} <= {"aten::bitwise_or"}
    assert sum(work.question is not None for work in works) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_config_gives_the_same_program(kind: str) -> None:
    one, other = program(**KINDS[kind]), program(**KINDS[kind])
    assert one.signatures == other.signatures
    assert [one.names[row] for row in one.ops.name] == [other.names[row] for row in other.ops.name]
    assert one.collectives == other.collectives


@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_is_waited_for(kind: str) -> None:
    assert not needed_by_nobody(tensor_waits(program(**KINDS[kind])))


@pytest.mark.parametrize("kind", ["gpt", "gpt2", "llama", "autocast", "tensor", "fsdp"])
def test_backward_multiplies_twice_as_much_as_forward(kind: str) -> None:
    made = program(**KINDS[kind])
    assert multiplied(made, Phase.BACKWARD) == 2 * multiplied(made, Phase.FORWARD)


def test_forward_multiplies_every_token_with_every_weight_of_a_product() -> None:
    made = program(**LLAMA)
    width, inner, keys = 64, 256, 32
    weights = 3 * (2 * width * width + 2 * width * keys + 3 * width * inner) + 256 * width
    assert multiplied(made, Phase.FORWARD) == 16 * 32 * weights


def test_tensor_parallelism_divides_the_products() -> None:
    assert 2 * multiplied(program(parallel=Parallelism(tensor=2))) == multiplied(program())


def test_data_parallelism_divides_the_batch() -> None:
    assert 4 * multiplied(program(parallel=Parallelism(data=4))) == multiplied(program())


def test_every_layer_adds_the_same() -> None:
    counts = [len(program(layers=layers).ops) for layers in (2, 3, 4)]
    assert counts[2] - counts[1] == counts[1] - counts[0]


def test_a_tied_head_saves_a_parameter_and_adds_its_gradients() -> None:
    accumulate = "torch::autograd::AccumulateGrad"
    tied, own = (Counter(made.names[row] for row in made.ops.name) for made in (program(), program(tied_head=False)))
    assert tied[accumulate] == own[accumulate] - 1
    assert tied["aten::add_"] + tied["aten::add"] == own["aten::add_"] + own["aten::add"]  # one sum more, one count less


# Parallelism


@pytest.mark.parametrize("parallel", [Parallelism(2, 3, 4), Parallelism(4, 1, 2), Parallelism(1, 4, 2), Parallelism(8)])
def test_groups_divide_all_ranks_and_their_sizes_multiply_up(parallel: Parallelism) -> None:
    groups = groups_of(parallel)
    for name, sets in groups.items():
        assert sorted(rank for some in sets for rank in some) == list(range(parallel.ranks))
        assert {len(some) for some in sets} == {getattr(parallel, name)}
    for rank in range(parallel.ranks):
        met = [set(some) for sets in groups.values() for some in sets if rank in some]
        assert all(one & other == {rank} for one in met for other in met if one is not other)


def test_a_thousand_ranks_share_one_program() -> None:
    workload = build(Transformer(**{**SMALL, "batch": 256, "parallel": Parallelism(data=256, tensor=4)}))
    assert (workload.world_size, len(workload.programs), len(workload.owners)) == (1024, 1, 1024)
    for collective in workload.programs[0].collectives:
        assert 517 in workload.members(517, collective)
        assert workload.members(0, collective) == collective.ranks


def test_a_layer_split_over_ranks_reduces_its_activations_four_times() -> None:
    made = program(parallel=Parallelism(tensor=2))
    size = 16 * 32 * 64 * 4
    reduced = Counter(each.bytes_in for each in made.collectives)
    # Two in forward and two in backward of each layer, the embedding's, and the gradient of what the head takes.
    assert reduced[size] == 4 * 3 + 2
    assert len(made.collectives) == 4 * 3 + 2 + 3  # and the three numbers per token of the loss


def test_buckets_hold_every_gradient_once() -> None:
    made = program(width=512, parallel=Parallelism(data=4))
    weights = {inputs[0].id: inputs[0] for _, inputs, _ in ops(made, "torch.distributed.ddp.reducer::copy_bucket_to_grad")}
    nbytes = [each.bytes_in for each in made.collectives]
    assert sum(nbytes) == sum(each.numel * dtype_bytes(each.dtype) for each in weights.values())
    assert nbytes[0] >= MIB
    assert all(each >= 25 * MIB for each in nbytes[1:-1])


def test_accumulated_parts_reduce_their_gradients_once() -> None:
    whole, parts = (program(parallel=Parallelism(data=4), gradient_accumulation=count) for count in (1, 2))
    assert [each.bytes_in for each in whole.collectives] == [each.bytes_in for each in parts.collectives]
    assert multiplied(whole) == multiplied(parts)
    assert sum(1 for _ in ops(parts, "aten::scaled_dot_product_attention")) == 2 * 3


def test_shards_are_gathered_forward_and_backward_and_reduced_once() -> None:
    made = program(precision="bf16", parallel=Parallelism(fsdp=4))
    kinds = Counter((each.kind, each.dtype) for each in made.collectives)
    assert kinds == {("all_gather", "bfloat16"): 1 + 2 * 3, ("reduce_scatter", "float32"): 1 + 3}
    gathered = [each.bytes_out for each in made.collectives if each.kind == "all_gather"]
    scattered = [each.bytes_in for each in made.collectives if each.kind == "reduce_scatter"]
    assert sum(scattered) == 2 * (gathered[0] + sum(gathered[1:]) // 2)


def test_shards_beside_copies_are_summed_over_the_copies() -> None:
    made = program(precision="bf16", parallel=Parallelism(data=2, fsdp=2))
    scattered = [each.bytes_out for each in made.collectives if each.kind == "reduce_scatter"]
    summed = [each.bytes_in for each in made.collectives if each.kind == "all_reduce"]
    assert scattered == summed
    assert {each.group for each in made.collectives} == {"fsdp", "data"}


# Memory and recomputation


@pytest.mark.parametrize("kind", ["gpt", "llama", "autocast", "fsdp", "tensor"])
def test_checkpointing_computes_layers_again_and_saves_memory(kind: str) -> None:
    changes = {**KINDS[kind], "layers": 6, "batch": 64}
    kept, again = program(**changes), program(**changes, checkpointing=True)
    attention = [
        Counter(
            bool("backward" in name) for name in (made.names[row] for row in made.ops.name) if "_scaled_dot_product_" in name
        )
        for made in (kept, again)
    ]
    assert attention[0] == {False: 6, True: 6}
    assert attention[1] == {False: 12, True: 6}
    assert peak_memory(again).allocated < peak_memory(kept).allocated


@pytest.mark.parametrize(
    "recompute", ["selective", "ops", ("norm",), ("activation",), ("attention", "feed_forward", "norm", "activation")]
)
@pytest.mark.parametrize("kind", ["llama", "autocast", "megatron", "tensor"])
def test_recomputation_of_parts_lies_between_none_and_all(kind: str, recompute: Any) -> None:
    """In memory; and it multiplies no more than the products that are its own."""
    changes = {**KINDS[kind], "layers": 6, "batch": 64}
    kept, parts, again = (program(**changes, recompute=each) for each in ("none", recompute, "full"))
    most, some, least = (peak_memory(made).allocated for made in (kept, parts, again))
    small = kind == "megatron" or recompute != "selective"  # what fused attention saves beside its inputs is little
    assert least <= some < most if small else least < some <= most
    assert multiplied(kept) <= multiplied(parts) <= multiplied(again)
    if recompute in (("norm",), ("activation",), "selective"):
        assert multiplied(parts) == multiplied(kept)


def test_only_the_layers_that_are_named_are_computed_again() -> None:
    layer = multiplied(program(layers=1, recompute="full")) - multiplied(program(layers=1))
    for changes, count in (({"recompute_layers": 2}, 2), ({"recompute_every": 2}, 3), ({"recompute_every": 4}, 1), ({}, 6)):
        more = multiplied(program(layers=6, recompute="full", **changes)) - multiplied(program(layers=6))
        assert more == count * layer


def test_what_nothing_saved_is_not_computed_again() -> None:
    """The last product of a layer, unless dropout after it saves its mask."""
    layer = multiplied(program(layers=2), Phase.FORWARD) - multiplied(program(layers=1), Phase.FORWARD)
    last = 16 * 32 * 64 * 256
    plain, dropped = (
        multiplied(program(layers=1, checkpointing=True, dropout=dropout)) - multiplied(program(layers=1, dropout=dropout))
        for dropout in (0.0, 0.1)
    )
    assert (plain, dropped) == (layer - last, layer)


def test_sharding_saves_the_memory_of_parameters_and_their_state() -> None:
    big = {**SMALL, "width": 512, "layers": 8, "precision": "bf16", "optimizer": "adamw_fused"}
    alone = peak_memory(program(**{**big, "batch": 2})).parts
    sharded = peak_memory(program(**{**big, "batch": 16, "parallel": Parallelism(fsdp=8)})).parts
    kinds = (MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER_STATE)
    # An eighth of 12 bytes for each parameter, where a rank alone has its 2 bytes in bf16 besides.
    assert sum(sharded[kind] for kind in kinds) == pytest.approx(12 / 14 / 8 * sum(alone[kind] for kind in kinds), rel=1e-3)


def test_autocast_casts_every_weight_once_in_a_pass() -> None:
    made = program(precision="bf16-autocast")
    cast = Counter(
        inputs[0].id
        for row, inputs, outputs in ops(made, "aten::_to_copy")
        if made.ops.phase[row] == Phase.FORWARD and outputs[0].dtype == "bfloat16"
    )
    assert set(cast.values()) == {1}
    assert len(cast) > 3 * 8
