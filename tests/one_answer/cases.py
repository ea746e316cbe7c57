"""The cases of the law that one step has one answer, and the command that makes their files.

    python -m tests.one_answer.cases

writes winners of `plan` (configs) and captured scripts beside this file, with the `steptime` of this environment.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from steptime._cli.app import run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WINNERS, CAPTURES = HERE / "winners", HERE / "captures"

_CONFIGS, _LOOPS = "examples/configs", "examples/loops"
# Every shipped config, and the machine that it is asked for; what large ones need to be asked in a second.
CONFIGS = {
    "bert": "--platform 1xh200 --price 3.5",
    "gpt2": "--platform 1xl4",
    "gpt2-ddp": "--platform 8xh200-nvlink",
    "gpt-megatron": "--platform 8xh100-nvlink --price 2",
    "llama-8b": "--platform 8xh200-nvlink",
    "llama-70b": "--platform 1024xh100-ib400 --set layers=16",
    "llama-405b": "--platform 16384xh100-ib400 --set layers=16 --set parallel.stages= --set parallel.chunks= "
    "--set parallel.schedule=",
    "mixtral-8x7b": "--platform 64xh100-ib400 --set layers=4",
    "qwen3-30b-a3b": "--platform 16xh100-ib400 --set layers=4",
    "deepseek-v3": "--platform 1024xh100-ib400 --set layers=16",
    "dlrm_small": "--platform 2xh200-nvlink",
    "dlrm_heavy4": "--platform 4xh200-quarter-loopback --price 2",
    "mlperf_dcnv2": "--platform 8xh200-nvlink",
}
_WIDE = "--set layers=2 --set sequence=2048"
_ONLY = "--context 1 --recompute none --micro-batch 1"
# Each bounds the search to one layout, so that it takes a second: what is tested is the answer, not the choice.
_WINNERS = {
    "data": f"gpt2-ddp 4xh200-nvlink --batch 16 --set layers=2 --data 4 --fsdp 1 --tensor 1 --pipeline 1 --zero 0 {_ONLY}",
    "zero": "gpt2-ddp 4xh200-nvlink --batch 16 --set layers=2 --data 4 --fsdp 1 --tensor 1 --pipeline 1 --zero 2 --context 1 "
    "--recompute full --micro-batch 4",
    "fsdp": f"llama-8b 8xh200-nvlink --batch 8 {_WIDE} --data 1 --fsdp 8 --tensor 1 --pipeline 1 --zero 0 {_ONLY}",
    "tensor": f"llama-8b 8xh200-nvlink --batch 8 {_WIDE} --data 2 --fsdp 1 --tensor 4 --sequence --pipeline 1 --zero 1 "
    "--context 1 --recompute selective --micro-batch 2",
    "pipeline": f"gpt2-ddp 2xh200-nvlink --batch 8 --set layers=2 --data 1 --fsdp 1 --tensor 1 --pipeline 2 --chunks 1 {_ONLY}",
    "interleaved": "gpt2-ddp 2xh200-nvlink --batch 8 --set layers=4 --data 1 --fsdp 1 --tensor 1 --pipeline 2 --chunks 2 "
    f"{_ONLY}",
    "context": "llama-8b 4xh200-nvlink --batch 2 --set layers=2 --data 1 --fsdp 2 --tensor 1 --pipeline 1 --context 2 --zero 0 "
    "--recompute none --micro-batch 1",
    "experts": "mixtral-8x7b 8xh200-nvlink --batch 8 --set layers=2 --set sequence=1024 --data 8 --fsdp 1 --tensor 1 "
    f"--pipeline 1 --expert 8 --zero 1 {_ONLY}",
    "experts-pipeline": "qwen3-30b-a3b 8xh200-nvlink --batch 8 --set layers=4 --set sequence=1024 --data 4 --fsdp 1 --tensor 1 "
    f"--pipeline 2 --chunks 1 --expert 4 --zero 1 {_ONLY}",
    "fp8": f"llama-8b 8xh200-nvlink --batch 8 {_WIDE} --set precision=fp8 --data 1 --fsdp 8 --tensor 1 --pipeline 1 {_ONLY}",
    "compiled": f"llama-8b 2xh200-nvlink --batch 2 {_WIDE} --compile --data 1 --fsdp 2 --tensor 1 --pipeline 1 {_ONLY}",
    "three-ways": "gpt-megatron 8xh100-nvlink --batch 8 --set layers=4 --data 2 --fsdp 1 --tensor 2 --sequence --pipeline 2 "
    "--chunks 1 --zero 0 --context 1 --recompute selective --micro-batch 2 --price 2",
}
# Scripts that capture in seconds, need PyTorch alone and draw the same data each time, and the machine that each is asked for.
_SCRIPTS = {
    "mnist_convnet": "1xh200",
    "vae": "1xl4",
    "dlrm": "1xa100",
    "gnn_message_passing": "1xh100",
    "super_resolution": "1xh200",
    "dcgan": "1xrtx-4090",
    "pinn_burgers": "1xh200",
    "policy_gradient": "1xh200",
    "ddpm": "1xh200",
    "fsdp2_decoder": "2xh200-nvlink",
}
_SHARDED = {
    "quarters": "examples/sharding/task.toml 4xh200-quarter-loopback --evaluations 300",
    "nvlink": "examples/sharding/task.toml 4xh200-nvlink --evaluations 300",
}
SHARDED = tuple(_SHARDED)
RECORDINGS = ("dlrm_overlap4", "gpt_compiled", "gpt_fsdp2_small", "gpt_graph", "h200_mps4_dlrm", "prefetch_sync")


def _swept(config: str, axes: Sequence[tuple[str, Sequence[str]]], *others: str) -> tuple[list[str], list[list[str]]]:
    """A sweep over values of options, where `--set` is written with its key, and what each of its variants is."""
    file = f"{_CONFIGS}/{config}.toml"
    sweep = [file, *others, *(word for option, values in axes for word in _option(option, ",".join(values)))]
    combinations = product(*(values for _, values in axes))
    questions = [
        [file, *others, *(word for (option, _), value in zip(axes, each, strict=True) for word in _option(option, value))]
        for each in combinations
    ]
    return sweep, questions


def _option(name: str, value: str) -> list[str]:
    return [name, value] if name.startswith("--") else ["--set", f"{name}={value}"]


# Sweeps, and the questions to `predict` that their variants are.
SWEPT = {
    "machines": _swept("bert", [("--platform", ("1xh200", "1xh100")), ("precision", ("bf16", "fp32"))]),
    "batches": _swept("dlrm_small", [("--batch", ("1024", "4096"))], "--platform", "2xh200-nvlink"),
    "layouts": _swept(
        "llama-8b", [("parallel.fsdp", ("4", "8")), ("layers", ("2",))], "--platform", "8xh200-nvlink", "--batch", "8"
    ),
    "compiled": _swept("gpt2", [("--compile", ("off", "default"))], "--platform", "1xh100"),
    "power": _swept("bert", [("--power-cap", ("300", "700"))], "--platform", "1xh200"),
}


def config(name: str) -> list[str]:
    """The words behind a command that ask about a shipped config."""
    return [f"{_CONFIGS}/{name}.toml", *CONFIGS[name].split()]


def winner_of(name: str) -> tuple[list[str], list[str]]:
    """The words of `plan` that find a winner, and those of `predict` for the config that was saved."""
    file, platform, *options = _WINNERS[name].split()
    price = options[options.index("--price") :][:2] if "--price" in options else []
    machine = ["--platform", platform]
    asked = [f"{WINNERS / name}.toml", *machine, *price]
    return ["plan", f"{_CONFIGS}/{file}.toml", *machine, *options], ["predict", *asked]


WINNER_NAMES = tuple(_WINNERS)
SCRIPT_NAMES = tuple(_SCRIPTS)


def captured(name: str) -> list[str]:
    """The words behind a command that ask about a captured script."""
    return [str(capture_file(name)), "--platform", _SCRIPTS[name]]


def scripted(name: str) -> list[str]:
    """The same of the script itself."""
    return [f"{_LOOPS}/{name}.py", "--platform", _SCRIPTS[name]]


def recording(name: str, platform: str | None = None) -> list[str]:
    """The same of a recording, as it ran or on a machine."""
    return [f"examples/{name}", *(["--platform", platform] if platform else [])]


def sharded(name: str) -> tuple[list[str], list[str], list[str]]:
    """The words behind `shard` that search, those that name the machine, and those with the memory that the task allows."""
    task, platform, *options = _SHARDED[name].split()
    return [task, *options], ["--platform", platform], ["--memory", "30GB"]


def capture_file(name: str) -> Path:
    """Where the capture of a script ships."""
    return CAPTURES / f"{name}.json.gz"


def without_comment(file: Path) -> str:
    """A saved winner without its first line, which has the step as it was predicted that day."""
    comment, _, content = file.read_text(encoding="utf-8").partition("\n")
    assert comment.startswith("# ")
    return content


def capture_words(name: str, file: Path) -> list[str]:
    """The command that captures a script."""
    ranks = _SCRIPTS[name].partition("x")[0]
    return ["capture", f"{_LOOPS}/{name}.py", "-o", str(file), *(["--ranks", ranks] if ranks != "1" else [])]


def printed(words: Sequence[str]) -> str:
    """What a command prints, as the command line runs it."""
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as out:
        code = run(words)
    assert code == 0, f"exit code {code} of {' '.join(words)}"
    return out.getvalue()


def answered(words: Sequence[str]) -> dict[str, Any]:
    """What a command answers as JSON."""
    before = words.index("--") if "--" in words else len(words)
    document: dict[str, Any] = json.loads(printed([*words[:before], "--json", *words[before:]]))
    return document


def main() -> None:
    """Make the files."""
    for folder in (WINNERS, CAPTURES):
        folder.mkdir(exist_ok=True)
    for name in WINNER_NAMES:
        file = WINNERS / f"{name}.toml"
        printed([*winner_of(name)[0], "--save", str(file)])
        file.write_text(without_comment(file), encoding="utf-8")
    for name in SCRIPT_NAMES:
        printed(capture_words(name, capture_file(name)))


if __name__ == "__main__":
    main()
