"""What `steptime shard --json` writes: stable keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from steptime._notices import Notices
from steptime._report.answers import Sharding
from steptime._report.cost import cost_document
from steptime._report.json import SCHEMA_VERSION, Document, power_document
from steptime._report.verdict import verdict_of
from steptime._shard.days import Days
from steptime._shard.explain import Explained, PlanReasons
from steptime._shard.given_plans import GivenPlan
from steptime._shard.search import Option
from steptime._shard.task import Task
from steptime._units import ms


def shard_document(sharding: Sharding) -> Document:
    """The best plan, its runners-up, the usual rules, and why; and what plans lose on every day."""
    found, why, days = sharding.searched, sharding.explained, sharding.days
    best_rule = found.best_rule
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": sharding.verdict.to_dict(),
        "task": found.task.model.name,
        "platform": sharding.platform.name,
        "tables": len(found.task.tables),
        "batch": found.task.model.batch,
        "samples_per_s": sharding.samples_per_s,
        "mfu": why.best.predicted.mfu,
        **power_document(why.best.predicted.power),
        **cost_document(sharding.cost),
        "best": _option(found.best, why),
        "alternatives": [_option(option, why) for option in found.options[1:]],
        "rules": {name: None if option is None else ms(option.step_ns) for name, option in found.rules.items()},
        "rules_not_played": [name for name, option in found.rules.items() if option is not None and not option.played],
        "best_rule": None if best_rule is None else best_rule[0],
        "gain": None if why.gain is None else _gain(why),
        **_why(why.best),
        "every_rank_tables_ms": ms(why.every_rank_tables_ns),
        "analytic_ms": ms(why.every_rank_tables_ns),  # its name in the last release; goes with the next
        "searched_plans": found.searched_plans,
        "seconds": found.seconds,
        "kinds_tried": list(found.task.kinds),
        **({} if days is None else {"days": _days(days)}),
        **sharding.notices.to_dict(),
    }


def _days(days: Days) -> dict[str, Any]:
    return {
        "objective": days.objective,
        "names": list(days.names),
        "plans": [
            {
                "name": plan.name,
                "plan": plan.plan.to_dict(),
                "kinds": plan.plan.kinds(),
                "step_times_ms": [ms(step) for step in plan.steps_ns],
                "losses": list(days.losses(plan)),
                "objective_ms": ms(plan.objective_ns),
            }
            for plan in days.plans
        ],
    }


def evaluated_document(task: Task, plans: Sequence[GivenPlan]) -> Document:
    """What `--evaluate` writes: the given plans, those that fit first, then the fastest."""
    return {
        "schema_version": SCHEMA_VERSION,
        "task": task.model.name,
        "plans": [
            {
                "name": plan.name, "plan": plan.plan.to_dict(), "kinds": plan.plan.kinds(),
                "step_time_ms": ms(plan.step_ns), "played": plan.why is not None,
                "fits": plan.fit.fits, "fullest_rank": plan.fit.rank, "fullest_bytes": plan.fit.needed_bytes,
                **({} if plan.why is None else {
                    "verdict": verdict_of(plan.why.predicted).to_dict(), "interval_ms": _interval(plan.step_ns, plan.why),
                    **_why(plan.why),
                }),
            }
            for plan in plans
        ],
        **evaluated_notices(task, plans).to_dict(),
    }  # fmt: skip


def evaluated_notices(task: Task, plans: Sequence[GivenPlan]) -> Notices:
    """What the task leaves open, and what the steps of given plans say; `verdict` of each has its caveats."""
    steps = (text for plan in plans if plan.why is not None for texts in plan.why.predicted.notices[1:] for text in texts)
    return Notices.of((*task.notes, *steps))


def _interval(step_ns: float, why: PlanReasons) -> list[float]:
    return [factor * ms(step_ns) for factor in why.interval]


def _why(why: PlanReasons) -> dict[str, Any]:
    return {
        "bound": why.bound,
        "bound_by": why.predicted.bound.text,
        "ranks": [_rank(rank) for rank in map(asdict, why.ranks)],
        "reasons": [_reason(reason) for reason in map(asdict, why.reasons)],
    }


def _option(option: Option, why: Explained) -> dict[str, Any]:
    return {
        "plan": option.plan.to_dict(),
        "kinds": option.plan.kinds(),
        "step_time_ms": ms(option.step_ns),
        "interval_ms": _interval(option.step_ns, why.best),
        "strategy": option.by,
        "played": option.played,
    }


def _gain(why: Explained) -> dict[str, Any]:
    assert why.gain is not None
    return {
        "over": why.gain.rule,
        "share": why.gain.share,
        "interval": list(why.gain.interval),
        "larger_than_uncertainty": why.gain.sure,
    }


def _rank(values: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_ns", "_ms"): ms(value) if key.endswith("_ns") else value for key, value in values.items()}


def _reason(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key.replace("_ns", "_ms"): ms(value) if key.endswith("_ns") and value is not None else value
        for key, value in values.items()
    }
