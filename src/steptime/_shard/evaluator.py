"""`Evaluator`: how long the step of a DLRM takes under each of many plans, and where on which rank the time goes.

Plans are given as a division of the model's tables and the rank of every shard. A shard is a whole table, or a slice of the
columns of one, which is a table of fewer columns with the same lookups. What is the same under all plans of a division is
prepared once: the step around lookups and exchanges, with the tables in it that every rank has a share or a copy of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import Division, Plan
from steptime._build.dlrm.workload import dlrm_workload, table_lookups
from steptime._models.collectives.message import KINDS, Messages
from steptime._models.lookups.contention import Contention, LookupsTogether, row_bytes
from steptime._models.lookups.question import BACKWARD, DIRECTIONS, FORWARD
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.fabric import Fabric
from steptime._platforms.platform import Platform
from steptime._shard.lookup_times import ExactLookups, LookupCurves, Setting, SubsetTimes
from steptime._sim import composed
from steptime._sim.composed import BesideCollectives, ComposedStep, Ends, Evaluation
from steptime._sim.core.timing import CohortTimeline, Timeline
from steptime._sim.laws.departures import EXCHANGE, ExchangeDepartures
from steptime._sim.modelled.issue import Issued
from steptime._sim.modelled.step import ModelledStep, modelled
from steptime._units import dtype_bytes
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Plans = npt.NDArray[np.integer]

SAME, IDLE, COPYING = "same", "idle", "streaming"
"""What other shares of a GPU do, as lookup models are asked (`models.kernels.question.OTHERS`)."""

# Plans that are evaluated at once: their columns stay in a second-level cache.
_AT_ONCE = 2048
# A step is its host's where they differ by less.
_EXACT = 1e-6
# On more ranks the tables of the step that stands for all are alike, so that ranks run one program, or two.
_MOST_PROGRAMS = 4
# Steps of plans that are kept with their models' answers: those that an answer shows.
_KEPT_STEPS = 16


@dataclass(frozen=True, slots=True)
class Laws:
    """Which of the platform's laws hold; without one, its effect is left out, to see what it is worth."""

    contention: bool = True  # lookups on shares of one GPU slow each other while they overlap; else all are always busy alike
    one_by_one: bool = True  # ranks leave an exchange as they are done, and find work done that came late


ALL_LAWS = Laws()


class Evaluator:
    """Evaluates plans of one model on one platform.

    Plans of table-batched lookups are evaluated together, others played one by one, a few in a second (`is_played`).
    """

    def __init__(
        self,
        model: Dlrm,
        platform: Platform,
        ranks: int,
        *,
        calibration: Calibration = UNCALIBRATED,
        laws: Laws = ALL_LAWS,
    ) -> None:
        if not 1 <= ranks <= platform.ranks:
            raise InputError(
                f"{model.name} on {ranks} ranks, platform {platform.name} has {platform.ranks}; choose one with {ranks} or more"
            )
        self.model, self.platform, self.ranks, self.calibration = model, platform, ranks, calibration
        self._laws, self._whole = laws, Division.whole(len(model.tables))
        self._prepared: dict[Division, PreparedDivision] = {}
        self._steps: dict[frozenset[tuple[int, str]], ComposedStep] = {}
        self._modelled: dict[str, ModelledStep] = {}

    def evaluate(self, rank_of: Plans, division: Division | None = None, *, exact: bool = False) -> Evaluation:
        """The plans of a division (else of whole tables), [plans, shards]: the rank of every shard.

        `exact`: the lookup models are asked about every rank of every plan, which takes twenty times as long as curves through
        their answers about some subsets of the tables, and pays for less than a thousand plans.
        """
        division = division or self._whole
        if is_played(self.model, division):
            return self.simulate(rank_of, division)
        prepared = self._of_division(division)
        plans = checked(rank_of, len(prepared.shards), self.ranks)
        lookups = prepared.exact if exact else prepared.for_many_plans
        starts = range(0, max(len(plans), 1), _AT_ONCE)
        parts = [prepared.evaluated(plans[first : first + _AT_ONCE], lookups) for first in starts]
        return parts[0] if len(parts) == 1 else Evaluation.joined(parts)

    def play(self, rank_of: Plans, forward: Floats, backward: Floats) -> Evaluation:
        """Plans of whole tables with lookups that take so long, [plans, ranks], each rank by itself."""
        prepared = self._of_division(self._whole)
        return prepared.step.play(forward, backward, prepared.ends(rank_of))

    def simulate(self, rank_of: Plans, division: Division | None = None) -> Evaluation:
        """The same as `predict` has it, one plan after another: workloads built, models asked, steps played."""
        division, tables = division or self._whole, self.model.tables
        plans = checked(rank_of, len(division.shards(tables)), self.ranks)
        results = []
        for owners in plans.tolist():
            step = self.modelled(division.plan(tables, owners, self.ranks))
            played = step.play(self.calibration)
            results.append(of_timeline(step, played.timeline, played.step_ns))
        return Evaluation.joined(results)

    def modelled(self, plan: Plan) -> ModelledStep:
        """The step of a plan with all models asked; the last ones are kept."""
        key = plan.to_json()
        if key not in self._modelled:
            if len(self._modelled) >= _KEPT_STEPS:
                del self._modelled[next(iter(self._modelled))]
            self._modelled[key] = modelled(dlrm_workload(self.model, self.ranks, plan), self.platform)
        return self._modelled[key]

    def _of_division(self, division: Division) -> PreparedDivision:
        if division not in self._prepared:
            self._prepared[division] = self._prepare(division)
        return self._prepared[division]

    def _prepare(self, division: Division) -> PreparedDivision:
        # What a plan changes is the whole of its lookups, so that none of it is sorted ahead, whichever plan that is.
        model = replace(self.model, presorted=False)
        shards = replace(model, tables=division.shard_tables(model.tables))
        contention = Contention.of(self.platform.device.limits) if self._laws.contention else None
        beside = (SAME,) if contention is None else (IDLE, COPYING)
        settings = [(direction, other) for direction in DIRECTIONS for other in beside]
        known = [table_lookups(table, shards.batch) for table in shards.tables]
        fabric, exchanges = self.platform.fabric, None
        if fabric is not None and self.ranks > 1:
            exchanges = Exchanges.of(shards, fabric, self.ranks, self.calibration, one_by_one=self._laws.one_by_one)
        # Slices of columns change nothing in the rest of the step, or next to nothing.
        everywhere = frozenset(division.everywhere().items())
        if everywhere not in self._steps:
            self._steps[everywhere] = composed_step(model, division.everywhere(), self.platform, self.ranks, self.calibration)
        return PreparedDivision(
            shards.tables,
            self.ranks,
            ExactLookups.of(shards, self.platform.device, settings),
            self._steps[everywhere],
            exchanges,
            contention,
            {direction: row_bytes(known, direction, shards.optimizer, shards.tables[0].dtype) for direction in DIRECTIONS},
        )


@dataclass(frozen=True, eq=False)
class PreparedDivision:
    """What all plans of one division of a model's tables share, of table-batched lookups."""

    shards: tuple[Table, ...]
    ranks: int
    exact: ExactLookups
    step: ComposedStep
    exchanges: Exchanges | None  # None where there is one rank
    contention: Contention | None
    row_bytes: Mapping[str, Floats]  # direction -> [shards]

    @cached_property
    def for_many_plans(self) -> LookupCurves | SubsetTimes:
        """Lookup times of thousands of plans."""
        return self.exact.for_many_plans(self.ranks)

    def evaluated(self, plans: Plans, lookups: ExactLookups | LookupCurves | SubsetTimes) -> Evaluation:
        """Plans, [plans, shards], with lookups that take as long as these say."""
        times = lookups.times(plans, self.ranks)
        alone = SAME if self.contention is None else IDLE
        together = None if self.contention is None else self._lookups_together(self.contention, plans, times)
        return self.step.play(times[FORWARD, alone], times[BACKWARD, alone], self.ends(plans), together)

    def ends(self, plans: Plans) -> Ends:
        """Of the exchanges of plans."""
        if self.exchanges is None:
            return lambda _number, arrivals_ns: np.zeros_like(arrivals_ns)
        return self.exchanges.ends(self._summed(plans, self.exchanges.column_bytes), self.step.slower)

    def _lookups_together(self, law: Contention, plans: Plans, times: Mapping[Setting, Floats]) -> LookupsTogether:
        alone = [times[direction, IDLE] for direction in (FORWARD, BACKWARD)]
        taken = [
            law.taken(direction, item, self._summed(plans, self.row_bytes[direction]))
            for direction, item in zip((FORWARD, BACKWARD), alone, strict=True)
        ]
        slowed = [law.slowed(item, times[way, COPYING]) for way, item in zip((FORWARD, BACKWARD), alone, strict=True)]
        return LookupsTogether(*alone, *taken, *slowed)

    def _summed(self, plans: Plans, of_shards: Floats) -> Floats:
        """Per rank, [plans, ranks]."""
        count = len(plans) * self.ranks
        cell = (plans + self.ranks * np.arange(len(plans))[:, None]).ravel()
        return np.bincount(cell, np.tile(of_shards, len(plans)), count).reshape(len(plans), self.ranks).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Exchanges:
    """The exchanges of looked-up rows of one model: every rank sends its tables' columns to all others, and back."""

    fabric: Fabric
    ranks: int
    column_bytes: Floats  # [tables] that a rank sends to one other for a table of its own
    departures: ExchangeDepartures | None  # where ranks leave one by one
    slower: float  # by which all exchanges take longer, as somebody calibrated

    @classmethod
    def of(
        cls, model: Dlrm, fabric: Fabric, ranks: int, calibration: Calibration = UNCALIBRATED, *, one_by_one: bool = True
    ) -> Exchanges:
        """Among the first ranks of a fabric: rows as they are sent, every rank's part of the batch."""
        sent = np.array(
            [float(dtype_bytes(model.sent_dtype) * (model.batch // ranks) * table.columns) for table in model.tables]
        )
        departures = ExchangeDepartures.of(fabric) if one_by_one else None
        return cls(fabric, ranks, sent, departures, calibration.wire_of(EXCHANGE))

    def times(self, sent: Floats) -> Floats:
        """Of one exchange reached together, [plans], ns; `sent` are bytes from each rank to any other, [plans, ranks]."""
        return self.slower * self.fabric.times(messages(sent, self.ranks), range(self.ranks)).ns

    def ends(self, sent: Floats, slower: Sequence[float]) -> Ends:
        """Of plans that send so much from each rank to any other, [plans, ranks]: forward first, then back.

        `slower`: how many times as long as alone each of them takes beside kernels and a busy host.
        """
        together, departures = self.times(sent), self.departures
        if departures is None:
            at_once = [np.repeat(together[:, None] * factor, self.ranks, axis=1) for factor in slower]
            return lambda number, _arrivals_ns: at_once[number]
        forward = np.repeat(sent.T[:, None], self.ranks, axis=1)
        sides = (forward, forward.swapaxes(0, 1))
        ways = [departures.flows(each, together * factor) for each, factor in zip(sides, slower, strict=False)]
        return lambda number, arrivals_ns: ways[number].departures_ns(arrivals_ns.T).T


def messages(sent: Floats, ranks: int) -> Messages:
    """Exchanges as columns, as `Messages.of` makes them one by one from splits."""
    total = sent.sum(axis=1)
    # Bytes that a rank sends and receives, its own part left out, over what it would of an even exchange of one byte.
    busiest = ((ranks - 2) * sent + total[:, None]).max(axis=1) / 2 * (ranks / max(ranks - 1, 1))
    pairs = np.sqrt((sent**2).mean(axis=1)) * ranks
    even = np.ptp(sent, axis=1) == 0
    load = np.where(even, total, busiest)
    kind = np.full(len(sent), KINDS.index(EXCHANGE), dtype=np.intp)
    counts = np.full(len(sent), ranks, dtype=np.intp)
    return Messages(kind, counts, ranks * sent.max(axis=1), load, np.where(even, total, pairs))


def composed_step(
    model: Dlrm, everywhere: Mapping[int, str], platform: Platform, ranks: int, calibration: Calibration
) -> ComposedStep:
    """The step that stands for all plans of a model: played once, under a plan that gives every rank shards.

    `everywhere` are the tables that every rank has a share or a copy of, by index; the others are whole.
    """
    placed = tuple(table for index, table in enumerate(model.tables) if index not in everywhere)
    if ranks > min(_MOST_PROGRAMS, len(placed)):
        placed = _alike(placed, ranks, one_width=model.interaction == "dot")
    plan: dict[str, object] = {table.name: index % ranks for index, table in enumerate(placed)}
    plan |= {model.tables[index].name: {"kind": kind} for index, kind in everywhere.items()}
    like = replace(model, tables=(*placed, *(model.tables[index] for index in everywhere)))
    step = modelled(dlrm_workload(like, ranks, plan), platform)
    played = step.play(calibration)
    # A rank whose tables look nothing up has nothing to update either.
    lookups = [
        len({number for number, group in enumerate(program.groups) if group in (composed.FORWARD, composed.BACKWARD)})
        for program in step.programs
    ]
    index = lookups.index(max(lookups))
    issued = step.programs[index]
    slowdowns = played.slowdowns()[index][:, 0, 0]
    exchanges = [work for work, number in enumerate(issued.estimate) if issued.groups[number] == composed.EXCHANGE]
    slower = step.stragglers.card * calibration.device
    beside = BesideCollectives(platform.overlap, platform.device.limits.share, (), slower)
    return ComposedStep.of(issued, played.timeline, index, slowdowns[exchanges].tolist(), beside)


def _alike(tables: tuple[Table, ...], ranks: int, *, one_width: bool) -> tuple[Table, ...]:
    """Tables like the one in the middle: as many on every rank, with as many columns in all but for rounding.

    Of one width, as many as there are: each gives the interaction a vector, and its products grow with their square.
    """
    count = len(tables) if one_width else max(1, round(len(tables) / ranks)) * ranks
    columns = sum(table.dim for table in tables)
    dim = tables[0].dim if one_width else max(1, round(columns / count))
    looked_up = [table for table in tables if table.pooling_factor > 0] or tables
    lookups = sorted(looked_up, key=lambda table: table.pooling_factor * table.dim)
    middle = replace(lookups[len(lookups) // 2], dim=dim)
    return tuple(replace(middle, name=f"like{number}") for number in range(count))


def of_timeline(step: ModelledStep, timeline: Timeline, step_ns: float) -> Evaluation:
    """What the ranks of a played step do; one plan."""
    rows: dict[int, tuple[float, ...]] = {}
    for program, played in zip(step.programs, timeline.cohorts, strict=True):
        # One rank may be played for all that do the same.
        rows |= dict.fromkeys(step.workload.run_by(program.program.rank), _of_rank(program, played, 0))
        rows |= {rank: _of_rank(program, played, index) for index, rank in enumerate(played.cohort.ranks) if index}
    forward, backward, exchange, waiting, host = np.array([rows[rank] for rank in sorted(rows)]).T[:, None]
    total = np.array([step_ns])
    return Evaluation(total, total, forward, backward, exchange, waiting, host.max(axis=1) >= total * (1.0 - _EXACT))


def _of_rank(issued: Issued, played: CohortTimeline, index: int) -> tuple[float, ...]:
    """Forward, backward, exchange, waiting, host."""
    groups = np.array([issued.groups[number] for number in issued.estimate])
    begin, moving, end = (column[:, index, 0] for column in (played.work_start_ns, played.moving_ns, played.work_end_ns))
    took = (end - moving).astype(np.float64)
    timing = played.cohort.timing
    return (
        *(float(took[groups == name].sum()) for name in (composed.FORWARD, composed.BACKWARD, composed.EXCHANGE)),
        float((moving - begin)[np.char.startswith(groups, "collective")].sum()),
        float((timing.gap_ns + timing.call_ns).sum()),
    )


def collectives_ns(step: ModelledStep, timeline: Timeline) -> dict[str, float]:
    """By kind, how long the collectives of a played step move data, on the rank where that takes longest."""
    result: dict[str, float] = {}
    for issued, played in zip(step.programs, timeline.cohorts, strict=True):
        took = (played.work_end_ns - played.moving_ns)[:, :, 0].astype(np.float64)
        sums: dict[str, Floats] = {}
        for work, number in enumerate(issued.estimate):
            _, collective, kind = issued.groups[number].partition("collective ")
            if collective:
                sums[kind] = sums.get(kind, np.zeros(took.shape[1])) + took[work]
        for kind, of_ranks in sums.items():
            result[kind] = max(result.get(kind, 0.0), float(of_ranks.max()))
    return result


def is_played(model: Dlrm, division: Division) -> bool:
    """Whether the plans of a division are played one by one.

    With one `nn.EmbeddingBag` for each table hosts wait for the device, and every table launches its own kernels; tables of
    several kinds (precision, weighted, pooled) are looked up kind by kind. Where nodes share rows, ranks of other nodes do
    other things; without a shard to place there is one plan. A loss scaler makes hosts wait too, and lookups that go ahead of
    their step have a stream of their own.
    """
    return not model.composable or division.shares_nodes or not any(division.slices)


def checked(rank_of: Plans, shards: int, ranks: int) -> Plans:
    """Plans as [plans, shards] of ranks that there are."""
    plans = np.atleast_2d(np.asarray(rank_of))
    if plans.ndim != 2 or plans.shape[1] != shards or plans.dtype.kind not in "iu":
        raise InputError(
            f"plans of shape {plans.shape} and type {plans.dtype}; expected whole numbers, one for each of {shards} shards"
        )
    if plans.size and not (int(plans.min()) >= 0 and int(plans.max()) < ranks):
        raise InputError(f"plans place shards on ranks {plans.min()} to {plans.max()}; expected 0 to {ranks - 1}")
    return plans
