"""What the timed plans of all tasks say in one line: do plans differ, and by more than the noise?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from steptime._measurements.recipe import spread_of

# A pick is as good as the fastest when it is within this of it.
CLOSE = 0.10

Times = dict[str, dict[tuple[Any, ...], float]]  # plan -> (process, block) -> nanoseconds


def by_task(rows: Iterable[Mapping[str, Any]]) -> dict[str, Times]:
    """Per task and rule the time in every block; rules that make the same plan share its times."""
    result: dict[str, Times] = {}
    for row in rows:
        block = (row["run"], row["process"], row["block"])
        for rule in (row["rule"], *filter(None, (row["aliases"] or "").split(","))):
            result.setdefault(row["task"], {}).setdefault(rule, {})[block] = row["time_ns"]
    return result


def chance(times: Times) -> float:
    """How often a rule picked at random is within 10 % of the fastest."""
    medians = [float(np.median(list(blocks.values()))) for blocks in times.values()]
    return sum(median <= (1 + CLOSE) * min(medians) for median in medians) / len(medians)


def slowest_over_fastest(times: Times) -> float:
    """How far apart the rules are."""
    medians = [float(np.median(list(blocks.values()))) for blocks in times.values()]
    return max(medians) / min(medians)


def paired_noise(times: Times) -> float:
    """Median over the rules: how far a rule's time over its block's mean spreads from block to block; NaN where no block has
    all rules."""
    every = [set(blocks) for blocks in times.values()]
    common = sorted(set.intersection(*every), key=str)
    if not common:
        return math.nan
    means = {block: float(np.mean([blocks[block] for blocks in times.values()])) for block in common}
    return float(np.median([spread_of([blocks[block] / means[block] for block in common]) for blocks in times.values()]))


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line over all tasks."""
    tasks = list(by_task(rows).values())
    if not tasks:
        return "sharding: nothing was timed"
    spread = float(np.median([slowest_over_fastest(task) for task in tasks]))
    noises = [noise for noise in map(paired_noise, tasks) if not math.isnan(noise)]
    noise = float(np.median(noises)) if noises else math.nan
    return (
        f"sharding: {len(tasks)} tasks; a random pick is within {CLOSE:.0%} of the fastest in "
        f"{np.mean([chance(task) for task in tasks]):.0%} of draws; slowest over fastest plan {spread:.2f} (median), "
        f"noise of a paired time {noise:.1%} (median)"
    )
