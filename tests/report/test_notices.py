"""What answers say besides numbers: at most one warning in the median, no standing fact among them, nothing twice."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import steptime
from steptime._notices import Basis, Caveat, Notices, restored, saved

EXAMPLES = Path(__file__).parents[2] / "examples"
# Facts about machines, models and captures in general, in any words that they ever had.
STANDING = re.compile(
    r"has not been measured|never measured|extrapolated|data sheet|cudnn\.benchmark|errors on \d+ steps|had not settled|"
    r"beyond what|of the device time|wait for the slowest|fused by steptime|name of its file|taken from the file name|"
    r"were not started|making the model and loading|before it did something else|do the same, op by op|host times"
)
QUICK = [
    ("dlrm_small", "2xh200-nvlink"), ("dlrm_small", "2xh100-nvlink"), ("dlrm_heavy4", "4xa100-nvlink"), ("gpt2", "1xh200"),
    ("gpt2", "1xl4"), ("bert", "1xa100"), ("gpt2-ddp", "8xh100-nvlink"), ("gpt-megatron", "8xh200-nvlink"),
    ("gpt-megatron", "8xh100-nvlink"), ("llama-8b", "8xh200-nvlink"), ("llama-8b", "8xa100-nvlink"),
    ("mlperf_dcnv2", "8xh100-nvlink"),
]  # fmt: skip
RECORDED = [("prefetch_sync", None), ("prefetch_sync", "1xh100"), ("gpt_compiled", "1xa100"), ("dlrm_overlap4", None)]
SLOW = [
    ("dlrm_heavy4", "4xh200-nvlink"), ("bert", "1xb200"), ("bert", "1xrtx-4090"), ("gpt2-ddp", "8xa100-nvlink"),
    ("gpt2-ddp", "8xb200-nvlink"), ("mixtral-8x7b", "64xh200-ib400"), ("mixtral-8x7b", "64xa100-ib200"),
    ("qwen3-30b-a3b", "16xh100-ib400"), ("qwen3-30b-a3b", "16xh200-ib400"), ("llama-70b", "1024xh100-ib400"),
    ("llama-405b", "16384xh100-ib400"), ("deepseek-v3", "1024xh100-ib400"), ("mlperf_dcnv2", "8xh200-nvlink"),
]  # fmt: skip
LOOPS = (
    "bert_mlm", "dcgan", "gru_seq2seq", "llama_lora", "lstm_text_classifier", "matrix_factorization", "mnist_convnet",
    "moe_transformer", "nanogpt", "unet_segmentation", "vae", "wgan_gp",
)  # fmt: skip


def checked(source: Any, platform: str | None) -> int:
    """How many warnings an answer has; no standing fact is among them, and nothing is said twice, in JSON neither."""
    answer = steptime.predict(source, platform, suggest=False)
    document = answer.to_dict()
    caveats, warnings, basis = document["verdict"]["caveats"], document["warnings"], document["basis"]
    assert (tuple(caveats), tuple(warnings), tuple(basis)) == answer.notices
    for text in (*caveats, *warnings):
        assert STANDING.search(text) is None, text
    alike = [re.sub(r"\d+", "#", text) for text in (*caveats, *warnings, *basis)]
    assert len(set(alike)) == len(alike), alike
    assert not any(text.startswith("does not fit") for text in warnings)  # the verdict says it
    return len(warnings)


def test_configs_and_recordings_have_one_warning_at_most_in_the_median() -> None:
    configs = [checked(EXAMPLES / "configs" / f"{name}.toml", platform) for name, platform in QUICK]
    runs = [checked(EXAMPLES / name, platform) for name, platform in RECORDED]
    assert median([*configs, *runs]) <= 1
    assert max(configs) <= 2


@pytest.mark.slow
def test_all_configs_and_captured_loops_have_one_warning_at_most_in_the_median() -> None:
    counts = [checked(EXAMPLES / "configs" / f"{name}.toml", platform) for name, platform in SLOW]
    for name in LOOPS:
        loop = steptime.read(EXAMPLES / "loops" / f"{name}.py")
        counts += [checked(loop, platform) for platform in ("1xh200", "1xa100", "1xl4")]
    assert median(counts) <= 1


def test_kinds_stay_apart_where_texts_are_saved_merged_and_put_behind_others() -> None:
    texts = (Caveat("2 run otherwise"), "5 tables", Basis("on h200"), "7 tables", Basis("on h200"), "5 tables")
    assert [(type(each), each) for each in restored(saved(texts))] == [(type(each), each) for each in texts]
    found = Notices.of(texts)
    assert tuple(found) == (("2 run otherwise",), ("5 tables (and 1 more like this)",), ("on h200",))
    assert Notices.of(()).after(*found.caveats, *found.warnings, *found.basis) == found
    assert found.after("first") == (("2 run otherwise",), ("first", "5 tables (and 1 more like this)"), ("on h200",))
    assert found.without_headline == ((), ("2 run otherwise", "5 tables (and 1 more like this)"), ("on h200",))


def test_a_host_that_was_never_calibrated_is_in_the_headline_where_it_binds() -> None:
    config = EXAMPLES / "configs" / "dlrm_small.toml"
    bound, busy = (steptime.predict(config, "2xh200-nvlink", batch=batch) for batch in (2048, 1 << 20))
    assert bound.verdict.bound == "host"
    assert "host-bound (host not calibrated)" in bound.verdict.headline
    assert busy.verdict.bound != "host"
    assert "calibrated" not in busy.verdict.headline
    own = steptime.predict(EXAMPLES / "prefetch_sync", "1xh200")  # with the host times of its recording
    assert "not calibrated" not in own.verdict.headline


def test_sweeps_and_comparisons_say_what_all_share_once_and_name_the_variants_otherwise() -> None:
    config = EXAMPLES / "configs" / "dlrm_heavy4.toml"
    swept = steptime.sweep(config, ["4xh200-nvlink", "4xh100-nvlink"], batch=[4096, 8192])
    (rule,) = swept.notices.warnings
    assert rule.startswith("dlrm-heavy4: tables are placed")
    carried = [text for text in swept.notices.basis if "by data sheets" in text]
    assert [text.partition(": ")[0] for text in carried] == ["platform 4xh100-nvlink"]
    compared = steptime.compare(config, platform=["4xh200-nvlink", "4xh100-nvlink"])
    assert compared.notices.warnings == swept.notices.warnings
    assert any(text.startswith("4xh100-nvlink: h100 as h200") for text in compared.notices.basis)
