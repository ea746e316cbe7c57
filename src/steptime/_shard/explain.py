"""`explain`: why a plan is as fast as it is: what its ranks do, what bounds it, where its large tables could be instead.

The step's interval is that of `predict` for the best plan. How sure its gain over the usual rules is, is another question: an
error that all lookups share changes two plans alike; one of a single table changes their order. So loads of tables are drawn
anew, each by the errors of the lookup model about it alone, and both plans are put together from the same draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.config import Doubt
from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import BY_NODE, EVERYWHERE, Plan
from steptime._build.dlrm.workload import table_lookups
from steptime._models.lookups.question import BACKWARD, FORWARD, Lookup
from steptime._shard.evaluator import Evaluator, collectives_ns, is_played, of_timeline
from steptime._shard.memory import rank_limit
from steptime._shard.search import TOLD_APART, Searched, search
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task
from steptime._sim.composed import Evaluation
from steptime._sim.explain import bound
from steptime._sim.modelled.prediction import prediction_of, within
from steptime._sim.prediction import PredictedStep
from steptime._units import NS_PER_MS

Floats = npt.NDArray[np.float64]

BOUNDS = (LOOKUPS, EXCHANGES, DENSE, HOST) = ("lookups", "exchange", "dense layers", "host")
"""What a step can be bound by; the dense layers with the all_reduces of their gradients."""

_REDUCED = "all_reduce"

LARGE = 12
"""Tables that are explained, at most."""

_ELSEWHERE = 8  # other ranks that a table is tried on: those with least to do
_PLAYED_LARGE, _PLAYED_ELSEWHERE = 4, 2  # where every plan is played, which takes a while
_DOUBT_EVALUATIONS = 2_000
# Of so many tables another search takes as long as the first, tens of seconds: what is doubted is then named alone.
_DOUBTED_TABLES = 1_000
_WORTH_SAVING = 0.0005  # of the step; less is shown as 0.0 %
_DRAWS = 400
_LEVELS = (0.05, 0.95)
_NINE_OF_TEN = 1.645  # standard deviations of a normal to either side


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
        return self.interval[0] > TOLD_APART


@dataclass(frozen=True, slots=True)
class PlanReasons:
    """Why one plan is as fast as it is."""

    ranks: tuple[RankLoad, ...]
    bound: str  # one of `BOUNDS`
    reasons: tuple[Reason, ...]
    predicted: PredictedStep = field(compare=False)  # as `predict` has it, where a rank may use what the task allows

    @property
    def interval(self) -> tuple[float, float]:
        """Of the step, as factors."""
        low, high = (edge / self.predicted.step_time_ms for edge in self.predicted.interval_ms)
        return low, high


@dataclass(frozen=True, slots=True)
class Explained:
    """Why the best plan is, and what it gains."""

    best: PlanReasons
    gain: Gain | None
    every_rank_tables_ns: float  # of the step: tables that every rank has a share or a copy of
    doubts: tuple[str, ...] = ()  # what the input left open, and what that could cost

    @property
    def ranks(self) -> tuple[RankLoad, ...]:
        """What they do under the best plan."""
        return self.best.ranks

    @property
    def interval(self) -> tuple[float, float]:
        """Of its step, as factors."""
        return self.best.interval


class PlacedShards:
    """The shards of one plan on their ranks, and what the ranks do."""

    def __init__(self, task: Task, evaluator: Evaluator, plan: Plan) -> None:
        self.task, self.evaluator, self.plan = task, evaluator, plan
        self.division, owners = plan.divided(task.tables)
        self.rank_of = np.array(owners, dtype=np.intp)
        self.tables = self.division.shard_tables(task.tables)
        self.table_of = [shard.table for shard in self.division.shards(task.tables)]
        self.here = self.evaluate(self.rank_of)

    def evaluate(self, plans: npt.NDArray[np.intp]) -> Evaluation:
        """The same shards on other ranks."""
        return self.evaluator.evaluate(plans, self.division, exact=True)

    def shares(self) -> Floats:
        """What each shard takes of its rank's lookups, in proportion to elements looked up there; [shards]."""
        elements = _elements(self.tables)
        of_rank = np.bincount(self.rank_of, weights=elements, minlength=self.task.ranks)
        result: Floats = elements / np.maximum(of_rank[self.rank_of], 1e-300)
        return result

    def every_rank_tables_ns(self) -> float:
        """What tables that every rank has a share or a copy of add to the step."""
        if not self.division.everywhere() or not self.tables or self.division.shares_nodes:
            return 0.0
        model, evaluator = replace(self.task.model, tables=self.tables), self.evaluator
        without = Evaluator(model, evaluator.platform, self.task.ranks, calibration=evaluator.calibration)
        return float(self.here.step_ns[0] - without.evaluate(self.rank_of, exact=True).step_ns[0])


def explain(searched: Searched, evaluator: Evaluator) -> Explained:
    """The best plan of a search; its step is played, as `predict` does."""
    task = searched.task
    best = PlacedShards(task, evaluator, searched.best.plan)
    return Explained(
        best=why_of(best),
        gain=gain(searched, best),
        every_rank_tables_ns=best.every_rank_tables_ns(),
        doubts=tuple(_doubted(searched, evaluator, doubt) for doubt in task.doubts),
    )


def why_of(placed: PlacedShards) -> PlanReasons:
    """What the ranks of a plan do, what bounds it, and where its large tables could be instead."""
    task, evaluator = placed.task, placed.evaluator
    step = evaluator.modelled(placed.plan)
    limit, _ = rank_limit(evaluator.platform.device.limits, task.ranks, task.constraints)
    predicted = within(prediction_of(step, step.workload, evaluator.calibration), limit)
    ranks = rank_loads(placed, predicted, of_timeline(step, predicted.timeline, predicted.step_time_ms * NS_PER_MS))
    return PlanReasons(
        ranks=tuple(ranks),
        bound=bound_of(predicted, ranks, collectives_ns(step, predicted.timeline)),
        reasons=tuple(reasons(placed, ranks)),
        predicted=predicted,
    )


def bound_of(predicted: PredictedStep, ranks: Sequence[RankLoad], collectives: Mapping[str, float]) -> str:
    """Of `BOUNDS`, where what binds the prediction comes from.

    Where the wire bounds the step, the collectives that take longest decide; where the GPU does, or nothing alone, whether
    lookups are most of what some device computes. Ranks that wait for one wait for its lookups, unless its host is late.
    """
    kind = predicted.bound.kind
    if bound.HOST in (kind, predicted.bound.late if kind == bound.PEERS else ""):
        return HOST
    if kind == bound.WIRE:
        reduced = collectives.get(_REDUCED, 0.0)
        return EXCHANGES if sum(collectives.values()) - reduced >= reduced else DENSE
    if kind == bound.PEERS:
        return LOOKUPS
    computed = {rank.rank: rank.compute_ms * NS_PER_MS for rank in predicted.ranks}
    busiest = max(ranks, key=lambda rank: rank.forward_ns + rank.backward_ns)
    return LOOKUPS if busiest.forward_ns + busiest.backward_ns >= computed[busiest.rank] / 2 else DENSE


def rank_loads(best: PlacedShards, predicted: PredictedStep, played: Evaluation) -> list[RankLoad]:
    """What every rank does and holds."""
    task, rank_of, memory = best.task, best.rank_of, predicted.memory
    run_by = predicted.workload.run_by
    used = {rank: held["peak_bytes"] for held in memory["ranks"] for rank in run_by(held["rank"])}
    tables_of = [[best.tables[index] for index in np.flatnonzero(rank_of == rank)] for rank in range(task.ranks)]
    return [
        RankLoad(
            rank=rank,
            shards=len(tables),
            columns=sum(table.dim for table in tables),
            lookups=sum(task.model.batch * table.pooling_factor for table in tables),
            forward_ns=float(played.forward_ns[0, rank]),
            backward_ns=float(played.backward_ns[0, rank]),
            exchange_ns=float(played.exchange_ns[0, rank]),
            waiting_ns=float(played.waiting_ns[0, rank]),
            used_bytes=int(used[rank]),
            limit_bytes=memory["capacity_bytes"],
        )
        for rank, tables in enumerate(tables_of)
    ]


def _doubted(searched: Searched, evaluator: Evaluator, doubt: Doubt) -> str:
    """What a default could cost: the plan it led to, beside the best one if it were otherwise."""
    if len(searched.task.tables) > _DOUBTED_TABLES:
        return f"{doubt.assumption}; were they {doubt.otherwise}, another plan might be faster"
    task, platform = replace(searched.task, model=doubt.model, doubts=()), evaluator.platform
    otherwise = Evaluator(doubt.model, platform, task.ranks, calibration=evaluator.calibration)
    plan = PlacedShards(task, otherwise, searched.best.plan)
    step = float(otherwise.simulate(plan.rank_of, plan.division).step_ns[0])
    budget = SearchBudget(min(_DOUBT_EVALUATIONS, max(searched.searched_plans, 1)), searched.seconds)
    best = search(task, platform, budget, evaluator=otherwise).best.step_ns
    lost = max(step / best - 1, 0.0)
    saving = ": measured statistics could save that much" * (lost >= _WORTH_SAVING)
    return (
        f"{doubt.assumption}; were they {doubt.otherwise}, this plan's step would be {step / 1e6:.3f} ms instead of "
        f"{searched.best.step_ns / 1e6:.3f}, {lost:.1%} longer than the best plan's{saving}"
    )


def reasons(best: PlacedShards, ranks: Sequence[RankLoad]) -> list[Reason]:
    """Of the largest tables: where else they could be, and what that would cost."""
    idle = np.argsort([item.forward_ns + item.backward_ns for item in ranks], kind="stable")
    played = is_played(best.task.model, best.division)
    large, others = (_PLAYED_LARGE, _PLAYED_ELSEWHERE) if played else (LARGE, _ELSEWHERE)
    tries: dict[int, list[tuple[int, int]]] = {}  # table -> shard and rank it is tried on
    for table in np.argsort(-_elements(best.task.tables), kind="stable")[:large].tolist():
        name = best.task.tables[table].name
        slices = [shard for shard, index in enumerate(best.table_of) if index == table]
        targets = [int(rank) for rank in idle if rank not in best.plan.placements[name].ranks][:others]
        tries[table] = [(shard, rank) for shard in slices for rank in targets] if _held(best, name) is None else []
    longer = _longer_ns(best, [change for changes in tries.values() for change in changes])
    return [_reason(best, table, changes, longer) for table, changes in tries.items()]


def _held(best: PlacedShards, table: str) -> str | None:
    """Why a table cannot be moved."""
    kind = best.plan.placements[table].kind
    if best.task.ranks == 1:
        return "one rank"
    if table in best.task.constraints.pinned:
        return "pinned by the task"
    if kind in BY_NODE:
        return f"every rank of {len(best.plan.placements[table].nodes)} nodes has a part ({kind})"
    return f"every rank has a part ({kind})" if kind in EVERYWHERE else None


def _longer_ns(best: PlacedShards, changes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """How much longer the step is with a shard on another rank, of each change by itself."""
    plans = np.repeat(best.rank_of[None, :], len(changes), axis=0)
    plans[np.arange(len(changes)), [shard for shard, _ in changes]] = [rank for _, rank in changes]
    steps = best.evaluate(plans).step_ns if changes else np.zeros(0)
    return dict(zip(changes, (steps - best.here.step_ns[0]).tolist(), strict=True))


def _reason(
    best: PlacedShards, table: int, changes: Sequence[tuple[int, int]], longer_ns: Mapping[tuple[int, int], float]
) -> Reason:
    name = best.task.tables[table].name
    placed = best.plan.placements[name]
    loads = best.shares() * best.here.lookups_ns[0, best.rank_of]
    load = float(sum(loads[shard] for shard, index in enumerate(best.table_of) if index == table))
    if not changes:
        why = _held(best, name) or "it has a slice on every rank"
        return Reason(name, placed.kind, placed.ranks, load, None, None, why)
    change = min(changes, key=lambda item: longer_ns[item])
    rank, longer = change[1], longer_ns[change]
    text = f"on rank {rank}, the best other place, the step would be {longer / 1e6:.3f} ms longer"
    if abs(longer) < 1e3:
        text = f"rank {rank} would do as well"
    elif longer < 0:
        text = f"on rank {rank} the step would be {-longer / 1e6:.3f} ms shorter"
    return Reason(name, placed.kind, placed.ranks, load, rank, longer, text)


def gain(searched: Searched, best: PlacedShards) -> Gain | None:
    """Over the best usual rule; None where no rule's plan fits."""
    rule = searched.best_rule
    if rule is None:
        return None
    name, option = rule
    share = option.step_ns / searched.best.step_ns - 1
    other = PlacedShards(searched.task, best.evaluator, option.plan)
    draws = _table_errors(best)
    samples = _drawn_ns(other, draws, option.step_ns) / _drawn_ns(best, draws, searched.best.step_ns) - 1
    low, high = np.quantile(samples, _LEVELS)
    return Gain(name, share, (min(float(low), share), max(float(high), share)))


def _table_errors(best: PlacedShards) -> Floats:
    """Factors of every table's lookups, [draws, tables]: each errs for itself, by what the lookup model errs about it alone."""
    model, questions = best.task.model, []
    for table in model.tables:
        counted = table_lookups(table, model.batch)
        for direction, optimizer in ((FORWARD, "none"), (BACKWARD, model.optimizer)):
            questions.append(Lookup(model.lookup, direction, (counted,), optimizer))
    answers = best.evaluator.platform.device.lookup_estimates(questions)
    sigmas = [
        np.log(max(answer.estimate.high_ns, 1.0) / max(answer.estimate.low_ns, 1.0)) / 2 / _NINE_OF_TEN for answer in answers
    ]
    of_table = np.array(sigmas).reshape(-1, 2).mean(axis=1)
    result: Floats = np.exp(np.random.default_rng(0).standard_normal((_DRAWS, len(model.tables))) * of_table)
    return result


def _drawn_ns(placed: PlacedShards, draws: Floats, step_ns: float) -> Floats:
    """Steps of a plan with the lookups of its tables drawn, [draws]: the slowest rank of each direction may be another then."""
    factors = draws[:, placed.table_of] * placed.shares()
    of_rank = np.zeros((len(draws), placed.task.ranks))
    np.add.at(of_rank.T, placed.rank_of, factors.T)
    result = np.full(len(draws), step_ns)
    for part in (placed.here.forward_ns[0], placed.here.backward_ns[0]):
        result += (part * of_rank).max(axis=1) - part.max()
    return result


def _elements(tables: Sequence[Table]) -> Floats:
    """What the lookups of a table cost, about: elements read, and some for every row."""
    return np.array([table.pooling_factor * (table.dim + 16) for table in tables])
