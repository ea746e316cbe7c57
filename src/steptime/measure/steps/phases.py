"""What `measure steps` does in which order, which cases are still due in each phase, and how the time is split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptime.measure.options import Options
from steptime.measure.session import Session
from steptime.measure.steps.profiled import key_of_kernels
from steptime.measure.steps.rows import fabric_of, key_of_case
from steptime.measure.steps.traced import programs_file

if TYPE_CHECKING:
    from steptime.workloads.case import Case

KINDS = ("timed", "traced", "profiled")
# Of every so many cases one is timed again, in `REPEATS` more groups of processes.
REPEATED = 5
REPEATS = 2
# What a case takes, and what a group takes beside its cases; they only split the time, an H200 was the model.
_CASE_S = {"timed": 1.1, "traced": 0.4, "profiled": 0.8}
_GROUP_S = {"timed": 18.0, "traced": 10.0, "profiled": 12.0}
_SPARE = 1.25


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
    yield from (Phase(kind, count) for kind in KINDS for count in ranks)
    yield from (Phase("timed", count, turn) for turn in range(1, REPEATS + 1) for count in ranks)


def cases_of(ranks: int, *, small: bool, only: Sequence[str]) -> list[Case]:
    """The cases of that many ranks; `only` names workloads or cases."""
    from steptime.workloads.cases import small_cases, step_cases

    every = small_cases(ranks) if small else step_cases(ranks)
    return [case for case in every if not only or case.workload in only or case.name in only]


def due(phase: Phase, cases: Sequence[Case], session: Session, options: Options) -> list[str]:
    """Names of the cases whose rows or traces this phase has yet to make."""
    share = phase.ranks if options.share_gpu else 1
    fabric = fabric_of(phase.ranks, share, options.device)
    if phase.kind == "traced":
        return [case.name for case in cases if not programs_file(session.folder, case.name).exists()]
    if phase.kind == "profiled":
        done = session.store.done("step_kernels")
        # Ranks flush each for itself: a group that was ended may have lost the rows of some.
        return [
            case.name
            for case in cases
            if not all(done[key_of_kernels(case.name, share, fabric, rank=rank)] for rank in range(phase.ranks))
        ]
    done = session.store.done("steps")
    chosen = cases[::REPEATED] if phase.turn else cases
    return [case.name for case in chosen if done[key_of_case(case, share, fabric)] <= phase.turn]


def estimate_s(phase: Phase, cases: int) -> float:
    """About how long a phase takes."""
    return _GROUP_S[phase.kind] + _CASE_S[phase.kind] * cases if cases else 0.0


def fraction(phase: Phase, expected_s: Sequence[float], left_s: float) -> float:
    """The share of the time left of the first of some phases: all it needs for first step times, else in proportion."""
    if not expected_s[0]:
        return 0.0
    even = expected_s[0] / sum(expected_s)
    first = phase.kind == "timed" and phase.turn == 0
    return max(even, min(1.0, _SPARE * expected_s[0] / max(left_s, 1.0))) if first else even
