"""How good the sharding predictions are that were committed before their plans ran (data/sharding_predictions.json).

Of the further tasks they were made without calibration. Regret: the pick by the committed predictions, among the plans of the
usual rules, over the fastest of these as measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import steptime_lab
from steptime._platforms.platform import Platform
from steptime_lab.validate.sharding.measured import shipped_tasks

FILE = Path(steptime_lab.__file__).parent / "data" / "sharding_predictions.json"


def main() -> None:
    document = json.loads(FILE.read_text(encoding="utf-8"))
    committed = {task["task"]: task["rules"] for task in document["tasks"]}
    tasks, _ = shipped_tasks(Platform.load(document["platform"]).host)
    print("| tasks | mean regret | max | within 10 % | steps off by | bias |\n|---|---|---|---|---|---|")
    for name, further in (("first", False), ("further", True)):
        some = [task for task in tasks if task.further == further]
        regrets, errors = [], []
        for task in some:
            said = np.empty(len(task.rank_of))
            for rule, place in task.rules.items():
                said[place] = 1e6 * committed[task.name][rule]["step_ms"]
            regrets.append(float(task.measured_ns[np.argmin(said)] / task.measured_ns.min() - 1))
            errors += (said / task.measured_ns - 1).tolist()
        print(
            f"| {name} {len(some)} | {np.mean(regrets):.2%} | {max(regrets):.1%} | {np.mean(np.array(regrets) < 0.1):.0%} | "
            f"{np.mean(np.abs(errors)):.1%} | {np.mean(errors):+.1%} |"
        )


if __name__ == "__main__":
    main()
