"""How fast host, device and wire of a recorded run were, beside what the models of a platform say of the same steps.

Whatever waited is taken out of the recording first (`recorded`), and what the profiler spent on every op and launch out of its
host times: that is CPU work too, and slows down with the host. Where the step was timed without a profiler as well, the host's
speed is the one at which the step is predicted as it was timed, if the host has a say in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from steptime._models.host.model import LAUNCH_PER_CPU, STEP, HostModel, ProfilerCost, Speed
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.machine_costs import MachineCosts, RecordedRun, RecordedSpeed
from steptime._platforms.platform import Platform
from steptime._program.program import CallKind, Collective, Program, WorkKind
from steptime._program.workload import Workload
from steptime._sim.core.timing import Cohort
from steptime._sim.modelled.issue import Issued
from steptime._sim.modelled.step import ModelledStep, modelled
from steptime._sim.recorded.timing import key_of, recorded, recorded_meetings
from steptime.errors import InputError

Rank = tuple[Program, Cohort, Issued]

# The profiler that records ops and device events, as people use it.
_PROFILER = "cpu_cuda"
# Shorter parts of a step say more about their rounding and about one another than about a machine.
_LEAST_NS = 100_000
# Ranks came together where what passed after the last came is so many times what passed since the first. Shorter collectives
# are latency.
_TWO, _TOGETHER, _LEAST_WIRE_NS = 2, 10, 50_000
# A step that gets longer by less than this share of what its host does says little about the host. Speeds that are tried.
_HAS_A_SAY, _MOST_TIMES, _TRIED = 0.5, 4.0, 15


def recorded_speeds(workload: Workload, platform: Platform, measured_ns: Sequence[float] = ()) -> RecordedRun:
    """Of a run that was recorded with its device events on a machine like this platform; `measured_ns`: unprofiled steps."""
    played = recorded(workload)
    step = modelled(workload, platform)
    ranks = list(zip(workload.programs, played.cohorts, step.programs, strict=True))
    profiler = _profiler(platform.host)
    profiled = RecordedRun(
        platform=platform.name,
        host=_speed([ratio for rank in ranks for ratio in _host(*rank, profiler, _slowdown(step))]),
        device=_device(ranks),
        wire={} if workload.absent else _wire(workload, ranks),
    )
    if not measured_ns or workload.absent:
        return profiled
    return replace(profiled, unprofiled=_unprofiled(step, profiled, measured_ns))


def _unprofiled(step: ModelledStep, profiled: RecordedRun, measured_ns: Sequence[float]) -> RecordedSpeed | None:
    """How many times as long CPU work takes where the step is predicted as measured; None where the host hardly matters."""
    known = Calibration.of(MachineCosts((), (), replace(profiled, host=None)), step.platform)
    logs = np.linspace(-math.log(_MOST_TIMES), math.log(_MOST_TIMES), _TRIED)
    speeds = [replace(known, speed=Speed.of_cpu(STEP.cpu * math.exp(each))) for each in logs]
    periods = np.log([step.play(each).step_ns for each in speeds])
    middle = float(np.mean(np.log(measured_ns)))
    # As modelled, not where it is solved: a host that is slow enough has the say in every step.
    usual = slice(_TRIED // 2 - 1, _TRIED // 2 + 2)
    share = float(np.ptp(periods[usual]) / np.ptp(logs[usual]))
    if not periods[0] < middle < periods[-1] or share < _HAS_A_SAY:
        return None
    spread = float(np.std(np.log(measured_ns))) / share
    return _told(math.exp(np.interp(middle, periods, logs)), spread, len(measured_ns), share)


def _profiler(host: HostModel) -> ProfilerCost:
    try:
        return host.profilers[_PROFILER]
    except KeyError:
        raise InputError("the platform's host has no cost of a profiler; fit it on rows that measured one") from None


def _slowdown(step: ModelledStep) -> float:
    """How many times as long hosts of this platform take beside their collectives."""
    return step.speed(UNCALIBRATED).cpu / STEP.cpu


def _told(factor: float, spread: float, repeats: int, share: float = 1.0) -> RecordedSpeed:
    """What a recording says; an error where no machine is so fast or slow beside the platform's."""
    try:
        return RecordedSpeed(round(factor, 4), round(spread, 4), repeats, round(share, 4))
    except ValueError as error:
        raise InputError(
            f"the recording beside the platform's models: {error}; look at it with steptime inspect, or give its own --platform"
        ) from None


def _speed(ratios: Sequence[float]) -> RecordedSpeed | None:
    """The quickest half of steps and ranks: pauses and warming up make others longer, never shorter."""
    if not ratios:
        return None
    kept = sorted(ratios)[: (len(ratios) + 1) // 2]
    return _told(float(np.exp(np.mean(np.log(kept)))), float(np.std(np.log(ratios))), len(ratios))


def _middle(ratios: Sequence[float]) -> RecordedSpeed | None:
    logs = np.log(ratios)
    return _told(float(np.exp(np.median(logs))), float(np.std(logs)), len(ratios)) if ratios else None


def _host(program: Program, cohort: Cohort, issued: Issued, profiler: ProfilerCost, slowdown: float) -> Iterator[float]:
    """Per step, how many times as long CPU work took as in a usual training step."""
    cpu_ns = float(issued.gap_cpu_ns.sum() + issued.call_cpu_ns.sum())
    busy_ns = (cohort.timing.gap_ns + cohort.timing.call_ns)[:, 0, 0]
    calls = program.calls
    for step in program.steps:
        mine = calls.step == step
        launches = int((mine & (calls.kind < CallKind.HOST)).sum())
        cpu = cpu_ns + int((program.ops.step == step).sum()) * profiler.per_op_ns
        launching = float(issued.call_launch_ns.sum()) + launches * profiler.per_launch_ns
        took_ns = float(busy_ns[mine].sum())
        own_ns = took_ns - (1.0 - LAUNCH_PER_CPU) * launching
        if took_ns > _LEAST_NS and own_ns > 0:
            yield own_ns / (cpu + LAUNCH_PER_CPU * launching) / (STEP.cpu * slowdown)


def _device(ranks: Sequence[Rank]) -> RecordedSpeed | None:
    """Kernels, copies and memsets, by the op that launched them: the ratio that half of the modelled time lies below.

    What one op does in one workload (tables that nobody described, a layout) is no speed of a device; what most do is.
    """
    took_ns: dict[str, float] = defaultdict(float)
    usual_ns: dict[str, float] = defaultdict(float)
    for program, cohort, issued in ranks:
        _add_by_op(took_ns, program, cohort.timing.duration_ns[:, 0, 0] / max(1, len(program.steps)))
        _add_by_op(usual_ns, issued.program, _works_ns(issued))
    ops = [op for op, time_ns in took_ns.items() if min(time_ns, usual_ns.get(op, 0.0)) > _LEAST_NS]
    if not ops:
        return None
    logs, weights = (
        np.array(values) for values in ([np.log(took_ns[op] / usual_ns[op]) for op in ops], [usual_ns[op] for op in ops])
    )
    order = np.argsort(logs)
    middle = logs[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)]
    spread = float(np.sqrt(np.average((logs - middle) ** 2, weights=weights)))
    return _told(float(np.exp(middle)), spread, len(ops))


def _add_by_op(sums: dict[str, float], program: Program, times_ns: np.ndarray) -> None:
    works, calls, ops = program.works, program.calls, program.ops
    rows = np.flatnonzero((works.kind != WorkKind.COLLECTIVE) & (works.call >= 0))
    op = calls.op[works.call[rows]]
    inside = (op >= 0) & (calls.step[works.call[rows]] >= 0)
    for row, index in zip(rows[inside].tolist(), op[inside].tolist(), strict=True):
        sums[program.names[ops.name[index]]] += float(times_ns[row])


def _wire(workload: Workload, ranks: Sequence[Rank]) -> dict[str, RecordedSpeed]:
    """Per kind, those evenly split for which all ranks came at about the same time: else some move while others wait."""
    spans = recorded_meetings(workload).spans
    ratios: dict[str, list[float]] = defaultdict(list)
    for program, _, issued in ranks:
        kinds = issued.program.collectives
        usual = {_asked(each): issued.estimates[len(issued.estimates) - len(kinds) + row] for row, each in enumerate(kinds)}
        for collective in program.collectives:
            met, estimate = spans.get(key_of(collective), {}), usual.get(_asked(collective))
            if len(met) < max(_TWO, len(collective.ranks)) or estimate is None or len(set(collective.in_splits)) > 1:
                continue
            first, last, end = (pick(each[at] for each in met.values()) for pick, at in ((min, 0), (max, 0), (min, 1)))
            if end - last > max(_TOGETHER * (last - first), 0) and estimate.time_ns > _LEAST_WIRE_NS:
                ratios[collective.kind].append((end - last) / estimate.time_ns)
    return {kind: speed for kind, values in sorted(ratios.items()) if (speed := _middle(values)) is not None}


def _asked(collective: Collective) -> tuple[str, str, int, int]:
    return collective.kind, collective.group, collective.bytes_in, collective.bytes_out


def _works_ns(issued: Issued) -> np.ndarray:
    times = np.array([estimate.time_ns for estimate in issued.estimates])
    result: np.ndarray = times[np.array(issued.estimate, dtype=np.int64)] * issued.share
    return result
