"""What changes save of a step: each alone and all together, played by the one simulator, with how sure that is.

A prediction's timeline holds the program and the durations of every rank. A what-if edits those and plays them again, so that
whatever a change does to waiting, to the host that runs ahead and to other ranks follows from the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._program.workload import Workload
from steptime._sim.core.steady import Steady, play_again
from steptime._sim.core.timing import Cohort
from steptime._sim.explain.activity import Window
from steptime._sim.prediction import NINE_OF_TEN, Operations, PredictedStep, explain, recorded_peak_flop_per_s
from steptime._units import NS_PER_MS, ms
from steptime._whatif.apply import Cohorts, applied
from steptime._whatif.draws import with_draws
from steptime._whatif.grammar import BATCH, BF16, COMPILE, SCALE, TF32, Change, error, samples_after

Floats = npt.NDArray[np.float64]
Apply = Callable[[Change, Cohorts], Cohorts]

LEVELS = (0.05, 0.95)
# Of a saving: nine of ten changes made for real on an H200 saved within this of what was foretold, of the 18 whose two rounds
# of timing agree (benchmarks/whatif_pairs.json, whatif_pairs_again.json; 2026-11-16).
OFF_BY = 0.22
_OTHER_PROGRAM = {"peak_bytes": None, "unknown": "it is not predicted for another batch or a compiled step of a what-if"}
_BUILT_AGAIN = (BATCH, COMPILE)
CHANGED = "changed"
"""What device times are that a what-if made otherwise, in coverage."""
_SINGLE = "float32"
_IN = {TF32: "tf32", BF16: "bfloat16"}  # what products in fp32 are computed in then, as devices call it


@dataclass(frozen=True)
class Saving:
    """What one change, or several together, save of the step."""

    changes: tuple[str, ...]
    before_ms: float
    after_ms: float
    interval_ms: tuple[float, float]  # of what is saved: holds nine of ten
    bound_by: str  # after the change
    path: Mapping[str, float]  # reason -> share of the critical path after the change
    work: float = 1.0  # samples of a step after the change over those before

    @property
    def saves_ms(self) -> float:
        """Of the step time; below zero where the change costs time."""
        return self.before_ms - self.after_ms

    @property
    def share(self) -> float:
        """Of the step before."""
        return self.saves_ms / self.before_ms if self.before_ms else 0.0

    @property
    def speedup(self) -> float:
        """Samples per second with the change over those without."""
        return self.work * self.before_ms / self.after_ms if self.after_ms else 1.0


@dataclass(frozen=True)
class WhatIf:
    """A step before and after some changes."""

    before: PredictedStep
    after: PredictedStep  # with all changes
    each: tuple[Saving, ...]  # every change alone
    together: Saving


class Scene:
    """A predicted step whose pieces can be changed and played again."""

    def __init__(self, prediction: PredictedStep, apply: Apply = applied) -> None:
        self.prediction, self._apply = prediction, apply
        self.cohorts: Cohorts = tuple(each.cohort for each in prediction.timeline.cohorts)
        self.steps = max(1, *(len(cohort.program.steps) for cohort in self.cohorts))
        self.before = self._play(self.cohorts)
        self._error = log_error_of(prediction)
        # The steady state and, of a single recorded step, what it took more.
        self._step_ns = prediction.step_time_ms * NS_PER_MS
        self._drawn_before: Floats | None = None

    def what_if(self, changes: Sequence[Change]) -> WhatIf:
        """Every change alone, and all together."""
        after, together = self.explained(changes)
        each = [together] if len(changes) == 1 else [self.saving([change]) for change in changes]
        return WhatIf(self.prediction, after, tuple(each), together)

    def changed(self, changes: Sequence[Change], cohorts: Cohorts | None = None) -> Cohorts:
        """The cohorts with all changes, made one after another."""
        result = self.cohorts if cohorts is None else cohorts
        if {change.action for change in changes} >= set(_BUILT_AGAIN):
            raise error(COMPILE, "builds the step anew, as another batch does; give one of them as --compile or --batch")
        # Another batch or a compiled step may be another program: other changes are made to that one.
        for change in sorted(changes, key=lambda change: change.action not in _BUILT_AGAIN):
            result = self._apply(change, result)
        return result

    def gains_ms(self, changes: Sequence[Change]) -> float:
        """What changes save of the step, for as many samples as it has, and nothing else about them."""
        return ms(self.before.period_ns[0] - self._play(self.changed(changes)).period_ns[0] / self._work(changes))

    def _work(self, changes: Sequence[Change]) -> float:
        """Samples of a step after changes over those before; 1 where neither is known."""
        batch, result = self.prediction.workload.description.batch, 1.0
        for change in changes:
            if change.action == BATCH and batch is not None:
                result = samples_after(change, batch) / batch
            elif change.action == BATCH and change.choice == SCALE:
                result = change.amount
        return result

    def saving(self, changes: Sequence[Change]) -> Saving:
        """What changes save together."""
        return self.explained(changes)[1]

    def explained(self, changes: Sequence[Change]) -> tuple[PredictedStep, Saving]:
        """The step with changes, and what they save together."""
        result = self._play(self.changed(changes))
        saved_ns = float(self.before.period_ns[0] - result.period_ns[0])
        before_ns, after_ns = self._step_ns, self._step_ns - saved_ns
        drawn_before, drawn_after = self._drawn(changes)
        saved = drawn_before - drawn_after
        least, most = np.quantile(saved, LEVELS)
        off_ns = OFF_BY * abs(saved_ns)
        interval = (ms(min(least, saved_ns - off_ns)), ms(max(most, min(saved_ns + off_ns, before_ns))))
        after = self._explained(changes, result, after_ns, self._interval_ms(after_ns, drawn_after))
        path = {kind.kind: kind.share for kind in after.critical_path.kinds}
        texts = tuple(change.text for change in changes)
        return after, Saving(texts, ms(before_ns), ms(after_ns), interval, after.bound_by, path, self._work(changes))

    def _interval_ms(self, after_ns: float, drawn: Floats) -> tuple[float, float]:
        """Of the step with changes: nine of ten draws, and no narrower for its length than that of the step without.

        Pieces are drawn one by one here, so that what all of them have in common averages out; a change takes none of it away.
        """
        low, high = np.quantile(drawn, LEVELS)
        step_ms, (below, above) = self.prediction.step_time_ms, self.prediction.interval_ms
        shares = (below / step_ms, above / step_ms) if step_ms else (1.0, 1.0)
        return ms(min(low, after_ns, after_ns * shares[0])), ms(max(high, after_ns, after_ns * shares[1]))

    def _explained(
        self, changes: Sequence[Change], result: Steady, step_ns: float, interval_ms: tuple[float, float]
    ) -> PredictedStep:
        base = self.prediction
        explained = explain(
            _described(base.workload, changes),
            result.timeline,
            Window(self.steps),
            step_ns=step_ns,
            interval_ms=interval_ms,
            complete=not base.workload.absent or base.platform is not None,
            first_ns=int(result.first_ns[0]),
        )
        operations, peak = _computed(base, explained.operations, changes)
        return replace(
            explained,
            operations=operations,
            notices=base.notices,
            platform=base.platform,
            situation=base.situation,
            profiled=base.profiled,
            gpus=base.gpus,
            price=base.price,
            helps=base.helps,
            coverage=_coverage(base.coverage, self.cohorts, [played.cohort for played in result.timeline.cohorts]),
            memory=_OTHER_PROGRAM if any(change.action in _BUILT_AGAIN for change in changes) else base.memory,
            peak_flop_per_s=peak,
            bound=replace(explained.bound, cap=base.bound.cap),  # at the clocks that the cap left before
        )

    def _play(self, cohorts: Cohorts) -> Steady:
        return play_again(self.prediction.timeline, cohorts)

    def _drawn(self, changes: Sequence[Change]) -> tuple[Floats, Floats]:
        """The step before and after in every draw of what pieces may take instead, in nanoseconds."""
        cohorts = tuple(with_draws(cohort, self._error) for cohort in self.cohorts)
        if self._drawn_before is None:
            self._drawn_before = self._play(cohorts).period_ns
        return self._drawn_before, self._play(self.changed(changes, cohorts)).period_ns


def log_error_of(prediction: PredictedStep) -> float:
    """The standard deviation of the logarithm that the interval of a step says."""
    low, high = prediction.interval_ms
    return math.log(high / low) / (2 * NINE_OF_TEN) if 0 < low < high else 0.0


def _computed(base: PredictedStep, counted: Operations, changes: Sequence[Change]) -> tuple[Operations, float | None]:
    """Operations after the changes and the peak that they are measured by, each only where it is known."""
    actions = {change.action for change in changes}
    if BATCH in actions:
        return Operations(), None
    precision = next((_IN[action] for action in (BF16, TF32) if action in actions), counted.precision)
    if counted.precision != _SINGLE or precision == _SINGLE:
        return counted, base.peak_flop_per_s
    peak = recorded_peak_flop_per_s(base.workload, precision) if base.platform is None and not base.workload.cut_off else None
    return replace(counted, precision=precision), peak


def _coverage(before: Mapping[str, float], cohorts: Sequence[Cohort], changed: Sequence[Cohort]) -> Mapping[str, float]:
    """Where device times are from, with the share of those that a change made otherwise."""
    pairs = [(old.timing.duration_ns, new.timing.duration_ns) for old, new in zip(cohorts, changed, strict=True)]
    if any(old.shape != new.shape for old, new in pairs):  # another program, whose times are models' throughout
        return before
    total = sum(int(new.sum()) for _, new in pairs)
    share = sum(int(new[new != old].sum()) for old, new in pairs) / total if total else 0.0
    if not share:
        return before
    return {**{source: part * (1.0 - share) for source, part in before.items()}, CHANGED: share}


def _described(workload: Workload, changes: Sequence[Change]) -> Workload:
    """The workload as it is described after the changes: with another batch or precision, where it says these."""
    known = workload.description
    for change in changes:
        if change.action == BATCH and known.batch is not None:
            known = replace(known, batch=samples_after(change, known.batch))
        if change.action in _IN and known.precision == "fp32":
            known = replace(known, precision=change.text)
    return replace(workload, description=known)
