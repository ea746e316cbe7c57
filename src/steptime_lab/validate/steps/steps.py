"""Predicted training steps against measured ones: all shipped steps, each visit with the calibration of its own machine.

By case: the median of the visits against the median of their predictions. A step comes from its execution trace, from its
config alone, or from its trace with the host times of its profile. Models of kernels, lookups, collectives and the host were
fitted to microbenchmarks. Three things were seen in steps, these among them: gaps between kernels (`modelled.dispatch`), how
collectives and kernels beside them slow each other (`collectives.overlap`), and how far visits lie apart, which widens the
intervals (`platforms.calibration`). With host times of profiles, what a profiler adds is estimated on the other cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from steptime._models.error import gmae
from steptime.errors import InputError
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, group, grouped, in_processes, repeat_errors
from steptime_lab.validate.steps.cases import DLRM, GPU_BOUND, HOST_BOUND, MIXED, WIRE_BOUND, shipped_steps
from steptime_lab.validate.steps.predict import CaseOutcome, RankOutcome, predict_case
from steptime_lab.validate.steps.sources import CONFIG, RECORDED, SOURCES, TRACE, Build, builder

REGIMES = (GPU_BOUND, HOST_BOUND, WIRE_BOUND, MIXED)
TRANSFORMERS, CONVNETS = ("bert", "gpt2", "xlnet"), ("inception_v3", "resnet50")
# Cases whose repeats disagree by more say little about the largest error.
STEADY_SPREAD = 0.05
BY_VISIT = "by visit"
_TITLES = {
    TRACE: "from execution traces",
    RECORDED: "from execution traces with the host times of a profile",
    CONFIG: "from configs, never run",
}
# Warnings that are shown: one per program, and many say the same.
_MOST_WARNINGS = 5

_NO_BUILDER = "no config builds it, and capturing it needs torch and its library (transformers, torchvision)"


@dataclass(frozen=True)
class StepValidation:
    """The usual figures, and what they are made of."""

    validation: Validation
    outcomes: tuple[CaseOutcome, ...]


def validate_steps(
    source: str = TRACE,
    names: Iterable[str] | None = None,
    *,
    explain: bool = False,
    captured: Mapping[str, Build] | None = None,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> StepValidation:
    """The shipped steps, or those of some names, by two processes unless an executor is given; `said` hears how far it is.

    `captured`, by workload, captures a step that no config builds; from configs, others are left out with a warning.
    """
    if source not in SOURCES:
        raise InputError(f"steps from {source!r}? there are {', '.join(SOURCES)}")
    every = shipped_steps(names, inflated=explain or source == RECORDED)
    result = [(case, builder(case, source, captured or {})) for case in every]
    cases = [(case, build) for case, build in result if build is not None]
    if not cases:
        raise InputError(f"no shipped step of these names can be predicted from its {source}; choose among `steps`' names")
    outcomes = []
    progress(0, len(cases))
    predicted = partial(predict_case, recorded=source == RECORDED, explain=explain)
    for outcome in in_processes(predicted, *zip(*cases, strict=True), executor=executor):
        outcomes.append(outcome)
        progress(len(outcomes), len(cases))
    left_out = Counter(case.workload for case, build in result if build is None)
    lines = [f"left out: {count} cases of {name}: {_NO_BUILDER}" for name, count in sorted(left_out.items())]
    return StepValidation(validation_of(outcomes, source, lines), tuple(outcomes))


def validation_of(outcomes: Sequence[CaseOutcome], source: str = TRACE, warnings: Sequence[str] = ()) -> Validation:
    """All cases, every group of them, baselines beside, and what else was compared."""
    cases, visits = [_by_case(item) for item in outcomes], [each for item in outcomes for each in by_visit(item)]
    together = {BY_VISIT: group(visits)} | grouped(visits, f", {BY_VISIT}")
    return Validation.of(
        "steps",
        f"training steps {_TITLES[source]}, after same-machine calibration",
        cases,
        groups=grouped(cases) | together,
        facts=_facts(outcomes),
        notes=(
            "a case is the median of its visits: processes that timed the same step, each predicted with its own calibration",
            "regimes by profile: device computes 95 % or more of the step; collectives exposed for more than 40 %; computes "
            "less than 60 %; mixed",
        ),
        warnings=(*warnings, *_warnings(outcomes)),
    )


def _groups(outcome: CaseOutcome) -> tuple[str | None, ...]:
    """Workload and ranks, regime, and the groups that bars are set for."""
    dlrm = outcome.workload == DLRM and outcome.ranks in (2, 4)
    transformer = outcome.workload in TRANSFORMERS
    return (
        f"{outcome.workload} {outcome.ranks} rank{'s' * (outcome.ranks > 1)}",
        *(regime if outcome.regime == regime else None for regime in REGIMES),
        "DLRM 2 and 4 ranks" if dlrm else None,
        "DLRM 2 and 4 ranks steady" if dlrm and outcome.spread < STEADY_SPREAD else None,
        "Transformers" if transformer else None,
        *(f"Transformers {regime}" if transformer and outcome.regime == regime else None for regime in REGIMES),
        "convnets" if outcome.workload in CONVNETS else None,
    )


def _by_case(outcome: CaseOutcome) -> Compared:
    low, high = (median(visit.interval_ns[end] for visit in outcome.visits) for end in (0, 1))
    case = MeasuredCase(
        name=outcome.name,
        predicted=outcome.predicted_ns,
        measured=outcome.measured_ns,
        spread=outcome.spread,
        interval=(low, high),
        repeat_errors=tuple(error for visit in outcome.visits for error in repeat_errors(visit.visit.times_ns)),
    )
    names = outcome.visits[0].baselines_ns
    beside = {name: case.by(median(visit.baselines_ns[name] for visit in outcome.visits)) for name in names}
    return Compared(case, _groups(outcome), beside)


def by_visit(outcome: CaseOutcome) -> Iterator[Compared]:
    """Every visit of a case, with its own calibration."""
    for visit in outcome.visits:
        seen = visit.visit
        case = MeasuredCase(
            name=f"{outcome.name} ({seen.process})",
            predicted=visit.predicted_ns,
            measured=seen.measured_ns,
            spread=seen.spread,
            interval=visit.interval_ns,
            repeat_errors=repeat_errors(seen.times_ns),
        )
        yield Compared(case, _groups(outcome), {name: case.by(time_ns) for name, time_ns in visit.baselines_ns.items()})


def _facts(outcomes: Sequence[CaseOutcome]) -> dict[str, float]:
    """Noise between processes; device compute, exposed communication and imbalance of ranks, predicted and profiled."""
    pairs, same_machine = between_visits(outcomes), between_visits(outcomes, same_machine=True)
    ranks = [rank for outcome in outcomes for rank in outcome.by_rank]
    several = [outcome for outcome in outcomes if outcome.ranks > 1]
    facts = {
        "noise_floor_between_processes": gmae(pairs),
        "noise_floor_between_processes_of_one_machine": gmae(same_machine),
        "device_compute_of_a_rank_geomean": gmae([rank.compute_ns / rank.profiled_compute_ns - 1 for rank in ranks]),
        "of_no_model": float(np.mean([outcome.fallback for outcome in outcomes])),
    }
    if several:
        facts["exposed_communication_predicted"] = _exposed(several, lambda rank: rank.exposed_ns)
        facts["exposed_communication_profiled"] = _exposed(several, lambda rank: rank.profiled_exposed_ns)
        predicted, profiled = ([imbalance(times) for times in _compute(several, place)] for place in (0, 1))
        facts["imbalance_predicted"], facts["imbalance_profiled"] = float(np.mean(predicted)), float(np.mean(profiled))
        facts["imbalance_error"] = float(np.mean(np.abs(np.subtract(predicted, profiled))))
    return {name: value for name, value in facts.items() if np.isfinite(value)}


def _exposed(outcomes: Sequence[CaseOutcome], time_ns: Callable[[RankOutcome], float]) -> float:
    """Mean over ranks and cases, as a share of the measured step."""
    return float(np.mean([time_ns(rank) / outcome.measured_ns for outcome in outcomes for rank in outcome.by_rank]))


def _compute(outcomes: Sequence[CaseOutcome], place: int) -> list[list[float]]:
    return [[(rank.compute_ns, rank.profiled_compute_ns)[place] for rank in outcome.by_rank] for outcome in outcomes]


def imbalance(times_ns: Sequence[float]) -> float:
    """How much more than the mean the rank computes that computes longest, as a fraction."""
    return max(times_ns) / max(float(np.mean(times_ns)), 1.0) - 1.0


def between_visits(outcomes: Iterable[CaseOutcome], *, same_machine: bool = False) -> list[float]:
    """What one visit measured against another of the same step, both ways: nobody predicts better without calibration."""
    return [
        visit.visit.measured_ns / other.visit.measured_ns - 1.0
        for outcome in outcomes for visit in outcome.visits for other in outcome.visits
        if visit.visit.process != other.visit.process and (not same_machine or visit.visit.machine == other.visit.machine)
    ]  # fmt: skip


def _warnings(outcomes: Sequence[CaseOutcome]) -> list[str]:
    """Those of most cases first."""
    counts = Counter(warning for outcome in outcomes for warning in outcome.warnings)
    return sorted(counts, key=lambda warning: (-counts[warning], warning))[:_MOST_WARNINGS]
