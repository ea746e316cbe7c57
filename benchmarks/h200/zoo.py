"""Predicts the zoo's architectures for an H200 before they are measured: captures each without a GPU.

`python benchmarks/h200/zoo.py [FILE] [--visit first|second] [--only a,b]` writes the answers, by default where
`steptime validate zoo` reads those of the visit.
`steptime measure zoo -o DIR` then measures the same architectures on the card; of those that were, errors are shown at the end.
None of them has a part in any fit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from steptime._cli.output import stdout
from steptime._platforms.platform import Platform, platform_parts
from steptime_lab.report.validation import print_validation
from steptime_lab.validate.zoo.answers import PLATFORM, PREDICTED, SECOND_PREDICTED, ZooAnswer, ZooAnswers
from steptime_lab.validate.zoo.refit import answered, captured_zoo
from steptime_lab.validate.zoo.zoo import validate_zoo, zoo_cases
from steptime_lab.workloads.zoo import of_visit

_FILES = {"first": PREDICTED, "second": SECOND_PREDICTED}


def say(line: str) -> None:
    """At once: the whole zoo takes minutes."""
    print(line, flush=True)


def main() -> None:
    """Captures, predicts and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--visit", choices=_FILES, default="first")
    parser.add_argument("--only", default="", help="names of architectures with commas between")
    given = parser.parse_args()
    platform = Platform.of(platform_parts(PLATFORM))
    cases: dict[str, ZooAnswer] = {}
    refused: dict[str, str] = {}
    for name in [name for name in given.only.split(",") if name] or of_visit(f"{given.visit} visit"):
        captured, why = captured_zoo([name], say)
        refused |= why
        cases |= answered(captured, platform, say)
        ZooAnswers(cases, refused).write(given.file or _FILES[given.visit])
    measured = zoo_cases(ZooAnswers(cases))
    if measured:
        with stdout() as console:
            print_validation(console, validate_zoo(measured, by_left_out=False))


if __name__ == "__main__":
    main()
