"""Damaged recordings: Kineto, execution traces, Chakra, archives, saved workloads, and measured steps beside them."""

from __future__ import annotations

import gzip
import json
import random
from functools import cache

from tests.fuzz.case import Case, Content, Kind, damaged_json
from tests.program.chakra_messages import COMP, file, node
from tests.program.mutations import BYTES, borrow, damage, drop_key, retype, tar
from tests.program.small_traces import RANKS, Files, small_chakra, small_et, small_kineto, small_saved

_ASKED: tuple[tuple[str, ...], ...] = (
    ("inspect",), ("replay",), ("predict",), ("predict", "--profiled"), ("replay", "--trace"), ("predict", "--html"),
    ("predict", "--platform", "4xh200-quarter-loopback"), ("predict", "--platform", "8xa100-nvlink"),
    ("predict", "--platform", "8xa100-nvlink", "--profiled"), ("predict", "--what-if"), ("predict", "--what-if"), ("whatif",),
)  # fmt: skip
CHANGES = (
    "cuda graph", "python remove", "rank:0 level", "optimizer fused", "tf32 on", "bf16 on", "batch * 2", "op:aten:: remove",
    "kernel:* = 3us", "all_to_all remove", "matmul roofline", "matmul * 0.5", "sync remove",
)  # fmt: skip
_OUTPUTS = {"--trace": "lanes.json.gz", "--html": "page.html"}


def _asked(draw: random.Random, files: Files) -> Case:
    """A question about all files."""
    command, *options = draw.choice(_ASKED)
    options = [word for each in options for word in ((each, draw.choice(CHANGES)) if each == "--what-if" else (each,))]
    outputs = tuple(_OUTPUTS[each] for each in options if each in _OUTPUTS)
    form = () if draw.random() < 0.1 else ("--json",)
    given: dict[str, Content] = dict(files)
    return Case((command, *files, *options, *outputs, *form), given, outputs)


def _packed(draw: random.Random, files: Files) -> Files:
    """Compressed now and then, sometimes with damage to that."""
    if draw.random() < 0.9:
        return files
    files = {f"{name}.gz": gzip.compress(data, 1, mtime=0) for name, data in files.items()}
    return {name: draw.choice(BYTES)(draw, data) for name, data in files.items()} if draw.random() < 0.5 else files


def kineto(draw: random.Random) -> Case:
    rank = draw.randrange(RANKS)
    name = draw.choice(("trace.json", f"rank{rank}.json"))
    return _asked(draw, _packed(draw, {name: damage(draw, small_kineto(rank), "traceEvents")}))


def job(draw: random.Random) -> Case:
    """Several ranks, some of them damaged."""
    return _asked(draw, _packed(draw, _job(draw)))


def _job(draw: random.Random) -> Files:
    files = {f"rank{r}.kineto.json": small_kineto(r) for r in sorted(draw.sample(range(RANKS), draw.choice((2, 2, 2, 4))))}
    for name in draw.sample(sorted(files), draw.choice((1, 1, 2))):
        files[name] = damage(draw, files[name], "traceEvents")
    return files


def linked(draw: random.Random) -> Case:
    """Both kinds of trace of one rank."""
    kineto, et = small_kineto(1), small_et(draw.choice((1, 1, 0)))
    if draw.random() < 0.5:
        return _asked(draw, {"rank1.kineto.json": damage(draw, kineto, "traceEvents"), "rank1.et.json": et})
    return _asked(draw, {"rank1.kineto.json": kineto, "rank1.et.json": damage(draw, et, "nodes")})


def execution_trace(draw: random.Random) -> Case:
    return _asked(draw, _packed(draw, {"rank0.et.json": damage(draw, small_et(0), "nodes")}))


@cache
def _chakra_of_ops() -> bytes:
    """Products and their kernels: a trace without them has device work alone, which no platform is asked about."""
    nodes: list[bytes] = []
    for number in range(12):
        tensors = f"[[{3 + 3 * number}, 4, 0, 1048576, 2, 'cuda:0'], [{4 + 3 * number}, 5, 0, 1048576, 2, 'cuda:0']]"
        io = (tensors, "[[1024, 1024], [1024, 1024]]", "['Tensor(c10::BFloat16)', 'Tensor(c10::BFloat16)']")
        host, at = 2 * number + 1, 1000 + 10 * number
        before = (host - 2,) if number else ()
        nodes.append(node(host, COMP, before, name="aten::mm", start=at, took=9, io=io, is_cpu_op=True, tid=1))
        nodes.append(node(host + 1, COMP, (host,), name="gemm", start=at + 5, took=20, is_cpu_op=False, stream=7))
    return file(*nodes)


def chakra(draw: random.Random) -> Case:
    if draw.random() < 0.5:
        name = "job.0.et"
        return Case(("predict", name, "--platform", "1xh200", "--json"), {name: damage(draw, _chakra_of_ops(), None)})
    files = {f"job.{r}.et": small_chakra(r) for r in range(draw.choice((1, 1, 2)))}
    return _asked(draw, _packed(draw, {name: damage(draw, data, None) for name, data in files.items()}))


def archive(draw: random.Random) -> Case:
    """Several ranks in one file, which is damaged itself, or they are."""
    files = _job(draw) if draw.random() < 0.5 else {f"rank{r}.kineto.json": small_kineto(r) for r in range(2)}
    mode = draw.choice(("w", "w:gz"))
    data = tar(files, mode)
    name = "run.tar" if mode == "w" else "run.tar.gz"
    return _asked(draw, {name: draw.choice(BYTES)(draw, data) if draw.random() < 0.7 else data})


def saved(draw: random.Random) -> Case:
    """What `capture` writes, or a timeline that was drawn."""
    document = json.loads(small_saved())
    program = draw.choice(document["programs"])
    for _ in range(draw.choice((1, 1, 2, 5))):
        table = program.get(draw.choice(("ops", "calls", "works", "works", "calls")))
        column = table[draw.choice(list(table))] if isinstance(table, dict) and table else None
        if draw.random() < 0.5 and isinstance(column, list) and column:
            column[draw.randrange(len(column))] = draw.choice(
                (-1, 0, 1, 5, 300, 2**31 - 1, 2**40, 2**62, -(2**63), draw.choice(column))
            )
        else:
            draw.choice((retype, drop_key, borrow))(
                draw, program, draw.choice(("collectives", "threads", "streams", "signatures", "orders"))
            )
    if draw.random() < 0.3:
        document = {"displayTimeUnit": "ms", "played": document, "traceEvents": []}
    data = json.dumps(document, separators=(",", ":")).encode("utf-8", errors="surrogatepass")
    return _asked(draw, _packed(draw, {"small.json": draw.choice(BYTES)(draw, data) if draw.random() < 0.2 else data}))


def difference(draw: random.Random) -> Case:
    """Two runs, one of them damaged."""
    files: dict[str, Content] = {"a.json": small_kineto(0), "b.json": damage(draw, small_kineto(0), "traceEvents")}
    machine = ("--platform", "4xh200-quarter-loopback") if draw.random() < 0.3 else ()
    return Case(("diff", "a.json", "b.json", *machine, "--json"), files)


def calibration_of_run(draw: random.Random) -> Case:
    """What a recording says of its machine."""
    name = "rank0.json"
    words = ("calibrate", "--from-run", name, "--platform", "4xh200-quarter-loopback", "-o", "mine.json", "--json")
    return Case(words, {name: damage(draw, small_kineto(0), "traceEvents")}, ("mine.json",))


_MEASURED = {"platform": "one H200", "measured_step_ms_unprofiled": [3.1, 3.2, 3.15], "steps_per_measurement": 60}


def measured(draw: random.Random) -> Case:
    """Steps measured without a profiler."""
    files: dict[str, Content] = {"rank0.json": small_kineto(0), "measured.json": damaged_json(draw, _MEASURED)}
    return Case(("replay", "rank0.json", "--measured", "measured.json", "--json"), files)


KINDS: dict[str, Kind] = {
    "kineto": kineto, "job": job, "linked": linked, "execution-trace": execution_trace, "chakra": chakra, "archive": archive,
    "saved": saved, "difference": difference, "calibration-of-run": calibration_of_run, "measured-steps": measured,
}  # fmt: skip
