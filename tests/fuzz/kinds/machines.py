"""Damaged descriptions of machines: devices, fabrics, hosts, platforms, calibrations, and output of nccl-tests."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.case import Case, Content, Kind, damaged_json, damaged_text
from tests.fuzz.samples import DLRM, GPT, NCCL_TEXT, NCCL_TREE, PLANS, PLATFORM, SHARE, TASK
from tests.support.mutated import written_json

from steptime._hardware.device import FOLDER as DEVICES
from steptime._hardware.fabric import FOLDER as FABRICS
from steptime._models.host.model import read_host

MULTI = ("--platform", "2xh200-nvlink", "--json")
_ON_PAPER = ("h100", "l4", "v100", "mi300x", "b200", "a100-40gb", "rtx-4090")
_FABRICS: tuple[str, ...] = ("h100-2-nodes", "a100-pairwise-nvlink", "h200-nvlink")


def text_of(folder: Path, name: str) -> str:
    """A shipped description."""
    return (folder / name).read_text(encoding="utf-8")


@cache
def host_tree() -> Any:
    """A shipped host as a file of one's own."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "host.json"
        read_host("xeon-h200").save(file)
        return json.loads(file.read_text(encoding="utf-8"))


@cache
def calibration_tree() -> Any:
    """A few rows of what `calibrate` measures."""
    names = [name.split(" ", 1) for name in read_host("xeon-h200").usual_bursts][:4]
    return {
        "schema_version": 1,
        "host": [{"kind": kind, "op": op, "time_ns": 9e3, "spread": 0.1} for kind, op in names],
        "fabric": [
            {"collective": kind, "ranks": 2, "bytes": size, "mode": "stream", "time_ns": 5e4}
            for size in (1 << 20, 1 << 24)
            for kind in ("all_reduce", "all_to_all")
        ],
    }


def _shown(draw: random.Random, options: tuple[str, ...], files: dict[str, Content]) -> Case:
    """The machine itself, or a step on it."""
    if draw.random() < 0.2:
        return Case(("platforms", "2xh200-nvlink", *options, "--json"), files)
    return Case(("predict", "task.toml", *MULTI, *options), {"task.toml": TASK, **files})


def device(draw: random.Random) -> Case:
    """One that answers with another's models, or a share of a measured one, whose models lie beside it."""
    if draw.random() < 0.6:
        return _shown(
            draw,
            ("--device", "mine.toml"),
            {"mine.toml": damaged_text(draw, text_of(DEVICES, f"{draw.choice(_ON_PAPER)}.toml"))},
        )
    whole = text_of(DEVICES, "h200.toml")
    files: dict[str, Content] = {"task.toml": TASK, "h200.toml": whole}
    files |= {name: DEVICES / name for name in ("h200.npz", "h200-lookups.npz")}
    files |= (
        {"h200.toml": damaged_text(draw, whole), "half.toml": SHARE}
        if draw.random() < 0.7
        else {"half.toml": damaged_text(draw, SHARE)}
    )
    return Case(("predict", "task.toml", "--platform", "2xh200-half-loopback", "--device", "half.toml", "--json"), files)


def fabric(draw: random.Random) -> Case:
    name = draw.choice(_FABRICS)
    toml, models = text_of(FABRICS, f"{name}.toml"), json.loads(text_of(FABRICS, f"{name}.json"))
    files: dict[str, Content] = {"mine.toml": toml, f"{name}.json": written_json(models)}
    files |= {"mine.toml": damaged_text(draw, toml)} if draw.random() < 0.5 else {f"{name}.json": damaged_json(draw, models)}
    return _shown(draw, ("--fabric", "mine.toml"), files)


def host(draw: random.Random) -> Case:
    return _shown(draw, ("--host", "host.json"), {"host.json": damaged_json(draw, host_tree())})


def platform(draw: random.Random) -> Case:
    files = {"task.toml": TASK, "mine.toml": damaged_text(draw, PLATFORM), "host.json": written_json(host_tree())}
    return Case(("predict", "task.toml", "--platform", "mine.toml", "--json"), files)


def calibration(draw: random.Random) -> Case:
    files = {"task.toml": TASK, "plan.json": json.dumps(PLANS[1]), "mine.json": damaged_json(draw, calibration_tree())}
    command = draw.choice((("predict", "task.toml"), ("shard", "task.toml", "--evaluate", "plan.json")))
    return Case((*command, *MULTI, "--calibration", "mine.json"), files)


def nccl_tests(draw: random.Random) -> Case:
    """Output of nccl-tests, of which a fabric is made."""
    damaged = damaged_json(draw, NCCL_TREE) if draw.random() < 0.4 else damaged_text(draw, NCCL_TEXT)
    like = ("--like", "h100-nvlink") if draw.random() < 0.5 else ()
    words = ("fabric", "all_reduce.log", "--name", "mine", "--json", *like)
    return Case(words, {"all_reduce.log": damaged}, ("mine.toml", "mine.json"))


def power_cap(draw: random.Random) -> Case:
    """Numbers of options that describe a machine."""
    number = draw.choice(("0", "-1", "1", "120", "350.5", "699", "1e5", "1e400", "nan", "inf", "x", ""))
    model = draw.choice((GPT, DLRM))
    ranks = "8xh200-nvlink" if model is GPT else "2xh200-nvlink"
    return Case(("predict", "model.toml", "--platform", ranks, "--json", "--power-cap", number), {"model.toml": model})


KINDS: dict[str, Kind] = {
    "device": device, "fabric": fabric, "host": host, "platform": platform, "calibration": calibration,
    "nccl-tests": nccl_tests, "power-cap": power_cap,
}  # fmt: skip
