"""Configs of Transformers with values that nobody expects: an answer that makes sense, or one clear line.

The cases are the same on every run. A seed that fails: `outcome` of `predicted_transformer(random.Random(seed))`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.cli.mutated_commands import outcome
from tests.cli.mutated_transformers import CONFIGS, PLAIN, predicted_transformer
from tests.slow import slow_beyond

from steptime._build.transformer.config import Transformer
from steptime.errors import InputError

BATCHES, BATCH = 10, 50


@pytest.mark.parametrize("batch", slow_beyond(2, range(BATCHES)))
def test_any_config_gives_an_answer_or_one_clear_line(tmp_path: Path, batch: int) -> None:
    outcomes = []
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:
            outcomes.append(outcome(predicted_transformer(random.Random(seed)), tmp_path / str(seed)))
        except Exception as error:
            raise AssertionError(f"case {seed}: {type(error).__name__}: {error}") from error
    assert BATCH // 10 < outcomes.count("answer") < BATCH


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: json.dumps(config["parallel"]))
def test_what_is_mutated_is_sound(config: dict[str, object]) -> None:
    Transformer.from_dict({**PLAIN, **config})


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"parallel": {"tensor": 3}}, "give one of 1, 2, 4, which divide heads, kv_heads and feed_forward"),
        ({"parallel": {"data": 3}}, "or one of 1, 2, 4, 8, 16, 32 parts"),
        ({"parallel": {"context": 3}}, "or one of 1, 2, 4, 8, 16, 32, 64 parts"),
        ({"parallel": {"pipeline": 8}}, "equal with one of 1, 2, 4"),
        ({"experts": {"count": 6}, "batch": 32, "parallel": {"data": 4, "expert": 4}}, "give one of 1, 2, 3, 6"),
        ({"experts": {"count": 6}, "parallel": {"data": 4, "expert": 3}}, "give one of 1, 2, 4"),
        ({"kv_heads": 3}, "kv_heads that is one of 1, 2, 4, 8"),
        ({"experts": {"count": 80_000_000}}, "from 0 to 16384"),
    ],
)
def test_what_does_not_divide_names_what_does(changes: dict[str, object], fits: str) -> None:
    with pytest.raises(InputError, match=fits):
        Transformer.from_dict({**PLAIN, "bias": False, **changes})
