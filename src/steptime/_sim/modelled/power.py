"""The clocks and the power of a step: `Cards` of a platform, what their kernels draw, and the clocks that their caps leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._models.power.card import Draws, Load, StepPower
from steptime._models.power.model import PowerModel
from steptime._program.program import WorkKind
from steptime._sim.core.steady import Steady
from steptime._sim.core.timing import CohortTimeline
from steptime._sim.modelled.issue import Issued

Floats = npt.NDArray[np.float64]

# Clocks have settled when none wants to move by more than this.
SETTLED = 1e-3
# And when a step does not: clocks of a pipeline's stages go on trading what none of them is late for.
STEP_SETTLED = 2e-4
ROUNDS = 6


@dataclass(frozen=True, eq=False)
class Cards:
    """The cards of a step: one for the ranks of each program, or one for all where ranks have shares of it."""

    model: PowerModel
    highest_hz: float
    draws: tuple[Draws, ...]  # per program
    counts: tuple[Floats, ...]  # per program and kernel: how often a step has it
    ranks: tuple[int, ...]  # how many run each program
    share: int
    energy: float = 1.0  # that kernels take on these cards, of what the model says

    @classmethod
    def of(cls, model: PowerModel, highest_hz: float, programs: Sequence[Issued], ranks: Sequence[int], share: int) -> Cards:
        """Of programs as issued; how many ranks run each."""
        draws, counts = [], []
        for program in programs:
            kernels = len(program.draws)
            times_ns = [estimate.time_ns for estimate in program.estimates[:kernels]]
            known = [
                draw or model.plain_draw("other", time_ns, share) for draw, time_ns in zip(program.draws, times_ns, strict=True)
            ]
            draws.append(Draws.of(times_ns, known, share))
            at = np.array(program.estimate, dtype=np.int64)
            kept = at < kernels
            steps = max(1, len(program.program.steps))
            counts.append(np.bincount(at[kept], weights=program.share[kept], minlength=kernels) / steps)
        return cls(model, highest_hz, tuple(draws), tuple(counts), tuple(ranks), share)

    def calibrated(self, energy: float, error: float | None, cap_w: float | None) -> Cards:
        """Cards of one machine: their kernels' energy, what is unknown of it, their cap; None: as of any."""
        model = replace(
            self.model,
            cap_w=self.model.cap_w if cap_w is None else cap_w,
            error=self.model.error if error is None else error,
        )
        return replace(self, model=model, energy=energy)

    @property
    def full(self) -> Floats:
        """Per program, the highest clock."""
        return np.ones(len(self.draws))

    def slowdown(self, program: int, clock: Floats) -> Floats:
        """Per kernel of a program, and clock, how many times as long it takes as its model says."""
        return self.draws[program].slowdown(self.model, clock)

    def loads(self, played: Steady, clocks: Floats) -> list[Load]:
        """Per card, what a step that was played at some clocks has it do."""
        period_ns = float(played.period_ns[0])
        waiting = [_collective_ns(cohort) for cohort in played.timeline.cohorts]
        if self.share == 1:
            pieces = zip(self.draws, self.counts, waiting, clocks.tolist(), strict=True)
            return [Load((draws,), (counts,), period_ns, clock, waited) for draws, counts, waited, clock in pieces]
        many = [index for index, count in enumerate(self.ranks) for _ in range(count)]
        waited = sum(waiting[index] for index in many) / self.share  # each holds its part of the SMs
        draws, counts = [self.draws[index] for index in many], [self.counts[index] for index in many]
        return [Load(tuple(draws), tuple(counts), period_ns, float(clocks[0]), waited)]

    def clocks(self, played: Steady, clocks: Floats) -> Floats:
        """Per program, the clock that the cap of its card leaves."""
        wanted = [float(load.solved(self.model, np.array([self.energy]))[0][0]) for load in self.loads(played, clocks)]
        return np.array(wanted if self.share == 1 else wanted * len(self.draws))

    def drawn(self, played: Steady, clocks: Floats) -> StepPower:
        """Power, clock and energy of a step that was played at these clocks."""
        loads = self.loads(played, clocks)
        weights = np.array(self.ranks if self.share == 1 else [1], dtype=np.float64)
        power = np.array([load.at_clock(self.model, self.energy) for load in loads])
        seconds = float(played.period_ns[0]) * 1e-9
        mean_clock = float(weights @ clocks[: len(weights)] / weights.sum())
        return StepPower(
            power_w=float(weights @ power / weights.sum()),
            clock_hz=mean_clock * self.highest_hz,
            energy_j=float(weights @ power) * seconds,
            cap_w=self.model.cap_w,
            capped=bool((clocks < 1.0 - SETTLED).any()),
        )

    def drawn_clocks(self, played: Steady, clocks: Floats, energy: Floats) -> list[Floats]:
        """Per program, its clock where all kernels take these times their energy."""
        solved = [load.solved(self.model, self.energy * energy)[0] for load in self.loads(played, clocks)]
        return solved if self.share == 1 else solved * len(self.draws)


def _collective_ns(played: CohortTimeline) -> float:
    """How long collectives of a rank are in flight, waiting included; mean over ranks."""
    rows = played.cohort.program.works.kind == WorkKind.COLLECTIVE
    if not rows.any():
        return 0.0
    steps = max(1, len(played.cohort.program.steps))
    spent = (played.work_end_ns - played.work_start_ns)[rows, :, 0]
    return float(spent.sum(axis=0).mean()) / steps
