"""Compiled steps, damaged: recorded, saved, in execution traces, asked for with `--compile`; sources and texts of kernels."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.case import Case, Content, Kind, damaged_json, damaged_text
from tests.fuzz.kinds.nearby import near_text
from tests.fuzz.kinds.transformers import CONFIGS, PLAIN, model, toml_lines
from tests.fuzz.samples import DLRM, TASK
from tests.program.mutations import BYTES, damage, retype
from tests.support.mutated import mutated_number, mutated_tree, written_json

import steptime
from steptime._cli.app import BAD_INPUT
from steptime._fuse.compiled import compiled_workload
from steptime._ops.generated import GeneratedKernel
from steptime._ops.generated_calls import moved_bytes
from steptime._ops.triton_source import described
from steptime._platforms.device import Device
from steptime._program.formats import saved
from steptime._program.workload import COMPILE
from steptime.errors import SteptimeError, one_line
from steptime_lab.validate.compiled.answers import CompiledAnswers

_ROOT = Path(__file__).parents[3]
_RECORDINGS = ("h200_gpt_default", "h200_gpt_reduce", "h200_dlrm_reduce_item")
_CHANGES = ("generated * 0.5", "generated remove", "kernel:triton_poi_* = 3us", "cuda graph", "python * 0.5", "matmul * 0.5")
_ASKED: tuple[tuple[str, ...], ...] = (
    ("predict",), ("predict", "--what-if"), ("replay",), ("inspect",), ("predict", "--platform", "1xh100"),
    ("predict", "--platform", "1xh200"), ("predict", "--platform", "1xb200"), ("predict", "--platform", "1xh100", "--profiled"),
    ("predict", "--platform", "1xh200", "--what-if"),
)  # fmt: skip
_MODES = ("default", "default", "reduce-overhead", "reduce-overhead", "off")
_ODD_MODES = (
    "max-autotune",
    "max-autotune-no-cudagraphs",
    "",
    " ",
    "x",
    "default,off",
    "DEFAULT",
    "true",
    "x" * 5000,
    "\x1b[2J",
)
_GENERATED = ("triton_", "Torch-Compiled", "Compiled", "cudaGraphLaunch", "Inductor", "TorchDynamo")


@cache
def _recorded(name: str) -> bytes:
    folder = _ROOT / ("examples" if name == "gpt_compiled" else "tests/support/recordings") / name
    return gzip.decompress((folder / "rank0.kineto.json.gz").read_bytes())


def _asked(draw: random.Random, name: str, content: Content) -> Case:
    command, *options = draw.choice(_ASKED)
    options = [word for each in options for word in ((each, draw.choice(_CHANGES)) if each == "--what-if" else (each,))]
    if command == "predict" and draw.random() < 0.05:
        options += ["--compile", draw.choice(_MODES)]
    return Case((command, name, *options, "--json"), {name: content})


def recording(draw: random.Random) -> Case:
    """A recording with kernels that Inductor generated, or with CUDA graphs."""
    data = _recorded(draw.choice((*_RECORDINGS, *_RECORDINGS, "gpt_compiled")))
    if draw.random() < 0.5:
        return _asked(draw, "rank0.json", damage(draw, data, "traceEvents"))
    document = json.loads(data)
    events = document["traceEvents"]
    generated = [at for at, event in enumerate(events) if str(event.get("name", "")).startswith(_GENERATED)]
    for at in draw.sample(generated, draw.choice((1, 1, 3, 10))):
        events[at] = _other(draw, events[at])
    return _asked(draw, "rank0.json", written_json(document).encode("utf-8", errors="surrogatepass"))


def _other(draw: random.Random, tree: Any) -> Any:
    return draw.choice((mutated_tree, mutated_number))(tree, draw)


@cache
def _small(mode: str, text: str) -> Any:
    """A small config as our fusion pass compiles it, saved as a captured step is."""
    with TemporaryDirectory() as folder:
        config, file = Path(folder) / "small.toml", Path(folder) / "small.json"
        config.write_text(text, encoding="utf-8")
        workload = steptime.read(config)
        workload = replace(workload, meta={**workload.meta, COMPILE: mode})
        done = compiled_workload(workload, Device.load("h200").limits)
        meta = {name: value for name, value in done.meta.items() if name != COMPILE}
        saved.write(replace(done, meta=meta, warnings=(), rebuild=None), file)
        return file.read_bytes()


_TINY = "\n".join(toml_lines({**PLAIN, "kind": "transformer", "layers": 2}))
_TINY_DLRM = DLRM.replace("ranks = 2", "ranks = 1").split("[plan]")[0]


def tiny_capture(draw: random.Random) -> tuple[Any, tuple[str, ...]]:
    text = draw.choice((_TINY, _TINY, _TINY_DLRM))
    return json.loads(_small(draw.choice(("default", "reduce-overhead")), text)), (
        "--platform",
        draw.choice(("1xh200", "1xh100")),
    )


def _texts(document: Any) -> list[tuple[list[Any], int]]:
    """Where the texts of generated kernels are."""
    found: list[tuple[list[Any], int]] = []

    def seek(value: Any) -> None:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(each, str) and each.startswith('{"n":"triton_'):
                found.append((value, key))
            elif isinstance(each, dict | list):
                seek(each)

    seek(document)
    return found


def saved_step(draw: random.Random) -> Case:
    """A captured step that was saved: texts of kernels mostly, sometimes the rest of it."""
    document, machine = tiny_capture(draw)
    if draw.random() < 0.8:
        for holder, key in draw.sample(_texts(document), draw.choice((1, 1, 3))):
            text = damaged_json(draw, json.loads(holder[key]))
            holder[key] = text if isinstance(text, str) else text.decode("latin-1")
    else:
        retype(draw, document, draw.choice(("programs", "signatures", "meta")))
    data = json.dumps(document, separators=(",", ":")).encode("utf-8", errors="surrogatepass")
    data = draw.choice(BYTES)(draw, data) if draw.random() < 0.1 else data
    packed = draw.random() < 0.3
    mode = ("--compile", draw.choice(_MODES)) if draw.random() < 0.1 else ()
    name = "small.json.gz" if packed else "small.json"
    words = ("predict", name, *machine, *mode, "--json")
    return Case(words, {name: gzip.compress(data, 1, mtime=0) if packed else data})


def _node(number: int, name: str, values: list[Any], shapes: list[Any], types: list[str]) -> dict[str, Any]:
    inputs = {"values": values, "shapes": shapes, "types": types, "strides": [[] for _ in shapes]}
    outputs = {"values": values[-1:], "shapes": shapes[-1:], "types": types[-1:], "strides": [[]]}
    attrs = [{"name": "rf_id", "type": "uint64", "value": number}, {"name": "tid", "type": "uint64", "value": 1}]
    return {"id": number, "name": name, "ctrl_deps": 1, "inputs": inputs, "outputs": outputs, "attrs": attrs}


@cache
def _execution_trace() -> bytes:
    """Products and generated kernels; every other kernel with its text."""
    size, nodes = 1024, [_node(2, "[pytorch|profiler|execution_trace|thread]", [], [], [])]
    tensor = [[3 + number, 100 + number, 0, size * size, 4, "cuda:0"] for number in range(40)]
    kind, shape = "Tensor(float)", [size, size]
    text = described((_ROOT / "tests/ops/triton_sources/pointwise.txt").read_text(encoding="utf-8")).text()
    for number in range(12):
        a, b, c, d = tensor[number], tensor[number + 1], tensor[number + 2], tensor[number + 3]
        nodes.append(_node(10 + 2 * number, "aten::mm", [a, b], [shape, shape], [kind, kind]))
        name = f"triton_{('poi', 'red', 'per', 'for')[number % 4]}_fused_add_{number}"
        with_text: tuple[list[Any], list[Any], list[str]] = (
            [[a, b], [c], text], [[shape, shape], [shape], []],
            ["GenericList[Tensor(float),Tensor(float)]", "GenericList[Tensor(float)]", "String"],
        )  # fmt: skip
        without = ([a, b, d, size, size], [shape, shape, shape, [], []], [kind, kind, kind, "Int", "Int"])
        nodes.append(_node(11 + 2 * number, name, *(with_text if number % 2 else without)))
    return json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes}).encode()


def execution_trace(draw: random.Random) -> Case:
    """An execution trace of generated kernels; of eager ops, which are then compiled."""
    machine, chosen = ("--platform", draw.choice(("1xh200", "1xh100"))), draw.choice(_MODES)
    mode = () if draw.random() < 0.4 else ("--compile", chosen)
    document = json.loads(_execution_trace())
    for holder, key in draw.sample(_texts(document), draw.choice((0, 1, 1))):
        holder[key] = written_json(_other(draw, json.loads(holder[key])))
    if mode and draw.random() < 0.8:  # of what is not compiled already
        document["nodes"] = [each for each in document["nodes"] if not each["name"].startswith("triton_")]
    data = written_json(document).encode("utf-8", errors="surrogatepass")
    return Case(("predict", "rank0.et.json", *machine, *mode, "--json"), {"rank0.et.json": damage(draw, data, "nodes")})


_SOURCES = sorted((_ROOT / "tests/ops/triton_sources").glob("*.txt"))


def _command(answer: Callable[[list[str]], Any]) -> Callable[[list[str]], int]:
    """As the command line has it: the answer as JSON, or an error in one line."""

    @wraps(answer)
    def command(words: list[str]) -> int:
        try:
            document = answer(words)
        except SteptimeError as error:
            sys.stderr.write(f"steptime: error: {one_line(str(error))}\n")
            return BAD_INPUT
        sys.stdout.write(json.dumps(document))
        return 0

    return command


@_command
def _described(words: list[str]) -> Any:
    """What a source says, there and back as text, and what it moves."""
    source, *sizes = (Path(word).read_text(encoding="utf-8", errors="replace") for word in words[1:3])
    kernel = described(source, json.loads(sizes[0]) if sizes else {})
    assert GeneratedKernel.read(kernel.text()).text() == kernel.text(), "another text after reading"
    return {"kind": kernel.kind, "elements": kernel.elements, "bytes": moved_bytes(kernel), "special": kernel.special}


def _words_changed(draw: random.Random, text: str) -> str:
    """A word, number or sign of a source replaced by another, or by one from elsewhere in it."""
    lines = text.splitlines()
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, other = draw.randrange(len(lines)), draw.choice(lines)
        how = draw.random()
        if how < 0.25:
            lines[at] = other
        elif how < 0.5:
            words = lines[at].split(" ")
            words[draw.randrange(len(words))] = draw.choice(draw.choice((other.split(" "), _TOKENS)))
            lines[at] = " ".join(words)
        elif how < 0.75:
            return str(damaged_text(draw, "\n".join(lines)))
        else:
            lines.insert(at, lines[at][: len(lines[at]) - len(lines[at].lstrip())] + draw.choice(_TOKENS))
    return "\n".join(lines)


_TOKENS = (
    "tl.load(in_ptr0 + (x0 // 0), None)", "x0 % 0", "-1", "10**400", "xindex = x0 * x0", "xnumel = -5", "xnumel = 10**30",
    "xnumel = 1 << 63", "tl.store(out_ptr0 + " + "(" * 500 + "x0" + ")" * 500 + ", x0)", "for _ in range(9**9):", "pass",
    "tl.rand", "(" * 90, "while True: pass", "tmp0 = tmp0 + tmp0", "x0 = 99999999999999999999", "tl.store()", "tl.load()", "~",
    "x0 = (xindex // 9223372036854775807)", "x0 = xindex * 9223372036854775807 * 9223372036854775807", "rnumel = 0", "@", "\0",
    "xnumel = 0",
)  # fmt: skip


def source(draw: random.Random) -> Case:
    """A Triton source that Inductor wrote, changed; with sizes of what it is given."""
    text = draw.choice(_SOURCES).read_text(encoding="utf-8")
    sizes = {"xnumel": draw.choice((0, 1, 4096, 10**6, 2**40, 2**62)), "r0_numel": draw.choice((0, 1, 1024, 10**12)), "ks0": 3}
    given = json.dumps(dict(draw.sample(sorted(sizes.items()), draw.randrange(4))))
    files: dict[str, Content] = {"kernel.py": _words_changed(draw, text).encode("utf-8", "surrogatepass"), "sizes.json": given}
    return Case(("describe", "kernel.py", "sizes.json", "--json"), files, command=_described)


def _model(draw: random.Random) -> tuple[str | bytes, str]:
    """A config and a platform that has enough GPUs for most."""
    if draw.random() < 0.3:
        text = draw.choice((DLRM, TASK))
        return text if draw.random() < 0.3 else damaged_text(draw, text), "2xh200-nvlink"
    whole = draw.random() < 0.3
    return "\n".join(toml_lines({**PLAIN, **draw.choice(CONFIGS)})) if whole else model(draw), draw.choice(
        ("8xh200-nvlink", "16xh100-ib400", "8xa100-nvlink")
    )


def config(draw: random.Random) -> Case:
    """A config with values changed, asked for as compiled."""
    mode = draw.choice(_MODES) if draw.random() < 0.95 else draw.choice(_ODD_MODES)
    text, platform = _model(draw)
    machine = ("--platform", platform if draw.random() < 0.95 else "1xh200")
    command = draw.choice(("predict",) * 6 + ("sweep", "plan"))
    more: tuple[str, ...] = ()
    if command == "sweep":
        mode = ",".join((mode, *draw.sample(("off", "default", "reduce-overhead"), draw.choice((0, 1, 2)))))
        more = draw.choice(((), ("--batch", "8,16"), ("--what-if", "generated * 0.5")))
    elif command == "plan":
        more = ("--pipeline", "1", "--tensor", "1", "--micro-batch", "16", "--recompute", "none")
    words = (command, "model.toml", *machine, f"--compile={mode}", *more, "--json")
    return Case(words, {"model.toml": text})


def value(draw: random.Random) -> Case:
    """Values of `compile` in Python, and in a config."""
    given = draw.choice((*_MODES, *_ODD_MODES, None, True, False, 0, 1, 1.5, ["default"], [], {}, {"mode": "default"}))
    if draw.random() < 0.3:
        values = {**PLAIN, **draw.choice(CONFIGS), "compile": [] if given is None else given}
        text = "\n".join(toml_lines(values))
        return Case(("predict", "model.toml", "--platform", "8xh200-nvlink", "--json"), {"model.toml": text})
    which = draw.choice(("predict", "predict", "sweep", "plan"))
    words = (which, "model.toml", json.dumps(given), "--json")
    return Case(words, {"model.toml": draw.choice((_TINY, _TINY_DLRM))}, command=_in_python)


@_command
def _in_python(words: list[str]) -> Any:
    given = json.loads(words[2])
    if words[0] == "sweep":
        return steptime.sweep(words[1], "1xh200", compile=given).to_dict()
    if words[0] == "plan":
        return steptime.plan(words[1], "1xh200", compile=given).to_dict()
    return steptime.predict(words[1], "1xh200", compile=given).to_dict()


@cache
def _answers() -> Any:
    step = {"step_ms": 3.0, "low_ms": 2.5, "high_ms": 4.0, "device_ms": 2.0, "allocated_bytes": 1 << 30, "fallback": 0.1}
    case = {"eager": {**step, "kinds": {"matmul": 10}}, "compiled": {**step, "kinds": {"generated": 3}}}
    cases = {"a": case, "b": {**case, "compiled": None}}
    return {"schema_version": 1, "made_with": {"torch": "2.11"}, "refused": {"c": "why"}, "cases": cases}


@_command
def _read_answers(words: list[str]) -> Any:
    answers = CompiledAnswers.read(Path(words[1]))
    return {
        "cases": len(answers.cases),
        "speedups": [each.speedup for each in answers.cases.values() if each.speedup is not None],
    }


def answers(draw: random.Random) -> Case:
    """The lab's file of predicted steps."""
    return Case(("answers", "answers.json", "--json"), {"answers.json": damaged_json(draw, _answers())}, command=_read_answers)


_NEAR: Sequence[Callable[[], str]] = (
    lambda: "\n".join(toml_lines({**PLAIN, "layers": 4, "width": 2048, "heads": 16, "sequence": 2048, "feed_forward": 5632})),
    lambda: DLRM.replace("batch = 2048", "batch = 65536").replace("[256, 128, 64]", "[2048, 1024, 64]"),
)


def near(draw: random.Random) -> Case:
    """One number of a config a little larger or smaller, asked for as compiled."""
    text = draw.choice(_NEAR)()
    words = ("predict", "model.toml", "--platform", "2xh200-nvlink", f"--compile={draw.choice(_MODES[:4])}", "--json")
    files: dict[str, Content] = {"model.toml": text}
    return Case(words, {"model.toml": near_text(draw, text)}, before=Case(words, files))


KINDS: dict[str, Kind] = {
    "compiled-recording": recording, "compiled-saved": saved_step, "compiled-trace": execution_trace, "triton-source": source,
    "compile-config": config, "compile-value": value, "compiled-answers": answers, "near-compiled": near,
}  # fmt: skip
