"""`LayoutEvaluator`: the questions of a search, asked wherever an executor runs; a layout is played as `predict` does it."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._garbage import no_collection
from steptime._plan.layers import (
    ActivationKey,
    Activations,
    LayerKey,
    LayerSizes,
    LayerTimes,
    StateKey,
    States,
    activations,
    layer_sizes,
    layer_times,
    mean_layer,
    states,
)
from steptime._plan.parts import parts_of
from steptime._plan.space import ModelLayout
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform, PlatformParts
from steptime._sim.modelled.prediction import draws_ns, interval_of, memory_of, predict_on
from steptime._sim.modelled.step import modelled
from steptime._sim.prediction import PredictedStep, operations_of, peak_flop_per_s

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Played:
    """A layout, and what the simulator says of it."""

    layout: ModelLayout
    step_ns: float
    interval_ns: tuple[float, float]
    draws_ns: Floats  # the step once per draw of what models may be off by, in the same order for all layouts
    peak_bytes: int
    flop: float  # that the model asks for, on all GPUs
    peak_flop_per_s: float | None
    energy_j: float | None
    parts_ns: Mapping[str, float]  # where the time of the busiest stage goes; adds up to the step

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation."""
        return None if not self.peak_flop_per_s else self.flop / (self.peak_flop_per_s * self.step_ns / 1e9)


@dataclass(frozen=True)
class LayoutEvaluator:
    """What all layouts of a search have in common. Other processes find the platform by the names of its parts."""

    model: Transformer
    parts: PlatformParts
    calibration: Calibration = UNCALIBRATED

    @property
    def platform(self) -> Platform:
        """The machine."""
        return _platform(self.parts)

    def sizes(self, shared: Parallelism) -> LayerSizes:
        """Parameters of a rank."""
        return mean_layer(self.model, lambda model: layer_sizes(model, shared))

    def activations(self, key: ActivationKey) -> Activations:
        """What layers leave for backward."""
        with no_collection():
            return mean_layer(self.model, lambda model: activations(model, key, self.platform))

    def states(self, key: StateKey) -> States:
        """What parameters, gradients and the optimiser's state need."""
        with no_collection():
            return mean_layer(self.model, lambda model: states(model, key, self.platform))

    def times(self, key: LayerKey) -> LayerTimes:
        """What a layer takes."""
        with no_collection():
            return mean_layer(self.model, lambda model: layer_times(model, key, self.platform, self.calibration))

    def play(self, layout: ModelLayout) -> Played:
        """The steady step of a layout, as `predict` plays it, with the draws of its interval.

        A process plays many layouts one after the other: nothing of one is left for the next.
        """
        with no_collection():
            result = self._played(layout)
        gc.collect()
        return result

    def predicted(self, layout: ModelLayout) -> PredictedStep:
        """The same layout with all that `predict` says of it."""
        return predict_on(build(layout.of(self.model)), self.platform, calibration=self.calibration)

    def _played(self, layout: ModelLayout) -> Played:
        platform = self.platform
        workload = build(layout.of(self.model))
        step = modelled(workload, platform)
        memory = memory_of(step.workload, platform)
        played = step.play(self.calibration)
        draws, step_ns, power = draws_ns(played), played.step_ns, played.power
        operations = operations_of(workload)
        peak = peak_flop_per_s(platform.device.limits, operations.precision)
        return Played(
            layout=layout,
            step_ns=step_ns,
            interval_ns=interval_of(step_ns, draws),
            draws_ns=draws,
            peak_bytes=int(memory["peak_bytes"]),
            flop=operations.model,
            peak_flop_per_s=None if peak is None else peak * workload.world_size,
            energy_j=None if power is None else power.energy_j,
            parts_ns=parts_of(layout, played.timeline, step_ns, operations),
        )


@lru_cache(maxsize=4)
def _platform(parts: PlatformParts) -> Platform:
    return Platform.of(parts)
