"""Floating-point operations of a step, against what people count by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from steptime._api.read import read
from steptime._build.config import read_config
from steptime._build.dlrm.model import KIND, Dlrm
from steptime._build.dlrm.step import top_width
from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import Experts, Lora
from steptime._hardware.device import read_device
from steptime._sim.prediction import Operations, operations_of, peak_flop_per_s, recorded_peak_flop_per_s

EXAMPLES = Path(__file__).parents[2] / "examples"


def whole_llama() -> Transformer:
    config = read_config(EXAMPLES / "configs" / "llama-8b.toml")
    assert isinstance(config, Transformer)
    return config


def llama(**changes: Any) -> Transformer:
    return replace(whole_llama(), layers=4, sequence=2048, **changes)


def six_n_t(config: Transformer, parameters: int) -> float:
    """6 N T of all weights that take part in products, and 12 L width sequence T of attention."""
    tokens = config.batch * config.sequence
    weights = parameters - config.vocabulary * config.width  # the embedding is looked up; the head is a product
    return 6.0 * weights * tokens + 12.0 * config.layers * config.width * config.sequence * tokens


def test_a_llama_computes_six_n_t_and_its_attention() -> None:
    workload = read(EXAMPLES / "configs" / "llama-8b.toml")
    parameters = workload.description.parameters
    assert parameters == 8_030_261_248  # as published
    found = operations_of(workload)
    assert found.model == pytest.approx(six_n_t(whole_llama(), parameters), rel=0.001)
    assert found.precision == "bfloat16"


def test_what_is_computed_again_counts_for_the_hardware_alone() -> None:
    plain, again = (operations_of(build(llama(checkpointing=each))) for each in (False, True))
    assert again.model == pytest.approx(plain.model, rel=1e-9)
    assert plain.hardware < again.hardware < plain.hardware + plain.forward  # all but the head


AGAIN: tuple[str | tuple[str, ...], ...] = (
    "full", "selective", "ops", ("attention",), ("feed_forward",), ("norm", "activation"), ("attention", "feed_forward"),
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unfused attention": {"attention": "unfused", "kv_heads": 32},
    "fused": {"fused": True},
    "eight bits": {"fused": True, "precision": "fp8"},
    "adapters": {"lora": Lora(rank=16), "projections": "separate"},
    "frozen": {"frozen": ("attention", "embedding")},
    "experts": {"experts": Experts(count=4, top_k=2, width=512)},
    "tensor": {"parallel": Parallelism(tensor=2, sequence=True)},
    "shards": {"parallel": Parallelism(fsdp=2)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_asks_for_as_much_whatever_is_computed_again(kind: str) -> None:
    small = {"layers": 2, "width": 512, "heads": 32, "feed_forward": 1024, "batch": 2, "parallel": Parallelism()}
    plain = replace(whole_llama(), **{**small, "sequence": 512, "checkpointing": False, **KINDS[kind]})
    usual = operations_of(build(plain))
    assert usual.model <= usual.hardware
    for recompute in AGAIN:
        found = operations_of(build(replace(plain, recompute=recompute)))
        assert found.model == pytest.approx(usual.model, rel=1e-9)
        assert found.hardware >= usual.hardware
        assert (found.hardware > usual.hardware) == (recompute != ("norm", "activation"))


@pytest.mark.parametrize("parallel", [Parallelism(data=4), Parallelism(fsdp=4), Parallelism(tensor=4)])
def test_ranks_share_the_operations_of_one(parallel: Parallelism) -> None:
    alone = llama(batch=8, parallel=Parallelism())
    shared = replace(alone, parallel=parallel)
    one, four = operations_of(build(alone)), operations_of(build(shared))
    assert four.model == pytest.approx(one.model, rel=0.01)  # tensor parallelism pads the vocabulary
    assert build(shared).description.parameters == build(alone).description.parameters


def test_a_dlrm_computes_its_layers_and_the_products_of_pairs() -> None:
    workload = read(EXAMPLES / "configs" / "dlrm_small.toml")
    model = Dlrm.from_dict(dict(workload.meta[KIND]))
    mlps = (model.dense_features, *model.bottom), (top_width(model), *model.top)
    layers = sum(before * after for mlp in mlps for before, after in pairwise(mlp))
    vectors = len(model.tables) + 1
    forward = 2.0 * model.batch * (layers + vectors * vectors * model.bottom[-1])
    found = operations_of(workload)
    assert found.forward == pytest.approx(forward, rel=1e-6)
    # Nobody asks for the gradient of the dense features.
    first = 2.0 * model.batch * model.dense_features * model.bottom[0]
    assert found.model == pytest.approx(3 * forward - first, rel=1e-6)


def test_recordings_and_their_execution_traces_count_alike() -> None:
    folder = EXAMPLES / "h200_mps4_dlrm"
    whole, one = operations_of(read(folder)), operations_of(read(folder / "rank0.et.json.gz"))
    assert whole.model == pytest.approx(one.model, rel=1e-6)


def test_a_recording_on_part_of_a_gpu_has_part_of_its_peak() -> None:
    workload = read(EXAMPLES / "h200_mps4_dlrm")
    h200 = read_device("h200")
    quarter = 32 / h200.sms.value  # MPS gave each of the four ranks 32 SMs
    assert recorded_peak_flop_per_s(workload, "float32") == pytest.approx(4 * quarter * h200.peak_flop_per_s["float32"].value)
    unknown = replace(workload, programs=tuple(replace(each, device_name="a board of mine") for each in workload.programs))
    assert recorded_peak_flop_per_s(unknown, "float32") is None
    assert peak_flop_per_s(h200, "int4") is None
    assert peak_flop_per_s(read_device("h200-quarter"), "bfloat16") == h200.peak_flop_per_s["bfloat16"].value / 4


def test_a_forward_pass_that_was_not_told_apart_is_no_ground_to_leave_operations_out() -> None:
    assert Operations(forward=1.0, hardware=8.0).model == 8.0
    assert Operations(forward=0.0, hardware=8.0).model == 8.0
    assert Operations(forward=2.0, hardware=7.0).model == 6.0
