"""`measure steps`: real training steps, timed in clean processes; their programs and kernels recorded in others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptime._calibrate.collectives.cases import fabric_of
from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import QUIET, Layout
from steptime._calibrate.harness.session import Budget, Session
from steptime_lab.measure.restarts import CASE_S, Attempts, CaseGroup, CrashMarker, SharedMps
from steptime_lab.measure.steps import profiled, timed, traced
from steptime_lab.measure.steps.profiled import key_of_kernels
from steptime_lab.measure.steps.timing import key_of_case
from steptime_lab.measure.steps.traced import programs_file, recorded_kinds
from steptime_lab.measurements.sets import STEP_KERNELS, STEPS

if TYPE_CHECKING:
    from steptime_lab.workloads.case import Case

KINDS = ("timed", "traced", "profiled")
# Of every so many cases one is timed again, in `REPEATS` more groups of processes; `--only` calls that so.
REPEATED = 5
REPEATS = 2
AGAIN = "repeats"
# Seconds, an H200 with 4 ranks was the model. A group: its start, for timed ones also their calibrations.
_GROUP_S = {"timed": 20.0, "traced": 14.0, "profiled": 14.0}
# A DLRM; another model: building it, and for each of the ranks that share the GPU what its steps take longer.
_TABLES_S = {"timed": 1.6, "traced": 0.3, "profiled": 0.3}
_DENSE_S = {"timed": (2.0, 2.5), "traced": (0.5, 0.6), "profiled": (1.0, 1.2)}
_SMALL_S = 0.5
# On the CPU, to try things out, groups start faster.
_CPU_GROUP_S = 3.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One kind of group on so many ranks. `turn` counts the groups that time the same cases again."""

    kind: str
    ranks: int
    turn: int = 0

    @property
    def name(self) -> str:
        """As a file and a person call it."""
        return f"{self.kind}{self.ranks}" + (f"_{self.turn}" if self.turn else "")


def phases(options: Options) -> Iterator[Phase]:
    """In order of worth: step times, programs, kernel times, then step times of other processes. Many ranks first."""
    ranks = sorted(set(options.ranks), reverse=True)
    chosen = {name for name in options.only if name in (*KINDS, AGAIN)} or {*KINDS, AGAIN}
    yield from (Phase(kind, count) for kind in KINDS if kind in chosen for count in ranks)
    if AGAIN in chosen:
        yield from (Phase("timed", count, turn) for turn in range(1, REPEATS + 1) for count in ranks)


def cases_of(ranks: int, *, small: bool, only: Sequence[str]) -> list[Case]:
    """The cases of that many ranks; `only` names workloads or cases, or phases, which choose no cases.

    Held-out cases are timed only where they, or all of them, are named.
    """
    from steptime_lab.workloads.cases import held_out_cases, shrunk, small_cases, step_cases

    every = small_cases(ranks) if small else step_cases(ranks)
    named = {name for name in only if name not in (*KINDS, AGAIN)}
    chosen = [case for case in every if not named or case.workload in named or case.name in named]
    for group, cases in held_out_cases(ranks).items():
        chosen += [shrunk(case) if small else case for case in cases if group in named or case.name in named]
    return chosen


def due(phase: Phase, cases: Sequence[Case], session: Session, options: Options) -> list[str]:
    """Names of the cases whose rows or traces this phase has yet to make."""
    share = phase.ranks if options.share_gpu else 1
    fabric = fabric_of(phase.ranks, share, options.device)
    if phase.kind == "traced":
        return [case.name for case in cases if not programs_file(session.folder, case.name).exists()]
    if phase.kind == "profiled":
        done = session.store.done(STEP_KERNELS)
        # Ranks flush each for itself: a group that was ended may have lost the rows of some.
        return [
            case.name
            for case in cases
            if not all(done[key_of_kernels(case.name, share, fabric, rank=rank)] for rank in range(phase.ranks))
        ]
    done = session.store.done(STEPS)
    chosen = cases[::REPEATED] if phase.turn else cases
    return [case.name for case in chosen if done[key_of_case(case, share, fabric)] <= phase.turn]


def need_s(phase: Phase, cases: Sequence[Case], options: Options) -> float:
    """About how long a phase takes with these cases; nothing without any."""
    start_s = _GROUP_S[phase.kind] if options.device == "cuda" else _CPU_GROUP_S
    return start_s + sum(_case_s(phase, case, options) for case in cases) if cases else 0.0


def _case_s(phase: Phase, case: Case, options: Options) -> float:
    if options.small:
        return _SMALL_S
    if case.plan is not None:
        return _TABLES_S[phase.kind]
    once_s, per_rank_s = _DENSE_S[phase.kind]
    return once_s + per_rank_s * (phase.ranks if options.share_gpu else 1)


def share_s(needs_s: Sequence[float], left_s: float) -> float:
    """What the first of some phases gets of the time left: its proportion where there is enough for all, else what it needs.

    So no phase starves while there is time for each; where there is not, those of less worth go without.
    """
    total_s = sum(needs_s)
    if not total_s:
        return 0.0
    return left_s * needs_s[0] / total_s if left_s >= total_s else min(needs_s[0], left_s)


# Small workloads of few ranks, smallest batch first, whose full traces are kept: (workload, ranks).
_FULL_TRACES = (("dlrm", 2), ("bert", 1), ("resnet50", 1))


def run(session: Session, options: Options) -> None:
    """Goes through the phases; each stops at its share of the time, and a group that dies is started again behind its case."""
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
    from steptime_lab.workloads.case import workloads
    from steptime_lab.workloads.cases import held_out_cases

    cases = [case.name for ranks in options.ranks for case in cases_of(ranks, small=options.small, only=())]
    held_out = [
        (group, *(case.name for case in cases)) for ranks in options.ranks for group, cases in held_out_cases(ranks).items()
    ]
    return [*KINDS, AGAIN, *workloads(), *cases, *dict.fromkeys(name for group in held_out for name in group)]


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
    wanted = set(plan["cases"])
    cases = [case for case in cases_of(group.ranks, small=plan["small"], only=plan["only"]) if case.name in wanted]
    progress = session.progress(f"steps, {plan['phase']}", len(cases))
    attempts = Attempts(group, session, CrashMarker(session.folder, plan["phase"]), progress)
    {"timed": timed, "traced": traced, "profiled": profiled}[plan["kind"]].work(attempts, cases, plan)
    attempts.close()
