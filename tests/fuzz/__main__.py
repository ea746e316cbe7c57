"""`python -m tests.fuzz`: damaged inputs of every kind through the command line.

One case:    python -m tests.fuzz --kind device --case 1234 [--keep FOLDER]
Many:        python -m tests.fuzz --cases 100000 --jobs 16 --out failures.jsonl [--from N] [--seconds S]
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import shlex
import sys
from pathlib import Path

from tests.fuzz.kinds import KINDS, case_of
from tests.fuzz.many import fuzz, play
from tests.fuzz.player import write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Damaged inputs through the command line.")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="of these kinds only")
    parser.add_argument("--case", type=int, help="this one, in this process")
    parser.add_argument("--keep", type=Path, help="with --case: write its files there and print the command instead")
    parser.add_argument("--cases", type=int, default=3000, help="how many (3000)")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first of them, to go on where a run ended")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--out", type=Path, help="append failures and the table to this file")
    given = parser.parse_args()
    if given.case is None:
        return bool(fuzz(given.first, given.cases, given.jobs, given.out, given.seconds, given.kind or ()).failures)
    if not given.kind:
        parser.error("--case is one of a kind: give --kind")
    if given.keep is not None:
        case = case_of(given.kind[0], given.case)
        write(case, given.keep)
        print(f"cd {given.keep}; python -m steptime {shlex.join(case.arguments)}")
        return 0
    outcome = play(given.kind[0], given.case)
    print(outcome.kind, outcome.message, f"({outcome.cpu_seconds:.2f} s of CPU time)")
    return outcome.bad


if __name__ == "__main__":
    sys.exit(main())
