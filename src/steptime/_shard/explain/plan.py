"""`Evaluated`: one plan on its platform: what its ranks do and hold, and how sure its step is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.plan import Plan
from steptime._build.dlrm.workload import dlrm_workload
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.divided import DividedEvaluator
from steptime._shard.evaluate.evaluator import Evaluation
from steptime._shard.evaluate.simulated import of_timeline
from steptime._shard.task.memory import memory_of, rank_limit
from steptime._shard.task.task import Task
from steptime._sim.composed import ComposedStep
from steptime._sim.modelled.prediction import prediction_of
from steptime._sim.modelled.step import ModelledStep, modelled
from steptime._sim.prediction import PredictedStep
from steptime._units import NS_PER_MS


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


class Evaluated:
    """One plan on its platform, with its shards' model."""

    def __init__(
        self,
        task: Task,
        platform: Platform,
        plan: Plan,
        calibration: Calibration = UNCALIBRATED,
        step: ComposedStep | None = None,  # of the same model, composed before
    ) -> None:
        self.task, self.platform, self.plan, self._calibration = task, platform, plan, calibration
        self.division, owners = plan.divided(task.tables)
        self.rank_of = np.array(owners, dtype=np.intp)
        self._divided = DividedEvaluator.of(task.model, self.division, platform, task.ranks, calibration, exact=True, step=step)
        self.model = self._divided.model

    def evaluate(self, plans: npt.NDArray[np.intp]) -> Evaluation:
        """Other plans of the same shards."""
        return self._divided.evaluate(plans)

    @cached_property
    def here(self) -> Evaluation:
        """The plan itself."""
        return self.evaluate(self.rank_of[None, :])

    @cached_property
    def _played(self) -> tuple[ModelledStep, PredictedStep]:
        """Its step as `predict` has it: what ranks do, the interval and the bound are of one evaluation."""
        built = dlrm_workload(self.task.model, self.task.ranks, self.plan)
        step = modelled(built, self.platform)
        return step, prediction_of(step, built, self._calibration)

    def loads(self) -> list[RankLoad]:
        """What every rank does."""
        step, predicted = self._played
        result, task = of_timeline(step, predicted.timeline, predicted.step_time_ms * NS_PER_MS), self.task
        limit, outside = rank_limit(self.platform.device.limits, task.ranks, task.constraints.memory_bytes)
        memory = memory_of(task.model, self.division, task.ranks, limit, outside)
        used = memory.used(self.rank_of, task.ranks)
        shards = self.model.tables
        return [
            RankLoad(
                rank=rank,
                shards=int((self.rank_of == rank).sum()),
                columns=sum(shards[index].dim for index in np.flatnonzero(self.rank_of == rank)),
                lookups=sum(task.model.batch * shards[index].pooling_factor for index in np.flatnonzero(self.rank_of == rank)),
                forward_ns=result.forward_ns[rank],
                backward_ns=result.backward_ns[rank],
                exchange_ns=result.exchange_ns[rank],
                waiting_ns=result.waiting_ns[rank],
                used_bytes=int(used[rank]),
                limit_bytes=memory.limit,
            )
            for rank in range(task.ranks)
        ]

    def interval(self) -> tuple[tuple[float, float], str, tuple[str, ...]]:
        """As factors of the step, what bounds it in words, and what to doubt."""
        result = self._played[1]
        step = result.step_time_ms * NS_PER_MS
        low, high = (edge * NS_PER_MS for edge in result.interval_ms)
        return (low / step, high / step), result.bound_by, result.warnings

    @property
    def everywhere_ns(self) -> float:
        """What tables that every rank has a part of add to the step."""
        if not self.division.everywhere():
            return 0.0
        return self._played[1].step_time_ms * NS_PER_MS - float(self.here.step_ns[0])
