"""The noise floor of the shipped measurements; `--docs` puts it into docs/measuring.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from steptime_lab.measure.tables import noise_lines, noises
from steptime_lab.measurements.shipped import FOLDER

PAGE = Path(__file__).parents[1] / "docs" / "measuring.md"
BLOCK = re.compile(r"(<!-- noise -->\n).*?(<!-- /noise -->)", re.DOTALL)


def main() -> None:
    lines = noise_lines(noises(FOLDER, parts=False))
    print("\n".join(lines))
    if "--docs" in sys.argv[1:]:
        table = "\n".join(lines) + "\n"
        PAGE.write_text(
            BLOCK.sub(lambda found: found[1] + table + found[2], PAGE.read_text(encoding="utf-8")), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
