"""Built Transformers beside recorded ones: the execution traces of GPT-2 and BERT that come with the package."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tests.support.same_ops import same_ops

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._models.host.columns import host_columns
from steptime._models.host.model import read_host
from steptime._models.kernels.from_ops import questions_of
from steptime._models.memory.peak import peak_memory
from steptime._platforms.device import Device
from steptime._program.program import Program, Tensor
from steptime_lab.measurements.shipped import program_of, shipped_programs

CASES = ("gpt2-b8-r1", "bert-b8-r1", "gpt2-b16-r1-bf16", "bert-b16-r2", "bert-b64-r4-bf16")
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "sequence": 128, "max_positions": 1024, "vocabulary": 50257, "activation": "gelu_new", "weights": "in_out",
        "head": "tokens", "classes": 9, "mask": "padding",
    },
    "bert": {
        "sequence": 512, "vocabulary": 28996, "segments": 2, "norm_place": "after", "projections": "separate",
        "head": "sequence", "classes": 5, "causal": False,
    },
}  # fmt: skip
# Layers, norms, attention, loss and optimiser: what a step's device time consists of.
COMPARED = (
    "aten::mm", "aten::addmm", "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::gelu",
    "aten::gelu_backward",
    "aten::native_dropout", "aten::native_dropout_backward", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward", "aten::embedding_dense_backward", "aten::_log_softmax", "aten::add_",
)  # fmt: skip


@cache
def recorded(case: str) -> Program:
    return program_of(shipped_programs(case), 0)


@cache
def built(case: str) -> Program:
    model, batch, ranks, *precision = case.split("-")
    config = Transformer(
        layers=12,
        width=768,
        heads=12,
        batch=int(batch[1:]),
        dropout=0.1,
        precision="bf16-autocast" if precision else "fp32",
        parallel=Parallelism(data=int(ranks[1:])),
        **MODELS[model],
    )
    return build(config).programs[0]


@cache
def device() -> Device:
    return Device.load("h200")


def device_ns(program: Program) -> float:
    works = [work for work in questions_of(program) if work.question is not None]
    found = device().estimates([work.question for work in works if work.question is not None])
    return sum(one.estimate.time_ns * work.moved for one, work in zip(found, works, strict=True))


def host_ns(program: Program) -> float:
    return float(host_columns(program, read_host("xeon-h200")).time_ns().sum())


def sequence(program: Program) -> list[tuple[str, int, list[tuple[tuple[int, ...], str, tuple[int, ...] | None]]]]:
    """The compared ops in order of their phases, with what they take: shapes, dtypes, strides."""
    found = []
    for row, name in enumerate(program.names[number] for number in program.ops.name):
        if name in COMPARED:
            inputs = program.signatures[program.ops.signature[row]].inputs
            taken = [(each.shape, each.dtype, each.strides) for each in inputs if isinstance(each, Tensor)]
            found.append((name, int(program.ops.phase[row]), taken))
    return found


@pytest.mark.parametrize("case", CASES)
def test_layers_are_computed_in_the_recorded_order_on_the_recorded_shapes(case: str) -> None:
    assert sequence(built(case)) == sequence(recorded(case))


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_the_recorded_ones_in_order(case: str) -> None:
    mine, theirs = (
        [(each.kind, each.bytes_in, each.bytes_out, each.dtype, each.ranks) for each in program.collectives]
        for program in (built(case), recorded(case))
    )
    assert mine == theirs


@pytest.mark.parametrize("case", CASES)
def test_device_time_is_that_of_the_recorded_step(case: str) -> None:
    assert device_ns(built(case)) == pytest.approx(device_ns(recorded(case)), rel=0.001)


@pytest.mark.parametrize("case", CASES)
def test_host_time_is_that_of_the_recorded_step(case: str) -> None:
    assert host_ns(built(case)) == pytest.approx(host_ns(recorded(case)), rel=0.01)


@pytest.mark.parametrize("case", CASES)
def test_memory_is_that_of_the_recorded_step(case: str) -> None:
    mine, theirs = peak_memory(built(case)), peak_memory(recorded(case))
    assert mine.allocated == pytest.approx(theirs.allocated, rel=0.001)


def test_the_optimiser_updates_the_recorded_parameters_in_order() -> None:
    for case in ("gpt2-b8-r1", "bert-b8-r1"):
        shapes = []
        for program in (built(case), recorded(case)):
            row = next(row for row in range(len(program.ops)) if program.names[program.ops.name[row]] == "aten::_foreach_lerp_")
            lists = program.signatures[program.ops.signature[row]].inputs[0]
            assert isinstance(lists, tuple)
            shapes.append([each.shape for each in lists if isinstance(each, Tensor)])
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("case", CASES)
def test_almost_every_op_is_the_recorded_one(case: str) -> None:
    """With its name, nesting, phase, thread, arguments and memory; seeds of random numbers differ."""
    assert same_ops(built(case), recorded(case)).fraction > 0.99
