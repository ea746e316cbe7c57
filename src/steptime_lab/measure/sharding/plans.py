"""Plans of a user's own that `measure sharding` times beside those of the rules: a JSON file, task: name: table: rank."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.errors import InputError

if TYPE_CHECKING:
    from steptime._build.dlrm.model import Dlrm

Given = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Task -> name -> table -> rank."""

# Names become rules of rows, several of them with commas between.
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")


def read_plans(file: Path, tasks: Sequence[Dlrm], ranks: int) -> Given:
    """The plans in a file, each checked against its task: every table on a rank that there is."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{file}: no readable plans ({error}); expected JSON, task: name: table: rank") from error
    if not isinstance(content, dict) or not content or not all(isinstance(item, dict) for item in content.values()):
        raise InputError(f"{file}: expected a JSON object with a task or more, each an object of named plans")
    known = {task.name: task for task in tasks}
    for name, plans in content.items():
        if name not in known:
            raise InputError(f"{file}: no sharding task is called {name!r}; there are {', '.join(list(known)[:3])}, ...")
        for plan, placed in plans.items():
            _check(f"{file}, {name}, {plan}", plan, placed, known[name], ranks)
    return content


def _check(where: str, name: str, placed: Any, task: Dlrm, ranks: int) -> None:
    from steptime._shard.rules import RULES

    if not _NAME.fullmatch(name) or name in RULES:
        raise InputError(f"{where}: a plan needs a short name of a-z, 0-9, _ and - that is no rule's")
    if not isinstance(placed, dict):
        raise InputError(f"{where}: expected an object of tables and their ranks")
    odd = sorted({table.name for table in task.tables} ^ set(placed))
    if odd:
        raise InputError(f"{where}: table {odd[0]!r} is in the plan or in the task only; expected every table once")
    for table, rank in placed.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
            raise InputError(f"{where}: table {table!r} is on {rank!r}; expected a rank from 0 to {ranks - 1}")
