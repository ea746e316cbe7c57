"""Damaged tables of embeddings: DLRM configs, sharding tasks, CSV, TorchRec collections, plans and statistics of lookups."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.case import Case, Kind, damaged_json, damaged_text
from tests.fuzz.samples import COLLECTION, DLRM, PLANS, TABLES, TASK

from steptime._api.read import read
from steptime._lookups.saved import to_dict
from steptime._lookups.workload import WorkloadLookups

MULTI = ("--platform", "2xh200-nvlink")
_CELLS = (
    "", "0", "-1", "nan", "inf", "1e400", "text", "9" * 5000, "x" * 140_000, "1_0", "\0", '"', ",", "user", "9" * 18, "1e9",
)  # fmt: skip
_PAGES: tuple[tuple[str, ...], ...] = ((), (), (), (), (), ("--html", "page.html"), ("--trace", "lanes.json"))


def _predicted(draw: random.Random, name: str, content: str | bytes, *more: str, **files: str | bytes) -> Case:
    """Mostly as JSON, now and then with a page or a timeline."""
    output = draw.choice(_PAGES)
    form = ("--json",) if draw.random() < 0.85 else ()
    given = {name: content, **{each.replace("_", "."): text for each, text in files.items()}}
    return Case(("predict", name, *MULTI, *more, *form, *output), given, output[1:])


def dlrm(draw: random.Random) -> Case:
    return _predicted(draw, "model.toml", damaged_text(draw, DLRM))


def task(draw: random.Random) -> Case:
    damaged = damaged_text(draw, TASK)
    if draw.random() < 0.5:
        return _predicted(draw, "task.toml", damaged)
    if draw.random() < 0.5:
        plan = json.dumps(draw.choice(PLANS))
        files = {"task.toml": damaged, "plan.json": plan}
        return Case(("shard", "task.toml", *MULTI, "--evaluate", "plan.json", "--json"), files)
    return Case(("shard", "task.toml", *MULTI, "--evaluations", "20", "--json"), {"task.toml": damaged})


def csv(draw: random.Random) -> Case:
    tables = _csv(draw)
    if draw.random() < 0.5:
        return _predicted(draw, "tables.csv", tables)
    files = {"tables.csv": tables, "plan.json": json.dumps(draw.choice(PLANS))}
    return Case(("shard", "tables.csv", *MULTI, "--evaluate", "plan.json", "--json"), files)


def _csv(draw: random.Random) -> str | bytes:
    if draw.random() < 0.3:
        return damaged_text(draw, TABLES)
    rows = [line.split(",") for line in TABLES.splitlines()]
    row = draw.choice(rows)
    row[draw.randrange(len(row))] = draw.choice(_CELLS)
    return "\n".join(",".join(row) for row in rows)


def collection(draw: random.Random) -> Case:
    return _predicted(draw, "collection.json", damaged_json(draw, COLLECTION))


def plan(draw: random.Random) -> Case:
    damaged = damaged_json(draw, draw.choice(PLANS))
    if draw.random() < 0.5:
        return _predicted(draw, "task.toml", TASK, "--plan", "plan.json", plan_json=damaged)
    files = {"task.toml": TASK, "plan.json": damaged}
    return Case(("shard", "task.toml", *MULTI, "--evaluate", "plan.json", "--json"), files)


@cache
def _lookups() -> tuple[Any, Any]:
    """What the DLRM looks up, and the statistics of one of its tables."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.toml"
        file.write_text(DLRM, encoding="utf-8")
        found = read(file).lookups
        assert isinstance(found, WorkloadLookups)
        found.save(Path(folder) / "lookups.json")
        whole = json.loads((Path(folder) / "lookups.json").read_text(encoding="utf-8"))
    first = next(iter(found.ranks.values()))
    return whole, to_dict(first.steps.steps[0][0])


def lookups(draw: random.Random) -> Case:
    damaged = damaged_json(draw, _lookups()[0])
    return _predicted(draw, "model.toml", DLRM, "--lookups", "lookups.json", lookups_json=damaged)


def days(draw: random.Random) -> Case:
    """Lookups of several days for one plan."""
    files = {"task.toml": DLRM, "monday.json": json.dumps(_lookups()[0]), "tuesday.json": damaged_json(draw, _lookups()[0])}
    words = ("shard", "task.toml", *MULTI, "--lookups", "monday.json", "--lookups", "tuesday.json", "--evaluations", "5")
    return Case((*words, "--json"), files)


def statistics(draw: random.Random) -> Case:
    """The file that a table's statistics are in."""
    model = DLRM.replace('skew = { kind = "zipf", alpha = 0.9 }', 'statistics = "user.json"', 1)
    return _predicted(draw, "model.toml", model, user_json=damaged_json(draw, _lookups()[1]))


KINDS: dict[str, Kind] = {
    "dlrm": dlrm, "task": task, "csv": csv, "collection": collection, "plan": plan, "lookups": lookups, "days": days,
    "statistics": statistics,
}  # fmt: skip
