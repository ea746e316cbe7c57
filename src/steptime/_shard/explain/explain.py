"""`explain`: why a plan is as fast as it is: what its ranks do, what bounds it, where its large tables could be instead.

The step's interval is that of `predict` for the best plan; `explain_gain` says how sure its gain is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.config import Doubt
from steptime._build.dlrm.plan import EVERYWHERE
from steptime._models.lookups.question import TABLE_BATCHED
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.evaluator import BOUNDS, Evaluation
from steptime._shard.explain.gain import Gain, gain
from steptime._shard.explain.plan import Evaluated, RankLoad
from steptime._shard.search.search import Searched, evaluators, search
from steptime._shard.search.state import Budget
from steptime._shard.task.task import Task

Floats = npt.NDArray[np.float64]

LARGE = 12
"""Tables that are explained, at most."""

_ELSEWHERE = 8  # other ranks that a table is tried on: those with least to do
_PLAYED_LARGE, _PLAYED_ELSEWHERE = 4, 2  # where every plan is played, which takes a while
_DOUBT_EVALUATIONS = 2_000


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a table is where it is: what it would cost to move one of its shards to the best other rank."""

    table: str
    kind: str
    ranks: tuple[int, ...]
    load_ns: float  # of all its shards: what the lookups of their ranks lose with them
    elsewhere: int | None  # the best other rank; None where there is none, or the table is pinned or everywhere
    moved_ns: float | None  # how much longer the step is then
    said: str


@dataclass(frozen=True)
class Explained:
    """A plan's ranks, bound, reasons, interval and gain."""

    ranks: tuple[RankLoad, ...]
    bound: str
    bound_by: str
    reasons: tuple[Reason, ...]
    interval: tuple[float, float]  # as factors of the step
    gain: Gain | None
    analytic_ns: float  # of the step: tables that every rank has a part of
    doubts: tuple[str, ...] = ()  # what the input left open, and what that could cost
    warnings: tuple[str, ...] = ()


def explain(found: Searched, platform: Platform, calibration: Calibration = UNCALIBRATED) -> Explained:
    """The best plan of a search."""
    best = Evaluated(found.task, platform, found.best.plan, calibration)
    ranks = best.loads()
    interval, bound_by, warnings = best.interval()
    bound = BOUNDS[int(best.evaluate(best.rank_of[None, :]).bound[0])]
    return Explained(
        ranks=tuple(ranks),
        bound=bound,
        bound_by=bound_by,
        reasons=tuple(reasons(best, ranks)),
        interval=interval,
        gain=gain(found, best, calibration),
        analytic_ns=best.added_ns,
        doubts=tuple(_doubted(found, platform, doubt, calibration) for doubt in found.task.doubts),
        warnings=warnings,
    )


def _doubted(found: Searched, platform: Platform, doubt: Doubt, calibration: Calibration) -> str:
    """What a default could cost: the plan it led to, beside the best one if it were otherwise."""
    task = replace(found.task, model=doubt.model, doubts=())
    same = Evaluated(task, platform, found.best.plan, calibration)
    step = float(same.evaluate(same.rank_of[None, :]).step_ns[0])
    budget = Budget(min(_DOUBT_EVALUATIONS, max(found.searched_plans, 1)), found.seconds)
    best = search(task, platform, budget, make=evaluators(platform, calibration)).best.step_ns
    lost = max(step / best - 1, 0.0)
    return (
        f"{doubt.said}; were they {doubt.otherwise}, this plan's step would be {step / 1e6:.3f} ms instead of "
        f"{found.best.step_ns / 1e6:.3f}, {lost:.1%} longer than the best plan's: measured statistics could save that much"
    )


def reasons(best: Evaluated, ranks: Sequence[RankLoad]) -> list[Reason]:
    """Of the largest tables: where else they could be, and what that would cost."""
    here = best.evaluate(best.rank_of[None, :])
    step = float(here.step_ns[0])
    idle = np.argsort([item.forward_ns + item.backward_ns for item in ranks], kind="stable")
    shards = best.division.shards(best.task.tables)
    work = _work(best.task)
    played = best.model.lookup != TABLE_BATCHED
    large, others = (_PLAYED_LARGE, _PLAYED_ELSEWHERE) if played else (LARGE, _ELSEWHERE)
    results = []
    for index in np.argsort(-work, kind="stable")[:large].tolist():
        table = best.task.tables[index]
        placed = best.plan.placements[table.name]
        own = [number for number, shard in enumerate(shards) if shard.table == index]
        share = float(sum(_of_rank(best, here, number) for number in own))
        if table.name in best.task.constraints.pinned or placed.kind in EVERYWHERE or best.task.ranks == 1:
            why = (
                "pinned by the task"
                if table.name in best.task.constraints.pinned
                else f"every rank has a part ({placed.kind}, analytic)"
            )
            results.append(
                Reason(table.name, placed.kind, placed.ranks, share, None, None, "one rank" if best.task.ranks == 1 else why)
            )
            continue
        targets = [int(rank) for rank in idle if rank not in placed.ranks][:others]
        results.append(_moved(best, step, table.name, own, targets, share))
    return results


def _moved(best: Evaluated, step: float, table: str, own: Sequence[int], targets: Sequence[int], load: float) -> Reason:
    placed = best.plan.placements[table]
    tries = [(shard, rank) for shard in own for rank in targets]
    if not tries:
        return Reason(table, placed.kind, placed.ranks, load, None, None, "it has a slice on every rank")
    plans = np.repeat(best.rank_of[None, :], len(tries), axis=0)
    for row, (shard, rank) in enumerate(tries):
        plans[row, shard] = rank
    more = best.evaluate(plans).step_ns - step
    least = int(np.argmin(more))
    rank, longer = tries[least][1], float(more[least])
    text = f"on rank {rank}, the best other place, the step would be {longer / 1e6:.3f} ms longer"
    if longer < 1e3:
        text = f"rank {rank} would do as well"
    return Reason(table, placed.kind, placed.ranks, load, rank, longer, text)


def _of_rank(best: Evaluated, here: Evaluation, shard: int) -> float:
    """What a shard takes of its rank's lookups, in proportion to elements looked up there."""
    rank = int(best.rank_of[shard])
    elements = [table.pooling_factor * (table.dim + 16) for table in best.model.tables]
    total = sum(element for element, owner in zip(elements, best.rank_of, strict=True) if owner == rank)
    took = float(here.forward_ns[0, rank] + here.backward_ns[0, rank])
    return took * elements[shard] / total if total else 0.0


def _work(task: Task) -> Floats:
    return np.array([table.pooling_factor * (table.dim + 16) for table in task.tables])
