"""Ranks whose programs issue alike are played together although their durations differ: arrays of all, each stretch once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from steptime._sim.core.compile import LaneGraph
from steptime._sim.core.schedule import Depart, Play, Return, Schedule, Step
from steptime._sim.core.timing import Cohort, Nanoseconds, Timing

# What stretches are played with.
_PLAYED = ("gap_ns", "call_ns", "return_ns", "latency_ns", "spacing_ns", "release_ns", "duration_ns")
_WRITTEN = "duration_ns"  # where ranks leave one by one


# Beyond so many ranks arrays are wide enough for each cohort to be played by itself.
_MOST_RANKS = 64
# Plans of which the order is kept, as many as `schedule` keeps.
_KEPT = 8


@lru_cache(maxsize=_KEPT)
def stacks(plan: Schedule) -> tuple[tuple[int, ...], ...]:
    """The cohorts of a plan, those of one graph together."""
    by_graph: dict[LaneGraph, dict[int, int]] = {}
    for part, graph in zip(plan.parts, plan.graphs, strict=True):
        ranks = by_graph.setdefault(graph, {})
        ranks[part.cohort] = max(ranks.get(part.cohort, 0), part.high)
    result: list[tuple[int, ...]] = []
    for ranks in by_graph.values():
        result += [tuple(ranks)] if sum(ranks.values()) <= _MOST_RANKS else [(cohort,) for cohort in ranks]
    return tuple(result)


def stacked_timing(cohorts: Sequence[Cohort]) -> Timing:
    """The durations of all ranks of some cohorts, side by side."""
    if len(cohorts) == 1:
        return cohorts[0].timing
    ranks = [len(cohort.ranks) for cohort in cohorts]
    changes: dict[str, Any] = {}
    for name in _PLAYED:
        values = [getattr(cohort.timing, name) for cohort in cohorts]
        same = values[0].shape[1] == 1 and all(np.array_equal(values[0], other) for other in values[1:])
        changes[name] = values[0] if same and name != _WRITTEN else _side_by_side(values, ranks)
    return replace(cohorts[0].timing, **changes)


def _side_by_side(values: Sequence[Nanoseconds], ranks: Sequence[int]) -> Nanoseconds:
    scenarios = max(each.shape[2] for each in values)
    wide = [np.broadcast_to(each, (len(each), count, scenarios)) for each, count in zip(values, ranks, strict=True)]
    return np.concatenate(wide, axis=1)


@lru_cache(maxsize=_KEPT)
def fused(plan: Schedule) -> tuple[Step, ...]:
    """The steps of a plan, with those that all parts of a stack do alike done once.

    Only meetings join parts: steps of one part can be moved past those of others, and past a meeting whose arrivals are not
    among them. A step for a stack has the number of the stack, counted on from the parts.
    """
    members = [[number for number, part in enumerate(plan.parts) if part.cohort in stack] for stack in stacks(plan)]
    waiting: list[list[Play | Return]] = [[] for _ in plan.parts]
    result: list[Step] = []
    for step in plan.steps:
        if not isinstance(step, Depart):
            waiting[step.part].append(step)
            continue
        arrivals = {(p.part, plan.graphs[p.part].half[int(plan.graphs[p.part].work_row[p.work])]) for p in step.meeting.parties}
        for number, parts in enumerate(members):
            result += _alike(waiting, parts, len(plan.parts) + number)
            rest = [each for part in parts for each in waiting[part]]
            if any(isinstance(each, Play) and (each.part, each.stretch.half) in arrivals for each in rest):
                result += rest
                for part in parts:
                    waiting[part].clear()
        result.append(step)
    for number, parts in enumerate(members):
        result += _alike(waiting, parts, len(plan.parts) + number)
        result += [each for part in parts for each in waiting[part]]
    return tuple(result)


def _alike(waiting: Sequence[list[Play | Return]], parts: Sequence[int], stack: int) -> Iterator[Step]:
    """Takes what all these parts do next from what waits, as steps of their stack."""
    while len(parts) > 1 and all(waiting[part] for part in parts):
        steps = [replace(waiting[part][0], part=stack) for part in parts]
        if any(step != steps[0] for step in steps[1:]):
            return
        for part in parts:
            waiting[part].pop(0)
        yield steps[0]
