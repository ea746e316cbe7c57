"""`measure steps`: real training steps, timed in clean processes; their programs and kernels recorded in others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.budget import Budget
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.options import Options
from steptime._calibrate.harness.ranks import QUIET, Layout
from steptime._calibrate.harness.session import Session
from steptime_lab.measure.attempts import CASE_S, Attempts
from steptime_lab.measure.crash_marker import CrashMarker
from steptime_lab.measure.restarts import CaseGroup
from steptime_lab.measure.shared_mps import SharedMps

if TYPE_CHECKING:
    from steptime_lab.measure.steps.phases import Phase
    from steptime_lab.workloads.case import Case

# Small workloads of few ranks, smallest batch first, whose full traces are kept: (workload, ranks).
_FULL_TRACES = (("dlrm", 2), ("bert", 1), ("resnet50", 1))


def run(session: Session, options: Options) -> None:
    """Goes through the phases; each stops at its share of the time, and a group that dies is started again behind its case."""
    from steptime_lab.measure.steps.phases import cases_of, due, need_s, phases, share_s

    planned = list(phases(options))
    cases = {ranks: cases_of(ranks, small=options.small, only=options.only) for ranks in set(options.ranks)}

    def needs_s(phase: Phase) -> float:
        names = due(phase, cases[phase.ranks], session, options)
        return need_s(phase, [case for case in cases[phase.ranks] if case.name in names], options)

    later_s = [needs_s(phase) for phase in planned]
    skipped: set[str] = set()
    with SharedMps(session, options) as daemon:
        for at, phase in enumerate(planned):
            names = due(phase, cases[phase.ranks], session, options)
            if not names:
                continue
            # A phase before may have made some of its cases due, or no longer.
            given_s = share_s([needs_s(phase), *later_s[at + 1 :]], session.budget.left_s())
            if given_s < need_s(phase, [case for case in cases[phase.ranks] if case.name == names[0]], options):
                session.warn(f"{phase.name}: {given_s:.0f} s left, too few to start and make a case; {len(names)} are due")
                continue
            _run_phase(phase, session, options, Budget(time.time() + given_s), names, skipped, daemon)


def names(options: Options) -> list[str]:
    """What `--only` may name: phases, workloads, and the cases of the ranks that are asked."""
    from steptime_lab.measure.steps.phases import AGAIN, KINDS, cases_of
    from steptime_lab.workloads.case import workloads

    cases = [case.name for ranks in options.ranks for case in cases_of(ranks, small=options.small, only=())]
    return [*KINDS, AGAIN, *workloads(), *cases]


def _run_phase(
    phase: Phase,
    session: Session,
    options: Options,
    share: Budget,
    names: Sequence[str],
    skipped: set[str],
    daemon: SharedMps,
) -> None:
    """One phase: started again after a case that ended its group, which is then skipped for the rest of the run."""
    from steptime_lab.measure.steps.phases import cases_of, due
    from steptime_lab.measure.steps.traced import recorded_kinds

    cases = cases_of(phase.ranks, small=options.small, only=options.only)

    def waiting() -> list[str]:
        return [name for name in due(phase, cases, session, options) if name in names]

    def plan(asked: Sequence[str], start: int) -> dict[str, Any]:
        return session.to_plan(
            ends_at=share.ends_at, kind=phase.kind, phase=phase.name, cases=asked, small=options.small, only=list(options.only),
            full_traces=full_traces(cases), called=recorded_kinds(session.folder), seed=options.seed, turn=phase.turn,
            calibrate=calibrations(phase, options.small) if start == 0 else 0,
        )  # fmt: skip

    layout, marker = Layout(phase.ranks, options.share_gpu, options.device), CrashMarker(session.folder, phase.name)
    group = CaseGroup(session, __name__, layout, daemon, marker, QUIET, grace_s=2 * CASE_S)
    group.run(share, waiting, plan, skipped, names=lambda case: case.split("+"))


def calibrations(phase: Phase, small: bool) -> int:
    """How many a group of this phase makes: where every case is timed one before and one after, in repeats one."""
    return 2 if phase.turn == 0 and not small else 1


def full_traces(cases: Sequence[Case]) -> list[str]:
    """The few cases whose full traces are kept."""
    results = []
    for workload, ranks in _FULL_TRACES:
        fitting = [case for case in cases if (case.workload, case.ranks) == (workload, ranks)]
        if fitting:
            results.append(min(fitting, key=lambda case: case.batch).name)
    return results


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank of one phase."""
    from steptime_lab.measure.steps import profiled, timed, traced
    from steptime_lab.measure.steps.phases import cases_of

    wanted = set(plan["cases"])
    cases = [case for case in cases_of(group.ranks, small=plan["small"], only=plan["only"]) if case.name in wanted]
    progress = session.progress(f"steps, {plan['phase']}", len(cases))
    attempts = Attempts(group, session, CrashMarker(session.folder, plan["phase"]), progress)
    {"timed": timed, "traced": traced, "profiled": profiled}[plan["kind"]].work(attempts, cases, plan)
    attempts.close()
