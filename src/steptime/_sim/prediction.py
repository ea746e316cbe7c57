"""What a prediction says: how long a step takes, what ranks do meanwhile, how many operations, and why it is not faster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from steptime._hardware.device import DeviceLimits, device_named
from steptime._models.kernels.call import computed_in
from steptime._models.memory.fit import Fit, Remedy
from steptime._models.power.card import StepPower
from steptime._notices import Basis, Notices
from steptime._ops.operations import is_product, products_of
from steptime._program.host_code import outside_ops
from steptime._program.nesting import ENGINE
from steptime._program.program import CallKind, Phase, Program, Tensor
from steptime._program.workload import Workload
from steptime._sim.core.timing import Cohort, Timeline
from steptime._sim.explain.activity import Activity, RankSummary, Window, activity
from steptime._sim.explain.bound import StepBound, Straggler, Waiting, waiting
from steptime._sim.explain.critical_path import PathSummary, critical_path, summarise_path
from steptime._sim.recorded.profiler import profiler_costs, unprofiled
from steptime._sim.recorded.replay import played, recorded_step_ns, step_times_ns
from steptime._sim.recorded.timing import Recorded, recorded
from steptime._units import ms

# Forward, and a backward pass that differentiates each product by both of its factors.
_MODEL_PASSES = 3.0
# All of it computed again, scores of fused attention too. More than this says that the forward pass was not told from the
# rest, as in recordings of compiled steps.
_MOST_PASSES = 4.5
# What a step that the device bounds takes without a profiler, of what it was recorded with.
_UNPROFILED_DEVICE = (0.93, 1.03)
NINE_OF_TEN = 1.645  # standard deviations to either side
# As people call what devices' data sheets name by type.
_PRECISIONS = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Operations:
    """Floating-point operations of one step over all ranks.

    Counted are products, convolutions and attention, by the shapes of their arguments; attention as if every query met every
    key, whether a mask leaves half of them out or not. Backward is twice forward at most: what a backward pass has beyond that
    is computed again (activation checkpointing, the scores of fused attention), which the hardware does and the model does not
    ask for. Where parts are frozen, backward is less, and what is computed again is told by the autograd nodes that it makes.
    """

    forward: float = 0.0
    hardware: float = 0.0  # of the whole step, with what is computed again
    precision: str | None = None  # in which most of them are computed, as devices call it
    again: float = 0.0  # of those that checkpoints compute again, as far as they can be told

    @property
    def model(self) -> float:
        """Without what is computed again."""
        phases_known = self.hardware <= _MOST_PASSES * self.forward
        return min(self.hardware - self.again, _MODEL_PASSES * self.forward) if phases_known else self.hardware


def operations_of(workload: Workload) -> Operations:
    """What all ranks of a step compute; a rank without a program is taken to do what the first one does."""
    forward, repeated, by_precision = 0.0, 0.0, dict[str, float]()
    for index, program in enumerate(workload.programs):
        ranks = len(workload.run_by(program.rank)) + (len(workload.absent) if index == 0 else 0)
        for phase, again, precision, flop in _products(program):
            by_precision[precision] = by_precision.get(precision, 0.0) + ranks * flop
            forward += ranks * flop if phase == Phase.FORWARD else 0.0
            repeated += ranks * flop if again else 0.0
    usual = max(by_precision, key=by_precision.__getitem__, default=None)
    return Operations(forward, sum(by_precision.values()), usual, repeated)


def _computed_again(program: Program, rows: Sequence[int]) -> list[bool]:
    """Which ops run within a node of the backward pass and make nodes themselves: autograd numbers these anew."""
    ops = program.ops
    engine = [name.startswith(ENGINE) for name in program.names]
    parent, sequence, name = (column.tolist() for column in (ops.parent, ops.sequence, ops.name))
    result = []
    for op in rows:
        row, numbers = op, list[int]()  # of what is around it, out to the node that the engine runs
        while row >= 0 and not engine[name[row]]:
            numbers.append(sequence[row])
            row = parent[row]
        result.append(row >= 0 and any(each not in (-1, numbers[-1]) for each in numbers))
    return result


def _products(program: Program) -> Iterator[tuple[int, bool, str, float]]:
    """Phase, whether it is computed again, precision and operations per step of every distinct product of a program."""
    ops = program.ops
    # Autocast shows an op around the casts of its arguments and once more inside.
    within = (ops.parent >= 0) & (ops.name[np.maximum(ops.parent, 0)] == ops.name)
    products = np.isin(ops.name, [row for row, name in enumerate(program.names) if is_product(name)])
    counted = products & (ops.signature >= 0) & ~within & ((ops.step >= 0) | (not program.steps))
    calls: Counter[tuple[int, int, int, bool]] = Counter()
    columns = (column[counted].tolist() for column in (ops.name, ops.signature, ops.phase, program.op_counts))
    again = _computed_again(program, np.flatnonzero(counted).tolist())
    for name, signature, phase, count, repeated in zip(*columns, again, strict=True):
        calls[name, signature, phase, repeated] += count
    operations = products_of([(program.names[name], program.signatures[signature]) for name, signature, *_ in calls])
    for ((name, signature, phase, repeated), count), flop in zip(calls.items(), operations, strict=True):
        if flop is not None:
            called = program.signatures[signature]
            dtype = next((value.dtype for value in called.inputs if isinstance(value, Tensor)), "")
            yield (
                phase,
                repeated,
                computed_in(program.names[name], dtype, called.switches.tf32),
                flop * count / max(len(program.steps), 1),
            )


def peak_flop_per_s(limits: DeviceLimits, precision: str | None) -> float | None:
    """What one rank on this device could compute at most; None where nobody says for this precision."""
    peak = limits.peak_flop_per_s.get(precision or "")
    return None if peak is None else peak.value / limits.share


def recorded_peak_flop_per_s(workload: Workload, precision: str | None) -> float | None:
    """The same, summed over the ranks of a recording, of the devices and the share of their SMs that it names."""
    peaks = [peak for program in workload.programs if (peak := _recorded_peak(program, precision)) is not None]
    return sum(peaks) * workload.world_size / len(peaks) if len(peaks) == len(workload.programs) else None


def _recorded_peak(program: Program, precision: str | None) -> float | None:
    limits = device_named(program.device_name)
    peak = None if limits is None else peak_flop_per_s(limits, precision)
    if limits is None or peak is None:
        return None
    return peak * _recorded_share(program, limits)


def _recorded_share(program: Program, limits: DeviceLimits) -> float:
    """What a rank had of its device, by the SMs that the recording names."""
    sms = program.meta.get("device_sms")
    return min(sms / limits.sms.value, 1.0) if isinstance(sms, int) and sms > 0 else 1.0


def recorded_gpus(workload: Workload) -> float | None:
    """Whole devices that the ranks of a recording had together; None where a device is not known."""
    known = [(program, device_named(program.device_name)) for program in workload.programs]
    shares = [_recorded_share(program, limits) for program, limits in known if limits is not None]
    return sum(shares) * workload.world_size / len(shares) if shares and len(shares) == len(known) else None


@dataclass(frozen=True)
class Iterations:
    """The step time over iterations that look up other rows. The recorded step stands for the mean iteration."""

    step_ms: tuple[float, ...]  # [iterations]
    slowest: int  # iteration, counted from 0
    # Rank -> by what the step is longer where its lookups alone are those of the slowest iteration.
    alone_ms: Mapping[int, float]

    @property
    def mean_ms(self) -> float:
        """The mean of all iterations."""
        return float(np.mean(self.step_ms))

    @property
    def std_ms(self) -> float:
        """The standard deviation of these iterations, none of which is left out for an estimate of others."""
        return float(np.std(self.step_ms))

    def quantile_ms(self, level: float) -> float:
        """What this share of iterations does not exceed, between neighbours in proportion."""
        return float(np.quantile(self.step_ms, level))


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step of a workload."""

    workload: Workload = field(compare=False, repr=False)
    step_time_ms: float
    # Holds nine of ten measured steps; as recorded: the span of the prediction and the recorded steps after the first.
    interval_ms: tuple[float, float]
    ranks: tuple[RankSummary, ...]
    breakdown: Mapping[str, float]  # family -> device busy time, mean over ranks; sums to the mean busy time
    critical_path: PathSummary
    straggler: Straggler | None
    bound: StepBound
    timeline: Timeline  # what it was read from
    first_step_ms: float | None = None  # a single step from empty queues, where that is not the step
    coverage: Mapping[str, float] = field(default_factory=lambda: {"measured": 1.0})  # source -> share of device time
    # As `predict --json` has it; nothing is known of the memory of a prediction as recorded. `unknown` says why on a platform.
    memory: Mapping[str, Any] = field(default_factory=lambda: {"peak_bytes": None})
    notices: Notices = field(default_factory=Notices)
    iterations: Iterations | None = None  # where it was asked how iterations differ: `lookup_scenarios`
    platform: str | None = None  # None: as recorded
    operations: Operations = field(default_factory=Operations)
    peak_flop_per_s: float | None = None  # of all ranks together, in the precision of most operations; None: not known
    power: StepPower | None = None  # of the cards; None: nobody knows what they draw
    host_code_ms: float | None = None  # host time per step outside all ops, mean over ranks; None: not recorded
    profiled: bool = False  # whether host times are those of the recording, what the profiler cost included
    situation: str | None = None  # what is known of the machine, by which the interval is as wide as it is; None: as recorded
    gpus: float | None = None  # whole devices that the ranks have together; None: not known
    price: float | None = None  # of one of them for an hour, as it was asked with
    helps: tuple[Remedy, ...] = ()  # changes that would make it fit, each tried
    # The step once per draw of what models may be off by; the same errors are in the same draws of every prediction.
    draws_ms: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user can act on, or must know of this step."""
        return self.notices.warnings

    @property
    def basis(self) -> tuple[str, ...]:
        """Standing facts that it rests on."""
        return self.notices.basis

    @cached_property
    def recorded_step_ms(self) -> float | None:
        """What a step of the run took as recorded, with its profiler; None where nothing ran."""
        step_ns = recorded_step_ns(self.workload)
        return None if step_ns is None else ms(step_ns)

    @property
    def fit(self) -> Fit | None:
        """What the fullest rank needs of its memory; None where that is not known."""
        return Fit.of(self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether every rank has room; None where that is not known."""
        return None if self.fit is None else self.fit.fits

    @property
    def bound_by(self) -> str:
        """What bounds the step, and why, in a sentence."""
        return self.bound.text

    @property
    def precision(self) -> str | None:
        """What the workload says it computes in, or else what most of its products do."""
        computed = self.operations.precision
        return self.workload.description.precision or _PRECISIONS.get(computed or "", computed)

    @property
    def samples_per_s(self) -> float | None:
        """Samples that all ranks together train on; None where the batch is not known."""
        batch = self.workload.description.batch
        return None if batch is None or not self.step_time_ms else 1e3 * batch / self.step_time_ms

    @property
    def tokens_per_s(self) -> float | None:
        """Samples times the tokens of each."""
        sequence, samples = self.workload.description.sequence, self.samples_per_s
        return None if samples is None or sequence is None else samples * sequence

    @property
    def flop(self) -> float | None:
        """Operations that the model asks for in one step, over all ranks; None where no product is known."""
        return self.operations.model or None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: these over what the devices could compute in the step time at their peak."""
        return self._utilisation(self.operations.model)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: the same with what is computed again."""
        return self._utilisation(self.operations.hardware)

    def _utilisation(self, flop: float) -> float | None:
        if not flop or not self.peak_flop_per_s or not self.step_time_ms:
            return None
        return flop / (self.peak_flop_per_s * self.step_time_ms / 1e3)


def predict(workload: Workload, *, profiled: bool = True) -> PredictedStep:
    """Predict the steady-state step with the run's own durations; on a platform: `modelled.prediction`.

    As it was recorded; what the profiler cost is taken out if it is asked for so (not `profiled`).
    """
    as_recorded = recorded(workload)
    inputs = as_recorded if profiled else unprofiled(as_recorded)
    result = played(inputs)
    steps = max(1, *(len(cohort.program.steps) for cohort in inputs.cohorts))
    notices = [*workload.warnings, *missing_ranks(workload)]
    if steps == 1:
        notices.append(
            "one step was recorded: how much host time lies between steps is not known and taken as none, and ranks begin "
            "together even if they did not; record three or more"
        )
    if not result.converged:
        notices.append(Basis(f"the mean of {result.iterations} windows, in which the step had not settled"))
    step_ns = float(result.period_ns[0]) + (single_step_ns(as_recorded) if profiled else 0.0)
    interval_ns = _recorded_span(as_recorded, step_ns) if profiled else _without_profiler(as_recorded, step_ns)
    text = explain(
        workload,
        result.timeline,
        Window(steps),
        step_ns=step_ns,
        interval_ms=(ms(interval_ns[0]), ms(interval_ns[1])),
        complete=not workload.absent,
        first_ns=int(result.first_ns[0]),
        notices=notices,
    )
    peak = None if workload.cut_off else recorded_peak_flop_per_s(workload, text.operations.precision)
    return replace(
        text,
        peak_flop_per_s=peak,
        profiled=profiled,
        host_code_ms=host_code_ms(inputs.cohorts),
        gpus=recorded_gpus(workload),
    )


def host_code_ms(cohorts: Sequence[Cohort]) -> float:
    """What recorded hosts spend outside ops, per step and in the mean over ranks, as their timings have it."""
    spent = []
    for cohort in cohorts:
        calls, gap_ns = cohort.program.calls, cohort.timing.gap_ns[:, 0, 0]
        inside = (calls.step >= 0) & (calls.kind != CallKind.STEP_BEGIN)
        outside = (outside_ops(cohort.program) * gap_ns)[inside]
        spent.append(float(outside.sum()) / max(1, len(cohort.program.steps)))
    return ms(float(np.mean(spent)))


def missing_ranks(workload: Workload) -> list[str]:
    """What to say of ranks without a trace."""
    if not workload.absent:
        return []
    missing = f"{len(workload.absent)} of {workload.world_size}"
    return [f"ranks without a trace ({missing}) are taken to come to collectives as late as the recording shows"]


def single_step_ns(inputs: Recorded) -> float:
    """What the only step of a recording took beyond its steady state: ranks began apart, at its end the device ran empty."""
    steps = step_times_ns(inputs)
    if len(steps) > 1:
        return 0.0
    return float(next(iter(steps.values()))) - float(played(inputs).period_ns[0])


def _recorded_span(inputs: Recorded, step_ns: float) -> tuple[float, float]:
    """Of the prediction and the recorded steps."""
    times_ns = [float(period) for period in step_times_ns(inputs).values()]
    # The first counts from the host's start and waits for what was launched before the recording.
    times_ns = times_ns[1:] or times_ns
    return min(*times_ns, step_ns), max(*times_ns, step_ns)


def _without_profiler(inputs: Recorded, step_ns: float) -> tuple[float, float]:
    """What holds nine of ten unprofiled steps: less or more of the host times may be left, kernels be as quick or quicker."""
    times = math.exp(NINE_OF_TEN * profiler_costs().error)
    other = [unprofiled(inputs, each) for each in (1.0 / times, times)]
    if any(late_ns.any() for late_ns in inputs.late_ns):
        # Ranks without a trace may come as late as they did.
        other.append(replace(unprofiled(inputs, times), late_ns=inputs.late_ns))
    periods = [float(played(each).period_ns[0]) for each in other]
    low, high = min(periods), max(periods)
    faster, slower = _UNPROFILED_DEVICE
    return min(low, step_ns) * faster, max(high, step_ns) * slower


def explain(
    workload: Workload,
    timeline: Timeline,
    window: Window,
    *,
    step_ns: float,
    interval_ms: tuple[float, float],
    complete: bool = True,
    first_ns: int | None = None,
    notices: Sequence[str] = (),
) -> PredictedStep:
    """Read the answers out of a timeline. Not `complete`: ranks are left out of it, and nobody can say who waits for whom."""
    seen: Activity = activity(timeline, window)
    since_ns = int(timeline.end_ns[0]) - round(step_ns * window.steps)
    path = summarise_path(critical_path(timeline), timeline, window.steps, since_ns)
    waited = waiting(timeline, steps=window.steps, step_ns=step_ns) if complete else Waiting(None, 0.0)
    waited = waited.with_reason(seen.ranks)
    return PredictedStep(
        workload=workload,
        operations=operations_of(workload),
        step_time_ms=ms(step_ns),
        interval_ms=interval_ms,
        ranks=seen.ranks,
        breakdown=seen.breakdown,
        critical_path=path,
        straggler=waited.straggler,
        bound=StepBound.of(seen, path, waited),
        timeline=timeline,
        first_step_ms=None if first_ns in (None, round(step_ns)) else ms(first_ns or 0),
        notices=Notices.of(notices),
    )
