"""How well a profiled recording tells the unprofiled step, and what `data/profiler.toml` is fitted from.

    python benchmarks/unprofiled_replay.py [FOLDER ...]

Each folder holds the traces of a run and `measured.json` with `measured_step_ms_unprofiled`. Without folders: those under
examples/ and, where present, under the shared data beside the repository. Per case: the step without a profiler, as recorded,
as shipped, and by costs fitted without all cases of the same visit to the same machine. A case tells what is left of its host
times if taking the profiler out can explain its step; ln(left) is fitted to ln(pace) by least squares.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from steptime._program.load import load
from steptime._sim.recorded.profiler import ProfilerCosts, pace, profiler_costs, unprofiled
from steptime._sim.recorded.replay import MEASURED_FILE, period_ms, read_measured
from steptime._sim.recorded.timing import Recorded, recorded

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("STEPTIME_SHARED", ROOT.parent / "shared"))
# A case tells something if half of its host time less would make its step shorter by this share.
TELLING = 0.1
HALVINGS = 16
ERROR_FLOOR = 4e-4  # keeps a lucky zero from sinking a geometric mean


@dataclass(frozen=True, eq=False)
class Case:
    """A recorded run whose unprofiled step time is known."""

    name: str
    visit: str
    inputs: Recorded
    unprofiled_ms: tuple[float, ...]

    @property
    def measured_ms(self) -> float:
        """The unprofiled step: median over the repeats."""
        return median(self.unprofiled_ms)

    @cached_property
    def pace(self) -> float:
        """How slow its recorded ops were, mean over ranks."""
        return float(np.mean([pace(cohort.program, profiler_costs()) for cohort in self.inputs.cohorts]))

    def predicted_ms(self, costs: ProfilerCosts | None = None) -> float:
        """The step without a profiler of these costs; None: as shipped."""
        return period_ms(unprofiled(self.inputs, costs=costs))

    def with_left(self, left: float) -> float:
        """The step with this share of its host times left."""
        return self.predicted_ms(replace(profiler_costs(), left=left, per_pace=0.0, left_at_least=0.0, left_at_most=1.0))

    @cached_property
    def left(self) -> float | None:
        """What must be left of its host times for the period to be the unprofiled step; None where this case cannot tell."""
        low, high = 0.02, 1.0
        if not self.with_left(low) < self.measured_ms < self.with_left(high):
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.with_left(middle) < self.measured_ms else (low, middle)
        return low if self.with_left(low / 2) < (1 - TELLING) * self.measured_ms else None


def read_case(folder: Path) -> Case:
    """The traces of a folder and the unprofiled step times beside them."""
    file = folder / MEASURED_FILE
    recipe = json.loads(file.read_text(encoding="utf-8")).get("recipe", {})
    visit = f"{recipe.get('machine', '')} {recipe.get('date', folder.parent.name)}"
    return Case(folder.name, visit, recorded(load([folder])), read_measured(file))


def fitted(cases: Sequence[Case]) -> ProfilerCosts | None:
    """Costs by the cases that tell; None where fewer than two do."""
    told = [(case.pace, case.left) for case in cases if case.left is not None]
    if len(told) < 2:
        return None
    paces, left = np.log(np.array(told)).T
    slope, level = np.polyfit(paces, left, 1) if np.ptp(paces) > math.log(1.2) else (0.0, float(left.mean()))
    error = float(np.std(left - (level + slope * paces)))
    return replace(profiler_costs(), left=math.exp(level), per_pace=max(-slope, 0.0), error=error)


def geomean(errors: Sequence[float]) -> float:
    """Of absolute errors."""
    return math.exp(sum(math.log(abs(error) + ERROR_FLOOR) for error in errors) / len(errors))


def folders(given: Sequence[str]) -> list[Path]:
    """The folders asked for, or every one at hand; a run that lies in two places counts once."""
    if given:
        return [Path(each) for each in given]
    found = [*(ROOT / "examples").glob(f"*/{MEASURED_FILE}"), *(SHARED / "data" / "traces").glob(f"*/{MEASURED_FILE}")]
    return sorted({file.parent.name: file.parent for file in reversed(found)}.values(), key=lambda folder: folder.name)


def main() -> None:
    """Prints the table and the fit."""
    cases = [read_case(folder) for folder in folders(sys.argv[1:])]
    columns: dict[str, list[float]] = {"as recorded": [], "shipped": [], "left out": []}
    print(f"{'':26} {'measured':>9} {'spread':>7} {'pace':>5} {'left':>5} " + " ".join(f"{name:>12}" for name in columns))
    for case in cases:
        others = fitted([other for other in cases if other.visit != case.visit])
        periods = (period_ms(case.inputs), case.predicted_ms(), math.nan if others is None else case.predicted_ms(others))
        errors = [period / case.measured_ms - 1 for period in periods]
        for column, error in zip(columns.values(), errors, strict=True):
            column.append(error)
        spread = (max(case.unprofiled_ms) - min(case.unprofiled_ms)) / case.measured_ms
        left = "    -" if case.left is None else f"{case.left:5.2f}"
        print(
            f"{case.name:26} {case.measured_ms:9.2f} {spread:7.1%} {case.pace:5.2f} {left} "
            + " ".join(f"{e:+12.1%}" for e in errors)
        )
    for name, errors in columns.items():
        known = [error for error in errors if not math.isnan(error)]
        if known:
            within = sum(abs(error) <= 0.06 for error in known)
            print(
                f"{name:12} geomean {geomean(known):.1%}, worst {max(known, key=abs):+.1%}; {within} of {len(known)} within 6 %"
            )
    found = fitted(cases)
    if found is not None:
        print(f"fit: left {found.left:.3f}, per_pace {found.per_pace:.3f}, error {found.error:.3f}")


if __name__ == "__main__":
    main()
