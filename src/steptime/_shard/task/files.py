"""`read_task`: a task from a `.toml` or `.json` config, a CSV of tables, or a TorchRec `EmbeddingBagCollection` as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steptime._build.config_values import Values, read_toml
from steptime._build.dlrm.config import DlrmConfig, dlrm_of
from steptime._shard.plan.kind_names import KINDS, USUAL_KINDS
from steptime._shard.task.tables import listed_tables, torchrec_tables
from steptime._shard.task.task import Constraints, Task
from steptime.errors import InputError

_CONSTRAINTS = ("memory_bytes", "pinned", "kinds", "kinds_of")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says beside the file; `ranks` else the file's, else as many as the platform has."""

    platform_ranks: int
    ranks: int | None = None
    batch: int | None = None


def read_task(path: Path, asked: Asked) -> Task:
    """The task in a file, of whichever form its name says."""
    if path.suffix == ".csv":
        return listed_tables(_text(path), str(path), asked.ranks or asked.platform_ranks, asked.batch)
    if path.suffix == ".json":
        return _of_json(path, asked)
    if path.suffix != ".toml":
        raise InputError(
            f"{path}: no task by its name; expected a .toml or .json config, a .csv of tables, or TorchRec's .json"
        )
    return of_config(read_toml(path), path, asked)


def _of_json(path: Path, asked: Asked) -> Task:
    try:
        values = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); expected a task, see docs/sharding.md") from None
    tables = values.get("tables") if isinstance(values, dict) else values
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path}: no list of tables; expected a DLRM config, or the tables of an EmbeddingBagCollection")
    if any("num_embeddings" in table for table in tables):
        return torchrec_tables(tables, str(path), asked.ranks or asked.platform_ranks, asked.batch)
    return of_config(values, path, asked)


def of_config(values: Mapping[str, Any], path: Path, asked: Asked) -> Task:
    """A DLRM config (docs/configs.md) with `[constraints]`."""
    plain = {key: value for key, value in values.items() if key != "constraints"}
    if asked.batch is not None:
        plain["batch"] = asked.batch
    if asked.ranks is not None:
        plain = {key: value for key, value in plain.items() if key not in ("ranks", "plan")} | {"ranks": asked.ranks}
    config: DlrmConfig = dlrm_of(plain, str(path), path.parent)
    ranks = asked.ranks or (config.ranks if "ranks" in values or config.plan is not None else asked.platform_ranks)
    notes = []
    if "plan" in values or "rule" in values:
        notes.append("the config's own plan and rule are left aside: the search makes the plan")
    given = constraints_of(Values(values, str(path)).table("constraints")) if "constraints" in values else Constraints()
    return Task(config.model, ranks, given, tuple(notes))


def constraints_of(given: Values) -> Constraints:
    """`[constraints]` of a config."""
    given.only(_CONSTRAINTS)
    pinned = given.table("pinned").values if "pinned" in given.values else {}
    for name, rank in pinned.items():
        if type(rank) is not int:
            raise InputError(f"{given.where}, pinned: table {name!r} is on {rank!r}; expected a rank")
    of = given.table("kinds_of").values if "kinds_of" in given.values else {}
    return Constraints(
        memory_bytes=given.whole("memory_bytes", 1) if "memory_bytes" in given.values else None,
        pinned=dict(pinned),
        kinds=_kinds(given.values.get("kinds", list(USUAL_KINDS)), f"{given.where}, kinds"),
        kinds_of={name: _kinds(kinds, f"{given.where}, kinds_of, {name}") for name, kinds in of.items()},
    )


def with_memory(task: Task, memory_bytes: int | None) -> Task:
    """The same with another limit of a rank, if one is given."""
    if memory_bytes is None:
        return task
    return replace(task, constraints=replace(task.constraints, memory_bytes=memory_bytes))


def _kinds(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or any(kind not in KINDS for kind in value):
        raise InputError(f"{where} is {value!r}; expected a list of {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in value)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); expected a sharding task") from None
