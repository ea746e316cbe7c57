"""Lookups inside measured DLRM steps: the time of a rank's table-batched kernels in profiled steps against the models.

The models were fitted to lookups measured alone; here they run in real steps, on parts of a GPU beside ranks that do the same,
with collectives around them. Statistics are those that the steps' generators have on average: nothing is drawn.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import numpy as np

from steptime._build.dlrm.model import Dlrm
from steptime._hardware.device import FOLDER
from steptime._lookups.generators import Generator
from steptime._lookups.parametric import expected_statistics
from steptime._lookups.table import TableStatistics
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.fitted import LookupModels, lookups_file
from steptime._models.lookups.question import Lookup
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.summary import Case, summary

KERNEL = {
    "forward": ("table_batched_forward", "table_batched_forward"),
    "backward": ("table_batched_linearize", "table_batched_update"),
}


def measured_ns(row: dict, direction: str) -> float:
    """From the first kernel of a pass to its last, on their stream, collectives aside."""
    first, last = KERNEL[direction]
    begin = row["kernel"].index(first)
    end = len(row["kernel"]) - 1 - row["kernel"][::-1].index(last)
    stream = row["stream"][begin]
    places = (place for place in range(begin, end + 1) if row["stream"][place] == stream and row["kernel_ns"][place])
    return float(sum(np.median(row["kernel_ns"][place]) for place in places))


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
    models = LookupModels.load(lookups_file(FOLDER, "h200"))
    steps = {row["name"]: row for row in shipped("steps").select(["name", "config", "plan", "workload"]).to_pylist()}
    known: dict[tuple[str, int, int], TableStatistics] = {}

    def statistics(generator: Generator, batch: int, dim: int) -> TableStatistics:
        key = (generator.to_json(), batch, dim)
        if key not in known:
            known[key] = expected_statistics(generator, batch, dim)
        return known[key]

    cases: dict[tuple[str, int], list[Case]] = defaultdict(list)
    asked: dict[str, list[tuple[Lookup, float, str]]] = defaultdict(list)
    rows = shipped("step_kernels").select(["workload", "name", "rank", "share", "kernel", "stream", "kernel_ns"]).to_pylist()
    for row in rows:
        if row["workload"] != "dlrm" or "table_batched_forward" not in row["kernel"] or len(asked["forward"]) >= most:
            continue
        model, plan = Dlrm.from_dict(json.loads(steps[row["name"]]["config"])), json.loads(steps[row["name"]]["plan"])
        own = [table for table in model.tables if plan[table.name] == row["rank"]]
        tables = tuple(statistics(table.generator, model.batch, table.dim) for table in own)
        others = "none" if row["share"] == 1 else "same"
        for direction in KERNEL:
            update = "none" if direction == "forward" else model.optimizer
            lookup = Lookup("table_batched", direction, tables, optimizer=update, share=row["share"], others=others)
            asked[direction].append((lookup, measured_ns(row, direction), f"{row['name']} rank {row['rank']}"))
    for direction, some in asked.items():
        times = models.form("table_batched", direction).times(Lookups.of([lookup for lookup, _, _ in some])).time_ns
        for (lookup, measured, name), predicted in zip(some, times.tolist(), strict=True):
            cases[direction, lookup.share].append(Case(name, predicted, measured))
    print("| lookups in steps | rows | GMAE | MAPE | p90 | bias of the sum | worst |")
    print("|---|---|---|---|---|---|---|")
    for (direction, share), own_cases in sorted(cases.items()):
        found = summary(own_cases)
        part = "whole GPU" if share == 1 else f"1/{share} of the GPU"
        errors = (found.gmae, found.mape, found.p90, found.bias)
        print(
            " | ".join(
                [f"| {direction}, {part}", str(found.rows), *(f"{100 * one:.1f} %" for one in errors), f"{found.worst} |"]
            )
        )


if __name__ == "__main__":
    main()
