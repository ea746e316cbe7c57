"""`shard`: the embedding sharding of a task with the shortest predicted step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steptime._api.predict import calibration_for, platform_for
from steptime._build.config_values import Overrides
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform
from steptime._report.answers import Sharding
from steptime._report.cost import checked_price
from steptime._shard.days import OBJECTIVES, WORST, day_models, search_days
from steptime._shard.evaluator import Evaluator
from steptime._shard.explain import explain
from steptime._shard.search import check_ranks, search, usual_evaluations
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task, read_task
from steptime.errors import InputError


def shard(
    task: str | Path | Task,
    platform: str | Path | Platform,
    *,
    ranks: int | None = None,
    batch: int | None = None,
    settings: Mapping[str, Any] | None = None,
    fabric: str | Path | None = None,
    memory_bytes: int | None = None,
    headroom: float | None = None,
    calibration: str | Path | Calibration | None = None,
    budget_s: float | None = None,
    evaluations: int | None = None,
    lookups: Sequence[str | Path] = (),
    objective: str = WORST,
    price: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Sharding:
    """Search for the fastest plan of a task on a platform, and explain it.

    `task` is a file: a DLRM config with constraints (`.toml`, `.json`), a `.csv` of tables or a TorchRec collection. `ranks`,
    `batch`, `settings` (keys of a config, dotted), `memory_bytes` (of a rank, at most) and `headroom` (a share of it that is
    left free) change it, `fabric` the platform; `budget_s` and `evaluations` bound the search. `lookups` are files of
    statistics, of a day each: the plan is then the best on their `worst` or on their `mean`, as the objective says.
    `price` is what one GPU costs for an hour. `progress` is told how far the search is.
    """
    checked_price(price)
    machine = machine_for(platform, ranks, fabric)
    sharding_task = task_for(
        task, machine, ranks=ranks, batch=batch, settings=settings, memory_bytes=memory_bytes, headroom=headroom
    )
    speed = calibration_for(calibration, machine)
    budget = SearchBudget(
        evaluations or usual_evaluations(sharding_task.model, sharding_task.ranks), budget_s, progress=progress
    )
    if objective not in OBJECTIVES:
        raise InputError(f"objective is {objective!r}; expected {' or '.join(OBJECTIVES)}")
    if not lookups:
        evaluator = Evaluator(sharding_task.model, machine, sharding_task.ranks, calibration=speed)
        searched = search(sharding_task, machine, budget, evaluator=evaluator)
        return Sharding(searched, explain(searched, evaluator), machine, price=price)
    models = day_models([Path(file) for file in lookups], sharding_task.model)
    found = search_days(replace(sharding_task, doubts=()), machine, models, objective, budget, speed)
    return Sharding(found.searched, explain(found.searched, found.longest), machine, found.days, price)


def machine_for(platform: str | Path | Platform, ranks: int | None, fabric: str | Path | None = None) -> Platform:
    """Fewer ranks than a platform has leave the others idle; more are refused by whoever knows the task."""
    return platform_for(platform, None if ranks == 1 else ranks, fabric=fabric)


def task_for(
    task: str | Path | Task,
    machine: Platform,
    *,
    ranks: int | None,
    batch: int | None,
    settings: Mapping[str, Any] | None = None,
    memory_bytes: int | None,
    headroom: float | None = None,
) -> Task:
    """The task in a file, for these ranks, this batch and this memory."""
    sharding_task = task
    if not isinstance(sharding_task, Task):
        overrides = Overrides.of(sharding_task, batch, ranks, machine.ranks, settings)
        sharding_task = read_task(Path(sharding_task), overrides, memory_bytes, headroom)
    check_ranks(sharding_task, machine)
    return sharding_task
