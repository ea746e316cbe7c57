"""Plans that somebody else made: read from a file and evaluated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steptime._platforms.platform import Platform
from steptime._shard.evaluate.divided import DividedEvaluator
from steptime._shard.plan.kind_names import TABLE_WISE
from steptime._shard.plan.kinds import Division, MixedPlan
from steptime._shard.task.memory import memory_of, rank_limit
from steptime._shard.task.task import Task
from steptime._sim.modelled.step import UNCALIBRATED, Calibration
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Given:
    """A given plan, its predicted step, and the fullest rank."""

    name: str
    plan: MixedPlan
    step_ns: float
    fullest_rank: int
    fullest_bytes: int
    fits: bool


def read_plans(path: Path, task: Task) -> dict[str, MixedPlan]:
    """Plans by name, each table -> rank, [ranks] or {"kind": ..., "ranks": [...]}; one plan alone is called `plan`."""
    try:
        values = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); expected plans by name") from None
    named = _named(values, {table.name for table in task.tables}, path)
    return {name: MixedPlan.from_dict(plan, task.tables, task.ranks, f"{path}, plan {name!r}") for name, plan in named.items()}


def _named(values: Any, tables: set[str], path: Path) -> dict[str, Mapping[str, Any]]:
    if isinstance(values, list):
        values = {f"plan {place}": plan for place, plan in enumerate(values)}
    if not isinstance(values, dict) or not values:
        raise InputError(f"{path}: {type(values).__name__} found; expected plans by name, each a table of table and ranks")
    if set(values) <= tables:
        return {"plan": values}
    odd = next((name for name, plan in values.items() if not isinstance(plan, dict)), None)
    if odd is not None:
        raise InputError(f"{path}: plan {odd!r} is {values[odd]!r}; expected a table of table and ranks")
    return values


def evaluated(
    task: Task, platform: Platform, plans: Mapping[str, MixedPlan], calibration: Calibration = UNCALIBRATED
) -> list[Given]:
    """The plans, fastest first; those that divide tables alike are evaluated together."""
    alike: dict[Division, list[tuple[str, Sequence[int]]]] = {}
    for name, plan in plans.items():
        division, owners = plan.divided(task.tables)
        if task.model.interaction == "dot" and set(division.kinds) != {TABLE_WISE}:
            raise InputError(f'plan {name!r} divides tables, and interaction "dot" is modelled for whole tables only')
        alike.setdefault(division, []).append((name, owners))
    limit, outside = rank_limit(platform.device.limits, task.ranks, task.constraints.memory_bytes)
    found = []
    for division, group in alike.items():
        places = np.array([one for _, one in group], dtype=np.intp)
        evaluator = DividedEvaluator.of(task.model, division, platform, task.ranks, calibration, exact=True)
        steps = evaluator.evaluate(places).step_ns
        memory = memory_of(task.model, division, task.ranks, limit, outside)
        used = memory.used(places, task.ranks)
        for (name, _), step, held in zip(group, steps.tolist(), used, strict=True):
            fullest = int(np.argmax(held))
            found.append(Given(name, plans[name], step, fullest, int(held[fullest]), bool(held[fullest] <= memory.limit)))
    return sorted(found, key=lambda one: (one.step_ns, one.name))
