"""`measure zoo`: step time, power, clock and memory of the zoo's architectures, and device time per kernel.

Times come from a process that never profiles, kernels from another: a profiler slows every launch of its process from its
first use on. Rows are stored one by one, so that a run that is cut off goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group, no_collector
from steptime._calibrate.harness.ranks import QUIET, Layout
from steptime._calibrate.harness.session import Session
from steptime._measurements.sets import MeasuredSet
from steptime._measurements.store import key_of
from steptime_lab.measure.restarts import Attempts, CaseGroup, CrashMarker, SharedMps
from steptime_lab.measurements.sets import ZOO, ZOO_KERNELS

if TYPE_CHECKING:
    from steptime_lab.workloads.zoo import Architecture

JOB = "zoo"
TIMED, PROFILED = "zoo_timed", "zoo_profiled"
_SETS = {TIMED: ZOO, PROFILED: ZOO_KERNELS}
# A trial takes one of each group.
_SMALL_S = 0.2
# What making a model takes at most, and profiling it, beside the steps.
_BUILD_S, _PROFILE_S, _CASE_S = 6.0, 8.0, 90.0

Row = dict[str, Any]


def run(session: Session, options: Options) -> None:
    """One process times, then one profiles; one that dies is started again behind its architecture."""
    with SharedMps(session, options) as daemon:
        for phase in _SETS:
            _run_phase(session, options, daemon, phase)


def names(_: Options) -> list[str]:
    """What `--only` may name: architectures, groups, visits, and the two phases."""
    from steptime_lab.workloads.zoo import FIRST_VISIT, GROUPS, SECOND_VISIT, architectures

    return [*GROUPS, FIRST_VISIT, SECOND_VISIT, TIMED, PROFILED, *architectures()]


def _run_phase(session: Session, options: Options, daemon: SharedMps, phase: str) -> None:
    if {TIMED, PROFILED} & set(options.only) and phase not in options.only:
        return

    def plan(waiting: Sequence[str], _start: int) -> dict[str, Any]:
        return session.to_plan(cases=waiting, small=options.small, phase=phase, seconds=_seconds(options))

    marker = CrashMarker(session.folder, phase)
    group = CaseGroup(session, __name__, Layout(1, device=options.device), daemon, marker, QUIET, grace_s=5.0)
    group.run(session.budget, lambda: due(session, options, phase), plan, skipped=set())


def _seconds(options: Options) -> tuple[float, float]:
    """Of warm-up and of timing."""
    return (_SMALL_S, _SMALL_S) if options.small else (options.warm_up_s, options.seconds)


def due(session: Session, options: Options, phase: str) -> list[str]:
    """Architectures that have no row yet."""
    done = session.store.done(_SETS[phase])
    return [each.name for each in chosen(options) if not done[key_of(_SETS[phase], {"architecture": each.name})]]


def chosen(options: Options) -> list[Architecture]:
    """All, or those that are named, by themselves, by their group or visit; of a trial the first of every group.

    Groups take turns, so that a run that is cut off has some of each.
    """
    from steptime_lab.workloads.zoo import architectures

    wanted = set(options.only) - {TIMED, PROFILED}
    every = [each for each in architectures().values() if not wanted or {each.name, each.group, each.visit} & wanted]
    turns: Counter[str] = Counter()
    order = []
    for each in every:
        order.append((turns[each.group], each))
        turns[each.group] += 1
    in_turn = sorted(order, key=lambda item: item[0])
    return [each for turn, each in in_turn if not (options.small and turn and not wanted)]


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """The architectures one after another, in one of the phases."""
    from steptime_lab.workloads.zoo import architectures

    phase, cases = plan["phase"], [architectures()[name] for name in plan["cases"]]
    measure, need_s = _measuring(phase, group, plan)
    attempts = Attempts(group, session, CrashMarker(session.folder, phase), session.progress(phase, len(cases)), _CASE_S)
    with no_collector():
        for each in cases:
            if not attempts.time_left(need_s):
                break
            row = attempts.attempt(each.name, partial(measure, each))
            if row is not None:
                _store(session, _SETS[phase], row)
                attempts.progress.step()
    attempts.close()


def _measuring(phase: str, group: Group, plan: Mapping[str, Any]) -> tuple[Callable[[Architecture], Row], float]:
    """What gives the row of an architecture, and the seconds that it may take."""
    small, (warm_up_s, seconds) = bool(plan["small"]), plan["seconds"]
    if phase == PROFILED:
        from steptime_lab.measure.zoo.profiled import profiled

        return partial(profiled, group=group, small=small), _PROFILE_S
    from steptime_lab.measure.zoo.timed import timed

    return partial(timed, group=group, small=small, warm_up_s=warm_up_s, seconds=seconds), _BUILD_S + warm_up_s + seconds


def _store(session: Session, measured: MeasuredSet, row: Row) -> None:
    session.store.add(measured, row)
    session.store.flush()
