"""Sizes whose rows begin at no multiple of 16 bytes are said, for steps of their neighbours are far shorter."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz.kinds.transformers import PLAIN
from tests.fuzz.samples import DLRM

from steptime._api.read import read
from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer


def said(**changes: object) -> list[str]:
    found = build(Transformer.from_dict({**PLAIN, **changes})).warnings
    return [warning for warning in found if "no multiple of" in warning]


def test_aligned_sizes_need_no_word() -> None:
    assert not said()
    assert not said(parallel={"tensor": 2})


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"feed_forward": 252}, "feed_forward: 252 elements on a rank are no multiple of 8"),
        ({"feed_forward": 264, "parallel": {"tensor": 2}}, "feed_forward: 132 elements on a rank are no multiple of 8"),
        ({"feed_forward": 250, "precision": "fp32"}, "feed_forward: 250 elements on a rank are no multiple of 4"),
        ({"sequence": 60, "attention": "unfused", "kv_heads": 0}, "sequence: 60 elements on a rank are no multiple of 8"),
    ],
)
def test_others_name_what_would_be_aligned(changes: dict[str, object], warning: str) -> None:
    (found,) = said(**changes)
    assert found.startswith(warning)
    assert "can be far faster" in found


def test_a_layer_just_wider_than_whole_tiles_is_said(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text(DLRM.replace("[256, 128, 64]", "[1032, 64]"), encoding="utf-8")
    assert [warning for warning in read(file).warnings if "tiles" in warning] == [
        "bottom: 1032 is just above 1024, whole tiles of 128: that layer can take a tile's time more"
    ]
