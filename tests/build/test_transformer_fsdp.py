"""A model sharded by FSDP2, beside a recorded one: the example gpt_fsdp2_small."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Parallelism, Transformer
from steptime._program.load import load
from steptime._program.program import Program

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
