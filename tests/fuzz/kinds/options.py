"""Options of every command with values that nobody expects, as the commands themselves declare them."""

from __future__ import annotations

import json
import random
import typing
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case, Content, Kind
from tests.fuzz.kinds.machines import calibration_tree, host_tree, text_of
from tests.fuzz.kinds.transformers import PLAIN, toml_lines
from tests.fuzz.samples import DLRM, PLANS, TASK
from tests.program.small_traces import small_kineto
from tests.support.mutated import written_json
from typer.models import OptionInfo

from steptime._cli import compare as compare_command
from steptime._cli import plan as plan_command
from steptime._cli import platforms, shard, steps, whatif
from steptime._cli import sweep as sweep_command
from steptime._hardware.device import FOLDER as DEVICES
from steptime._hardware.fabric import FOLDER as FABRICS
from steptime_lab import cli as lab

_NUMBERS = (
    "0", "-1", "1", "2", "3", "4", "8", "16", "64", "100", "1000", "131072", "1000000", "2147483648", "1000000000000", "9" * 30,
    "9" * 5000, "1e3", "0.5", "1.5", "1e-9", "1e18", "1e400", "nan", "inf", "-inf", "x", "", " ", "1,2", "1,2,,4", "1:64",
    "0x10", "1_000", "\u0663", "30GB", "-0", "+1",
)  # fmt: skip
_WORDS = (
    "", " ", "x", "none", "full", "-", "--", "--json", ",", "1,2", "h200", "8xh200-nvlink", "2xh200-nvlink", "1xh200",
    "../evil", "/", ".", "\x1b[2J", "a\nb", "x" * 5000, "\udcff", "nan", "[]", "{}", "model.toml", "missing.json",
    "matmul * 0.5", "sync remove", "all * nan", "* * *", "op:aten::mm * 1e400", "worst", "mean", "nvlink", "loopback",
    "h100-nvlink", "host", "batch=64", "parallel.fsdp=2", "width=0", "a.b.c=1", "tables=[]", "=", "A,B", "16xh100-ib400",
)  # fmt: skip
_OF = {
    "--platform": ("2xh200-nvlink", "8xh200-nvlink", "1xh200", "16xh100-ib400", "8xa100-nvlink", "2xh200-half-loopback"),
    "--device": ("h100", "l4", "device.toml", "h200-half", "mi300x"),
    "--fabric": ("h100-nvlink", "loopback", "fabric.toml", "h100-ib400"),
    "--host": ("xeon-h200", "host.json"),
    "--only": ("host", "fabrics", "host,fabrics", "kernels", "power"),
    "--evaluations": ("1", "5", "20"),
    "--budget": ("0", "0.1", "0.5"),
    "--calibration": ("calibration.json",),
    "--plan": ("plan.json",),
    "--evaluate": ("plan.json",),
    "--what-if": ("matmul * 0.5", "sync remove", "tf32 on", "all * 2", "collectives * 0", "batch * 2", "h2d remove"),
    "--memory": ("1", "30000000000", "4"),
    "--limit": ("1", "0"),
}  # fmt: skip
_PLATFORM = ("--platform", "2xh200-nvlink")
# All layouts of even a small model take 14 s of CPU time.
_FEW_LAYOUTS = ("--pipeline", "1", "--tensor", "1", "--micro-batch", "16", "--recompute", "none")
_BASES: tuple[tuple[Callable[..., None], tuple[tuple[str, ...], ...]], ...] = (
    (steps.predict, (("model.toml", *_PLATFORM), ("gpt.toml", "--platform", "8xh200-nvlink"), ("rank0.json",))),
    (steps.predict, (("task.toml", *_PLATFORM), ("task.toml", *_PLATFORM, "--plan", "plan.json"))),
    (steps.replay, (("rank0.json",),)),
    (steps.inspect, (("rank0.json",), ("missing.json",), ("gpt.toml",))),
    (sweep_command.sweep, (("model.toml", *_PLATFORM), ("gpt.toml", "--platform", "8xh200-nvlink,1xh200", "--batch", "32,64"))),
    (compare_command.compare, (("model.toml", "model.toml", *_PLATFORM), ("rank0.json", "rank0.json"), ("gpt.toml", "x.json"))),
    (shard.shard, (("task.toml", *_PLATFORM, "--evaluations", "20"), ("task.toml", *_PLATFORM, "--evaluate", "plan.json"))),
    (plan_command.plan, (("gpt.toml", "--platform", "8xh200-nvlink", "--gpus", "2", *_FEW_LAYOUTS),)),
    (whatif.whatif, (("rank0.json",), ("model.toml", *_PLATFORM))),
    (whatif.diff, (("rank0.json", "rank0.json"), ("model.toml", "model.toml", *_PLATFORM))),
    (platforms.platforms, ((), ("2xh200-nvlink",), ("h100-2-nodes",), ("fabric.toml",), ("nowhere",))),
    (platforms.fabric, (("--name", "mine", "--bandwidth", "450", "--latency", "5", "--ranks", "8"), ("--name", "mine"))),
    (lab.fit, (("missing",), ("empty", "--only", "host"))),
    (lab.validate, (("nothing",), ("steps", "--models", "x"), ("collectives", "--rows", "missing.csv"))),
)  # fmt: skip
_WRITE = ("--html", "--trace", "--torchrec", "--save", "--torchtitan", "--csv", "--parquet", "--resume")
_MAY_WRITE = tuple(f"written.{suffix}" for suffix in ("json", "html", "toml", "json.gz", "csv", "parquet"))


@cache
def _files() -> dict[str, Content]:
    return {
        "model.toml": DLRM,
        "gpt.toml": "\n".join(toml_lines({**PLAIN, "kind": "transformer", "parallel": {"fsdp": 2}})),
        "task.toml": TASK,
        "plan.json": json.dumps(PLANS[1]),
        "rank0.json": small_kineto(0),
        "calibration.json": written_json(calibration_tree()),
        "host.json": written_json(host_tree()),
        "device.toml": text_of(DEVICES, "h100.toml"),
        "fabric.toml": text_of(FABRICS, "mi300x-xgmi.toml"),
        "empty/note.txt": "nothing",
    }


@cache
def _options(command: Callable[..., None]) -> tuple[tuple[str, Any], ...]:
    """Names and types of a command's options."""
    found = []
    for name, hint in typing.get_type_hints(command, include_extras=True).items():
        kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        option = next((note for note in notes if isinstance(note, OptionInfo)), None)
        if option is not None:
            declared = [option.default, *(option.param_decls or ())]
            names = [each for each in declared if isinstance(each, str) and each.startswith("--")]
            found.append((names[0].split("/")[0] if names else f"--{name.replace('_', '-')}", kind))
    return tuple(found)


def _value(draw: random.Random, option: str, kind: Any, own: Sequence[str]) -> tuple[str, ...]:
    if kind in (bool, bool | None):
        return ()
    if option in _WRITE:
        return (draw.choice((*_MAY_WRITE, *own, "", ".", "nowhere/x.json", "\0")),)
    if option in _OF and draw.random() < 0.7:
        return (draw.choice(_OF[option]),)
    if kind in (Path, Path | None, list[Path] | None):
        return (draw.choice((*list(_files())[:-1], "missing.json", ".", "", "nowhere/x.json", "\0", "empty")),)
    return (draw.choice(_NUMBERS if kind in (int, float, int | None, float | None) or draw.random() < 0.5 else _WORDS),)


def options(draw: random.Random) -> Case:
    """One to three options more than a command needs, or one of those that it needs again."""
    command, bases = draw.choice(_BASES)
    if command is lab.fit and find_spec("scipy") is None:  # which the lab is installed with
        command, bases = _BASES[0]
    base = draw.choice(bases)
    words, own = [command.__name__, *base], [each for each in base if each in _files()]
    for option, kind in draw.choices(_options(command), k=draw.choice((1, 1, 2, 3))):
        words += [option, *_value(draw, option, kind, own)]
    if draw.random() < 0.1:
        words.insert(draw.randrange(1, len(words) + 1), draw.choice(_WORDS))
    if draw.random() < 0.8 and command is not lab.fit and "--json" not in words:
        words.insert(1, "--json")
    return Case(tuple(words), _files(), may=("*.toml", "*.json") if command is platforms.fabric else _MAY_WRITE)


KINDS: dict[str, Kind] = {"options": options}
