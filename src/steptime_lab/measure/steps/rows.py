"""A case as a row of `steps` or `sharding`: what was asked, its memory, its lookups."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.group import Group
from steptime._measurements.store import key_of
from steptime_lab.measurements.sets import measured_set

if TYPE_CHECKING:
    from steptime_lab.workloads.case import Case, Step


def asked(case: Case, share: int, fabric: str) -> dict[str, Any]:
    """The columns that say what is measured."""
    return {
        "workload": case.workload,
        "name": case.name,
        "config": json.dumps(case.config, separators=(",", ":"), sort_keys=True),
        "precision": case.precision,
        "batch": case.batch,
        "ranks": case.ranks,
        "share": share,
        "fabric": fabric,
        "plan": None if case.plan is None else json.dumps(case.plan, separators=(",", ":")),
        "task": case.task or None,
        "rule": case.rule or None,
        "block": 0,
    }


def key_of_case(case: Case, share: int, fabric: str, *, name: str = "steps", block: int = 0) -> str:
    """The key of the row that this case gives."""
    return key_of(measured_set(name), {**asked(case, share, fabric), "block": block})


def lookups_json(case: Case, step: Step, group: Group) -> str | None:
    """Lookup statistics of every iteration and table, on every rank; None without tables.

    A list with one object per iteration: table -> [lookups, distinct rows, [17 bins of reuse]].
    """
    names = [table["name"] for table in case.config.get("tables", ())]
    plan = case.plan or {}
    mine = [name for name in names if plan.get(name, 0) == group.rank]
    iterations = [
        {
            name: [lookup.lookups, lookup.unique, [round(share, 4) or 0 for share in lookup.reuse]]
            for name, lookup in zip(mine, step.lookups(iteration), strict=False)
        }
        for iteration in range(step.batches)
    ]
    parts = [json.loads(text) for text in group.gather_text(json.dumps(iterations))]
    merged = [{name: lookup for part in parts for name, lookup in part[at].items()} for at in range(step.batches)]
    return json.dumps(merged, separators=(",", ":"), sort_keys=True) if any(merged) else None
