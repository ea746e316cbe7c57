"""TorchRec's planner and our search on the same tables with the same kinds: both plans by our step, then by its estimator.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/sharding_torchrec.py [--cases 200x32 1000x128] [--plans FOLDER]

Needs torchrec (_sharding_torchrec_plans.py says which). Its planner has ten minutes for a plan and a process of its own; its
topology has eight GPUs to a node. With --plans its plans are kept there, and those that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from _sharding_torchrec_plans import estimated_ms, everywhere_ms, topology
from sharding_search import PLATFORM, drawn_model
from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import COLUMN_WISE, EVERYWHERE, KINDS, TABLE_WISE, Division, Placement, Plan
from steptime._platforms.platform import Platform
from steptime._shard.given_plans import evaluated
from steptime._shard.search import Searched, search, usual_evaluations
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task
from steptime._sim.composed import Evaluation
from steptime_lab.validate.sharding.estimates import planner_costs

CASES = ("60x4", "200x32", "1000x128")
# It looks at its clock between proposals, not while it lists options, which can take longer.
SECONDS, MOST_SECONDS = 600, 1800
# Of columns: its default of 128 would leave these tables whole.
_SLICES = ("--columns", "32")
# The same as slices of columns, but on ranks of one node.
_SAME = {"table_column_wise": COLUMN_WISE}


@dataclass(frozen=True)
class Way:
    """Kinds that a plan may have, ours and what is said to the planner."""

    name: str
    kinds: tuple[str, ...]
    said: tuple[str, ...]


WAYS = (
    Way("whole", (TABLE_WISE,), ("--kinds", TABLE_WISE)),
    Way("whole, told bandwidths", (TABLE_WISE,), ("--kinds", TABLE_WISE, "--told")),
    Way("whole and column-wise", (TABLE_WISE, COLUMN_WISE), ("--kinds", TABLE_WISE, COLUMN_WISE, *_SLICES)),
    Way("four kinds", KINDS, ("--kinds", *KINDS, *_SLICES)),
    Way("four kinds, told bandwidths", KINDS, ("--kinds", *KINDS, *_SLICES, "--told")),
    Way("its defaults", KINDS, ()),
)


Found = Mapping[tuple[str, Way], Mapping[str, Any] | None]
"""Plans by case and way."""


def main() -> None:
    if find_spec("torchrec") is None:
        print("torchrec is not installed; nothing to compare with")
        return
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--cases", nargs="+", default=CASES)
    given.add_argument("--plans", type=Path)
    asked = given.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.plans or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = {(case, way): planned(case, way, folder) for case in asked.cases for way in WAYS}
    by_step(asked.cases, found)
    by_estimator(asked.cases, found)


def planned(case: str, way: Way, folder: Path) -> dict[str, Any] | None:
    """What TorchRec's planner finds; None where it finds nothing in time."""
    kept = folder / f"{case}-{way.name.replace(',', '').replace(' ', '-')}.json"
    if not kept.exists():
        script = Path(__file__).with_name("_sharding_torchrec_plans.py")
        command = [sys.executable, str(script), case, str(kept), "--seconds", str(SECONDS), *way.said]
        try:
            subprocess.run(command, check=True, timeout=MOST_SECONDS, env={**os.environ, "PYTHONHASHSEED": "0"})
        except subprocess.TimeoutExpired:
            kept.write_text("null", encoding="utf-8")
    found: dict[str, Any] | None = json.loads(kept.read_text(encoding="utf-8"))
    return found


def by_step(cases: Sequence[str], found: Found) -> None:
    """Both plans by our evaluation of the step; our search once for each set of kinds."""
    print("| case | kinds | our step, ms | its plan's | slower by | our search, s | its planner, s | its plan |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        platform, known = _platform(case), dict[tuple[str, ...], Searched]()
        for way in WAYS:
            task, theirs = _task(case, way), found[case, way]
            if theirs is None:
                print(f"| {case} | {way.name} | | no plan in {MOST_SECONDS // 60} minutes | | | | |")
                continue
            if way.kinds not in known:
                known[way.kinds] = search(task, platform, SearchBudget(usual_evaluations(task.model, task.ranks)))
            print(f"| {case} | {way.name} | {_compared(known[way.kinds], theirs, task, platform)}", flush=True)


def _compared(ours: Searched, theirs: Mapping[str, Any], task: Task, platform: Platform) -> str:
    """The cells of a line. Of a plan with tables that we do not evaluate, what the others take at least."""
    part, best = modelled(theirs, task), ours.best.step_ns
    plan = mixed(theirs, part)
    took = f"{ours.seconds:.1f} | {theirs['seconds']:.1f} | {_said(theirs)} |"
    if not any(plan.divided(part.tables)[0].slices):
        return f"{best / 1e6:.2f} | not evaluated | | {took}"
    step = evaluated(part, platform, {"theirs": plan})[0].step_ns
    least = "" if len(part.tables) == len(task.tables) else "at least "
    return f"{best / 1e6:.2f} | {least}{step / 1e6:.2f} | {least}{step / best - 1:+.1%} | {took}"


def by_estimator(cases: Sequence[str], found: Found) -> None:
    """Our search with TorchRec's estimator in place of the step; both plans by the real estimator, with its own bandwidths."""
    print("\n| case | kinds | our plan's estimate, ms | its plan's | larger by | our search, s | its planner, s |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        for way in (one for one in WAYS if "--told" not in one.said):
            task, theirs = _task(case, way), found[case, way]
            if theirs is None:
                continue
            machine, platform = topology(task.ranks), _platform(case)
            began = time.monotonic()
            plan = searched_by_estimator(task, platform, machine)
            took = time.monotonic() - began
            value, other = estimated_ms(task.model, plan, machine), theirs["estimate_ms"]
            print(
                f"| {case} | {way.name} | {value:.2f} | {other:.2f} | {other / value - 1:+.1%} | {took:.1f} | "
                f"{theirs['seconds']:.1f} |",
                flush=True,
            )


def searched_by_estimator(task: Task, platform: Platform, machine: Any) -> Plan:
    """The plan our search finds with its estimator.

    What the search adds for tables that every rank has a part of cannot be replaced, so those are chosen here as the search
    chooses copies: where they cost every rank less than their share of a whole table's cost.
    """
    whole = 1e3 * planner_costs(task.model, task.ranks)
    kinds = [kind for kind in EVERYWHERE if kind in task.constraints.kinds]
    costs = np.array([whole / task.ranks, *(everywhere_ms(task.model, kind, machine) for kind in kinds)])
    names = ["", *kinds]
    kind_of = {table.name: names[place] for table, place in zip(task.tables, np.argmin(costs, axis=0), strict=True)}
    rest = replace(task.model, tables=tuple(table for table in task.tables if not kind_of[table.name]))
    usual = Constraints(kinds=tuple(kind for kind in task.constraints.kinds if kind in (TABLE_WISE, COLUMN_WISE)))
    found = search(
        Task(rest, task.ranks, usual),
        platform,
        SearchBudget(usual_evaluations(rest, task.ranks)),
        evaluator=Estimator(rest, task.ranks),
    ).best.plan
    every = {name: Placement(kind, tuple(range(task.ranks))) for name, kind in kind_of.items() if kind}
    return Plan(task.ranks, {**found.placements, **every})


@dataclass(frozen=True)
class Estimator:
    """The largest sum over ranks of what its estimator says of their shards, in place of the step."""

    model: Dlrm
    ranks: int

    def evaluate(self, rank_of: npt.NDArray[np.intp], division: Division, *, exact: bool = False) -> Evaluation:  # noqa: ARG002
        costs = 1e9 * planner_costs(replace(self.model, tables=division.shard_tables(self.model.tables)), self.ranks)
        plans = np.atleast_2d(rank_of)
        sums = np.zeros((len(plans), self.ranks))
        np.add.at(sums, (np.arange(len(plans))[:, None], plans), costs)
        none = np.zeros_like(sums)
        return Evaluation(sums.max(axis=1), sums.max(axis=1), sums, none, none, none, np.zeros(len(plans), dtype=np.bool_))

    def simulate(self, rank_of: npt.NDArray[np.intp], division: Division) -> Evaluation:
        return self.evaluate(rank_of, division)


def modelled(found: Mapping[str, Any], task: Task) -> Task:
    """The task without the tables that its plan divides, or keeps outside GPU memory, in ways that we do not evaluate."""
    placed = found["tables"]
    kept = tuple(table for table in task.tables if _kind(placed[table.name]) in KINDS)
    return replace(task, model=replace(task.model, tables=kept))


def mixed(found: Mapping[str, Any], task: Task) -> Plan:
    """Its plan of the tables of a task, as ours."""
    placed = {table.name: found["tables"][table.name] for table in task.tables}
    values = {name: {"kind": _kind(one), "ranks": one["ranks"]} for name, one in placed.items()}
    return Plan.from_dict(values, task.tables, task.ranks)


def _said(found: Mapping[str, Any]) -> str:
    """How many tables of each kind, and how many proposals it made of them."""
    kinds = Counter(_kind(one) for one in found["tables"].values())
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) + f"; {found['proposals']} proposals"


def _kind(one: Mapping[str, Any]) -> str:
    """By our names; a slice that is all of a table is the table."""
    kind = _SAME.get(one["kind"], one["kind"])
    kind = TABLE_WISE if kind == COLUMN_WISE and len(one["ranks"]) == 1 else kind
    return kind if one["kernel"] in ("fused", "dense") else f"{kind} ({one['kernel']})"


def _task(case: str, way: Way) -> Task:
    tables, ranks = map(int, case.split("x"))
    return Task(drawn_model(tables, ranks), ranks, Constraints(kinds=way.kinds))


def _platform(case: str) -> Platform:
    return Platform.load(str(PLATFORM), ranks=int(case.split("x")[1]))


if __name__ == "__main__":
    main()
