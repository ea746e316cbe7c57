"""Names of published rows are read again: what they ran is a config, or a line says why nobody can say it."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pytest

from steptime._build.transformer.config import Transformer
from steptime_lab.validate.intervals.rows import read_rows
from steptime_lab.validate.published.readings import COMPILED, Reading, reading


def _config(source: str, name: str, ranks: int) -> Transformer:
    found = reading(source, name, ranks)
    assert isinstance(found, Reading)
    return Transformer.from_dict(found.config)


def test_a_name_of_simumax_says_model_and_layout() -> None:
    config = _config("simumax B200", "llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc4_cef", 8)
    parallel = config.parallel
    assert (config.layers, config.sequence, config.gradient_accumulation, config.fused) == (12, 32768, 4, True)
    assert (parallel.tensor, parallel.context, parallel.context_exchange, parallel.sequence) == (2, 4, "all_to_all", True)
    experts = _config("simumax B200", "deepseekv3_l4_tp1_ep4_pp2_dp4_mbc32_cef", 8)
    assert (experts.experts.first_dense, experts.parallel.expert, experts.parallel.pipeline) == (1, 4, 2)
    assert not experts.parallel.overlap_grad_reduce


def test_a_name_of_torchtitan_says_how_it_is_sharded_and_recomputed() -> None:
    config = _config("torchtitan", "8B FSDP8 eager SAC (as full AC)", 8)
    assert (config.batch, config.parallel.fsdp, config.recompute) == (16, 8, "ops")
    large = _config("torchtitan", "70B FSDP32 TP8 compile full AC bf16 (as eager)", 256)
    assert (large.batch, large.parallel.tensor, large.recompute, large.parallel.sequence) == (512, 8, "full", True)
    long = _config("torchtitan", "8B FSDP2 CP4 128k", 8)
    assert (long.sequence, long.parallel.context, long.batch) == (131072, 4, 2)
    found = reading("torchtitan", "8B H200 32 fp8", 32)
    assert isinstance(found, Reading)
    assert (found.device, found.group, found.config["precision"]) == ("h200", COMPILED, "fp8")


def test_async_tensor_parallelism_is_read_from_its_commands() -> None:
    large, small = _config("torchtitan", "70B asyncTP bf16", 256), _config("torchtitan", "8B asyncTP bf16", 64)
    assert (large.batch, large.recompute, large.parallel.tensor, large.parallel.fsdp) == (512, "full", 8, 32)
    assert (small.batch, small.recompute, small.parallel.tensor, small.parallel.fsdp) == (96, "ops", 8, 8)
    assert large.parallel.tp_comm_overlap and small.parallel.tp_comm_overlap


def test_rows_of_others_have_their_files_reading() -> None:
    assert reading("llm-foundry H100", "70b s2048", 512) is None
    assert reading("simumax B200", "unknown_l4_tp1", 8) is None


def test_two_readings_of_one_row_are_scored_once(tmp_path: Path) -> None:
    rows = [
        {"source": "torchtitan", "row": f"8B FSDP8 eager SAC (as {how} AC)", "measured_ms": 9.0, "device": "h100", "ranks": 8}
        for how in ("no", "full")
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    found = read_rows(file)
    assert len(found.steps) == 1
    assert "another reading of a row before it" in found.refused[0]


@pytest.mark.parametrize("source", ["simumax B200", "torchtitan"])
def test_any_name_is_read_or_not(source: str) -> None:
    drawn = random.Random(20)
    words = [
        "llama3_70b",
        "deepseekv2",
        "8B",
        "70B",
        "_tp0",
        "_tp2",
        "_l4",
        "_pp2",
        "FSDP0",
        "FSDP8",
        "CP4",
        "999k",
        "fp8",
        "_mbc4",
        " ",
    ]
    for _ in range(250):
        name = "".join(drawn.choice([*words, drawn.choice(string.printable)]) for _ in range(drawn.randint(1, 10)))
        found = reading(source, name, drawn.choice([0, 1, 8, 10**9]))
        assert found is None or isinstance(found, str | Reading)
