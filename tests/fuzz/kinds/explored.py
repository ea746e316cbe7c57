"""Questions of a page to `explore`, with values that no control of it sends."""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case, Kind
from tests.support.mutated import VALUES

from steptime._api.read import read
from steptime._explore.answer import PREDICT, answered
from steptime._explore.subject import Subject

_CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
_MODELS = {"dlrm_small.toml": "2xh200-nvlink", "gpt2-ddp.toml": "8xh200-nvlink"}
_WRONG = "mistake of its own"  # what a page is told where there was no answer and no error that a user can make


@cache
def _subject(name: str) -> Subject:
    subject = Subject(read(_CONFIGS / name), (name,), _MODELS[name])
    subject.predicted({})
    return subject


def _value(draw: random.Random, control: dict[str, Any]) -> Any:
    """One that the control could have, or anything."""
    low, high, choices = control.get("low"), control.get("high"), control.get("choices")
    value = control.get("value")
    if draw.random() < 0.3:
        return draw.choice(VALUES)
    if choices:
        chosen = draw.choice(choices)
        return chosen.get("value", chosen) if isinstance(chosen, dict) else chosen
    if isinstance(value, bool):
        return not value
    if isinstance(low, int | float) and isinstance(high, int | float):
        return draw.choice((low, high, draw.uniform(low, high), draw.randint(int(low), max(int(low), int(high)))))
    if isinstance(value, int | float):
        return type(value)(value * draw.choice((0, 0.5, 2, 3, 8, 1e6, -1)))
    return draw.choice(VALUES)


def _asked(words: list[str]) -> int:
    """As the server asks a worker: an answer, or an error in one line."""
    _, name, form, values = words
    answer = answered(_subject(name), form, json.loads(values))
    if not answer.startswith(b'{"error":'):
        sys.stdout.write(json.dumps(json.loads(answer)["answer"]) if form == PREDICT else answer.decode())
        return 0
    said = json.loads(answer)["error"]
    assert _WRONG not in said, said
    sys.stderr.write(f"steptime: error: {said}\n")
    return 2


def explored(draw: random.Random) -> Case:
    """Up to three controls, now and then one that there is not."""
    name = draw.choice(list(_MODELS))
    controls = [control.to_dict() for control in _subject(name).controls.values()]
    values = {control["name"]: _value(draw, control) for control in draw.sample(controls, draw.choice((1, 1, 2, 3)))}
    if draw.random() < 0.05:
        values["x\x1b[2J"] = 1
    form = draw.choice((PREDICT, PREDICT, "json", "html", "toml"))
    text = json.dumps({key: value for key, value in values.items() if not isinstance(value, int) or abs(value) < 10**300})
    return Case(("--json" if form == "json" else "ask", name, form, text), command=_asked)


KINDS: dict[str, Kind] = {"explore": explored}
