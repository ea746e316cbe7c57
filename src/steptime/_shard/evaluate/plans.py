"""Plans that somebody else made: read from a file and evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steptime._build.dlrm.plan import TABLE_WISE, Division, Plan
from steptime._build.dlrm.plan_files import read_plans
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.divided import DividedEvaluator
from steptime._shard.evaluate.simulated import played_ns
from steptime._shard.task.memory import memory_of, rank_limit
from steptime._shard.task.task import Task
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Given:
    """A given plan, its predicted step, and the fullest rank."""

    name: str
    plan: Plan
    step_ns: float
    fullest_rank: int
    fullest_bytes: int
    fits: bool


def plans_in(path: Path, task: Task) -> dict[str, Plan]:
    """Plans by name, in whichever form `read_plans` knows; those that move a pinned table are refused."""
    plans = {
        name: Plan.from_dict(values, task.tables, task.ranks, f"{path}, plan {name!r}")
        for name, values in read_plans(path).items()
    }
    for name, plan in plans.items():
        task.constraints.check_pins(plan, f"{path}, plan {name!r}")
    return plans


def evaluated(
    task: Task, platform: Platform, plans: Mapping[str, Plan], calibration: Calibration = UNCALIBRATED
) -> list[Given]:
    """The plans, fastest first; those that divide tables alike are evaluated together."""
    alike: dict[Division, list[tuple[str, Sequence[int]]]] = {}
    for name, plan in plans.items():
        division, owners = plan.divided(task.tables)
        if task.model.interaction == "dot" and set(division.kinds) != {TABLE_WISE}:
            raise InputError(f'plan {name!r} divides tables, and interaction "dot" is modelled for whole tables only')
        alike.setdefault(division, []).append((name, owners))
    limit, outside = rank_limit(platform.device.limits, task.ranks, task.constraints.memory_bytes)
    results = []
    for division, group in alike.items():
        places = np.array([one for _, one in group], dtype=np.intp)
        if division.everywhere():  # every such plan is played: its ops are in the program
            steps = np.array([played_ns(task.model, platform, plans[name], calibration) for name, _ in group])
        else:
            evaluator = DividedEvaluator.of(task.model, division, platform, task.ranks, calibration, exact=True)
            steps = evaluator.evaluate(places).step_ns
        memory = memory_of(task.model, division, task.ranks, limit, outside)
        used = memory.used(places, task.ranks)
        for (name, _), step, held in zip(group, steps.tolist(), used, strict=True):
            fullest = int(np.argmax(held))
            results.append(Given(name, plans[name], step, fullest, int(held[fullest]), bool(held[fullest] <= memory.limit)))
    return sorted(results, key=lambda one: (one.step_ns, one.name))
