"""`predict_on`: how long a step takes on a platform, how sure that is and why it is not faster, from models alone.

`interval_ns` plays the same step with durations drawn from what its models are known to be off by: one draw per group of
estimates that err together (a model about calls of one op and size), one per kind of collective and one for the host, since a
box is slow or fast as a whole. Draws depend on the group's name alone, so that the same input gives the same interval and two
configurations of one model are compared under the same errors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._fuse.compiled import OFF
from steptime._garbage import no_collection
from steptime._lookups.workload import TABLE_BATCHED, RankLookups, row_bytes, state_bytes
from steptime._models.estimate import Estimate
from steptime._models.memory.fit import Fit, fullest, usable_bytes
from steptime._models.memory.peak import peak_memory
from steptime._models.memory.tensors import names_tensors
from steptime._models.power.card import StepPower
from steptime._notices import Basis
from steptime._ops.families import WorkFamily, work_families
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._platforms.recorded_kernels import CarriedKernels
from steptime._platforms.situation import Situation, situation_of
from steptime._program.one_step import one_step
from steptime._program.workload import COMPILE, UnnamedMemory, Workload
from steptime._sim.core.steady import steady_period
from steptime._sim.core.timing import Cohort
from steptime._sim.explain.activity import Window
from steptime._sim.explain.bound import PowerCap
from steptime._sim.modelled.issue import Issued
from steptime._sim.modelled.recorded_run import modelled_run
from steptime._sim.modelled.step import ModelledStep, PlayedStep, modelled
from steptime._sim.prediction import PredictedStep, explain, peak_flop_per_s
from steptime._sim.recorded.timing import inside_graphs, timed
from steptime._units import ms

Floats = npt.NDArray[np.float64]

# From here on (13 separate GPUs) it is said what waiting for the slowest costs.
_MUCH_SLOWER = 0.025
SAMPLES = 64
LEVELS = (0.05, 0.95)
_UNNAMED_TENSORS = (
    "the recording does not name its tensors; give an execution trace recorded with it, or predict the script or a config"
)
_GRAPHS_HOLD = "what CUDA graphs hold is in no recording; predict the script or a config"
# Estimates' intervals hold nine of ten: so many standard deviations of a normal to either side.
_NINE_OF_TEN = 1.645
_EVEN_NORMAL = np.array([NormalDist().inv_cdf((at + 0.5) / SAMPLES) for at in range(SAMPLES)])


@no_collection()
def predict_on(
    workload: Workload,
    platform: Platform,
    *,
    calibration: Calibration = UNCALIBRATED,
    strict: bool = False,
    situation: Situation | None = None,
    profiled: bool = False,
    other_host: bool = False,
) -> PredictedStep:
    """Predict the steady-state step of a workload on a platform.

    `strict`: an op without a model is an error, not a guess. `situation`: what may be wrong, where it is not the machine's.
    A recorded run keeps its host times, of which the profiler's part is left in if `profiled`; on another device, of a
    calibration or if asked for (`other_host`) they are those of the platform's host.
    """
    limits = platform.device.limits
    limits.check_format(workload.description.precision or "", workload.name or "workload")
    if workload.meta.get(COMPILE, OFF) == OFF and all(timed(program) for program in workload.programs):
        same = all(CarriedKernels.of(each.device_name, limits).same for each in workload.programs)
        own_host = profiled or (same and not other_host and calibration is UNCALIBRATED)
        step = modelled_run(workload, platform, profiled=profiled, own_host=own_host, strict=strict)
    else:
        step = modelled(workload, platform, strict=strict)
    return replace(prediction_of(step, workload, calibration, situation), profiled=profiled, host_code_ms=step.host_code_ms)


def prediction_of(
    step: ModelledStep, workload: Workload, calibration: Calibration = UNCALIBRATED, situation: Situation | None = None
) -> PredictedStep:
    """The prediction of a step whose models were asked."""
    played = step.play(calibration)
    steps = max(1, *(len(program.program.steps) for program in step.programs))
    draws = draws_ns(played, situation)
    low, high = interval_of(played.step_ns, draws)
    predicted = explain(
        workload,
        played.timeline,
        Window(steps),
        step_ns=played.step_ns,
        interval_ms=(ms(low), ms(high)),
        first_ns=int(played.steady.first_ns[0]),
        notices=[*step.warnings, *_notices(played)],
    )
    peak, power = peak_flop_per_s(step.platform.device.limits, predicted.operations.precision), played.power
    return replace(
        step.everybody(predicted),
        power=power,
        situation=situation_of(step.platform, played.calibration).name,
        draws_ms=tuple(map(ms, draws)),
        bound=replace(predicted.bound, cap=_power_cap(power, step.platform.device.limits.clock_hz.value)),
        platform=step.platform.name,
        coverage=step.coverage,
        peak_flop_per_s=None if peak is None or workload.cut_off else peak * workload.world_size,
        gpus=workload.world_size / step.platform.device.limits.share,
        memory=memory_of(step.workload, step.platform),
    )


def _notices(played: PlayedStep) -> Iterator[Basis]:
    """What the number rests on."""
    step, settling = played.step, played.settling
    limits = step.platform.device.limits
    if limits.analytic:
        yield Basis(f"{limits.name} as {limits.models} by data sheets, not measured; its host as {step.platform.parts.host}")
    known = situation_of(step.platform, played.calibration)
    if known.errors:
        kind = "groups of architectures" if known.by_family else "published sources"
        yield Basis(f"interval by the errors on {known.rows} steps of {len(known.sources)} {kind}")
    slowest = step.stragglers
    if slowest.card >= 1.0 + _MUCH_SLOWER:
        yield Basis(f"the slowest of {slowest.ranks} GPUs {slowest.card - 1:.1%} slower than the usual one")
    if not played.steady.converged:
        yield Basis(f"the mean of {played.steady.iterations} windows, in which the step had not settled")
    if settling is not None and not settling.settled:
        yield Basis(f"how collectives and kernels slow each other, to within {settling.change:.1%}")


def _power_cap(power: StepPower | None, highest_hz: float) -> PowerCap | None:
    """The cap that holds the clock of the cards down, where one does."""
    return PowerCap(power.cap_w, power.clock_hz, highest_hz) if power is not None and power.capped else None


def interval_ns(played: PlayedStep) -> tuple[float, float]:
    """The interval that should hold nine of ten measured steps."""
    return interval_of(played.step_ns, draws_ns(played))


def interval_of(step: float, draws: Floats) -> tuple[float, float]:
    """Nine of ten draws, and the step without draws."""
    low, high = np.quantile(draws, LEVELS)
    return min(float(low), step), max(float(high), step)


def draws_ns(played: PlayedStep, situation: Situation | None = None) -> Floats:
    """The step once per draw of what its models may be off by, and all of a kind together in a situation: the machine's."""
    step, calibration = played.step, played.calibration
    known = situation_of(step.platform, calibration) if situation is None else situation
    cohorts = (of_cohort.cohort for of_cohort in played.timeline.cohorts)
    power = _power_factors(played)
    drawn = [_drawn(*each, calibration, known) for each in zip(step.programs, cohorts, power, strict=True)]
    return steady_period(drawn, iterations_at_most=24) + step.single_ns


def _power_factors(played: PlayedStep) -> list[Floats | None]:
    """Per program (kernel, draw): what kernels take longer where cards draw more or less than their model says."""
    step, clocks = played.step, played.clocks
    cards = step.cards(played.calibration)
    if cards is None:
        return [None] * len(step.programs)
    energy = np.exp(cards.model.error * _normal("power"))
    drawn = cards.drawn_clocks(played.steady, clocks, energy)
    if all((each == clocks[index]).all() for index, each in enumerate(drawn)):
        return [None] * len(step.programs)
    return [cards.slowdown(index, each) / cards.slowdown(index, clocks[index : index + 1]) for index, each in enumerate(drawn)]


def box_factors(situation: Situation) -> dict[str, Floats]:
    """Per kind of kernel a factor for each draw: what all of the kind take on this box."""
    return {kind: error.drawn(_normal(f"box {kind}")) for kind, error in situation.errors.items()}


def _drawn(issued: Issued, cohort: Cohort, power: Floats | None, calibration: Calibration, situation: Situation) -> Cohort:
    """The cohort with a scenario per draw, around durations that have settled already."""
    factors = _factors(issued) if issued.groups else np.ones((1, SAMPLES))
    if power is not None:
        factors[: len(power)] *= power
    collectives = issued.program.collectives
    factors[: len(issued.groups) - len(collectives)] *= _together(issued, situation)
    if collectives:
        wire = np.stack([calibration.wire_error * _normal(f"wire {collective.kind}") for collective in collectives])
        factors[-len(collectives) :] *= np.exp(wire)
    host = np.exp(calibration.host_error * _normal("host"))
    timing = cohort.timing
    drawn = {
        "duration_ns": timing.duration_ns[:, :, :1] * factors[np.array(issued.estimate, dtype=np.int64)][:, None, :],
        "gap_ns": timing.gap_ns[:, :, :1] * host,
        "call_ns": timing.call_ns[:, :, :1] * host,
    }
    return replace(cohort, timing=replace(timing, **{name: np.rint(times).astype(np.int64) for name, times in drawn.items()}))


def _together(issued: Issued, situation: Situation) -> Floats:
    """Per estimate but those of collectives a factor for each draw of what all of its kind are off by."""
    kernels = issued.groups[: len(issued.groups) - len(issued.program.collectives)]
    if not situation.errors or not kernels:
        return np.ones((len(kernels), SAMPLES))
    drawn = {**box_factors(situation), "": np.ones(SAMPLES)}
    families = np.full(len(issued.estimates), WorkFamily.OTHER)
    families[np.array(issued.estimate, dtype=np.int64)] = work_families(issued.program)
    pairs = list(zip(kernels, families.tolist(), strict=False))
    known = {pair: drawn[situation.kind(pair[0], WorkFamily(pair[1]))] for pair in dict.fromkeys(pairs)}
    return np.stack([known[pair] for pair in pairs])


def _factors(issued: Issued) -> Floats:
    """Per estimate a factor for each draw of its group."""
    draws = np.stack([_normal(group) for group in issued.groups])
    below, above = np.array([_log_errors(estimate) for estimate in issued.estimates]).T[:, :, None]
    result: Floats = np.exp(np.where(draws < 0, below, above) * draws)
    return result


def _log_errors(estimate: Estimate) -> tuple[float, float]:
    """Standard deviations of the logarithm below and above an estimate."""
    if estimate.time_ns <= 0:
        return 0.0, 0.0
    below, above = max(estimate.low_ns, 1e-3) / estimate.time_ns, estimate.high_ns / estimate.time_ns
    return -float(np.log(min(below, 1.0))) / _NINE_OF_TEN, float(np.log(max(above, 1.0))) / _NINE_OF_TEN


@lru_cache(maxsize=1 << 14)
def _normal(group: str) -> Floats:
    """As many draws of a standard normal as samples, one of each part of it that is equally likely, in an order of the group.

    So few independent ones lean to one side: an interval would say more of its seed than of what is known.
    """
    return np.random.default_rng(zlib.crc32(group.encode())).permutation(_EVEN_NORMAL)


def memory_of(workload: Workload, platform: Platform) -> dict[str, Any]:
    """As `predict --json` has it: the largest of all ranks, the device's memory, and each distinct rank's share of it.

    Nothing is known of recordings without identities of tensors, and the answer says so. Tables that one kernel looks up are no
    argument of any op: the workload has their sizes as `unnamed`, or statistics of them.
    """
    limits = platform.device.limits
    if not all(names_tensors(one_step(program).program) for program in workload.programs):
        return {"peak_bytes": None, "unknown": _UNNAMED_TENSORS}
    if any(program.recorded and inside_graphs(program).any() for program in workload.programs):
        return {"peak_bytes": None, "unknown": _GRAPHS_HOLD}
    ranks: list[dict[str, Any]] = []
    for program in workload.programs:
        rank = program.rank
        unnamed = workload.unnamed.get(rank) or _tables(None if workload.lookups is None else workload.lookups.ranks.get(rank))
        result = peak_memory(
            one_step(program).program,
            outside_bytes=program.meta.get("outside_bytes", ()),  # of a captured step, what no op names
            parameters=unnamed.parameters,
            optimizer_state=unnamed.optimizer_state,
            device=limits,
        )
        ranks.append({
            "rank": rank,
            "peak_bytes": result.device_bytes(workload.world_size, limits.share),
            "allocated_bytes": result.allocated,
            "steady_allocated_bytes": result.steady_allocated,
            "reserved_bytes": result.reserved,
            "parts": {kind.value: nbytes for kind, nbytes in result.parts.items() if nbytes},
        })  # fmt: skip
    most = fullest(ranks)
    known = {key: most[key] for key in ("peak_bytes", "allocated_bytes", "steady_allocated_bytes", "reserved_bytes")}
    return limited({**known, "ranks": ranks}, usable_bytes(limits))


def within(step: PredictedStep, limit_bytes: int) -> PredictedStep:
    """Return the step where a rank may use only so much of its device."""
    return replace(step, memory=limited(step.memory, limit_bytes)) if step.fit is not None else step


def limited(memory: Mapping[str, Any], limit_bytes: int) -> dict[str, Any]:
    """Return what is known of memory, with a limit."""
    fit = Fit.of({**memory, "capacity_bytes": limit_bytes})
    return {**memory, "capacity_bytes": limit_bytes, "fits": fit is not None and fit.fits}


def _tables(lookups: RankLookups | None) -> UnnamedMemory:
    """Tables that one kernel looks up together are no argument of any op."""
    if lookups is None or lookups.implementation != TABLE_BATCHED:
        return UnnamedMemory()
    tables = lookups.steps.steps[0]
    weights = tuple(table.rows * row_bytes(table.dim, lookups.dtype) for table in tables)
    state = tuple(state_bytes(table.rows, table.dim, lookups.optimizer) for table in tables)
    return UnnamedMemory(weights, state if any(state) else ())
