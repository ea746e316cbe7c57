"""Searched plans against the seven rules' plans, measured in interleaved blocks on four quarters of an H200.

The plans and their predicted steps were committed before they were measured (data/sharding_predictions.json); the times are in
benchmarks/h200/searched_plans.json: `steptime measure sharding --plans FILE`, which also times the rules' plans.
`python benchmarks/sharding_searched.py` compares with the rule that was fastest in hindsight, block by block.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
SEARCHED = "searched"


def main() -> None:
    measured = json.loads((ROOT / "benchmarks/h200/searched_plans.json").read_text(encoding="utf-8"))["tasks"]
    listed = json.loads((ROOT / "src/steptime/data/sharding_predictions.json").read_text(encoding="utf-8"))["tasks"]
    predicted = {task["task"]: task for task in listed}
    print("| task | searched, ms (predicted) | fastest rule, ms | faster by | 95 % | predicted |\n|---|---|---|---|---|---|")
    clear = slower = 0
    for task, rules in sorted(measured.items()):
        middle = {rule: float(np.median(list(times.values()))) / 1e6 for rule, times in rules.items()}
        best = min((rule for rule in middle if rule != SEARCHED), key=middle.__getitem__)
        blocks = sorted(rules[SEARCHED].keys() & rules[best].keys())
        logs = np.log([rules[best][block] / rules[SEARCHED][block] for block in blocks])
        error = 2 * float(logs.std(ddof=1)) / len(logs) ** 0.5
        gain, said = float(np.expm1(np.median(logs))), predicted[task]
        clear, slower = clear + (logs.mean() > error), slower + (gain < -max(0.02, error))
        expected = min(one["step_ms"] for one in said["rules"].values()) / said[SEARCHED]["step_ms"] - 1
        print(
            f"| {task} | {middle[SEARCHED]:.2f} ({said[SEARCHED]['step_ms']:.2f}) | {best} {middle[best]:.2f} | "
            f"{100 * gain:+.1f} % | +-{100 * error:.1f} % | {100 * expected:+.1f} % |"
        )
    print(f"\n{len(measured)} tasks: faster beyond noise in {clear}, slower by more than noise and 2 % in {slower}.")


if __name__ == "__main__":
    main()
