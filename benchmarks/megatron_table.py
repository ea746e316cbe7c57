"""The public table of Megatron-DeepSpeed iterations on A100s (vTrain, VIA-Research) against predictions on `8xa100-nvlink`.

`python benchmarks/megatron_table.py megatron_a100_single_node.csv [ROWS]`. docs/devices.md says what the table is and is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from steptime.validate.megatron_predicted import megatron


def main() -> None:
    if not sys.argv[1:]:
        print("give the table, megatron_a100_single_node.csv of VIA-Research/vTrain; it is not part of this project")
        return
    file, *most = sys.argv[1:]
    found = megatron(Path(file), most=int(most[0]) if most else 60, said=lambda words: print(words, file=sys.stderr))
    print("| rows | cases | GMAE | MAPE | p90 | bias | worst |\n|---|---|---|---|---|---|---|")
    for name, part in {"all": found.whole, **found.parts}.items():
        one = part.summary
        errors = (one.gmae, one.mape, one.p90, one.bias)
        print(" | ".join([f"| {name}", str(one.rows), *(f"{100 * error:+.1f} %" for error in errors), f"{one.worst} |"]))
    for warning in found.warnings:
        print(f"- {warning}")


if __name__ == "__main__":
    main()
