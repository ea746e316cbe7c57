"""Fits src/steptime/data/situations.toml to a file of steps that others measured: `python scripts/public_situations.py FILE`.

The rows stay where they are; the package has their sources, their number and what was fitted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from steptime._platforms.situation import FILE, written
from steptime_lab.validate.intervals.intervals import predicted_rows
from steptime_lab.validate.intervals.rows import read_rows
from steptime_lab.validate.intervals.widths import fitted_calibrated, fitted_situation, telling

HEADER = """What all kernels of a kind may be off by together on a machine that nobody measured: standard deviations of the
logarithm below and above a prediction. Written by `python scripts/public_situations.py FILE` from public steps, whose
sources docs/accuracy.md names. Calibrated: once a box has one number, from a few of its steps."""


def main() -> None:
    """Writes the file."""
    rows = telling(predicted_rows(read_rows(Path(sys.argv[1])))[0])
    carried = fitted_situation(rows)
    FILE.write_text(written([carried, fitted_calibrated(rows, carried)], HEADER), encoding="utf-8")


if __name__ == "__main__":
    main()
