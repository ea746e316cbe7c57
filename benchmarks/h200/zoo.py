"""Predicts the zoo's architectures for an H200 before they are measured: captures each without a GPU.

`python benchmarks/h200/zoo.py [FILE] [--only a,b]` writes the answers, by default where `steptime validate zoo` reads them.
`steptime measure zoo -o DIR` then measures the same architectures on the card. None of them has a part in any fit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from steptime_lab.validate.zoo.answers import PREDICTED, ZooAnswers
from steptime_lab.validate.zoo.refit import answered, captured_zoo


def main() -> None:
    """Captures, predicts and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=PREDICTED)
    parser.add_argument("--only", default="", help="names of architectures with commas between")
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name]
    captured, refused = captured_zoo(names, print)
    ZooAnswers(answered(captured, report=print), refused).write(given.file)


if __name__ == "__main__":
    main()
