"""A model split by tensor parallelism, beside Megatron-LM's own: a forward pass recorded on 8 A100s."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path

import pytest

from steptime._build.transformer import sampling
from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._program.load import load
from steptime._program.program import Phase, Program, Tensor

SHARED = Path(os.environ.get("STEPTIME_SHARED", Path(__file__).parents[3] / "shared")) / "data"
RECORDED = SHARED / "traces" / "megatron_tp8_8xA100" / "megatron_et_0.json.gz"


def products(program: Program) -> Counter[tuple[tuple[int, ...], ...]]:
    """Shapes of what is multiplied in forward, biases left out."""
    found: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for row, name in enumerate(program.names[number] for number in program.ops.name):
        if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm") and program.ops.phase[row] == Phase.FORWARD:
            inputs = program.signatures[program.ops.signature[row]].inputs
            found[tuple(each.shape for each in inputs if isinstance(each, Tensor))[-2:]] += 1
    return found


def forward_reductions(program: Program) -> list[int]:
    """Elements of what is reduced in forward, in order."""
    found = []
    for row, name in enumerate(program.names[number] for number in program.ops.name):
        if name == "c10d::allreduce_" and program.ops.phase[row] == Phase.FORWARD:
            (reduced,), *_ = program.signatures[program.ops.signature[row]].inputs
            found.append(math.prod(reduced.shape))
    return found


@pytest.mark.skipif(not RECORDED.exists(), reason=f"{RECORDED} is not there")
def test_forward_multiplies_and_reduces_what_megatron_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_WRITTEN_OUT", 1 << 20)
    recorded = load([RECORDED]).programs[0]
    config = Transformer(
        layers=40,
        width=4096,
        heads=64,
        sequence=2048,
        vocabulary=51200,
        batch=4,
        attention="unfused",
        parallel=Parallelism(tensor=8),
    )
    built = build(config).programs[0]
    assert products(built) == products(recorded)
    # Megatron-LM sums the loss over copies too, for its log.
    assert forward_reductions(built) == [size for size in forward_reductions(recorded) if size > 1]


@pytest.mark.parametrize(("batch", "precision", "fused"), [(1, "fp16", False), (2, "fp16", True), (2, "fp32", False)])
def test_softmax_is_one_kernel_where_heads_come_in_fours_of_16_bits(batch: int, precision: str, fused: bool) -> None:
    config = Transformer(
        layers=2, width=256, heads=4, sequence=64, vocabulary=512, batch=batch, precision=precision, attention="unfused",
        parallel=Parallelism(tensor=2),
    )  # fmt: skip
    program = build(config).programs[0]
    made = Counter(program.names[number] for number in program.ops.name)
    assert made["ScaledUpperTriangMaskedSoftmax"] == (config.layers if fused else 0)
    assert made["aten::_softmax"] == made["aten::_softmax_backward_data"] == config.layers
    softmax = [
        program.ops.signature[row] for row, name in enumerate(program.ops.name) if program.names[name] == "aten::_softmax"
    ]
    assert {program.signatures[each].inputs[0].dtype for each in softmax} == {"float16" if fused else "float32"}
