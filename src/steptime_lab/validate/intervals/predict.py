"""Rows predicted, whole steps as `predict` plays them, with what their draws and their device tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._platforms.platform import Platform, PlatformParts
from steptime._platforms.situation import KINDS, Situation, kind_of
from steptime._sim.explain.activity import Window, activity
from steptime._sim.modelled.prediction import draws_ns, interval_of
from steptime._sim.modelled.step import modelled
from steptime._units import NS_PER_MS, ms
from steptime.errors import SteptimeError
from steptime_lab.validate.intervals.rows import MeasuredStep

Floats = npt.NDArray[np.float64]

COMMUNICATION, EXPOSED, IDLE = "communication", "exposed communication", "idle"


@dataclass(frozen=True)
class Played:
    """A step without draws, with them, and what its device does; milliseconds."""

    step_ms: float
    draws_ms: Floats  # as `predict` has them
    alone_ms: Floats  # without what all kernels of a kind may have in common on the box
    parts_ms: Mapping[str, float]  # families of kernels, exposed communication, idle

    @property
    def kinds_ms(self) -> dict[str, float]:
        """Kernels by kind; what is left of the step waits for collectives or the host."""
        result = dict.fromkeys(KINDS, 0.0)
        for name, took in self.parts_ms.items():
            if name not in (COMMUNICATION, EXPOSED, IDLE):
                result[kind_of(name)] += took
        return result


@dataclass(frozen=True)
class PredictedRow:
    """A row and what was predicted of it."""

    step: MeasuredStep
    played: Played
    outside: float  # share of the device time that is beyond what the models were fitted on

    @property
    def interval_ms(self) -> tuple[float, float]:
        """That should hold nine of ten."""
        return interval_of(self.played.step_ms, self.played.draws_ms)


def predicted(step: MeasuredStep) -> PredictedRow | str:
    """A row as it is predicted with defaults alone, or a line that says why it cannot be."""
    try:
        return PredictedRow(step, *_played(step.config, _platform(step.platform)))
    except (SteptimeError, ArithmeticError, MemoryError) as error:
        return f"{step.source}: {step.name[:80]}: {type(error).__name__}: {error}"


@lru_cache(maxsize=16)
def _platform(parts: PlatformParts) -> Platform:
    return Platform.of(parts)


def _played(config: Transformer, platform: Platform) -> tuple[Played, float]:
    """A step, and the share of its device time that is beyond what the models were fitted on."""
    step = modelled(build(config), platform)
    played = step.play()
    seen = activity(played.timeline, Window(1))
    rank = seen.ranks[0]
    parts = {**seen.breakdown, EXPOSED: rank.exposed_communication_ms, IDLE: rank.idle_ms}
    draws, alone = (draws_ns(played, known) / NS_PER_MS for known in (None, Situation("none")))
    return Played(ms(played.step_ns), draws, alone, parts), step.coverage["out_of_range"]
