"""How long a step takes: many unsynchronised steps between barriers, divided by their number; the slowest rank counts.

Beside it the state of the machine: hosts have two speeds, up to a factor of two apart, and change between them within seconds,
rank by rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.group import Group
from steptime._measurements.store import key_of
from steptime._units import MIB
from steptime_lab.measurements.sets import measured_set

if TYPE_CHECKING:
    from steptime_lab.workloads.case import Case, Step


def asked(case: Case, share: int, fabric: str) -> dict[str, Any]:
    """The columns that say what is measured."""
    return {
        "workload": case.workload,
        "name": case.name,
        "config": json.dumps(case.config, separators=(",", ":"), sort_keys=True),
        "precision": case.precision,
        "batch": case.batch,
        "ranks": case.ranks,
        "share": share,
        "fabric": fabric,
        "plan": None if case.plan is None else json.dumps(case.plan, separators=(",", ":")),
        "task": case.task or None,
        "rule": case.rule or None,
        "block": 0,
    }


def key_of_case(case: Case, share: int, fabric: str, *, name: str = "steps", block: int = 0) -> str:
    """The key of the row that this case gives."""
    return key_of(measured_set(name), {**asked(case, share, fabric), "block": block})


def lookups_json(case: Case, step: Step, group: Group) -> str | None:
    """Lookup statistics of every iteration and table, on every rank; None without tables.

    A list with one object per iteration: table -> [lookups, distinct rows, [17 bins of reuse]].
    """
    names = [table["name"] for table in case.config.get("tables", ())]
    plan = case.plan or {}
    mine = [name for name in names if _first_rank(plan.get(name, 0)) == group.rank]
    iterations = [
        {
            name: [lookup.lookups, lookup.unique, [round(share, 4) or 0 for share in lookup.reuse]]
            for name, lookup in zip(mine, step.lookups(iteration), strict=False)
        }
        for iteration in range(step.batches)
    ]
    parts = [json.loads(text) for text in group.gather_text(json.dumps(iterations))]
    merged = [{name: lookup for part in parts for name, lookup in part[at].items()} for at in range(step.batches)]
    return json.dumps(merged, separators=(",", ":"), sort_keys=True) if any(merged) else None


def _first_rank(placed: Any) -> int:
    """The rank with a table's first shard; a kind alone is on every rank."""
    if isinstance(placed, dict):
        placed = placed.get("ranks", 0)
    return int(placed[0] if isinstance(placed, list) else placed)


# About a millisecond of calls that go through Python and the dispatcher and launch nothing.
_VIEWS = 1000
# The sentinel of the collectives: four of them take 2-4 ms on loopback.
_WIRE_BYTES = MIB
_WIRE_CALLS = 3


def host_ns(group: Group) -> float:
    """Nanoseconds of a fixed loop of `view` on the CPU, of the slowest rank; every rank calls it."""
    import torch

    vector = torch.zeros(8)
    begun = time.perf_counter_ns()
    for _ in range(_VIEWS):
        vector.view(2, 4)
    return max(group.gather(time.perf_counter_ns() - begun))


def wire_ns(group: Group) -> float | None:
    """Nanoseconds of an all_reduce of 1 MiB, mean of a few behind one another, of the slowest rank; None for one rank."""
    if group.ranks == 1:
        return None
    import torch
    import torch.distributed as dist

    # Made anew each time: a buffer that stays would count in the memory of every case.
    data = torch.randn(_WIRE_BYTES // 4, device=group.device)
    dist.all_reduce(data)
    group.barrier()
    begun = time.perf_counter_ns()
    for _ in range(_WIRE_CALLS):
        dist.all_reduce(data)
    group.synchronize()
    return max(group.gather((time.perf_counter_ns() - begun) / _WIRE_CALLS))


# A step time is flat when the last three steps agree to this; host-bound steps never do better (2-7 % within a run).
_FLAT = 0.05
_FLAT_OVER = 3
# A step this long hides its host and repeats to a tenth of a percent: few steps warm it up and tell its length.
LONG_S = 0.2
_LONG_WARM, _LONG_STEPS, _LONG_ROUNDS = 3, 2, 3
# `steps_per_time` is stored in 16 bits, and more steps than this say nothing new.
MOST_STEPS = 1000

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to warm up and to time. A repeat takes about `repeat_s`, whatever a step takes; every round has one."""

    # Once a case is built: until the time is flat, and through all of its input batches at least.
    warm_least: int = 4
    warm_most: int = 8
    warm_s: float = 0.5
    settle_s: float = 1.0  # more of it for the first case of a group, whose processes are slower at first
    first_s: float = 0.3  # before the repeat of the first round
    again_s: float = 0.03  # before the others: another case ran in between
    again_least: int = 2
    rounds: int = 5
    repeat_s: float = 0.1
    least_steps: int = 4

    def rounds_of(self, step_s: float) -> int:
        """In how many rounds a case is timed."""
        return min(self.rounds, _LONG_ROUNDS) if step_s > LONG_S else self.rounds

    def steps_of(self, step_s: float) -> int:
        """Over how many steps a repeat is the mean."""
        return steps_for(self.repeat_s, step_s, _LONG_STEPS if step_s > LONG_S else self.least_steps)

    def warm_of(self, step_s: float, turn: int, *, hot: bool) -> int:
        """How many steps come before the repeat of a round; `hot`: nothing else ran since this case did."""
        if hot and (turn or step_s > LONG_S):
            return 0
        return steps_for(self.again_s if turn else self.first_s, step_s, self.again_least)

    def cost_s(self, step_s: float, *, hot: bool) -> float:
        """About how long the rounds of a case take."""
        rounds = range(self.rounds_of(step_s))
        return step_s * sum(self.warm_of(step_s, turn, hot=hot) + self.steps_of(step_s) for turn in rounds)


FULL = Pace()
# To try things out: seconds in all.
SMALL = Pace(warm_least=2, warm_most=3, settle_s=0.0, first_s=0.0, again_s=0.0, rounds=3, repeat_s=0.0, least_steps=2)


def flat(step_s: Sequence[float]) -> bool:
    """Whether the last steps took the same time."""
    last = step_s[-_FLAT_OVER:]
    return len(last) == _FLAT_OVER and max(last) - min(last) <= _FLAT * max(last)


def steps_for(seconds: float, step_s: float, least: int) -> int:
    """How many steps fill that time."""
    return max(least, min(MOST_STEPS, round(seconds / max(step_s, 1e-9))))


def warm_up(step: Run, group: Group, pace: Pace) -> float:
    """Steps until the time is flat; seconds of a late one. Every rank makes the same number, as steps contain collectives."""
    taken_s: list[float] = []
    while len(taken_s) < pace.warm_most:
        # Slowest of all ranks and the same numbers everywhere, so every rank stops at the same step.
        taken_s.append(time_once(step, group, 1))
        least = _LONG_WARM if taken_s[-1] > LONG_S else pace.warm_least
        if len(taken_s) >= least and (flat(taken_s) or sum(taken_s[1:]) >= pace.warm_s):
            break
    return min(taken_s[-_FLAT_OVER:])


def time_once(step: Run, group: Group, count: int) -> float:
    """Seconds per step over `count` unsynchronised steps between barriers, of the slowest rank, on every rank."""
    group.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    group.synchronize()
    return max(group.gather((time.perf_counter() - begun) / count))
