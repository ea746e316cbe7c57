"""`measure sharding`: the plans of one task after another, interleaved in blocks, so that their differences are paired."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from steptime.measure.group import Group
from steptime.measure.mps import mps
from steptime.measure.options import Options
from steptime.measure.ranks import Layout, RanksError, run_ranks
from steptime.measure.session import Session
from steptime.measure.sharding_summary import summary
from steptime.measure.steps.attempts import Attempts, free
from steptime.measure.steps.flight import Flight
from steptime.measure.steps.rows import asked, fabric_of, key_of_case, lookups_json
from steptime.measure.steps.timing import no_collector, steps_for, time_once
from steptime.measurements.store import read

if TYPE_CHECKING:
    from steptime.sharding.tasks import ShardingTask
    from steptime.workloads.case import Case, Step

BLOCKS = 8
_SMALL_BLOCKS = 2
# One task in so many is timed again in another group of processes.
_REPEATED = 5
_RESTARTS = 4
_TASK_S = 120.0
# What is timed of a plan in a block; 2,240 of them take four minutes.
_TIMED_S = 0.07
_LEAST_STEPS = 5
_WARM_UP = 2
# A task has to end before the time does: about what one takes.
_NEED_S = 8.0
# Wires matter less on the fastest sockets there are, so that lookups, which plans differ in, matter more.
_FAST = {"loopback-2x2": {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}}


def run(session: Session, options: Options) -> None:
    """Times every task under its plans, then a fifth of them again in other processes; ends with what was found, in a line."""
    ranks = max(options.ranks)
    layout = Layout(ranks, options.share_gpu, options.device)
    share = ranks if options.share_gpu else 1
    fabric = fabric_of(ranks, share, options.device)
    fabric = "loopback-2x2" if fabric == "loopback" else fabric
    skipped: set[str] = set()
    with ExitStack() as stack:
        daemon = stack.enter_context(mps()) if options.share_gpu and options.device == "cuda" and ranks > 1 else None
        for turn in range(2):
            for _ in range(1 + _RESTARTS):
                lost = Flight(session.folder, "sharding").take()
                if lost:
                    session.warn(f"sharding: {lost} was in flight when its ranks ended; its task is skipped this time")
                    skipped.add(lost.partition("/")[0])
                names = [name for name in due(session, options, share, fabric, turn) if name not in skipped]
                if not names or session.budget.left_s() <= 0:
                    break
                plan = session.to_plan(
                    tasks=names, small=options.small, seed=options.seed, fabric=fabric, only=list(options.only)
                )
                try:
                    limit_s = session.budget.left_s() + _TASK_S
                    run_ranks("sharding", layout, plan, limit_s=limit_s, environment=_FAST.get(fabric), daemon=daemon)
                    break
                except RanksError as error:
                    session.warn(str(error))
    print(summary(read(session.folder, "sharding").to_pylist()), file=sys.stderr, flush=True)


def due(session: Session, options: Options, share: int, fabric: str, turn: int) -> list[str]:
    """Names of the tasks of which a plan was not timed in every block often enough."""
    done = session.store.done("sharding")
    tasks = tasks_of(small=options.small, only=options.only)
    blocks = range(_SMALL_BLOCKS if options.small else BLOCKS)
    found = []
    for task in tasks[::_REPEATED] if turn else tasks:
        cases = [case for case, _ in plans_of(task, max(options.ranks), options.seed)]
        keys = [key_of_case(case, share, fabric, name="sharding", block=block) for case in cases for block in blocks]
        if any(done[key] <= turn for key in keys):
            found.append(task.name)
    return found


def tasks_of(*, small: bool, only: Sequence[str]) -> list[ShardingTask]:
    """The tasks to time; `only` names some."""

    raise NotImplementedError


def plans_of(task: ShardingTask, ranks: int, seed: int) -> list[tuple[Case, str]]:
    """A case per distinct plan of the rules, and the names of the other rules that make the same one."""
    from steptime.sharding.rules import Machine, plans_by_rule
    from steptime.workloads.case import Case

    rules: dict[str, list[str]] = {}
    for rule, plan in plans_by_rule(task.model.tables, Machine(ranks, seed=seed)).items():
        rules.setdefault(plan.to_json(), []).append(rule)
    config = task.model.to_dict()
    return [
        (
            Case(
                workload="dlrm",
                name=f"{task.name}-{names[0]}",
                config=config,
                precision="fp32",
                batch=task.model.batch,
                ranks=ranks,
                plan=json.loads(plan),
                task=task.name,
                rule=names[0],
            ),
            ",".join(names[1:]),
        )
        for plan, names in rules.items()
    ]


def order_of(task: str, block: int, plans: int, seed: int) -> list[int]:
    """In which order a block times the plans: drawn anew for every block, the same on every rank."""
    drawn = np.random.default_rng([seed, zlib.crc32(task.encode()), block])
    return [int(at) for at in drawn.permutation(plans)]


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank's part in every task."""
    wanted = set(plan["tasks"])
    tasks = [task for task in tasks_of(small=plan["small"], only=plan["only"]) if task.name in wanted]
    flight = Flight(session.folder, "sharding")
    attempts = Attempts(group, session, flight, session.progress("sharding", len(tasks)), case_s=_TASK_S)
    with no_collector():
        for task in tasks:
            if not attempts.time_left(0.0 if plan["small"] else _NEED_S):
                break
            rows = _task(attempts, task, plan)
            if rows is not None:
                attempts.progress.step()
            if group.rank == 0:
                for row in rows or ():
                    session.store.add("sharding", row)
                session.store.flush()
    attempts.close()


def _task(attempts: Attempts, task: ShardingTask, plan: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The rows of one task. Its plans stay built throughout: they share their tables, and switching takes nothing."""
    group = attempts.group
    built: list[tuple[Case, str, Step]] = []
    for case, aliases in plans_of(task, group.ranks, plan["seed"]):
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
    from steptime.workloads.case import build

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
    lookups = _lookups(built, group)
    rows = []
    for block in range(_SMALL_BLOCKS if plan["small"] else BLOCKS):
        for turn, at in enumerate(order_of(task, block, len(built), plan["seed"])):
            case, aliases, step = built[at]
            for _ in range(_WARM_UP):
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


def _lookups(built: Sequence[tuple[Case, str, Step]], group: Group) -> str | None:
    case, _, step = built[0]
    return lookups_json(case, step, group)
