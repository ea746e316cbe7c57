"""A model sharded by FSDP2, beside a recorded one: the example gpt_fsdp2_small."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._ops.waits import WAIT, tensor_waits
from steptime._program.load import load
from steptime._program.program import Program
from steptime._sim.modelled.issue import _sends_on

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_fsdp2_small"
COMPARED = (
    "aten::addmm", "aten::mm", "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::gelu",
    "aten::gelu_backward",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward", "aten::embedding",
    "aten::embedding_dense_backward", "aten::_log_softmax", "aten::add_", "fsdp::all_gather_copy_in",
    "fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "RegisterPostBackwardFunction",
)  # fmt: skip


@cache
def built() -> Program:
    config = Transformer(
        layers=4,
        width=512,
        heads=8,
        sequence=256,
        vocabulary=8192,
        batch=256,
        tied_head=False,
        precision="bf16",
        optimizer="adamw_fused",
        parallel=Parallelism(fsdp=2),
    )
    return build(config).programs[0]


@cache
def recorded() -> Program:
    return load([EXAMPLE]).programs[0]


def test_units_are_gathered_and_reduced_in_the_recorded_order() -> None:
    program = recorded()
    rows = np.flatnonzero((program.works.step == program.steps[1]) & (program.works.collective >= 0))
    rows = rows[np.argsort(program.calls.start_ns[program.works.call[rows]])]
    theirs = [program.collectives[row] for row in program.works.collective[rows]]
    mine = built().collectives
    assert [(one.kind, one.bytes_in, one.bytes_out, one.dtype) for one in mine] == [
        (one.kind, one.bytes_in, one.bytes_out, one.dtype) for one in theirs
    ]


def test_a_step_has_as_many_layers_and_copies_as_the_recorded_one() -> None:
    program = recorded()
    theirs = Counter(program.names[row] for row in program.ops.name[program.ops.step == program.steps[1]])
    mine = Counter(built().names[row] for row in built().ops.name)
    assert {name: mine[name] for name in COMPARED} == {name: theirs[name] for name in COMPARED}


def test_hooks_stand_in_the_recorded_order() -> None:
    def labels(program: Program, rows: list[int]) -> list[str]:
        found = [program.names[program.ops.name[row]] for row in rows]
        return [name.replace("blocks.", "layers.") for name in found if name.startswith("FSDP::")]

    program = recorded()
    theirs = np.flatnonzero(program.ops.step == program.steps[1])
    ordered = theirs[np.argsort(program.ops.start_ns[theirs], kind="stable")].tolist()
    assert labels(built(), list(range(len(built().ops)))) == labels(program, ordered)


def accumulated(**parallel: bool) -> list[tuple[str, str]]:
    """Kinds and phases of what two stages' first rank sends to shard, of four micro-batches."""
    config = Transformer(
        layers=4,
        width=64,
        heads=4,
        sequence=16,
        vocabulary=128,
        batch=8,
        gradient_accumulation=4,
        precision="bf16",
        optimizer="adamw_fused",
        tied_head=False,
        parallel=Parallelism(fsdp=2, **({"pipeline": 2} | parallel)),  # type: ignore[arg-type]
    )
    return [(each.kind, each.group) for each in build(config).programs[0].collectives if each.group == "fsdp"]


def test_in_a_pipeline_layers_are_gathered_once_and_reduced_after_the_last_micro_batch() -> None:
    units = 3  # two layers, and the embedding
    sent = accumulated()
    assert sent == [("all_gather", "fsdp")] * units + [("reduce_scatter", "fsdp")] * units


def test_what_a_pipeline_does_not_do_can_be_said() -> None:
    every = accumulated(reshard_after_forward=True, no_sync=False)
    assert every.count(("reduce_scatter", "fsdp")) == 4 * 3
    assert every.count(("all_gather", "fsdp")) == 4 * (3 + 2)  # layers again in backward


def test_copies_of_shards_are_summed_beside_compute_once_they_are_scattered() -> None:
    """All_reduces wait for their reduce_scatters on streams of their own; compute waits where the next unit is reduced."""
    config = Transformer(
        layers=2,
        width=64,
        heads=4,
        sequence=16,
        vocabulary=128,
        batch=4,
        precision="bf16",
        parallel=Parallelism(fsdp=2, data=2),
    )
    program = build(config).programs[0]
    chained = _sends_on(program)
    kinds = {(program.collectives[one].kind, program.collectives[each].kind) for one, all_ in chained.items() for each in all_}
    assert kinds == {("all_reduce", "reduce_scatter")}
    assert len(chained) == 3  # both layers, and the rest
    waits = {wait.collective: wait for wait in tensor_waits(program)}
    scattered = [index for index, each in enumerate(program.collectives) if each.kind == "reduce_scatter"]
    for index, following in pairwise(scattered):
        assert waits[index].reason == WAIT
        assert waits[index].needed_by < waits[following].launched_by
        assert waits[index].needed_by > waits[index + 1].launched_by  # the all_reduce is on its way


@pytest.mark.parametrize("changes", [{}, {"no_sync": False}, {"no_sync": False, "reshard_after_forward": True}])
@pytest.mark.parametrize("layers", [4, 24])
def test_every_shard_has_a_gradient_however_stages_reduce(layers: int, changes: dict[str, bool]) -> None:
    config = Transformer(
        layers=layers,
        width=64,
        heads=4,
        sequence=16,
        vocabulary=128,
        batch=16,
        gradient_accumulation=8,
        precision="bf16",
        optimizer="adamw_fused",
        parallel=Parallelism(fsdp=2, pipeline=4, **changes),  # type: ignore[arg-type]
    )
    for program in build(config).programs:
        (update,) = [row for row, number in enumerate(program.ops.name) if program.names[number] == "aten::_fused_adamw_"]
        weights, gradients, *_ = program.signatures[program.ops.signature[update]].inputs
        assert isinstance(weights, tuple)
        assert isinstance(gradients, tuple)
        assert [each.shape for each in weights] == [each.shape for each in gradients]
