"""Predicts the zoo's architectures for an H200 before they are measured: captures each without a GPU.

`python benchmarks/h200/zoo.py [FILE] [--only a,b]` writes the answers, by default where `steptime validate zoo` reads them.
`steptime measure zoo -o DIR` then measures the same architectures on the card. None of them has a part in any fit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from steptime._platforms.platform import Platform, platform_parts
from steptime_lab.validate.zoo.answers import PLATFORM, PREDICTED, ZooAnswer, ZooAnswers
from steptime_lab.validate.zoo.refit import answered, captured_zoo
from steptime_lab.workloads.zoo import architectures


def say(line: str) -> None:
    """At once: the whole zoo takes minutes."""
    print(line, flush=True)


def main() -> None:
    """Captures, predicts and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=PREDICTED)
    parser.add_argument("--only", default="", help="names of architectures with commas between")
    given = parser.parse_args()
    platform = Platform.of(platform_parts(PLATFORM))
    cases: dict[str, ZooAnswer] = {}
    refused: dict[str, str] = {}
    for name in [name for name in given.only.split(",") if name] or architectures():
        captured, why = captured_zoo([name], say)
        refused |= why
        cases |= answered(captured, platform, say)
        ZooAnswers(cases, refused).write(given.file)


if __name__ == "__main__":
    main()
