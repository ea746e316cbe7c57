"""Commands whose files were damaged: which file, how, and what may come of it. The same seed is the same case."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.program.mutations import BYTES
from tests.program.small_traces import small_saved
from tests.support.mutated import mutated_text, mutated_tree

from steptime._cli.app import run
from steptime._hardware.device import FOLDER as DEVICES
from steptime._hardware.fabric import FOLDER as FABRICS
from steptime._models.host.model import read_host

MULTI = ("--platform", "2xh200-nvlink")
LONGEST_MESSAGE = 2000
TASK = """
batch = 16384
dense_features = 8
bottom = [16]
top = [16, 1]
interaction = "cat"
optimizer = "rowwise_adagrad"
[constraints]
memory_bytes = 30_000_000_000
kinds = ["table_wise", "column_wise"]
pinned = { item = 1 }
kinds_of = { user = ["row_wise", "table_wise"] }
headroom = 0.1
min_partition = { user = 8 }
max_partition = { user = 16, item = 16 }
[[tables]]
name = "user"
rows = 1_000_000
dim = 32
pooling_factor = 3.5
skew = { kind = "zipf", alpha = 0.9, shift = 20, lengths = "geometric", locality = 0.1, window = 5 }
[[tables]]
name = "item"
rows = 2000
dim = 16
pooling_factor = 20
statistics = { reuse = [0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], unique = 900, batch = 256 }
"""
TABLES = (
    "name,rows,dim,pooling_factor,kind,alpha,precision,pinned,kinds,min_partition,max_partition\n"
    "user,1000,32,3.5,zipf,1.1,fp32,,row_wise|column_wise|table_wise,8,16\nitem,2000,16,20,uniform,,fp32,1,,,\n"
)
COLLECTION = {
    "tables": [
        {"name": "user", "num_embeddings": 1000, "embedding_dim": 32, "feature_names": ["a", "b"], "data_type": "FP32"},
        {"name": "item", "num_embeddings": 2000, "embedding_dim": 16, "feature_names": ["c"], "pooling_factor": 3.0},
    ]
}
_SHARDS = [
    {"shard_offsets": [0, 16 * rank], "shard_sizes": [1000, 16], "placement": f"rank:{rank}/cuda:{rank}"} for rank in range(2)
]
_OPTION = {"plan": {"user": [0, 1], "item": [1]}, "kinds": {"user": "column_wise", "item": "table_wise"}, "step_time_ms": 1.0}
PLANS: tuple[Any, ...] = (
    {"user": [0, 1], "item": 1},
    {"mine": {"user": {"kind": "row_wise", "ranks": [0, 1]}, "item": 1}, "other": {"user": 0, "item": 1}},
    [{"user": {"kind": "data_parallel"}, "item": 1}, {"user": 1, "item": 1}],
    {"schema_version": 1, "best": _OPTION, "alternatives": [_OPTION], "warnings": []},
    {"schema_version": 1, "plans": [{"name": "mine", **_OPTION}, {"name": "other", **_OPTION}]},
    {
        "schema_version": 1,
        "torchrec": "torchrec.distributed.types.ShardingPlan",
        "world_size": 2,
        "plan": {
            "": {
                "user": {
                    "sharding_type": "column_wise", "compute_kernel": "fused", "ranks": [0, 1],
                    "sharding_spec": {"shards": _SHARDS},
                },
                "item": {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [1], "sharding_spec": None},
            }
        },
    },
    {"user": {"kind": "table_row_wise", "ranks": [0, 1]}, "item": 1},
    {"user": {"kind": "grid_shard", "ranks": [[0, 1], [0, 1]]}, "item": 1},
    {"user": {"kind": "table_column_wise", "ranks": [1, 0]}, "item": 1},
)  # fmt: skip
PLATFORM = 'schema_version = 1\nname = "mine"\nranks = 2\ndevice = "h200"\nhost = "host.json"\nfabric = "h200-nvlink"\n'
SHARE = 'schema_version = 1\npart_of = "h200"\nshare = 2\n'


@dataclass(frozen=True, slots=True)
class Case:
    """A command, and the files that it reads."""

    arguments: tuple[str, ...]
    files: Mapping[str, str | bytes | Path]  # a path: the file as it is


@cache
def _host() -> Any:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "host.json"
        read_host("xeon-h200").save(file)
        return json.loads(file.read_text(encoding="utf-8"))


@cache
def _calibration() -> Any:
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


def _text(draw: random.Random, text: str) -> str | bytes:
    """Damaged now and then as bytes are, mostly as values are, sometimes twice."""
    if draw.random() < 0.15:
        return draw.choice(BYTES)(draw, text.encode())
    for _ in range(draw.choice((1, 1, 1, 2))):
        text = mutated_text(text, draw)
    return text


def _json(draw: random.Random, tree: Any) -> str | bytes:
    if draw.random() < 0.15:
        return draw.choice(BYTES)(draw, json.dumps(tree).encode())
    for _ in range(draw.choice((1, 1, 1, 2))):
        tree = mutated_tree(tree, draw)
    return _dumped(tree)


def _dumped(tree: Any) -> str:
    """With integers of any length, which `json` refuses to write by itself."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(tree)
    finally:
        sys.set_int_max_str_digits(limit)


def predicted_task(draw: random.Random) -> Case:
    return Case(("predict", "task.toml", *MULTI), {"task.toml": _text(draw, TASK)})


def evaluated_task(draw: random.Random) -> Case:
    plan = json.dumps(draw.choice(PLANS))
    return Case(("shard", "task.toml", *MULTI, "--evaluate", "plan.json"), {"task.toml": _text(draw, TASK), "plan.json": plan})


def predicted_tables(draw: random.Random) -> Case:
    return Case(("predict", "tables.csv", *MULTI), {"tables.csv": _csv(draw)})


def evaluated_tables(draw: random.Random) -> Case:
    plan = json.dumps(draw.choice(PLANS))
    arguments = ("shard", "tables.csv", *MULTI, "--evaluate", "plan.json")
    return Case(arguments, {"tables.csv": _csv(draw), "plan.json": plan})


def _csv(draw: random.Random) -> str | bytes:
    if draw.random() < 0.3:
        return _text(draw, TABLES)
    rows = [line.split(",") for line in TABLES.splitlines()]
    row = draw.choice(rows)
    row[draw.randrange(len(row))] = draw.choice(
        (
            "",
            "0",
            "-1",
            "nan",
            "inf",
            "1e400",
            "text",
            "9" * 5000,
            "x" * 140_000,
            "1_0",
            "\0",
            '"',
            ",",
            "user",
            "9" * 18,
            "1e9",
        )
    )
    return "\n".join(",".join(row) for row in rows)


def predicted_collection(draw: random.Random) -> Case:
    return Case(("predict", "collection.json", *MULTI), {"collection.json": _json(draw, COLLECTION)})


def predicted_plan(draw: random.Random) -> Case:
    files = {"task.toml": TASK, "plan.json": _json(draw, draw.choice(PLANS))}
    return Case(("predict", "task.toml", *MULTI, "--plan", "plan.json"), files)


def evaluated_plan(draw: random.Random) -> Case:
    files = {"task.toml": TASK, "plan.json": _json(draw, draw.choice(PLANS))}
    return Case(("shard", "task.toml", *MULTI, "--evaluate", "plan.json"), files)


def own_device(draw: random.Random) -> Case:
    """One that answers with another's models, or a share of a measured one, whose models lie beside it."""
    if draw.random() < 0.6:
        files: dict[str, str | bytes | Path] = {"mine.toml": _text(draw, (DEVICES / "h100.toml").read_text(encoding="utf-8"))}
        return Case(("predict", "task.toml", *MULTI, "--device", "mine.toml"), {"task.toml": TASK, **files})
    whole = (DEVICES / "h200.toml").read_text(encoding="utf-8")
    files = {"task.toml": TASK, "h200.toml": whole, **{name: DEVICES / name for name in ("h200.npz", "h200-lookups.npz")}}
    files |= {"h200.toml": _text(draw, whole), "half.toml": SHARE} if draw.random() < 0.7 else {"half.toml": _text(draw, SHARE)}
    return Case(("predict", "task.toml", "--platform", "2xh200-half-loopback", "--device", "half.toml"), files)


def own_fabric(draw: random.Random) -> Case:
    toml = (FABRICS / "h100-2-nodes.toml").read_text(encoding="utf-8")
    models = json.loads((FABRICS / "h100-2-nodes.json").read_text(encoding="utf-8"))
    files: dict[str, str | bytes] = {"task.toml": TASK, "mine.toml": toml, "h100-2-nodes.json": json.dumps(models)}
    files |= {"mine.toml": _text(draw, toml)} if draw.random() < 0.5 else {"h100-2-nodes.json": _json(draw, models)}
    return Case(("predict", "task.toml", *MULTI, "--fabric", "mine.toml"), files)


def own_platform(draw: random.Random) -> Case:
    files: dict[str, str | bytes] = {"task.toml": TASK, "mine.toml": PLATFORM, "host.json": json.dumps(_host())}
    files |= {"mine.toml": _text(draw, PLATFORM)} if draw.random() < 0.5 else {"host.json": _json(draw, _host())}
    return Case(("predict", "task.toml", "--platform", "mine.toml"), files)


def calibration(draw: random.Random) -> Case:
    files = {"task.toml": TASK, "plan.json": json.dumps(PLANS[1]), "mine.json": _json(draw, _calibration())}
    command = draw.choice((("predict", "task.toml"), ("shard", "task.toml", "--evaluate", "plan.json")))
    return Case((*command, *MULTI, "--calibration", "mine.json"), files)


def saved_workload(draw: random.Random) -> Case:
    return Case(
        ("predict", "saved.json", "--platform", "4xh200-nvlink"), {"saved.json": _json(draw, json.loads(small_saved()))}
    )


KINDS: tuple[Callable[[random.Random], Case], ...] = (
    predicted_task, evaluated_task, predicted_tables, evaluated_tables, predicted_collection, predicted_plan, evaluated_plan,
    own_device, own_fabric, own_platform, calibration, saved_workload,
)  # fmt: skip


def case(seed: int) -> Case:
    """The kinds take turns."""
    return KINDS[seed % len(KINDS)](random.Random(seed))


def outcome(case: Case, folder: Path) -> str:
    """ "answer" or "refusal"; anything else that may come of a case is an AssertionError."""
    folder.mkdir()
    for name, content in case.files.items():
        if isinstance(content, Path):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    arguments = [str(folder / each) if each in case.files else each for each in case.arguments]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([*arguments, "--json"])
    return check(code, out.getvalue(), err.getvalue())


def check(code: int, out: str, err: str) -> str:
    """An answer of numbers that make sense, or one line."""
    if code == 2:
        lines = err.splitlines()
        assert not out
        assert len(lines) == 1, err
        assert lines[0].startswith("steptime: error: "), err
        assert lines[0].isprintable(), err
        assert len(lines[0]) <= LONGEST_MESSAGE, f"{len(lines[0])} characters: {lines[0][:300]}"
        return "refusal"
    assert code == 0, f"exit code {code}: {err}"
    answer = json.loads(out, parse_constant=_not_a_number)
    for plan in answer.get("plans", [answer]):
        assert 0 < plan["step_time_ms"] < 1e12, plan["step_time_ms"]
    _check_numbers(answer, "")
    return "answer"


def _not_a_number(text: str) -> None:
    raise AssertionError(f"{text} in an answer")


def _check_numbers(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, each in value.items():
            _check_numbers(each, f"{where}.{name}")
    elif isinstance(value, list):
        for each in value:
            _check_numbers(each, where)
    elif isinstance(value, int | float):
        assert math.isfinite(value), where
        # A table of a given plan may be better off elsewhere.
        assert value >= 0 or where.endswith(".moved_ms"), f"{where} is {value}"
