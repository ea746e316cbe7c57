"""How well a profiled recording tells the unprofiled step, with the profiler's inflation taken out.

    python benchmarks/unprofiled_replay.py [FOLDER ...]

Each folder holds the traces of a run and `measured.json` with `measured_step_ms_unprofiled`. Without folders: those under
examples/ and, where present, under the shared data beside the repository. Every case is predicted with strengths estimated on
the *other* cases (median over those that can tell); nothing is fitted and scored on the same run.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from steptime._sim.recorded.unprofiled import MEASURED_FILE, STRENGTH_AT_MOST, Case, UnprofiledReplay, compare, read_case

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("STEPTIME_SHARED", ROOT.parent / "shared"))
COLUMNS = ("as_recorded", "published", *STRENGTH_AT_MOST)
ERROR_FLOOR = 4e-4  # keeps a lucky zero from sinking a geometric mean


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
