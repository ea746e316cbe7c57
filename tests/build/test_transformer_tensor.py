"""A model split by tensor parallelism, beside Megatron-LM's own: a forward pass recorded on 8 A100s."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from pathlib import Path

import pytest

from steptime.build.transformer import build
from steptime.build.transformer_config import Parallelism, Transformer
from steptime.build.transformer_megatron import MEASURED, megatron_gpt
from steptime.errors import InputError
from steptime.graph.load import load
from steptime.graph.program import Phase, Program, Tensor

SHARED = Path(os.environ.get("STEPTIME_SHARED", Path(__file__).parents[3] / "shared")) / "data"
RECORDED = SHARED / "traces" / "megatron_tp8_8xA100" / "megatron_et_0.json.gz"
TABLE = SHARED / "steps" / "megatron_a100_single_node.csv"

ROW = {
    "# GPUs": "8", "global batch": "32", "micro batch": "4", "hidden size": "1024", "attention heads": "16", "# layers": "2",
    "sequence length": "1024", "tensor parallelism": "4", "data parallelism": "2", "pipeline parallelism": "1",
}  # fmt: skip


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
def test_forward_multiplies_and_reduces_what_megatron_does() -> None:
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


def test_a_measured_row_becomes_the_model_it_names() -> None:
    model = megatron_gpt(ROW)
    assert (model.ranks, model.parallel, model.gradient_accumulation, model.local_batch) == (8, Parallelism(2, 1, 4), 4, 4)
    assert (model.precision, model.kernels, model.checkpointing) == ("fp16", "unfused", False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pipeline parallelism": "2"}, "pipeline parallelism is 2; only 1 can be built"),
        ({"data parallelism": "4"}, "is not # GPUs 8"),
        ({"global batch": "33"}, "does not divide by micro batch 4"),
        ({"# layers": "many"}, "# layers is 'many'; expected a whole number"),
        ({"attention heads": "3"}, "width 1024 does not divide by heads 3"),
    ],
)
def test_a_row_that_cannot_be_built_says_why(changes: dict[str, str], said: str) -> None:
    with pytest.raises(InputError) as error:
        megatron_gpt({**ROW, **changes})
    assert said in str(error.value)


@pytest.mark.skipif(not TABLE.exists(), reason=f"{TABLE} is not there")
def test_every_measured_row_without_pipelines_can_be_built() -> None:
    with TABLE.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["pipeline parallelism"] == "1"]
    assert len(rows) == 499
    assert all(megatron_gpt(row).ranks == int(row["# GPUs"]) and float(row[MEASURED]) > 0 for row in rows)
