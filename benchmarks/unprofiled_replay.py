"""How well a profiled recording tells the unprofiled step, with the profiler's inflation taken out.

    python benchmarks/unprofiled_replay.py [FOLDER ...]

Each folder holds the traces of a run and `measured.json` with `measured_step_ms_unprofiled`. Without folders: those under
examples/ and, where present, under the shared data beside the repository. Every case is predicted with strengths estimated on
the *other* cases (median over those that can tell); nothing is fitted and scored on the same run.

Two forms of inflation are compared. `events`: so much per op, call and launch, in the published proportions. `share`: the same
share of all host time. How strong either is differs between boxes.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

from steptime._program.load import load
from steptime._sim.recorded.replay import (
    MEASURED_FILE,
    NO_INFLATION,
    PUBLISHED,
    Inflation,
    Replay,
    period_ms,
    read_measured,
    replay,
)

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("STEPTIME_SHARED", ROOT.parent / "shared"))
# A case says how strong the inflation is only if its profiled period is longer by this share; below, noise would be fitted.
TELLING_EXCESS = 0.1
# Times the published constants; ten times stronger than anything seen.
STRENGTH_AT_MOST = {"events": 50.0, "share": 1.0}
HALVINGS = 24
COLUMNS = ("as_recorded", "published", *STRENGTH_AT_MOST)
ERROR_FLOOR = 4e-4  # keeps a lucky zero from sinking a geometric mean


def inflation(form: str, strength: float) -> Inflation:
    """The inflation of one form: times the published constants for `events`, the share itself for `share`."""
    if form == "share":
        return Inflation(share=strength)
    return Inflation(
        per_op_ns=PUBLISHED.per_op_ns * strength,
        per_call_ns=PUBLISHED.per_call_ns * strength,
        per_launch_ns=PUBLISHED.per_launch_ns * strength,
    )


@dataclass(frozen=True, eq=False)
class Case:
    """A recorded run whose unprofiled step time is known."""

    name: str
    replayed: Replay
    unprofiled_ms: tuple[float, ...]
    _periods: dict[Inflation, float] = field(default_factory=dict, repr=False)

    @property
    def measured_ms(self) -> float:
        """The unprofiled step: median over the repeats."""
        return median(self.unprofiled_ms)

    @property
    def spread(self) -> float:
        """Range of the repeats, relative to their median."""
        return (max(self.unprofiled_ms) - min(self.unprofiled_ms)) / self.measured_ms

    def period_ms(self, inflated: Inflation = NO_INFLATION) -> float:
        """The period of the recorded steps with an inflation taken out."""
        if inflated not in self._periods:
            self._periods[inflated] = period_ms(self.replayed.recorded, inflated)
        return self._periods[inflated]

    @cached_property
    def strengths(self) -> Mapping[str, float]:
        """How strong each form must be for the period to be the unprofiled step; empty where this case cannot tell."""
        if self.period_ms() < (1 + TELLING_EXCESS) * self.measured_ms:
            return {}
        result = {
            form: _root(lambda x, form=form: self.period_ms(inflation(form, x)) - self.measured_ms, limit)  # type: ignore[misc]
            for form, limit in STRENGTH_AT_MOST.items()
        }
        return {form: strength for form, strength in result.items() if strength is not None}


def _root(excess: Callable[[float], float], limit: float) -> float | None:
    """Where a falling function crosses zero, by halving; None if it does not."""
    low, high = 0.0, limit
    if excess(high) > 0:
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Deflated:
    """One prediction of an unprofiled step."""

    predicted_ms: float
    error: float


@dataclass(frozen=True)
class UnprofiledReplay:
    """One case: the unprofiled step, the profiled one, and predictions of the former from the recording of the latter."""

    name: str
    measured_ms: float
    spread: float
    profiled_ms: float
    predictions: Mapping[str, Deflated]  # as_recorded, published, and per form where other cases could tell its strength
    floor_ms: float  # the period with no host time at all: less no inflation can explain
    telling: bool  # whether this case says how strong the inflation is


def read_case(folder: Path) -> Case:
    """The traces of a folder and the unprofiled step times beside them."""
    measured_ms = read_measured(folder / MEASURED_FILE)
    return Case(folder.name, replay(load([folder])), measured_ms)


def compare(cases: Sequence[Case]) -> tuple[UnprofiledReplay, ...]:
    """Every case predicted with strengths that the other cases tell."""
    return tuple(_compared(case, [other for other in cases if other is not case]) for case in cases)


def _compared(case: Case, others: Sequence[Case]) -> UnprofiledReplay:
    tried = {"as_recorded": NO_INFLATION, "published": PUBLISHED}
    for form in STRENGTH_AT_MOST:
        known = [other.strengths[form] for other in others if form in other.strengths]
        if known:
            tried[form] = inflation(form, median(known))
    return UnprofiledReplay(
        name=case.name,
        measured_ms=case.measured_ms,
        spread=case.spread,
        profiled_ms=median(step.measured_ns for step in case.replayed.steps) / 1e6,
        predictions={name: _predicted(case, inflated) for name, inflated in tried.items()},
        floor_ms=case.period_ms(inflation("share", 1.0)),
        telling=bool(case.strengths),
    )


def _predicted(case: Case, inflated: Inflation) -> Deflated:
    predicted = case.period_ms(inflated)
    return Deflated(predicted, predicted / case.measured_ms - 1)


def folders(given: Sequence[str]) -> list[Path]:
    """The folders asked for, or every one at hand; a run that lies in two places counts once."""
    if given:
        return [Path(each) for each in given]
    found = [*(ROOT / "examples").glob(f"*/{MEASURED_FILE}"), *(SHARED / "data" / "traces").glob(f"*/{MEASURED_FILE}")]
    return sorted({file.parent.name: file.parent for file in reversed(found)}.values(), key=lambda folder: folder.name)


def line(row: UnprofiledReplay) -> str:
    """One case: measured, profiled, floor, and per way of predicting the step and its error."""
    cells = [f"{row.name:18} {row.measured_ms:8.2f} {row.spread:6.1%} {row.profiled_ms:9.2f} {row.floor_ms:8.2f}"]
    for name in COLUMNS:
        made = row.predictions.get(name)
        cells.append(f"{made.predicted_ms:8.2f} {made.error:+7.1%}" if made else f"{'-':>8} {'-':>7}")
    return "  ".join([*cells, "yes" if row.telling else "no"])


def summary(rows: Sequence[UnprofiledReplay], name: str) -> str:
    """Geometric mean and maximum of the errors of one way: over all cases, and over those the profiler slows down."""
    parts = []
    for what, chosen in (("all", rows), ("telling", [row for row in rows if row.telling])):
        errors = [abs(row.predictions[name].error) for row in chosen if name in row.predictions]
        if errors:
            geomean = math.exp(sum(math.log(error + ERROR_FLOOR) for error in errors) / len(errors))
            parts.append(f"{what}: geomean {geomean:6.1%}, max {max(errors):6.1%} ({len(errors)} cases)")
    return f"{name:12} " + ("; ".join(parts) or "no case to estimate it from")


def strengths(cases: Sequence[Case]) -> str:
    """What each telling case says by itself."""
    told = [f"{case.name} " + ", ".join(f"{k} {v:.2f}" for k, v in case.strengths.items()) for case in cases if case.strengths]
    return "; ".join(told) or "no case can tell"


def main() -> None:
    """Prints the table."""
    cases = [read_case(folder) for folder in folders(sys.argv[1:])]
    rows = compare(cases)
    print(
        f"{'':18} {'measured':>8} {'spread':>6} {'profiled':>9} {'no host':>8}  "
        + "  ".join(f"{n:>16}" for n in COLUMNS)
        + "  tells"
    )
    for row in rows:
        print(line(row))
    print(f"strength for an exact match: {strengths(cases)}")
    for name in COLUMNS:
        print(summary(rows, name))


if __name__ == "__main__":
    main()
