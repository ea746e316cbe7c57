"""Fused dense layers, captured steps, and MLPerf's recommender: what is built, and what it is played as."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steptime import predict, read
from steptime._build.config import read_dlrm_config
from steptime._build.config_values import Overrides
from steptime._build.dlrm.config import dlrm_of
from steptime._build.dlrm.model import FUSED_OPTIMIZERS, Dlrm
from steptime._build.dlrm.plan import DATA_PARALLEL, GRID, ROW_WISE, TABLE_ROW_WISE, TABLE_WISE
from steptime._build.dlrm.workload import dlrm_workload
from steptime._platforms.platform import Platform
from steptime._program.one_step import one_step
from steptime._program.program import Program
from steptime._program.workload import Workload
from steptime._shard.rules import Machine, place
from steptime._sim.modelled.device_work import device_work
from steptime._units import dtype_bytes
from steptime.errors import InputError

MLPERF = Path(__file__).parents[2] / "examples" / "configs" / "mlperf_dcnv2.toml"


def model(**changes: Any) -> Dlrm:
    table = {"rows": 50_000, "dim": 32, "pooling_factor": 4, "skew": {"kind": "uniform"}}
    values = {
        "batch": 512, "dense_features": 8, "bottom": [64, 32], "top": [64, 32, 1], "interaction": "dcnv2", "cross_rank": 16,
        "precision": "fp16", "fused": True, "tables": [{"name": name, **table} for name in "abc"],
    }  # fmt: skip
    return dlrm_of({key: value for key, value in {**values, **changes}.items() if value is not None}).model


def counts(program: Program) -> Counter[str]:
    return Counter(program.names[name].removeprefix("aten::") for name in program.ops.name.tolist())


@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_products_are_all_that_layers_have_beside_one_kernel_a_cross_layer(optimizer: str) -> None:
    (program,) = dlrm_workload(model(dense_optimizer=optimizer)).programs
    found = counts(program)
    layers, cross = 5, 3
    # A weight's gradient for every layer, and what goes on to the layer before; the inputs need none. A cross layer has two.
    assert found["addmm"] == layers + cross
    assert found["mm"] == (2 * layers - 1) + cross * 5
    assert (found["addcmul"], found["relu"], found["sum"], found["threshold_backward"]) == (cross, 0, 1, 0)  # the loss's
    assert found[f"_fused_{optimizer}_"] == 1


def test_what_is_exchanged_and_reduced_is_in_16_bits_and_reduced_once() -> None:
    workload = dlrm_workload(model(), 2, {"a": 0, "b": 1, "c": 0})
    collectives = workload.programs[0].collectives
    assert {each.dtype for each in collectives} == {"float16"}
    dense = 8 * 64 + 64 + 64 * 32 + 32 + 3 * (2 * 128 * 16 + 128) + (128 * 64 + 64) + (64 * 32 + 32) + 33
    assert [each.bytes_in for each in collectives if each.kind == "all_reduce"] == [dense * dtype_bytes("float16")]


def test_a_captured_step_costs_its_host_one_launch() -> None:
    built = [dlrm_workload(model(cuda_graph=graph)) for graph in (False, True)]
    eager, captured = (predict(each, "1xh200") for each in built)
    assert captured.step_time_ms < 0.7 * eager.step_time_ms
    busy = captured.to_dict()["ranks"][0]
    assert busy["device_busy_ms"] > 0.6 * captured.step_time_ms


def lookups_backward(workload: Workload) -> list[float]:
    (found,) = device_work([one_step(workload.programs[0])], Platform.load("1xh200").device, workload.lookups)
    return [work.estimate.time_ns for work in found.works if work.group == "lookup backward"]


@pytest.mark.parametrize("lookup", ["table_batched", "fbgemm"])
def test_what_is_sorted_ahead_is_no_longer_backward_and_takes_no_longer(lookup: str) -> None:
    plan = {"a": {"kind": "row_wise"}, "b": {"kind": "data_parallel"}, "c": 0}
    built = [dlrm_workload(model(lookup=lookup, presorted=ahead, cuda_graph=True), 2, plan) for ahead in (False, True)]
    works = [lookups_backward(workload) for workload in built]
    assert [len(each) for each in works] == [3, 6]  # what is sorted apart from the rest
    assert sum(works[1]) == pytest.approx(sum(works[0]))
    before, after = (predict(workload, "2xh200-nvlink").step_time_ms for workload in built)
    assert after <= before * 1.001


def test_mlperfs_tables_are_copied_divided_and_spread() -> None:
    tables = read_dlrm_config(MLPERF, Overrides()).model.tables
    for ranks, expected in ((8, {DATA_PARALLEL, ROW_WISE, TABLE_WISE}), (64, {DATA_PARALLEL, GRID, TABLE_ROW_WISE})):
        plan = place("copied_and_split", tables, Machine(ranks))
        kinds = plan.kinds()
        assert set(kinds.values()) == expected
        assert kinds["t20"] in (ROW_WISE, GRID)  # 100 of 214 lookups
        assert kinds["t5"] == DATA_PARALLEL


@pytest.mark.parametrize("platform", ["8xa100-nvlink", "8xh100-nvlink", "8xh200-nvlink", "8xb200-nvlink", "16xh200-ib400"])
def test_mlperfs_recommender_is_predicted(platform: str) -> None:
    ranks = int(platform.partition("x")[0])
    predicted = predict(read(MLPERF, ranks=ranks), platform)
    assert 1.5 < predicted.step_time_ms < 10
    assert predicted.to_dict()["memory"]["fits"]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"fused": False}, 'write precision = "fp16-autocast" for PyTorch\'s layers, or add fused = true'),
    ({"precision": "fp32"}, 'fused = true with precision "fp32"; expected "bf16" or "fp16"'),
    ({"interaction": "dot", "cross_rank": None}, 'fused = true with interaction "dot"'),
    ({"dense_optimizer": "adam_fused"}, 'fused = true with dense_optimizer "adam_fused"'),
    ({"exchange_precision": "bf16"}, 'fused = true with exchange_precision "bf16"'),
    ({"presorted": "a"}, "presorted is 'a'; expected true or false"),
    ({"presorted": True, "prefetch": "lookups"}, 'presorted = true with prefetch "lookups"'),
    ({"fused": 1}, "fused is 1; expected true or false"),
    ({"cuda_graph": "yes"}, "cuda_graph is 'yes'; expected true or false"),
    ({"lookup": "embedding_bag", "fused": False, "precision": "fp32", "cuda_graph": True}, "cuda_graph = true with lookup"),
]


@pytest.mark.parametrize(("changes", "expected"), MISTAKES, ids=[expected for _, expected in MISTAKES])
def test_a_mistake_is_one_line(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        model(**changes)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
