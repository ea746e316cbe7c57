"""Whatever is asked for, the command leaves with an answer or one line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NoReturn

import pytest

from steptime._api import plan as api
from steptime._cli.app import run
from steptime._plan.evaluate import LayoutEvaluator
from steptime._plan.space import Choices, layouts_of
from steptime.errors import InputError

CASES = 500
_NUMBERS = ("1", "2", "4", "8", "3", "0", "-1", "1,2", "2,,4", ",", "x", "1e3", "²", "99999999999999999999", "1, 2 ,4", "")
_DEGREES = ("--tensor", "--pipeline", "--fsdp", "--data", "--context", "--expert", "--chunks", "--zero", "--micro-batch")
_OTHERS = {
    "--recompute": ("none", "full", "ops,none", "selective", "", "all", "none,,full"),
    "--gpus": ("1", "2", "8", "7", "0", "-3", "16", "many"),
    "--batch": ("1", "8", "12", "0", "99999999999"),
    "--headroom": ("0", "0.5", "0.99", "1", "-1", "nan"),
    "--memory": ("1", "1000000000000", "0", "x"),
    "--price": ("0", "2.5", "inf", "nan", "-1"),
    "--platform": ("8xh200-nvlink", "1xh200", "no-such"),
}
_VALUES = ("0", "1", "3", "-2", '"x"', "true", "[]", "1e9", "2147483648", "8")
_CONFIG = {
    "layers": "4", "width": "64", "heads": "8", "sequence": "64", "vocabulary": "128", "batch": "8", "kv_heads": "4",
    "precision": '"bf16"', "recompute": '"none"', "positions": '"rotary"', "norm": '"rms_norm"', "activation": '"swiglu"',
}  # fmt: skip


def listed(evaluator: LayoutEvaluator, gpus: int, choices: Choices, **_: object) -> NoReturn:
    """A search that ends where playing would begin."""
    space = layouts_of(evaluator.model, gpus, choices)
    for layout in space.layouts[:: max(1, len(space.layouts) // 16)]:
        assert layout.of(evaluator.model).ranks == gpus
    raise InputError(f"{len(space.layouts)} layouts")


@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, CASES, 50)], ids=str)
def test_any_options_end_in_layouts_or_in_one_line(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "search", listed)
    reached = 0
    for seed in seeds:
        draw = random.Random(seed)
        config = dict(_CONFIG)
        for key in draw.sample(list(config), draw.randrange(3)):
            config[key] = draw.choice(_VALUES)
        file = tmp_path / f"{seed}.toml"
        file.write_text("".join(f"{key} = {value}\n" for key, value in config.items()))
        options = {"--platform": "8xh200-nvlink"}
        options |= {option: draw.choice(_NUMBERS) for option in draw.sample(_DEGREES, draw.randrange(4))}
        options |= {option: draw.choice(_OTHERS[option]) for option in draw.sample(list(_OTHERS), draw.randrange(3))}
        assert run(["plan", str(file), *(f"{key}={value}" for key, value in options.items())]) == 2
        said = capsys.readouterr()
        assert not said.out
        assert "Traceback" not in said.err
        reached += "layouts\n" in said.err
    assert reached  # some are sound
