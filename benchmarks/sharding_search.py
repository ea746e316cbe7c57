"""How long a search takes and how much it finds: tables drawn like production's on ranks of a cluster, against the usual rules.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/sharding_search.py [--cases 60x4 200x32 1000x128]

Prints CPU and wall seconds of the whole search, what of them went into preparing the evaluation, plans asked for, and the
predicted step against the best usual rule, against greedy alone, and against a bound: loads that are all equal.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.populations import PRODUCTION_2022
from steptime._platforms.platform import Platform
from steptime._shard.evaluator import Evaluator
from steptime._shard.search import search, usual_evaluations
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task
from steptime_lab.workloads.drawn_tasks import Draws

PLATFORM = Path(__file__).parents[1] / "examples" / "sharding" / "128xh200.toml"
CASES = ("60x4", "200x32", "1000x128")
SAMPLES_PER_RANK = 4096


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--cases", nargs="+", default=CASES)
    for case in given.parse_args().cases:
        tables, ranks = map(int, case.split("x"))
        _one(Task(drawn_model(tables, ranks), ranks), Platform.load(str(PLATFORM), ranks=ranks))


def _one(task: Task, platform: Platform) -> None:
    evaluator = Evaluator(task.model, platform, task.ranks)
    cpu, wall = time.process_time(), time.monotonic()
    evaluator.evaluate(np.zeros((1, len(task.tables)), dtype=np.intp))
    preparing = time.process_time() - cpu
    found = search(task, platform, SearchBudget(usual_evaluations(task.model, task.ranks)), evaluator=evaluator)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    greedy = search(task, platform, SearchBudget(2000), evaluator=evaluator, only=("greedy",))
    rule = found.best_rule
    assert rule is not None
    print(
        f"{len(task.tables)} tables on {task.ranks} ranks: {cpu:.1f} s CPU ({preparing:.1f} preparing), {wall:.1f} s wall, "
        f"{found.searched_plans:,} plans; step {found.best.step_ns / 1e6:.3f} ms; best rule ({rule[0]}) "
        f"{rule[1].step_ns / found.best.step_ns - 1:+.1%}, greedy on predicted cost "
        f"{greedy.best.step_ns / found.best.step_ns - 1:+.1%}",
        flush=True,
    )


def drawn_model(tables: int, ranks: int, seed: int = 1) -> Dlrm:
    draws = Draws(seed)
    made = tuple(
        Table(f"t{place:04d}", draws.pick((16, 32, 64, 128)), draws.stream(PRODUCTION_2022, (1e3, 2e7), (0.5, 200)))
        for place in range(tables)
    )
    made = tuple(replace(one, generator=replace(one.generator, locality=0.0)) for one in made)
    return Dlrm("drawn", SAMPLES_PER_RANK * ranks, 512, (1024, 256, 128), (1024, 512, 256, 1), made, interaction="cat")


if __name__ == "__main__":
    main()
