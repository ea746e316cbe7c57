"""Gradients and optimiser states that data-parallel ranks share: what is sent, when, and what every rank keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._hardware.device import reference_device
from steptime._models.memory.lifetimes import MemoryKind, storages
from steptime._program.program import Phase, Program
from steptime.errors import InputError

GPT = Transformer(
    layers=4, width=2048, heads=16, sequence=128, vocabulary=32000, batch=16, precision="bf16", optimizer="adamw_fused",
    parallel=Parallelism(data=4, zero=1),
)  # fmt: skip
BUCKET = 40_000_000  # parameters


def program(config: Transformer) -> Program:
    (result,) = build(config).programs
    return result


def with_parallel(config: Transformer, **changes: Any) -> Transformer:
    return replace(config, parallel=replace(config.parallel, **changes))


def parameters(config: Transformer) -> int:
    count = build(config).description.parameters
    assert count is not None
    return count


def sent(config: Transformer, kind: str) -> list[int]:
    return [max(each.bytes_in, each.bytes_out) for each in program(config).collectives if each.kind == kind]


def kept(config: Transformer, kind: MemoryKind) -> int:
    return sum(each.nbytes for each in storages(program(config), reference_device()) if each.kind is kind and each.stays)


@pytest.mark.parametrize("fused", [False, True])
def test_every_gradient_is_scattered_and_every_parameter_gathered_once(fused: bool) -> None:
    config = replace(GPT, fused=fused, batch=32, gradient_accumulation=2)
    scattered, gathered = sent(config, "reduce_scatter"), sent(config, "all_gather")
    padding = 4 * 4 * len(scattered)
    assert 0 <= sum(scattered) - 4 * parameters(config) <= padding
    assert 0 <= sum(gathered) - 2 * parameters(config) <= padding
    assert not sent(config, "all_reduce")
    assert [size // 2 for size in reversed(scattered)] == gathered  # the same buckets, the first layers' first


def test_buckets_are_of_forty_million_parameters_or_a_million_a_rank() -> None:
    *full, last = sent(GPT, "reduce_scatter")
    assert all(BUCKET <= size // 4 < BUCKET + 4 * 2048**2 for size in full)
    assert last
    many = with_parallel(replace(GPT, batch=64), data=64)
    assert all(size // 4 >= 64_000_000 for size in sent(many, "reduce_scatter")[:-1])


def test_gradients_may_be_scattered_in_the_precision_of_the_weights() -> None:
    narrow = with_parallel(GPT, grad_reduce_in_fp32=False)
    assert [2 * size for size in sent(narrow, "reduce_scatter")] == sent(GPT, "reduce_scatter")
    assert kept(narrow, MemoryKind.GRADIENTS) == pytest.approx(2 * parameters(GPT), rel=1e-4)


def phases(config: Transformer, kind: str) -> list[Phase]:
    built = program(config)
    name = {"all_gather": "c10d::_allgather_base_", "reduce_scatter": "c10d::_reduce_scatter_base_"}[kind]
    rows = [row for row, number in enumerate(built.ops.name) if built.names[number] == name]
    return [Phase(built.ops.phase[row]) for row in rows]


def test_sending_is_beside_the_passes_unless_that_is_said() -> None:
    assert set(phases(GPT, "all_gather")) == {Phase.FORWARD}
    assert set(phases(GPT, "reduce_scatter")) == {Phase.BACKWARD}
    after = with_parallel(GPT, overlap_grad_reduce=False, overlap_param_gather=False)
    built = program(after)
    names = [built.names[number] for number in built.ops.name]
    update = names.index("Optimizer.step#AdamW.step")
    assert names.index("c10d::_allgather_base_") > update
    assert [name for name in names[:update] if name == "c10d::_reduce_scatter_base_"] == ["c10d::_reduce_scatter_base_"]


def test_a_layer_waits_for_its_own_bucket_while_the_next_one_comes() -> None:
    built = program(replace(GPT, layers=8))
    order = []
    for row, number in enumerate(built.ops.name.tolist()):
        name, signature = built.names[number], built.ops.signature[row]
        if name == "c10d::_allgather_base_":
            order.append("ask")
        elif name == "record_param_comms" and "wait" in built.signatures[signature].inputs:
            order.append("wait")
        elif name == "aten::addmm":
            order.append("product")
    assert order[:4] == ["ask", "wait", "ask", "wait"]  # the embedding's bucket, and the first layer's
    first = order.index("product")
    assert order[first - 1] == "ask"
    assert order[first:].index("wait") < order[first:].index("ask")


@pytest.mark.parametrize(("ranks", "fused"), [(2, False), (4, False), (8, False), (4, True)])
def test_a_rank_keeps_its_part_of_masters_and_moments(ranks: int, fused: bool) -> None:
    config = with_parallel(replace(GPT, fused=fused), data=ranks)
    count = parameters(config)
    assert kept(config, MemoryKind.OPTIMIZER_STATE) == pytest.approx(12 * count / ranks, rel=1e-3)
    assert kept(config, MemoryKind.PARAMETERS) == pytest.approx(2 * count, rel=1e-3)
    assert kept(config, MemoryKind.GRADIENTS) == pytest.approx(4 * count, rel=1e-3)


def test_zero_2_scatters_every_micro_batch_and_keeps_a_part_of_the_gradients() -> None:
    config = replace(with_parallel(GPT, zero=2), batch=48, gradient_accumulation=3)
    assert len(sent(config, "reduce_scatter")) == 3 * len(sent(GPT, "reduce_scatter"))
    assert kept(config, MemoryKind.GRADIENTS) == 0
    found = storages(program(config), reference_device())
    made = sum(each.nbytes for each in found if each.kind is MemoryKind.GRADIENTS)
    assert made == pytest.approx(4 * parameters(config) / 4, rel=1e-3)


def test_in_a_pipeline_zero_2_holds_gradients_of_a_chunk_from_its_first_backward_pass_to_its_last() -> None:
    parallel = Parallelism(data=2, tensor=2, sequence=True, pipeline=2, chunks=2, schedule="interleaved")
    staged = replace(GPT, gradient_accumulation=4, fused=True, norm="rms_norm", tied_head=False, parallel=parallel)
    of_stage = []
    for zero in (1, 2):
        built = build(with_parallel(staged, zero=zero)).programs[0]
        scattered = [each.bytes_in for each in built.collectives if each.kind == "reduce_scatter" and each.group != "tensor"]
        of_stage.append((scattered, storages(built, reference_device())))
    (once, kept_whole), (also_once, passing) = of_stage
    assert once == also_once  # sent no more often than ZeRO 1 sends it
    gradients = [each.nbytes for each in kept_whole if each.kind is MemoryKind.GRADIENTS and each.stays]
    buffers = sorted((each for each in passing if not each.stays and each.nbytes in gradients), key=lambda each: each.born)
    assert sorted(each.nbytes for each in buffers) == sorted(gradients)  # one of each chunk
    assert not any(each.stays for each in passing if each.kind is MemoryKind.GRADIENTS)
    first, *_, last = buffers
    assert first.dies < last.dies  # the chunk whose backward passes come first lets go first


def test_experts_are_shared_among_the_ranks_that_have_the_same() -> None:
    config = Transformer.from_dict({
        "layers": 2, "width": 1024, "heads": 16, "sequence": 128, "vocabulary": 32000, "batch": 8, "precision": "bf16",
        "norm": "rms_norm", "activation": "swiglu", "positions": "rotary", "experts": {"count": 8, "top_k": 2},
        "parallel": {"data": 4, "expert": 2, "zero": 1},
    })  # fmt: skip
    groups = {each.group for each in program(config).collectives if each.kind == "reduce_scatter"}
    assert groups == {"0", "expert_data"}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"data": 4, "overlap_grad_reduce": False}, "give parallel.zero = 1 or 2"),
        ({"data": 4, "zero": 1, "grad_reduce_in_fp32": "yes"}, "expected true or false"),
        ({"data": 4, "zero": 3}, "expected 0, 1 or 2"),
    ],
)
def test_what_does_not_go_together_is_refused(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(GPT, parallel=Parallelism(**parallel))
