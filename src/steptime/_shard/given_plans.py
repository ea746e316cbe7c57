"""Plans that somebody else made: read from a file and evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from steptime._build.dlrm.plan import Division, Plan
from steptime._build.dlrm.plan_files import read_plans
from steptime._build.dlrm.workload import check_kinds
from steptime._models.memory.fit import Fit
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluator import Evaluator
from steptime._shard.explain import PlacedShards, PlanReasons, why_of
from steptime._shard.memory import memory_of, rank_limit
from steptime._shard.task import Task
from steptime._units import NS_PER_MS
from steptime.errors import InputError

# Plans whose ranks and reasons are found: each is played, which takes a while.
_EXPLAINED = 20


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """A given plan, its predicted step, and the fullest rank; of plans without a reason as the search estimates them."""

    name: str
    plan: Plan
    step_ns: float
    fit: Fit
    why: PlanReasons | None = None  # of the fastest plans


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
) -> list[GivenPlan]:
    """The plans, those that fit first, then the fastest; those that divide tables alike are evaluated together."""
    alike: dict[Division, list[tuple[str, Sequence[int]]]] = {}
    for name, plan in plans.items():
        division, owners = plan.divided(task.tables)
        try:
            check_kinds(task.model, plan)
        except InputError as error:
            raise InputError(f"plan {name!r}: {error}") from None
        alike.setdefault(division, []).append((name, owners))
    evaluator = Evaluator(task.model, platform, task.ranks, calibration=calibration)
    limit, outside = rank_limit(platform.device.limits, task.ranks, task.constraints)
    results = []
    for division, group in alike.items():
        rank_of = np.array([owners for _, owners in group], dtype=np.intp)
        steps = evaluator.evaluate(rank_of, division, exact=True).step_ns
        memory = memory_of(task.model, division, task.ranks, limit, outside)
        for (name, _), step, held in zip(group, steps.tolist(), memory.used(rank_of, task.ranks), strict=True):
            fit = Fit.of_ranks(dict(enumerate(held.tolist())), memory.limit)
            results.append(GivenPlan(name, plans[name], step, fit))
    results.sort(key=lambda plan: (not plan.fit.fits, plan.step_ns, plan.name))
    shown = [_explained(plan, why_of(PlacedShards(task, evaluator, plan.plan))) for plan in results[:_EXPLAINED]]
    return [*sorted(shown, key=lambda plan: (not plan.fit.fits, plan.step_ns, plan.name)), *results[_EXPLAINED:]]


def _explained(plan: GivenPlan, why: PlanReasons) -> GivenPlan:
    """With the step and the memory that `predict` says."""
    fit = Fit.of_ranks({each.rank: each.used_bytes for each in why.ranks}, why.ranks[0].limit_bytes)
    return replace(plan, why=why, step_ns=why.predicted.step_time_ms * NS_PER_MS, fit=fit)
