"""`explain`: why a plan is as fast as it is: what its ranks do, what bounds it, where its large tables could be instead.

The step's interval is that of `predict` for the best plan; `explain_gain` says how sure its gain is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.config import Doubt
from steptime._build.dlrm.plan import EVERYWHERE
from steptime._models.lookups.question import TABLE_BATCHED
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.evaluator import BOUNDS
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
    best = Evaluated(found.task, platform, found.best.plan, calibration, found.step)
    ranks = best.loads()
    interval, bound_by, warnings = best.interval()
    bound = BOUNDS[int(best.here.bound[0])]
    return Explained(
        ranks=tuple(ranks),
        bound=bound,
        bound_by=bound_by,
        reasons=tuple(reasons(best, ranks)),
        interval=interval,
        gain=gain(found, best, calibration),
        analytic_ns=best.everywhere_ns,
        doubts=tuple(_doubted(found, platform, doubt, calibration) for doubt in found.task.doubts),
        warnings=warnings,
    )


def _doubted(found: Searched, platform: Platform, doubt: Doubt, calibration: Calibration) -> str:
    """What a default could cost: the plan it led to, beside the best one if it were otherwise."""
    task = replace(found.task, model=doubt.model, doubts=())
    same = Evaluated(task, platform, found.best.plan, calibration)
    step = float(same.here.step_ns[0]) + same.everywhere_ns
    budget = Budget(min(_DOUBT_EVALUATIONS, max(found.searched_plans, 1)), found.seconds)
    best = search(task, platform, budget, make=evaluators(platform, calibration)).best.step_ns
    lost = max(step / best - 1, 0.0)
    return (
        f"{doubt.said}; were they {doubt.otherwise}, this plan's step would be {step / 1e6:.3f} ms instead of "
        f"{found.best.step_ns / 1e6:.3f}, {lost:.1%} longer than the best plan's: measured statistics could save that much"
    )


def reasons(best: Evaluated, ranks: Sequence[RankLoad]) -> list[Reason]:
    """Of the largest tables: where else they could be, and what that would cost."""
    idle = np.argsort([item.forward_ns + item.backward_ns for item in ranks], kind="stable")
    shards = best.division.shards(best.task.tables)
    played = best.model.lookup != TABLE_BATCHED
    large, others = (_PLAYED_LARGE, _PLAYED_ELSEWHERE) if played else (LARGE, _ELSEWHERE)
    tables = [best.task.tables[index].name for index in np.argsort(-_work(best.task), kind="stable")[:large].tolist()]
    tries: dict[str, list[tuple[int, int]]] = {}  # table -> shard and rank it is tried on
    for table in tables:
        slices = [number for number, shard in enumerate(shards) if best.task.tables[shard.table].name == table]
        targets = [int(rank) for rank in idle if rank not in best.plan.placements[table].ranks][:others]
        tries[table] = [(shard, rank) for shard in slices for rank in targets] if _held(best, table) is None else []
    longer = _longer_ns(best, [change for changes in tries.values() for change in changes])
    return [_reason(best, table, tries[table], longer) for table in tables]


def _held(best: Evaluated, table: str) -> str | None:
    """Why a table cannot be moved."""
    kind = best.plan.placements[table].kind
    if best.task.ranks == 1:
        return "one rank"
    if table in best.task.constraints.pinned:
        return "pinned by the task"
    return f"every rank has a part ({kind})" if kind in EVERYWHERE else None


def _longer_ns(best: Evaluated, changes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """How much longer the step is with a shard on another rank, of each change by itself."""
    plans = np.repeat(best.rank_of[None, :], len(changes), axis=0)
    plans[np.arange(len(changes)), [shard for shard, _ in changes]] = [rank for _, rank in changes]
    steps = best.evaluate(plans).step_ns if changes else np.zeros(0)
    return dict(zip(changes, (steps - best.here.step_ns[0]).tolist(), strict=True))


def _reason(
    best: Evaluated, table: str, tries: Sequence[tuple[int, int]], longer_ns: Mapping[tuple[int, int], float]
) -> Reason:
    placed = best.plan.placements[table]
    shards = best.division.shards(best.task.tables)
    load = float(
        sum(_of_rank(best, number) for number, item in enumerate(shards) if best.task.tables[item.table].name == table)
    )
    if not tries:
        why = _held(best, table) or "it has a slice on every rank"
        return Reason(table, placed.kind, placed.ranks, load, None, None, why)
    change = min(tries, key=lambda item: longer_ns[item])
    rank, longer = change[1], longer_ns[change]
    text = f"on rank {rank}, the best other place, the step would be {longer / 1e6:.3f} ms longer"
    if longer < 1e3:
        text = f"rank {rank} would do as well"
    return Reason(table, placed.kind, placed.ranks, load, rank, longer, text)


def _of_rank(best: Evaluated, shard: int) -> float:
    """What a shard takes of its rank's lookups, in proportion to elements looked up there."""
    rank = int(best.rank_of[shard])
    elements = [table.pooling_factor * (table.dim + 16) for table in best.model.tables]
    total = sum(element for element, owner in zip(elements, best.rank_of, strict=True) if owner == rank)
    took = float(best.here.lookups_ns[0, rank])
    return took * elements[shard] / total if total else 0.0


def _work(task: Task) -> Floats:
    return np.array([table.pooling_factor * (table.dim + 16) for table in task.tables])
