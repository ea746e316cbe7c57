"""`steptime adopt NAME -o DIR`: measures, fits and scores, each once; what is done already is not done again.

It needs nothing but torch, numpy and pyarrow to measure. Where what fits is not installed it ends with the rows saved and the
command that fits them elsewhere.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steptime._calibrate.harness.command import LineParser, Measured, Options, measured, minutes
from steptime._files import check_file_name, write_whole
from steptime._measurements.store import devices_of_rows
from steptime.errors import InputError
from steptime_lab.adopt.job import ADOPT, MEASUREMENTS
from steptime_lab.adopt.machine import FILE as DRIVER
from steptime_lab.adopt.machine import GpuFacts, facts

SCHEMA_VERSION = 1
REPORT = "report.json"
# What fitting needs beside what measuring does.
_FITTING = ("lightgbm", "scipy", "torch")
_RANKS = (2, 4, 8)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = LineParser(prog="steptime adopt", allow_abbrev=False, description=__doc__.partition("\n")[0])
    made.add_argument("name", metavar="NAME", help="what the platform and its files are called")
    made.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder of the platform and of its rows")
    made.add_argument("--minutes", type=minutes, default=ADOPT.minutes, help=f"of measuring ({ADOPT.minutes:g}); 2 will do")
    made.add_argument("--fit", action="store_true", help="measure nothing; fit the rows that are in DIR, without a GPU")
    about = "no models of other devices, scaled, for what was measured too little"
    made.add_argument("--alone", action="store_true", help=about)
    made.add_argument("--seed", type=int, default=0, help="random seed of the cases and of the fit (0)")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Adopts the GPUs of this machine, or fits what was measured on another."""
    # Whoever ends a run in time (timeout, a batch system) gets what Ctrl-C gets: rows kept, nothing left running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given = parser().parse_args(list(arguments))
    check_file_name("NAME", given.name)
    begun = time.monotonic()
    run = None if given.fit else _measure(given.name, given.out, given.minutes, given.seed)
    missing = [library for library in _FITTING if find_spec(library) is None]
    if missing:
        if run is None:
            raise InputError(f"fitting needs {', '.join(missing)}; pip install './lab[torch]' in a clone")
        document = _unfitted(given.name, given.out, missing, run)
    else:
        document = _fit(given.name, given.out, given.seed, run, begun, alone=given.alone)
    print(json.dumps(document, indent=2) if given.json else "\n".join(_lines(document, given.out)))
    return 0


def _measure(name: str, folder: Path, minutes: float, seed: int) -> Measured:
    found = facts()
    known = folder / DRIVER
    if known.exists() and (other := GpuFacts.read(known)).name != found.name:
        raise InputError(f"{folder}: was measured on {other.name}, this is {found.name}; give every device a folder (-o)")
    folder.mkdir(parents=True, exist_ok=True)
    found.write(known)
    ranks = tuple(sorted({1, found.gpus, *(count for count in _RANKS if count < found.gpus)}))
    words = ["steptime", "adopt", name, "--minutes", f"{minutes:g}", "-o", "DIR"]
    say(f"{found.name}: measuring for {minutes:g} minutes; interrupted, the same command goes on where it was")
    return measured(ADOPT, folder / MEASUREMENTS, minutes, Options(ranks=ranks, seed=seed), words)


def _unfitted(name: str, folder: Path, missing: Sequence[str], run: Measured) -> dict[str, Any]:
    """The rows are there; whoever has the fitting libraries makes a platform of them."""
    rows = {item: len(devices) for item, devices in sorted(devices_of_rows(folder / MEASUREMENTS).items())}
    say(f"{', '.join(missing)} is not installed here, so fit the rows elsewhere: copy {folder} to a machine with the lab and "
        f"run `steptime adopt {name} -o DIR --fit` there (no GPU needed)")  # fmt: skip
    seconds = {"measuring": round(run.seconds, 1), "fitting": 0.0, "all": round(run.seconds, 1)}
    return {
        "schema_version": SCHEMA_VERSION,
        "platform": None,
        "rows": rows,
        "errors": {},
        "seconds": seconds,
        "warnings": run.warnings,
    }


def _fit(name: str, folder: Path, seed: int, run: Measured | None, begun: float, *, alone: bool) -> dict[str, Any]:
    from steptime_lab.adopt.fitting import fit
    from steptime_lab.adopt.scores import errors, scored

    fitted = fit(folder, name, say, seed, alone=alone)
    document = {
        "schema_version": SCHEMA_VERSION,
        "platform": name,
        "rows": fitted.rows,
        "errors": errors(scored(folder)),
        "seconds": {
            "measuring": round(run.seconds, 1) if run else 0.0,
            "fitting": round(fitted.seconds, 1),
            "all": round(time.monotonic() - begun, 1),
        },
        "warnings": [*(run.warnings if run else ()), *fitted.warnings],
    }
    write_whole(folder / REPORT, json.dumps(document, indent=1) + "\n")
    return document


def _lines(document: dict[str, Any], folder: Path) -> list[str]:
    rows = ", ".join(f"{count:,} {name}" for name, count in document["rows"].items())
    if document["platform"] is None:
        return [f"{rows} rows are in {folder}; not fitted"]
    lines = [f"{document['platform']}: {rows} rows; {document['seconds']['fitting']:.0f} s to fit"]
    head = f"  {'':26s}{'rows':>7s}{'GMAE':>8s}{'p90':>8s}{'inside 90 %':>13s}{'half width':>12s}"
    lines += ["on rows that no fit saw:", "", head]
    for name, error in document["errors"].items():
        known = error["interval_coverage"] is not None
        interval = f"{error['interval_coverage']:13.0%}{error['sharpness']:12.1%}" if known else ""
        lines.append(f"  {name:26s}{error['rows']:7,d}{error['gmae']:8.1%}{error['p90']:8.1%}{interval}")
    lines += ["", *(f"  ! {warning}" for warning in document["warnings"])]
    return [*lines, f"predict with it: steptime predict WORKLOAD --platform {folder}"]


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
