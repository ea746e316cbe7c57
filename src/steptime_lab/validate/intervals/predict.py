"""Rows predicted, each in a few seconds: what repeats in a step is played a few times, and the rest follows.

Accumulated parts of a batch are alike, and so are layers. A step of many is therefore asked with one and two parts for each
stage of a pipeline, of four and six layers, draw by draw: `tests/validate/test_intervals.py` holds it to the whole step within
0.5 %. Where the device waits for the host, few layers can hide what many do not, so more of them are played. Layers of
pipelines and of experts are all played.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._platforms.calibration import UNCALIBRATED
from steptime._platforms.platform import Platform, PlatformParts
from steptime._platforms.situation import KINDS, Situation, kind_of
from steptime._sim.explain.activity import Window, activity
from steptime._sim.modelled.prediction import draws_ns, interval_of, known_of
from steptime._sim.modelled.step import modelled
from steptime._units import NS_PER_MS, ms
from steptime.errors import SteptimeError
from steptime_lab.validate.intervals.rows import MeasuredStep

Floats = npt.NDArray[np.float64]

# How many are played: of steps in which the device waits for the host, more.
FEW_LAYERS, MORE_LAYERS = (4, 6), (24, 32)
FEW_PARTS = (1, 2)
# Share of a step that the device waits for the host, above which layers are not taken to be alike.
_MOST_IDLE = 0.03
COMMUNICATION, EXPOSED, IDLE = "communication", "exposed communication", "idle"


@dataclass(frozen=True)
class Played:
    """A step without draws, with them, and what its device does; milliseconds, all linear in what repeats."""

    step_ms: float
    draws_ms: Floats  # as `predict` has them
    alone_ms: Floats  # without what all kernels of a kind may have in common on the box
    parts_ms: Mapping[str, float]  # families of kernels, exposed communication, idle

    def further(self, fewer: Played, times: float) -> Played:
        """This and `times` what it is longer than one with fewer repeats."""
        names = {**self.parts_ms, **fewer.parts_ms}
        here, there = ({name: each.parts_ms.get(name, 0.0) for name in names} for each in (self, fewer))
        return Played(
            self.step_ms + times * (self.step_ms - fewer.step_ms),
            self.draws_ms + times * (self.draws_ms - fewer.draws_ms),
            self.alone_ms + times * (self.alone_ms - fewer.alone_ms),
            {name: here[name] + times * (here[name] - there[name]) for name in names},
        )

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
        platform = _platform(step.platform)
        outside: list[float] = []
        return PredictedRow(step, _of_parts(step.config, platform, outside), outside[-1])
    except (SteptimeError, ArithmeticError, MemoryError) as error:
        return f"{step.source}: {step.name[:80]}: {type(error).__name__}: {error}"


@lru_cache(maxsize=16)
def _platform(parts: PlatformParts) -> Platform:
    return Platform.of(parts)


def _of_parts(config: Transformer, platform: Platform, outside: list[float]) -> Played:
    parts, (few, many) = config.gradient_accumulation, (count * config.parallel.pipeline for count in FEW_PARTS)
    if parts <= many:
        return _of_layers(config, platform, outside)
    fewer, more = (_of_layers(_with_parts(config, count), platform, outside) for count in (few, many))
    return more.further(fewer, (parts - many) / (many - few))


def _of_layers(config: Transformer, platform: Platform, outside: list[float]) -> Played:
    result = _by_layers(config, platform, outside, FEW_LAYERS)
    if result.parts_ms[IDLE] > _MOST_IDLE * result.step_ms:
        return _by_layers(config, platform, outside, MORE_LAYERS)
    return result


def _by_layers(config: Transformer, platform: Platform, outside: list[float], layers: tuple[int, int]) -> Played:
    few, many = layers
    if config.layers <= many or config.parallel.pipeline > 1 or config.experts.count:
        return _played(config, platform, outside)
    fewer, more = (_played(replace(config, layers=count), platform, outside) for count in layers)
    return more.further(fewer, (config.layers - many) / (many - few))


def _with_parts(config: Transformer, parts: int) -> Transformer:
    """The same micro-batches, so many of them."""
    return replace(config, batch=config.batch // config.gradient_accumulation * parts, gradient_accumulation=parts)


def _played(config: Transformer, platform: Platform, outside: list[float]) -> Played:
    step = modelled(build(config), platform)
    calibration = known_of(platform, UNCALIBRATED)
    result, _, clocks = step.powered(calibration)
    outside.append(step.coverage["out_of_range"])
    seen = activity(result.timeline, Window(1))
    rank = seen.ranks[0]
    parts = {**seen.breakdown, EXPOSED: rank.exposed_communication_ms, IDLE: rank.idle_ms}
    draws, alone = (draws_ns(step, result, calibration, clocks, known) / NS_PER_MS for known in (None, Situation("none")))
    return Played(ms(float(result.period_ns[0])), draws, alone, parts)
