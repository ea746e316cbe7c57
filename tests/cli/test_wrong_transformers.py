"""Configs of Transformers that tests damage are sound, and what does not divide names what does."""

from __future__ import annotations

import json

import pytest
from tests.fuzz.kinds.transformers import CONFIGS, PLAIN

from steptime._build.transformer.config import Transformer
from steptime.errors import InputError


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
