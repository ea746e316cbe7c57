"""At which clock cards run the kernels of a step: the highest at which none of them draws more than its cap in the mean.

A card's clock makes its kernels longer and lowers their energy; longer kernels make the step longer, and that lowers its power
again. `Cards.clocks` goes by the time that kernels take beside everything else of a played step; playing the step at those
clocks and asking again settles both (`steptime._sim.modelled.step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.power.model import LOWEST_CLOCK, KernelDraw, PowerModel

Floats = npt.NDArray[np.float64]

_HALVINGS = 40


@dataclass(frozen=True, eq=False)
class Draws:
    """Kernels of one rank: columns of those that differ, and for each kernel its row there."""

    row: npt.NDArray[np.int64]
    time_ns: Floats  # alone, at its isolated clock
    core_j: Floats
    memory_j: Floats
    elasticity: Floats
    tensor: npt.NDArray[np.bool_]
    isolated: Floats
    share: int  # of the card, one of so many parts

    @classmethod
    def of(cls, times_ns: Sequence[float], draws: Sequence[KernelDraw | None], share: int) -> Draws:
        """Of estimates in order; None: nothing is known, and no clock changes it."""
        rows: dict[tuple[float, KernelDraw], int] = {}
        nothing = KernelDraw(0.0, 0.0, 0.0, False, 1.0)
        each = zip(times_ns, (draw or nothing for draw in draws), strict=True)
        row = np.array([rows.setdefault(kernel, len(rows)) for kernel in each], dtype=np.int64)
        known = [draw for _, draw in rows]

        def column(name: str) -> Floats:
            return np.array([getattr(draw, name) for draw in known], dtype=np.float64)

        return cls(
            row,
            np.array([time_ns for time_ns, _ in rows], dtype=np.float64),
            column("core_j"),
            column("memory_j"),
            column("elasticity"),
            np.array([draw.tensor for draw in known], dtype=np.bool_),
            column("isolated"),
            share,
        )

    def _clock(self, model: PowerModel, clock: Floats) -> Floats:
        """(row, ...): what SMs run each kernel at where the driver asks for `clock`."""
        known = vars(self).get("_limits")
        if known is None or known[0] is not model:
            known = model, np.where(self.tensor, model.tensor_clock, 1.0), self._peak(model)
            vars(self)["_limits"] = known
        _, asked, peak = known
        shape = (-1, *[1] * clock.ndim)
        result: Floats = np.minimum(asked.reshape(shape) * clock, peak.reshape(shape))
        return result

    def slowdown(self, model: PowerModel, clock: Floats) -> Floats:
        """(kernel, ...): how many times as long as alone each takes."""
        return self._slowdown(self._clock(model, clock))

    def both(self, model: PowerModel, clock: Floats) -> tuple[Floats, Floats]:
        """(kernel, ...): how many times as long as alone each takes, and its energy."""
        run_at = self._clock(model, clock)
        shape = (-1, *[1] * clock.ndim)
        core: Floats = self.core_j.reshape(shape) * run_at**model.gamma
        return self._slowdown(run_at), (core + self.memory_j.reshape(shape))[self.row]

    def _slowdown(self, run_at: Floats) -> Floats:
        shape = (-1, *[1] * (run_at.ndim - 1))
        ratio = self.isolated.reshape(shape) / run_at
        result: Floats = (np.maximum(ratio, 1e-3) ** self.elasticity.reshape(shape))[self.row]
        return result

    def _peak(self, model: PowerModel) -> Floats:
        """Per row the clock at which it would draw as much as the card gives for a moment."""
        room = model.peak_room_w / self.share * self.time_ns * 1e-9 - self.memory_j
        # Below the clock that its time is of a kernel takes longer, and draws less for that too.
        power = model.gamma + self.elasticity
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.maximum(room, 0.0) * self.isolated**self.elasticity / np.maximum(self.core_j, 1e-30)
            limit = np.where(self.core_j > 0, ratio ** (1 / power), 1.0)
        result: Floats = np.clip(limit, LOWEST_CLOCK, 1.0)
        return result


@dataclass(frozen=True, slots=True)
class Load:
    """What one card does in a step."""

    draws: Sequence[Draws]  # of every rank on it
    counts: Sequence[Floats]  # per rank and kernel, how often a step has it
    period_ns: float
    clock: float  # that the period is of
    collective_ns: float  # that collectives are in flight, all ranks together

    def solved(self, model: PowerModel, energy: Floats) -> tuple[Floats, Floats]:
        """Clock and mean power where kernels take `energy` times their energy; one of each per factor."""
        base = np.full(energy.shape, self.clock)
        busy_ns = self._busy_ns(model, base)
        low, high = np.full(energy.shape, LOWEST_CLOCK), np.ones(energy.shape)
        high_w = self._dynamic_w(model, high, energy, busy_ns)
        free = high_w <= model.room_w
        if free.all():
            return high, np.array([model.power_w(each) for each in high_w])
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            fits = self._dynamic_w(model, middle, energy, busy_ns) <= model.room_w
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        clock: Floats = np.where(free, 1.0, low)
        dynamic = self._dynamic_w(model, clock, energy, busy_ns)
        return clock, np.array([model.power_w(each) for each in dynamic])

    def at_clock(self, model: PowerModel, energy: float) -> float:
        """Mean power at the clock that the period is of."""
        clock = np.array([self.clock])
        return model.power_w(float(self._dynamic_w(model, clock, np.array([energy]), self._busy_ns(model, clock))[0]))

    def _busy_ns(self, model: PowerModel, clock: Floats) -> Floats:
        return self._mean_ns([draws.slowdown(model, clock) for draws in self.draws])

    def _mean_ns(self, slowdowns: Sequence[Floats]) -> Floats:
        pairs = zip(self.draws, self.counts, slowdowns, strict=True)
        every = [(draws.time_ns[draws.row] * count)[:, None] * slowdown for draws, count, slowdown in pairs]
        return np.asarray(sum(times.sum(axis=0) for times in every) / max(len(every), 1))

    def _dynamic_w(self, model: PowerModel, clock: Floats, energy: Floats, busy_ns: Floats) -> Floats:
        known: dict[int, tuple[Floats, Floats]] = {}  # ranks of one program share their draws
        for draws in self.draws:
            if id(draws) not in known:
                known[id(draws)] = draws.both(model, clock)
        both = [known[id(draws)] for draws in self.draws]
        joule = sum((n[:, None] * each[1]).sum(axis=0) for each, n in zip(both, self.counts, strict=True))
        period_ns = np.maximum(self.period_ns + self._mean_ns([each[0] for each in both]) - busy_ns, 1.0)
        result: Floats = (joule * energy + model.collective_w * self.collective_ns * 1e-9) / (period_ns * 1e-9)
        return result


@dataclass(frozen=True, slots=True)
class StepPower:
    """What the cards of a step draw in the mean, and at which clock."""

    power_w: float  # mean over cards
    clock_hz: float  # that the driver asks for, as its tools show it; mean over cards
    energy_j: float  # of all cards, in one step
    cap_w: float
    capped: bool  # whether the cap holds the clock of a card down
