"""A step's time over iterations: the recorded run with a scenario for what its ranks look up in each iteration.

The recorded step stands for the mean iteration. A rank's lookup work (forward; backward with the update of the rows) takes its
recorded duration times what the models estimate for the iteration over the mean of their estimates: models say how iterations
differ, the recording says how long lookups take. All else stays as recorded. Every scenario is a steady state of its own, as if
its iteration came again and again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._lookups.workload import WorkloadLookups
from steptime._models.kernels.from_ops import LOOKUP, questions_of
from steptime._models.lookups.question import BACKWARD, DIRECTIONS, FORWARD, Lookup, rank_questions
from steptime._notices import Basis
from steptime._ops.catalogue import Role, op_kind
from steptime._platforms.device import Device
from steptime._program.program import Phase, Program, WorkKind
from steptime._program.workload import Workload
from steptime._sim.core.steady import steady
from steptime._sim.core.timing import Cohort
from steptime._sim.prediction import Iterations, PredictedStep, predict
from steptime._sim.recorded.profiler import run_timings
from steptime._sim.recorded.replay import repeatable
from steptime._sim.recorded.timing import Recorded
from steptime._units import ms
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Factors = Mapping[int, Mapping[str, Floats]]
"""Rank and direction -> by what its lookups' durations are multiplied, scenario by scenario."""

# Scenarios that are played together: many enough that numpy's own work outweighs the interpreter's (64 take 1.4 times as long
# as one on examples/h200_mps4_dlrm), few enough that the times of a large job fit in memory.
SCENARIOS_AT_ONCE = 64
# `nn.Embedding` has ops that other models than lookups answer too: they are lookups where a rank's statistics say so.
_ROW_IMPLEMENTATIONS = ("embedding_dense", "embedding_sparse")


def predict_iterations(workload: Workload, lookups: WorkloadLookups, device: Device, *, profiled: bool = True) -> PredictedStep:
    """The prediction of a recorded run, and the distribution of its step time over iterations that look up other rows."""
    prediction = predict(workload, profiled=profiled)
    inputs = repeatable(run_timings(workload, profiled=profiled))
    works, warnings = _works(workload, inputs, lookups)
    factors, unlike = _factors(lookups, sorted(works), device)
    step_ms, settled = _step_ms(inputs, works, factors, lookups.iterations)
    slowest = int(np.argmax(step_ms))
    alone_ms, alone_settled = _step_ms(inputs, works, _one_by_one(factors, slowest), len(works))
    more = {rank: time_ms - prediction.step_time_ms for rank, time_ms in zip(sorted(works), alone_ms, strict=True)}
    if unlike:
        warnings.append(Basis(f"{unlike}; how much iterations differ is extrapolated"))
    if not (settled and alone_settled):
        warnings.append(Basis("with the lookups of some iterations the mean of windows, in which the step had not settled"))
    return replace(
        prediction,
        iterations=Iterations(tuple(step_ms), slowest, more),
        notices=prediction.notices.after(*warnings),
    )


@dataclass(frozen=True)
class LookupWorks:
    """The device work of a rank's lookups."""

    rows: Mapping[str, Rows]  # direction -> rows of the program's works
    forward_per_step: float  # lookups, not works


def lookup_works(program: Program, implementation: str = "") -> LookupWorks:
    """What a program's lookup ops launch, by direction; the implementation says which ops beside the evident ones are lookups.

    The update of rows from a sparse gradient belongs to the backward pass, as it does in the measured lookups. An optimiser's
    pass over all rows of a dense gradient is left as recorded: it does not depend on what was looked up.
    """
    ops, works = program.ops, program.works
    names = [program.names[name] for name in ops.name.tolist()]
    outermost = {work.op for work in questions_of(program) if work.kind == LOOKUP}
    if implementation in _ROW_IMPLEMENTATIONS:
        outermost |= {row for row, name in enumerate(names) if op_kind(name).row_lookup}
    direction = np.full(len(ops), -1, dtype=np.int8)  # place in DIRECTIONS, or -1
    forward = 0
    for row, (name, parent, phase) in enumerate(zip(names, ops.parent.tolist(), ops.phase.tolist(), strict=True)):
        if parent >= 0 and direction[parent] >= 0:
            direction[row] = direction[parent]
        elif row in outermost:
            direction[row] = _direction(name, phase)
            forward += direction[row] == DIRECTIONS.index(FORWARD) and ops.step[row] in program.steps
    # One more of each, so that -1 is no op and no call.
    of_call = np.append(np.append(direction, np.int8(-1))[program.calls.op], np.int8(-1))
    of_work = np.where(works.kind == WorkKind.COLLECTIVE, -1, of_call[works.call])
    rows = {name: np.flatnonzero(of_work == index) for index, name in enumerate(DIRECTIONS)}
    return LookupWorks(rows, forward / max(len(program.steps), 1))


def _direction(name: str, phase: int) -> int:
    """The place in `DIRECTIONS`. An op without a lookup's name is one for its sparse gradient, which forward has not."""
    if op_kind(name).role is Role.LOOKUP or op_kind(name).row_lookup:
        backward = "backward" in name.lower() or phase == Phase.OPTIMIZER
        return DIRECTIONS.index(BACKWARD if backward else FORWARD)
    return DIRECTIONS.index(BACKWARD) if phase in (Phase.BACKWARD, Phase.OPTIMIZER) else -1


def _works(workload: Workload, inputs: Recorded, lookups: WorkloadLookups) -> tuple[dict[int, LookupWorks], list[str]]:
    """Of every rank with statistics and a trace the work of its lookups, and what to warn of."""
    unknown = sorted(rank for rank in lookups.ranks if rank >= workload.world_size)
    if unknown:
        raise InputError(f"lookups are given for rank {unknown[0]}; the job has ranks 0 to {workload.world_size - 1}")
    result, warnings = {}, []
    for cohort in inputs.cohorts:
        program = cohort.program
        statistics = lookups.ranks.get(program.rank)
        works = lookup_works(program, statistics.implementation if statistics else "")
        looks_up = any(len(rows) for rows in works.rows.values())
        if statistics is None:
            if looks_up:
                warnings.append(
                    f"rank {program.rank} has lookups in its trace and no statistics; they take their recorded time"
                )
            continue
        if not looks_up:
            where = program.source or f"rank {program.rank}"
            raise InputError(f"{where}: no lookup op launches device work here, but rank {program.rank} has lookup statistics")
        expected = len(rank_questions(statistics, FORWARD)[0])
        if works.forward_per_step not in (0, expected):
            warnings.append(
                f"rank {program.rank} looks up {works.forward_per_step:g} times forward in a recorded step, its statistics say "
                f"{expected}; all its lookups are scaled alike"
            )
        result[program.rank] = works
    if not result:
        raise InputError(f"lookups are given for ranks {sorted(lookups.ranks)}; none of them has a trace here")
    without = sorted(set(lookups.ranks) - set(result))
    if without:
        warnings.append(f"lookups of ranks without a trace are left out (rank {', '.join(map(str, without))})")
    return result, warnings


def _factors(lookups: WorkloadLookups, ranks: Sequence[int], device: Device) -> tuple[Factors, str]:
    """Estimates over their mean, and a word where some are beyond what was measured. All are asked at once."""
    questions: list[Lookup] = []
    starts: list[int] = []
    for rank in ranks:
        for direction in DIRECTIONS:
            for iteration in rank_questions(lookups.ranks[rank], direction):
                starts.append(len(questions))
                questions += iteration
    estimates = [answer.estimate for answer in device.lookup_estimates(questions)]
    # (rank, direction, iteration): what one iteration asks follows itself.
    summed = np.add.reduceat(np.array([estimate.time_ns for estimate in estimates]), starts)
    times = summed.reshape(len(ranks), len(DIRECTIONS), lookups.iterations)
    ratios = times / times.mean(axis=2, keepdims=True)
    outside = sum(not estimate.inside for estimate in estimates)
    text = f"{outside} of {len(estimates)} estimated lookups are beyond what was measured on {device.limits.name}"
    result = {rank: dict(zip(DIRECTIONS, of_rank, strict=True)) for rank, of_rank in zip(ranks, ratios, strict=True)}
    return result, text if outside else ""


def _one_by_one(factors: Factors, iteration: int) -> Factors:
    """A scenario for each rank: this rank alone looks up what it does in an iteration, the others as recorded."""
    count = len(factors)
    return {
        rank: {
            direction: np.where(np.arange(count) == index, values[iteration], 1.0)
            for direction, values in factors[rank].items()
        }
        for index, rank in enumerate(sorted(factors))
    }


def _step_ms(inputs: Recorded, works: Mapping[int, LookupWorks], factors: Factors, scenarios: int) -> tuple[list[float], bool]:
    """The step time of each scenario, many of them played at a time, and whether all came to repeat themselves."""
    times_ms: list[float] = []
    settled = True
    for start in range(0, scenarios, SCENARIOS_AT_ONCE):
        chosen = slice(start, min(start + SCENARIOS_AT_ONCE, scenarios))
        cohorts = [_scaled(cohort, works, factors, chosen) for cohort in inputs.cohorts]
        result = steady(cohorts, queue_depth=inputs.queue_depth)
        settled &= result.converged
        times_ms += map(ms, np.broadcast_to(result.period_ns, chosen.stop - chosen.start).tolist())
    return times_ms, settled


def _scaled(cohort: Cohort, works: Mapping[int, LookupWorks], factors: Factors, chosen: slice) -> Cohort:
    rank = cohort.program.rank
    if rank not in factors:
        return cohort
    recorded_ns = cohort.timing.duration_ns
    duration = np.repeat(recorded_ns, chosen.stop - chosen.start, axis=2)
    for direction, values in factors[rank].items():
        rows = works[rank].rows[direction]
        duration[rows] = np.rint(recorded_ns[rows] * values[chosen])
    return replace(cohort, timing=replace(cohort.timing, duration_ns=duration))
