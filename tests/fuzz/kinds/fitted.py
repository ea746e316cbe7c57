"""Damaged models of a device and of its power, sizes beyond any memory in captured steps, and patterns of what-ifs."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from typing import Any

import numpy as np
from tests.fuzz.case import Case, Content, Kind, damaged_json
from tests.fuzz.kinds.compiled import tiny_capture
from tests.fuzz.kinds.machines import text_of
from tests.fuzz.samples import DLRM, GPT
from tests.program.mutations import BYTES
from tests.program.small_traces import small_kineto
from tests.support.mutated import with_number, written_json

from steptime._hardware.device import FOLDER as DEVICES
from steptime._platforms import device as devices

_HUGE = (10**39, -(10**39), 2**63 - 1, 2**63, 2**64, 2**31, 10**15, 10**18, 10**30, 2**53 + 1)
_PIECES = (
    "*",
    "*",
    "*",
    "**",
    "a",
    "kernel:",
    "triton_",
    "?",
    "[",
    "]",
    "(",
    ")",
    "|",
    ".",
    "\\",
    "matmul",
    "aten::",
    "z",
    " ",
    "%",
)


@cache
def _arrays() -> dict[str, Any]:
    with np.load(DEVICES / "h200.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _other_array(draw: random.Random, array: Any) -> Any:
    """An array of another length, shape, type or size of numbers, or without any."""
    flat = array.reshape(-1)
    others = [flat[:0], flat[: array.size // 2], flat, array[None], np.array(["text"]), np.zeros(3), np.array(7)]
    if array.dtype.kind in "fiu":
        others += [array * draw.choice((0, -1, 100)), array.astype(np.int8), array.astype(np.complex64)]
    if array.dtype.kind == "f":
        others.append(np.full_like(array, draw.choice((np.nan, np.inf, -np.inf, 1e30))))
    return draw.choice(others)


def device_models(draw: random.Random) -> Case:
    """Fitted models beside a user's device that lack arrays, or have others."""
    devices._models.cache_clear()  # of the cases before
    arrays = dict(_arrays())
    for name in draw.sample(sorted(arrays), draw.choice((1, 1, 2, 5))):
        if draw.random() < 0.4:
            del arrays[name]
        else:
            arrays[name] = _other_array(draw, arrays[name])
    file = io.BytesIO()
    np.savez(file, **arrays)
    content = file.getvalue()
    if draw.random() < 0.15:
        content = draw.choice(BYTES)(draw, content)
    return _on_own_device(draw, {"h200.npz": content, "h200-power.json": DEVICES / "h200-power.json"})


def power_model(draw: random.Random) -> Case:
    tree = json.loads((DEVICES / "h200-power.json").read_text(encoding="utf-8"))
    damaged = written_json(with_number(tree, draw, _HUGE)) if draw.random() < 0.3 else damaged_json(draw, tree)
    return _on_own_device(draw, {"h200.npz": DEVICES / "h200.npz", "h200-power.json": damaged})


def _on_own_device(draw: random.Random, files: dict[str, Content]) -> Case:
    model, platform = draw.choice(((GPT, "8xh200-nvlink"), (DLRM, "2xh200-nvlink")))
    others: dict[str, Content] = {"model.toml": model, "h200.toml": text_of(DEVICES, "h200.toml")}
    others["h200-lookups.npz"] = DEVICES / "h200-lookups.npz"
    words = ("predict", "model.toml", "--platform", platform, "--device", "h200.toml", "--json")
    return Case(words, {**others, **files})


def huge_sizes(draw: random.Random) -> Case:
    """A captured step with a number that no size, stride, place or count can have."""
    tree, machine = tiny_capture(draw)
    for _ in range(draw.choice((1, 1, 2))):
        tree = with_number(tree, draw, _HUGE)
    command = draw.choice((("predict", "step.json", *machine), ("inspect", "step.json")))
    return Case((*command, "--json"), {"step.json": written_json(tree)})


def pattern(draw: random.Random) -> Case:
    """What-ifs of kernels by patterns, with as many stars as a question may have."""
    pieces = _PIECES if draw.random() < 0.3 else ("*", "a", "e", "n", "_", "gemm")
    text = "".join(draw.choices(pieces, k=draw.choice((1, 3, 10, 60, 400))))
    change = draw.choice((f"kernel:{text} * 0.5", f"{text} * 0.5", f"kernel:{text} remove", f"kernel:{text} = 3us", text))
    model: dict[str, Content] = {"rank0.json": small_kineto(0)} if draw.random() < 0.6 else {"model.toml": DLRM}
    options = () if "rank0.json" in model else ("--platform", "2xh200-nvlink")
    return Case(("predict", *model, *options, "--what-if", change, "--json"), model)


KINDS: dict[str, Kind] = {
    "device-models": device_models, "power-model": power_model, "huge-sizes": huge_sizes, "pattern": pattern,
}  # fmt: skip
