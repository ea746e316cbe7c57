"""`steptime validate bridge`: published runs of Megatron-Bridge become configs or one line, and are ranked within a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.mutated import damaged_tables

from steptime._cli.app import run
from steptime.errors import InputError
from steptime_lab.validate.engine import MeasuredCase
from steptime_lab.validate.published.bridge import COLUMNS, _by_token, read_bridge, validate_bridge
from steptime_lab.validate.published.models import model, pipeline, stages

HEAD = ",".join((*COLUMNS, "kind"))
# model, system, GPUs, precision, sequence, batch, micro-batch, TP, PP, VP, CP, EP, FSDP, tokens/s/GPU, kind
LLAMA = "LLAMA3_70B,DGX-GB200,64,BF16,8192,256,1,2,4,5,1,n/a,0,1000,Pre-Training"
SHARDED = "LLAMA3_70B,DGX-GB300,64,BF16,8192,256,2,1,1,n/a,1,n/a,64,2000,Pre-Training"
EXPERTS = "Qwen3_30B_a3B,DGX-H100,16,BF16,4096,1024,1,1,2,12,1,8,0,5000,Pre-Training"


def written(tmp_path: Path, *rows: str) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text("\n".join((HEAD, *rows)))
    return file


def test_a_run_is_the_config_of_its_model_on_the_platform_of_its_system(tmp_path: Path) -> None:
    (llama, sharded, experts), refused = read_bridge(written(tmp_path, LLAMA, SHARDED, EXPERTS))
    config, parallel = llama.row.config, llama.row.config.parallel
    assert (config.layers, config.gradient_accumulation, config.local_batch) == (80, 32, 1)
    assert (parallel.data, parallel.tensor, parallel.pipeline, parallel.chunks, parallel.sequence) == (8, 2, 4, 5, True)
    assert llama.row.measured_ms == pytest.approx(256 * 8192 / (1000 * 64) * 1e3)
    assert (sharded.row.config.parallel.fsdp, sharded.row.platform.fabric) == (64, "gb200-nvlink")
    assert (experts.row.config.experts.count, experts.row.platform.fabric) == (128, "h100-ib400")
    assert refused == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (LLAMA.replace("LLAMA3_70B", "Nemotron_3_Ultra"), "model is 'Nemotron_3_Ultra'; expected one of llama3_70b"),
        (LLAMA.replace("DGX-GB200", "DGX-X"), "System is 'DGX-X'; expected one of dgx-h100"),
        (LLAMA.replace(",256,", ",x,"), "GBS is 'x'; expected a whole number from 1"),
        (LLAMA.replace(",1000,", ",-1,"), "Tokens / sec / GPU is '-1'; expected a number above 0"),
        (LLAMA.replace(",256,", ",250,"), "do not divide by the layout"),
        (EXPERTS.replace(",8,0,", ",7,0,"), "does not divide"),
    ],
)
def test_a_run_that_cannot_be_said_costs_a_line(tmp_path: Path, row: str, said: str) -> None:
    rows, (refused,) = read_bridge(written(tmp_path, row, SHARDED))
    assert len(rows) == 1
    assert said in refused


@pytest.mark.parametrize(
    ("layers", "chunks", "expected"),
    [
        (80, 20, []),
        (126, 32, [3, *[4] * 30, 3]),
        (126, 128, [0, *[1] * 126, 0]),
        (94, 4, [23, 24, 24, 23]),
        (61, 16, [*[4] * 15, 1]),
    ],
)
def test_layers_are_divided_as_megatron_divides_them(layers: int, chunks: int, expected: list[int]) -> None:
    assert stages(layers, chunks) == expected
    assert not expected or sum(expected) == layers


def test_models_are_known_by_name() -> None:
    assert model("deepseek-v3")["experts"]["count"] == 256
    assert pipeline(80, 1, 5) == {}
    with pytest.raises(InputError, match="no published model is called 'x'"):
        model("x")


def test_runs_are_scored_by_precision_and_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"layers": 4, "width": 256, "heads": 4, "feed_forward": 512, "vocabulary": 1024}
    monkeypatch.setattr("steptime_lab.validate.published.bridge.model", lambda _name: small | {"norm": "rms_norm"})
    row = "LLAMA3_70B,DGX-H100,4,BF16,256,16,1,1,2,n/a,1,n/a,0,{},Pre-Training"
    with ThreadPoolExecutor(1) as executor:
        found = validate_bridge(written(tmp_path, row.format(1000), row.format(1100)), executor=executor)
    assert {"BF16", "DGX-H100", "pipelines", "llama3-70b"} <= set(found.groups)
    assert found.facts["expressible"] == 1.0


def test_bad_tables_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "plain.csv"
    file.write_text("a,b\n1,2")
    with pytest.raises(InputError, match="no column 'model'"):
        read_bridge(file)
    with pytest.raises(InputError, match="no row can be predicted; the first"):
        validate_bridge(written(tmp_path, LLAMA.replace("LLAMA3_70B", "x")))
    assert run(["validate", "bridge"]) == 2


def test_five_hundred_damaged_tables_are_read_or_refused(tmp_path: Path) -> None:
    for rows in damaged_tables(tmp_path, (HEAD, LLAMA, SHARDED, EXPERTS), read_bridge):
        assert all(each.row.measured_ms > 0 for each in rows)


def test_recipes_say_how_tokens_travel(tmp_path: Path) -> None:
    newer = "DeepSeekV3,DGX-GB300,256,MXFP8,4096,4096,1,1,2,8,1,32,0,6000,Pre-Training"
    file = tmp_path / "rows.csv"
    file.write_text("\n".join((f"{HEAD},container", f"{newer},26.08 NeMo Container", f"{newer},26.04 NeMo Container", EXPERTS)))
    (new, old, other), refused = read_bridge(file)
    assert [each.row.config.parallel.overlap_moe_expert_parallel_comm for each in (new, old, other)] == [True, False, False]
    assert [each.row.config.experts.exchange for each in (new, old, other)] == ["fused", "fused", "all_to_all"]
    assert all(each.row.config.parallel.overlap_p2p_comm for each in (new, old, other))
    assert not refused


def test_models_are_ranked_by_what_a_token_takes_not_by_the_length_of_a_step(tmp_path: Path) -> None:
    (short, long), _ = read_bridge(written(tmp_path, SHARDED, SHARDED.replace(",256,2,", ",512,2,")))
    cases = [_by_token(MeasuredCase("", row.measured_ms, row.measured_ms), row) for row in (short.row, long.row)]
    assert long.row.measured_ms == pytest.approx(2 * short.row.measured_ms)
    assert cases[1].measured == pytest.approx(cases[0].measured)
