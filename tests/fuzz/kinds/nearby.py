"""Sound inputs with one number a little larger or smaller: the step then moves little, or a warning says why not."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from tests.fuzz.case import Case, Content, Kind
from tests.fuzz.kinds.machines import calibration_tree, host_tree, text_of
from tests.fuzz.kinds.transformers import CONFIGS, PLAIN, toml_lines
from tests.fuzz.oracle import NEARBY
from tests.fuzz.samples import BUSY_DLRM, BUSY_GPT, DLRM, TASK
from tests.program.small_traces import small_kineto

from steptime._hardware.device import FOLDER as DEVICES
from steptime._hardware.fabric import FOLDER as FABRICS

_NUMBER = re.compile(r"(?<![\w.\"-])\d[\d_]*(?:\.\d+)?(?:e\d+)?(?![\w.\"])")
_DLRM = ("predict", "model.toml", "--platform", "2xh200-nvlink")
_GPT = ("predict", "model.toml", "--platform", "8xh200-nvlink")
_SIZES = {
    "layers": 4, "width": 4096, "heads": 32, "kv_heads": 8, "sequence": 2048, "vocabulary": 32000, "feed_forward": 11008,
    "batch": 64,
}  # fmt: skip
_BETWEEN = tuple(step / 10 * NEARBY for step in range(-10, 11) if step)


def near_text(draw: random.Random, text: str) -> str:
    """A text in which one number that can be is changed by up to two percent; whole numbers stay whole."""
    tokens = [token for token in _NUMBER.finditer(text) if _scaled(token[0], NEARBY) != token[0]]
    token = draw.choice(tokens)
    scaled = _scaled(token[0], draw.choice(_BETWEEN))
    return text[: token.start()] + scaled + text[token.end() :]


def _scaled(word: str, by: float) -> str:
    plain = word.replace("_", "")
    if plain.isdecimal():
        number = int(plain)
        moved = int(number * (1 + by)) if by > 0 else -int(-number * (1 + by))
        return str(moved)
    return repr(float(plain) * (1 + by))


def _changed(words: tuple[str, ...], files: dict[str, Content], name: str, near: str | bytes) -> Case:
    return Case(words, {**files, name: near}, before=Case(words, files))


def dlrm(draw: random.Random) -> Case:
    text = draw.choice((DLRM, BUSY_DLRM, TASK))
    return _changed((*_DLRM, "--json"), {"model.toml": text}, "model.toml", near_text(draw, text))


def transformer(draw: random.Random) -> Case:
    """Large enough that most of its numbers have a neighbour."""
    text = BUSY_GPT
    if draw.random() < 0.7:
        text = "\n".join(toml_lines({**PLAIN, **_SIZES, **draw.choice(CONFIGS)}))
    return _changed((*_GPT, "--json"), {"model.toml": text}, "model.toml", near_text(draw, text))


def _machine(option: str, name: str, texts: Callable[[], Sequence[str]]) -> Kind:
    """A kind: one number of a machine's description, under a step of either sort."""

    def kind(draw: random.Random) -> Case:
        text = draw.choice(texts())
        words, model = draw.choice(((_DLRM, BUSY_DLRM), (_DLRM, TASK), (_GPT, BUSY_GPT)))
        return _changed((*words, option, name, "--json"), {"model.toml": model, name: text}, name, near_text(draw, text))

    return kind


@cache
def _recording() -> Any:
    return json.loads(small_kineto(0))


def _durations(document: Any) -> Iterator[int]:
    for index, event in enumerate(document["traceEvents"]):
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "cuda_runtime") and event.get("dur"):
            yield index


def recording(draw: random.Random) -> Case:
    """One duration of a recording."""
    document = _recording()
    events = list(document["traceEvents"])
    index = draw.choice(list(_durations(document)))
    events[index] = {**events[index], "dur": events[index]["dur"] * (1 + draw.choice(_BETWEEN))}
    near = json.dumps({**document, "traceEvents": events}).encode()
    options = draw.choice(((), ("--profiled",), ("--platform", "4xh200-quarter-loopback")))
    return _changed(("predict", "rank0.json", *options, "--json"), {"rank0.json": small_kineto(0)}, "rank0.json", near)


def _devices() -> Sequence[str]:
    return [text_of(DEVICES, f"{name}.toml") for name in ("h100", "a100", "l4", "mi300x", "b200")]


def _fabrics() -> Sequence[str]:
    return [text_of(FABRICS, f"{name}.toml") for name in ("mi300x-xgmi", "v100-nvlink", "h100-ib400", "gb200-ib400")]


KINDS: dict[str, Kind] = {
    "near-dlrm": dlrm,
    "near-transformer": transformer,
    "near-device": _machine("--device", "mine.toml", _devices),
    "near-fabric": _machine("--fabric", "mine.toml", _fabrics),
    "near-calibration": _machine("--calibration", "mine.json", lambda: [json.dumps(calibration_tree())]),
    "near-host": _machine("--host", "host.json", lambda: [json.dumps(host_tree())]),
    "near-recording": recording,
}
