"""Rows of layouts predicted, those that differ in layers and micro-batches alone together.

Layers are alike and so are micro-batches, so a step grows by as much with each: two numbers of either are played, and the
others follow, draw by draw. `tests/validate/test_layouts.py` holds that to the whole step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform, PlatformParts
from steptime._sim.explain.activity import Window, activity
from steptime._sim.modelled.prediction import draws_ns
from steptime._sim.modelled.step import modelled
from steptime._units import NS_PER_MS, ms
from steptime.errors import SteptimeError
from steptime_lab.validate.layouts.rows import LayoutRow

Floats = npt.NDArray[np.float64]

# Of a stage, and in a rank's batch for each stage: the fewest that are played. A pipeline is full by then.
_LAYERS, _PARTS = (6, 8), (1, 2)


@dataclass(frozen=True)
class PlayedLayout:
    """A step with each calibration that was asked for: without draws and with them, and what the device did, milliseconds."""

    step_ms: Floats
    draws_ms: Floats  # (calibration, draw)
    idle_ms: float
    exposed_ms: float

    def further(self, fewer: PlayedLayout, times: float) -> PlayedLayout:
        """This and `times` what it is longer than one with fewer repeats."""
        return PlayedLayout(
            self.step_ms + times * (self.step_ms - fewer.step_ms),
            self.draws_ms + times * (self.draws_ms - fewer.draws_ms),
            self.idle_ms + times * (self.idle_ms - fewer.idle_ms),
            self.exposed_ms + times * (self.exposed_ms - fewer.exposed_ms),
        )


@dataclass(frozen=True)
class Question:
    """Rows of one machine that share what is played, the calibrations that are asked about, and whether draws are wanted."""

    rows: Sequence[LayoutRow]
    calibrations: tuple[Calibration, ...] = (UNCALIBRATED,)
    drawn: bool = True


def questions(rows: Iterable[LayoutRow], calibrations: Sequence[Calibration], *, drawn: bool) -> list[Question]:
    """The rows in groups that share what is played."""
    alike: dict[tuple[PlatformParts, Transformer], list[LayoutRow]] = defaultdict(list)
    for row in rows:
        few = _with_layers(row.config, _LAYERS[0])
        alike[row.platform, _with_parts(few, _PARTS[0])].append(row)
    return [Question(group, tuple(calibrations), drawn) for group in alike.values()]


def answered(question: Question) -> list[PlayedLayout | str]:
    """What each row of a group is predicted to take, or a line that says why it cannot be."""
    play = _Play(question)
    return [_answer(row, play) for row in question.rows]


def _answer(row: LayoutRow, play: _Play) -> PlayedLayout | str:
    try:
        return play.whole(row)
    except (SteptimeError, ArithmeticError, MemoryError) as error:
        return f"{row.name}: {type(error).__name__}: {error}"


class _Play:
    """Plays steps of a few layers and micro-batches once each."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._known: dict[Transformer, PlayedLayout] = {}

    def whole(self, row: LayoutRow) -> PlayedLayout:
        """A step by what few of its micro-batches take."""
        config, stages = row.config, row.config.parallel.pipeline
        few, more = (count * stages for count in _PARTS)
        parts = config.gradient_accumulation
        if parts <= more:
            return self._by_layers(config, row.platform)
        first, second = (self._by_layers(_with_parts(config, count), row.platform) for count in _PARTS)
        return second.further(first, (parts - more) / (more - few))

    def _by_layers(self, config: Transformer, platform: PlatformParts) -> PlayedLayout:
        first, second = (_with_layers(config, count) for count in _LAYERS)
        if config.layers <= second.layers or first.layers == second.layers:
            return self._one(config, platform)
        times = (config.layers - second.layers) / (second.layers - first.layers)
        return self._one(second, platform).further(self._one(first, platform), times)

    def _one(self, config: Transformer, platform: PlatformParts) -> PlayedLayout:
        if config not in self._known:
            self._known[config] = played(config, platform, self._question.calibrations, drawn=self._question.drawn)
        return self._known[config]


def _with_parts(config: Transformer, parts: int) -> Transformer:
    """The same micro-batches, so many of them for each stage."""
    count = parts * config.parallel.pipeline
    return replace(config, batch=config.batch // config.gradient_accumulation * count, gradient_accumulation=count)


def _with_layers(config: Transformer, layers: int) -> Transformer:
    """So many layers for each stage; as it is where stages or layers differ among themselves."""
    parallel, count = config.parallel, layers * config.parallel.pipeline
    alike = not (parallel.stages or config.layers % parallel.pipeline or parallel.chunks > 1)
    return replace(config, layers=count) if alike and not (config.experts.count or config.window) else config


@lru_cache(maxsize=16)
def platform_of(parts: PlatformParts) -> Platform:
    """The machine that a row ran on."""
    return Platform.of(parts)


def played(
    config: Transformer, parts: PlatformParts, calibrations: Sequence[Calibration] = (UNCALIBRATED,), *, drawn: bool = True
) -> PlayedLayout:
    """A whole step."""
    platform = platform_of(parts)
    step = modelled(build(config), platform)
    times, draws, seen = [], [], None
    for calibration in calibrations:
        result = step.play(calibration)
        times.append(ms(result.step_ns))
        draws.append(draws_ns(result) / NS_PER_MS if drawn else np.empty(0))
        if calibration is UNCALIBRATED or seen is None:
            seen = activity(result.timeline, Window(1)).ranks
    first = min(seen or (), key=lambda rank: rank.idle_ms)
    return PlayedLayout(np.array(times), np.array(draws), first.idle_ms, first.exposed_communication_ms)
