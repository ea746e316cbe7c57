"""`measure sharding`: the plans of one task after another, interleaved in blocks, so that their differences are paired."""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steptime._calibrate.collectives.cases import FABRIC, fabric_of
from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group, no_collector
from steptime._calibrate.harness.ranks import Layout
from steptime._calibrate.harness.session import Session
from steptime._measurements.recipe import spread_of
from steptime._measurements.store import read
from steptime.errors import InputError
from steptime_lab.measure.restarts import Attempts, CaseGroup, CrashMarker, SharedMps, free
from steptime_lab.measure.steps.timed import calibrate
from steptime_lab.measure.steps.timing import asked, key_of_case, lookups_json, steps_for, time_once
from steptime_lab.measurements.sets import SHARDING

if TYPE_CHECKING:
    from steptime._build.dlrm.model import Dlrm
    from steptime_lab.workloads.case import Case, Step

# A pick is as good as the fastest when it is within this of it.
CLOSE = 0.10

Times = dict[str, dict[tuple[Any, ...], float]]  # plan -> (process, block) -> nanoseconds


def by_task(rows: Iterable[Mapping[str, Any]]) -> dict[str, Times]:
    """Per task and rule the time in every block; rules that make the same plan share its times."""
    result: dict[str, Times] = {}
    for row in rows:
        block = (row["run"], row["process"], row["block"])
        for rule in (row["rule"], *filter(None, (row["aliases"] or "").split(","))):
            result.setdefault(row["task"], {}).setdefault(rule, {})[block] = row["time_ns"]
    return result


def medians_of(times: Times) -> list[float]:
    """Of every rule over its blocks."""
    return [float(np.median(list(blocks.values()))) for blocks in times.values()]


def chance(times: Times) -> float:
    """How often a rule picked at random is within 10 % of the fastest."""
    medians = medians_of(times)
    return sum(median <= (1 + CLOSE) * min(medians) for median in medians) / len(medians)


def slowest_over_fastest(times: Times) -> float:
    """How far apart the rules are."""
    medians = medians_of(times)
    return max(medians) / min(medians)


def paired_noise(times: Times) -> float:
    """Median over the rules: how far a rule's time over its block's mean spreads from block to block; NaN where no block has
    all rules."""
    every = [set(blocks) for blocks in times.values()]
    common = sorted(set.intersection(*every), key=str)
    if not common:
        return math.nan
    means = {block: float(np.mean([blocks[block] for blocks in times.values()])) for block in common}
    return float(np.median([spread_of([blocks[block] / means[block] for block in common]) for blocks in times.values()]))


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line over all tasks."""
    tasks = list(by_task(rows).values())
    if not tasks:
        return "sharding: nothing was timed"
    spread = float(np.median([slowest_over_fastest(task) for task in tasks]))
    noises = [noise for noise in map(paired_noise, tasks) if not math.isnan(noise)]
    noise = float(np.median(noises)) if noises else math.nan
    return (
        f"sharding: {len(tasks)} tasks; a random pick is within {CLOSE:.0%} of the fastest in "
        f"{np.mean([chance(task) for task in tasks]):.0%} of draws; slowest over fastest plan {spread:.2f} (median), "
        f"noise of a paired time {noise:.1%} (median)"
    )


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


BLOCKS = 8
_SMALL_BLOCKS, _SMALL_TASKS, _SMALL_BATCH = 2, 2, 32
# One task in so many is timed again in another group of processes.
_REPEATED = 5
_TASK_S = 120.0
# What is timed of a plan in a block; 2,240 of them take four minutes.
_TIMED_S = 0.06
_LEAST_STEPS = 5
_WARM_UP = 2
# Before each timing: the tables and the caches of another plan's turn are gone after one step.
_WARM_UP_IN_BLOCK = 1
# A task has to end before the time does: about what one takes.
_NEED_S = 8.0


@dataclass(frozen=True)
class PlansPlace:
    """Where the plans are timed."""

    layout: Layout
    share: int
    fabric: str


def run(session: Session, options: Options) -> None:
    """Times every task under its plans, then a fifth of them again in other processes; ends with what was found, in a line."""
    ranks = max(options.ranks)
    share = ranks if options.share_gpu else 1
    place = PlansPlace(Layout(ranks, options.share_gpu, options.device), share, fabric_of(ranks, share, options.device))
    with SharedMps(session, options) as daemon:
        skipped: set[str] = set()
        for turn in range(2):
            _run_turn(session, options, place, daemon, turn, skipped)
    print(summary(timed_at(place, options, read(session.folder, SHARDING).to_pylist())), file=sys.stderr, flush=True)


def timed_at(place: PlansPlace, options: Options, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the tasks of these options at a place: plans of one task on other ranks or wires are no rivals."""
    asked_now = {(task.name, task.batch) for task in known_tasks(options)}
    where = (place.layout.ranks, place.share, place.fabric)
    return [
        row for row in rows if (row["ranks"], row["share"], row["fabric"]) == where and (row["task"], row["batch"]) in asked_now
    ]


def names(options: Options) -> list[str]:
    """What `--only` may name: tasks."""
    return [task.name for task in known_tasks(options)]


def _run_turn(session: Session, options: Options, place: PlansPlace, daemon: SharedMps, turn: int, skipped: set[str]) -> None:
    """Goes through the tasks that are due; after one that ended its ranks, with a fresh group and without it."""

    def plan(names: Sequence[str], start: int) -> dict[str, Any]:
        options_of_plan = {"small": options.small, "seed": options.seed, "plans": given_plans(options)}
        return session.to_plan(tasks=names, fabric=place.fabric, turn=turn, calibrate=start == 0, **options_of_plan)

    marker = CrashMarker(session.folder, "sharding")
    group = CaseGroup(session, __name__, place.layout, daemon, marker, {FABRIC: place.fabric}, grace_s=_TASK_S)
    tasks = lambda: due(session, options, place, turn)  # noqa: E731
    group.run(session.budget, tasks, plan, skipped, names=lambda case: [case.partition("/")[0]])


def due(session: Session, options: Options, place: PlansPlace, turn: int) -> list[str]:
    """Names of the tasks of which a plan was not timed in every block often enough."""
    done = session.store.done(SHARDING)
    given = given_plans(options)
    tasks = tasks_of(small=options.small, only=options.only or tuple(given))
    blocks = range(_SMALL_BLOCKS if options.small else BLOCKS)
    results = []
    for task in tasks[::_REPEATED] if turn else tasks:
        cases = [case for case, _ in plans_of(task, max(options.ranks), given)]
        keys = [
            key_of_case(case, place.share, place.fabric, name="sharding", block=block) for case in cases for block in blocks
        ]
        if any(done[key] <= turn for key in keys):
            results.append(task.name)
    return results


def tasks_of(*, small: bool, only: Sequence[str]) -> list[Dlrm]:
    """The tasks to time: the studied ones, or those that `only` names of these and of the further ones."""
    from steptime_lab.workloads.drawn_tasks import further_tasks, sharding_tasks

    if small:
        return [task for task in map(_smaller, sharding_tasks()[:_SMALL_TASKS]) if not only or task.name in only]
    return [task for task in (*sharding_tasks(), *further_tasks()) if task.name in only] if only else list(sharding_tasks())


def known_tasks(options: Options) -> list[Dlrm]:
    """All that can be named."""
    from steptime_lab.workloads.drawn_tasks import further_tasks

    studied = tasks_of(small=options.small, only=())
    return studied if options.small else [*studied, *further_tasks()]


def _smaller(task: Dlrm) -> Dlrm:
    """The same task on a few rows and samples."""
    tables = [
        replace(table, generator=replace(table.generator, rows=64 * (1 + at), pooling=3.0))
        for at, table in enumerate(task.tables)
    ]
    return replace(task, batch=_SMALL_BATCH, tables=tuple(tables))


def given_plans(options: Options) -> Given:
    """The plans of the file that the options name; a task that there is not, or a plan that does not fit one, says so."""
    if options.plans is None:
        return {}
    return read_plans(options.plans, known_tasks(options), max(options.ranks))


def plans_of(task: Dlrm, ranks: int, given: Given | None = None) -> list[tuple[Case, str]]:
    """A case per distinct plan of the rules and of those given, and the names of the others that make the same one."""
    from steptime._shard.rules import RULES
    from steptime_lab.workloads.cases import dlrm_case

    result: dict[str, Case] = {}
    others: dict[str, list[str]] = {}
    built = [dlrm_case(task, ranks, f"{task.name}-{rule}-r{ranks}", task.name, rule) for rule in RULES]
    for name, placed in (given or {}).get(task.name, {}).items():
        named = replace(built[0], name=f"{task.name}-{name}-r{ranks}", rule=name)
        built.append(replace(named, plan={table.name: placed[table.name] for table in task.tables}))
    for case in built:
        plan, rule = json.dumps(case.plan), case.rule
        if plan in result:
            others[plan].append(rule)
        else:
            result[plan], others[plan] = case, []
    return [(case, ",".join(others[plan])) for plan, case in result.items()]


def order_of(task: str, block: int, plans: int, *seeds: int) -> list[int]:
    """In which order a block times the plans: drawn anew for every block, the same on every rank."""
    drawn = np.random.default_rng([*seeds, zlib.crc32(task.encode()), block])
    return [int(at) for at in drawn.permutation(plans)]


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank's part in every task."""
    tasks = tasks_of(small=plan["small"], only=plan["tasks"])
    marker = CrashMarker(session.folder, "sharding")
    attempts = Attempts(group, session, marker, session.progress("sharding", len(tasks)), case_s=_TASK_S)
    with no_collector():
        if plan["calibrate"]:
            calibrate(group, session)
        for task in tasks:
            if not attempts.time_left(0.0 if plan["small"] else _NEED_S):
                break
            rows = _task(attempts, task, plan)
            if rows is not None:
                attempts.progress.step()
            if group.rank == 0:
                for row in rows or ():
                    session.store.add(SHARDING, row)
                session.store.flush()
    attempts.close()


def _task(attempts: Attempts, task: Dlrm, plan: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The rows of one task. Its plans stay built throughout: they share their tables, and switching takes nothing."""
    group = attempts.group
    built: list[tuple[Case, str, Step]] = []
    for case, aliases in plans_of(task, group.ranks, plan.get("plans")):
        step = attempts.attempt(f"{task.name}/{case.rule}", partial(_built, case, group))
        if step is not None:
            built.append((case, aliases, step))
        del step
    rows = attempts.attempt(task.name, lambda: blocks_of(task.name, built, group, plan)) if built else None
    for _, _, step in built:
        step.close()
    built.clear()
    free(group)
    return rows


def _built(case: Case, group: Group) -> Step:
    from steptime_lab.workloads.case import build

    step = build(case, group, group.device)
    for _ in range(_WARM_UP):
        step()
    group.synchronize()
    return step


def blocks_of(
    task: str, built: Sequence[tuple[Case, str, Step]], group: Group, plan: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every plan once in every block."""
    seconds = 0.0 if plan["small"] else _TIMED_S
    counts = [steps_for(seconds, time_once(step, group, _WARM_UP), _LEAST_STEPS) for _, _, step in built]
    # What tables look up does not depend on the plan: one row of a task has it for all.
    lookups = lookups_json(built[0][0], built[0][2], group)
    rows = []
    for block in range(_SMALL_BLOCKS if plan["small"] else BLOCKS):
        for turn, at in enumerate(order_of(task, block, len(built), plan["seed"], plan["turn"])):
            case, aliases, step = built[at]
            for _ in range(_WARM_UP_IN_BLOCK):
                step()
            time_ns = 1e9 * time_once(step, group, counts[at])
            rows.append({
                **asked(case, group.share, plan["fabric"]),
                "block": block,
                "turn": turn,
                "aliases": aliases,
                "steps_per_time": counts[at],
                "allocated_bytes": None,
                "reserved_bytes": None,
                "lookups": lookups if block == turn == 0 else None,
                "times_ns": [time_ns],
            })  # fmt: skip
    return rows
