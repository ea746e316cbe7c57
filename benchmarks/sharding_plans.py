"""How many sharding plans are evaluated in a second: 60 tables on 4 ranks (bar: 10,000), beside plans played one by one.

Random plans, so that nothing is asked twice. What is done once for all plans (asking the models, playing one step) is said by
itself. The machine may be shared: time is CPU time of one process, the best of several runs; the step that is played one by one
says in the same run how fast this machine is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.populations import PRODUCTION_2021
from steptime._platforms.platform import Platform
from steptime._shard.evaluator import Evaluator

TABLES, RANKS, BATCH = 60, 4, 8192
PLANS, EXACT_PLANS, PLAYED_PLANS, RUNS = 20_000, 500, 4, 5
BAR = 10_000


def model(tables: int) -> Dlrm:
    """Like those of production recommenders."""
    dims = np.random.default_rng(1).choice([16, 32, 64, 128], tables).tolist()
    made = tuple(
        Table(f"t{place:04d}", int(dim), stream)
        for place, (dim, stream) in enumerate(zip(dims, PRODUCTION_2021.tables(tables), strict=True))
    )
    return Dlrm("benchmark", BATCH, 512, (512, 128), (512, 256, 1), made, optimizer="rowwise_adagrad", interaction="cat")


def cpu_seconds(run: Callable[[], object], runs: int = RUNS) -> float:
    """Of the fastest run."""
    times = []
    for _ in range(runs):
        begun = time.process_time()
        run()
        times.append(time.process_time() - begun)
    return min(times)


def main() -> None:
    """Print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--platform", default="4xh200-quarter-loopback")
    parser.add_argument("--tables", type=int, default=TABLES)
    parser.add_argument("--ranks", type=int, default=RANKS)
    chosen = parser.parse_args()
    task, platform = model(chosen.tables), Platform.load(chosen.platform)
    begun = time.process_time()
    evaluator = Evaluator(task, platform, chosen.ranks)
    evaluator.evaluate(np.zeros((1, chosen.tables), dtype=np.intp))
    made_s = time.process_time() - begun
    print(f"{chosen.tables} tables on {chosen.ranks} ranks of {platform.name}, bar {BAR:,} a second; made in {made_s:.2f} s")
    plans = np.random.default_rng(0).integers(0, chosen.ranks, (PLANS, chosen.tables))
    ways: dict[str, tuple[int, float]] = {
        "together": (PLANS, cpu_seconds(lambda: evaluator.evaluate(plans))),
        "models asked": (EXACT_PLANS, cpu_seconds(lambda: evaluator.evaluate(plans[:EXACT_PLANS], exact=True), 2)),
        "played one by one": (PLAYED_PLANS, cpu_seconds(lambda: evaluator.simulate(plans[:PLAYED_PLANS]), 1)),
    }
    slowest = ways["played one by one"][1] / PLAYED_PLANS
    for name, (count, seconds) in ways.items():
        each = seconds / count
        print(f"{name:20} {1 / each:12,.1f} plans a second {1e6 * each:12,.1f} us each {slowest / each:10,.0f} times as fast")
    few = plans[:PLAYED_PLANS]
    off = np.abs(evaluator.evaluate(few, exact=True).step_ns / evaluator.simulate(few).step_ns - 1)
    print(
        f"together against played: {np.median(off):.2%} off in the median, {off.max():.2%} at most (bar {BAR:,} plans a second)"
    )


if __name__ == "__main__":
    main()
