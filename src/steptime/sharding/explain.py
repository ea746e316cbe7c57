"""`explain`: why a plan is as fast as it is: what its ranks do, what bounds it, where its large tables could be instead.

The step's interval is that of `predict` for the best plan. Whether a gain is larger than its uncertainty is another question:
an error that all tables share changes both plans alike, one of a single table changes their order. So loads of tables are drawn
anew, each by the errors of the lookup model about it, and both plans are put together from the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime.build.dlrm_workload import dlrm_workload
from steptime.build.table_lookups import table_lookups
from steptime.models.kernels.lookups.question import BACKWARD, FORWARD, Lookup
from steptime.platforms.platform import Platform
from steptime.sharding.evaluation import BOUNDS, Evaluation
from steptime.sharding.kinds import EVERYWHERE
from steptime.sharding.plan_evaluation import DividedEvaluator
from steptime.sharding.plan_kinds import MixedPlan
from steptime.sharding.search import Option, Searched, evaluators, search
from steptime.sharding.search_state import Budget
from steptime.sharding.task import Doubt, Task
from steptime.sharding.task_memory import memory_of, rank_limit
from steptime.sim.modelled.prediction import predict_on
from steptime.sim.modelled.step import UNCALIBRATED, Calibration

Floats = npt.NDArray[np.float64]

LARGE = 12
"""Tables that are explained, at most."""

_ELSEWHERE = 8  # other ranks that a table is tried on: those with least to do
_DRAWS = 400
_DOUBT_EVALUATIONS = 2_000
_LEVELS = (0.05, 0.95)
_NINE_OF_TEN = 1.645  # standard deviations of a normal to either side
# Of what is put together from pieces and was never measured, either way.
_ANALYTIC_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank has to do and to hold under a plan."""

    rank: int
    shards: int
    columns: int
    lookups: float  # a step
    forward_ns: float
    backward_ns: float
    exchange_ns: float
    waiting_ns: float
    used_bytes: int
    limit_bytes: int


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


@dataclass(frozen=True, slots=True)
class Gain:
    """How much longer the best usual rule's step is than the best plan's, as a share, and nine of ten draws of it."""

    rule: str
    share: float
    interval: tuple[float, float]

    @property
    def sure(self) -> bool:
        """Whether the gain is larger than its uncertainty."""
        return self.interval[0] > 0


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


class Evaluated:
    """One plan on its platform, with its shards' model."""

    def __init__(self, task: Task, platform: Platform, plan: MixedPlan, calibration: Calibration = UNCALIBRATED) -> None:
        self.task, self.platform, self.plan, self._calibration = task, platform, plan, calibration
        self.division, owners = plan.divided(task.tables)
        self.rank_of = np.array(owners, dtype=np.intp)
        self._divided = DividedEvaluator.of(task.model, self.division, platform, task.ranks, calibration)
        self.model, self.added_ns = self._divided.model, self._divided.added_ns

    def evaluate(self, plans: npt.NDArray[np.intp]) -> Evaluation:
        """Other plans of the same shards."""
        return self._divided.evaluate(plans)

    def loads(self) -> list[RankLoad]:
        """What every rank does."""
        found, task = self.evaluate(self.rank_of[None, :]), self.task
        limit, outside = rank_limit(self.platform.device.limits, task.ranks, task.constraints.memory_bytes)
        memory = memory_of(task.model, self.division, task.ranks, limit, outside)
        used = memory.used(self.rank_of, task.ranks)
        shards = self.model.tables
        return [
            RankLoad(
                rank=rank,
                shards=int((self.rank_of == rank).sum()),
                columns=sum(shards[place].dim for place in np.flatnonzero(self.rank_of == rank)),
                lookups=sum(task.model.batch * shards[place].pooling_factor for place in np.flatnonzero(self.rank_of == rank)),
                forward_ns=float(found.forward_ns[0, rank]),
                backward_ns=float(found.backward_ns[0, rank]),
                exchange_ns=float(found.exchange_ns[0, rank]),
                waiting_ns=float(found.waiting_ns[0, rank]),
                used_bytes=int(used[rank]),
                limit_bytes=memory.limit,
            )
            for rank in range(task.ranks)
        ]

    def interval(self) -> tuple[tuple[float, float], str, tuple[str, ...]]:
        """As factors of the step, what bounds it in words, and what to doubt."""
        names = [table.name for table in self.model.tables]
        plan = dict(zip(names, self.rank_of.tolist(), strict=True))
        built = dlrm_workload(self.model, self.task.ranks, plan)
        found = predict_on(built.workload, self.platform, lookups=built.lookups, calibration=self._calibration)
        step = found.step_time_ms * 1e6
        low, high = (edge * 1e6 for edge in found.interval_ms)
        whole = step + self.added_ns
        factors = ((low + self.added_ns / _ANALYTIC_FACTOR) / whole, (high + self.added_ns * _ANALYTIC_FACTOR) / whole)
        return factors, found.bound_by, found.warnings


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
        f"{found.best.step_ns / 1e6:.3f}, {lost:.1%} longer than the best plan's: statistics are worth so much here"
    )


def reasons(best: Evaluated, ranks: Sequence[RankLoad]) -> list[Reason]:
    """Of the largest tables: where else they could be, and what that would cost."""
    here = best.evaluate(best.rank_of[None, :])
    step = float(here.step_ns[0])
    idle = np.argsort([one.forward_ns + one.backward_ns for one in ranks], kind="stable")
    shards = best.division.shards(best.task.tables)
    work = _work(best.task)
    found = []
    for place in np.argsort(-work, kind="stable")[:LARGE].tolist():
        table = best.task.tables[place]
        placed = best.plan.placed[table.name]
        own = [number for number, shard in enumerate(shards) if shard.table == place]
        share = float(sum(_of_rank(best, here, number) for number in own))
        if table.name in best.task.constraints.pinned or placed.kind in EVERYWHERE or best.task.ranks == 1:
            why = (
                "pinned by the task"
                if table.name in best.task.constraints.pinned
                else f"every rank has a part ({placed.kind}, analytic)"
            )
            found.append(
                Reason(table.name, placed.kind, placed.ranks, share, None, None, "one rank" if best.task.ranks == 1 else why)
            )
            continue
        targets = [int(rank) for rank in idle if rank not in placed.ranks][:_ELSEWHERE]
        found.append(_moved(best, step, table.name, own, targets, share))
    return found


def _moved(best: Evaluated, step: float, table: str, own: Sequence[int], targets: Sequence[int], load: float) -> Reason:
    placed = best.plan.placed[table]
    tries = [(shard, rank) for shard in own for rank in targets]
    if not tries:
        return Reason(table, placed.kind, placed.ranks, load, None, None, "it has a slice on every rank")
    plans = np.repeat(best.rank_of[None, :], len(tries), axis=0)
    for row, (shard, rank) in enumerate(tries):
        plans[row, shard] = rank
    more = best.evaluate(plans).step_ns - step
    least = int(np.argmin(more))
    rank, longer = tries[least][1], float(more[least])
    said = f"on rank {rank}, the best other place, the step would be {longer / 1e6:.3f} ms longer"
    if longer < 1e3:
        said = f"rank {rank} would do as well"
    return Reason(table, placed.kind, placed.ranks, load, rank, longer, said)


def _of_rank(best: Evaluated, here: Evaluation, shard: int) -> float:
    """What a shard takes of its rank's lookups, in proportion to elements looked up there."""
    rank = int(best.rank_of[shard])
    elements = [table.pooling_factor * (table.dim + 16) for table in best.model.tables]
    total = sum(one for one, owner in zip(elements, best.rank_of, strict=True) if owner == rank)
    took = float(here.forward_ns[0, rank] + here.backward_ns[0, rank])
    return took * elements[shard] / total if total else 0.0


def _work(task: Task) -> Floats:
    return np.array([table.pooling_factor * (table.dim + 16) for table in task.tables])


def gain(found: Searched, best: Evaluated, calibration: Calibration = UNCALIBRATED) -> Gain | None:
    """Over the best usual rule; None where no rule's plan fits."""
    rule = found.best_rule
    if rule is None:
        return None
    name, option = rule
    share = option.step_ns / found.best.step_ns - 1
    other = Evaluated(found.task, best.platform, option.plan, calibration)
    draws = _table_errors(found.task, best.platform)
    samples = _drawn_ns(other, draws, option) / _drawn_ns(best, draws, found.best) - 1
    low, high = np.quantile(samples, _LEVELS)
    return Gain(name, share, (min(float(low), share), max(float(high), share)))


def _table_errors(task: Task, platform: Platform) -> Floats:
    """Factors of every table's lookups, [draws, tables]: each errs for itself, by what the lookup model errs about it alone."""
    asked = []
    for table in task.tables:
        counted = table_lookups(table, task.model.batch)
        for direction in (FORWARD, BACKWARD):
            optimizer = task.model.optimizer if direction == BACKWARD else "none"
            asked.append(Lookup(task.model.lookup, direction, (counted,), optimizer))
    answers = platform.device.lookup_estimates(asked)
    sigmas = [np.log(max(one.estimate.high_ns, 1.0) / max(one.estimate.low_ns, 1.0)) / 2 / _NINE_OF_TEN for one in answers]
    of_table = np.array(sigmas).reshape(-1, 2).mean(axis=1)
    found: Floats = np.exp(np.random.default_rng(0).standard_normal((_DRAWS, len(task.tables))) * of_table)
    return found


def _drawn_ns(one: Evaluated, draws: Floats, option: Option) -> Floats:
    """Steps of a plan with the lookups of its tables drawn, [draws]: the slowest rank of each direction may be another then."""
    here = one.evaluate(one.rank_of[None, :])
    shards = one.division.shards(one.task.tables)
    elements = np.array([table.pooling_factor * (table.dim + 16) for table in one.model.tables])
    shares = elements / np.maximum(np.bincount(one.rank_of, weights=elements, minlength=one.task.ranks)[one.rank_of], 1e-300)
    factors = draws[:, [shard.table for shard in shards]] * shares
    of_rank = np.zeros((len(draws), one.task.ranks))
    np.add.at(of_rank.T, one.rank_of, factors.T)
    changed = np.full(len(draws), option.step_ns)
    for part in (here.forward_ns[0], here.backward_ns[0]):
        changed += (part * of_rank).max(axis=1) - part.max()
    return changed
