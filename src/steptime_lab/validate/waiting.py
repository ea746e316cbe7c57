"""Collectives of profiled steps on each rank: waiting and the fabric's estimate against what the rank's kernel took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError
from steptime_lab.fit.waiting import Waited
from steptime_lab.validate.engine import Case, Compared, Validation, group, groups

Floats = npt.NDArray[np.float64]

_WAITERS = 0.1  # the last to arrive tell nothing of waiting; those who waited so much of the time are shown apart


def case_factors(waited: Sequence[Waited]) -> dict[tuple[str, str], float]:
    """Per case and kind, how many times its estimate a collective took in the middle: the wire's speed on that day."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in waited:
        ratios[item.collective.case, item.kind].append(item.free_ns / item.alone_ns)
    return {key: float(np.median(entry)) for key, entry in ratios.items()}


def validation_of(waited: Sequence[Waited]) -> Validation:
    """Time of every collective on every rank: wait + the estimate of the fabric, times one factor per case and kind."""
    if not waited:
        raise InputError("no step with two collectives or more on several ranks")
    factors = case_factors(waited)
    rules: dict[str, Callable[[Waited], Floats]] = {
        "wait, estimate x factor": lambda one: one.waited_ns + one.alone_ns * factors[one.collective.case, one.kind],
        "wait, estimate": lambda one: one.waited_ns + one.alone_ns,
        "wait, shortest of the ranks": lambda one: one.waited_ns + float(one.collective.ran_ns.min()),
        "no wait, estimate x factor": lambda one: np.full(one.ranks, one.alone_ns * factors[one.collective.case, one.kind]),
    }
    compared = [one for each in waited for one in _compared(each, rules)]
    lots: dict[str, list[Waited]] = defaultdict(list)
    for one in sorted(waited, key=lambda one: (one.kind, one.ranks)):
        lots[_lot(one)].append(one)
    named: list[tuple[str, Callable[[RankWaited], bool]]] = [
        (name, lambda rank, name=name: _lot(rank.waited) == name)  # type: ignore[misc]
        for name in lots
    ]
    named.append((f"ranks that waited {_WAITERS:.0%} of the time or more", lambda rank: rank.share >= _WAITERS))
    facts = {"waiting": waiting_share(waited)}
    for name, item in lots.items():
        facts[f"waiting, {name}"] = waiting_share(item)
        facts[f"ends_apart_us, {name}"] = float(np.median([one.apart_ns for one in item])) / 1e3
    return Validation(
        name="waiting",
        title="collectives of profiled steps on each rank: waiting + wait-free time",
        cases=[one.case for one in compared],
        whole=group(compared),
        groups=groups(compared, named),
        facts=facts,
        notes=("arrivals are those of the profile; broadcasts are left out, because ranks do not leave them together",),
    )


def waiting_share(waited: Sequence[Waited]) -> float:
    """Of the time of collectives, what was waiting."""
    return float(sum(item.waited_ns.sum() for item in waited) / sum(item.collective.ran_ns.sum() for item in waited))


@dataclass(frozen=True, slots=True)
class RankWaited:
    """One rank in one collective, and of its time the share that it waited."""

    waited: Waited
    share: float


def _lot(one: Waited) -> str:
    return f"{one.kind}, {one.ranks} ranks"


def _compared(one: Waited, rules: Mapping[str, Callable[[Waited], Floats]]) -> list[Compared[RankWaited]]:
    """Every rank by the first rule, beside the others."""
    name = f"{one.collective.case}, {one.kind} of {one.collective.message.bytes} bytes"
    chosen, *others = ((rule, predict(one).tolist()) for rule, predict in rules.items())
    results = []
    for rank, (ran_ns, waited_ns) in enumerate(zip(one.collective.ran_ns.tolist(), one.waited_ns.tolist(), strict=True)):
        case = Case(f"{name}, rank {rank}", chosen[1][rank], ran_ns)
        beside = {rule: case.by(times[rank]) for rule, times in others}
        results.append(Compared(RankWaited(one, waited_ns / ran_ns), case, beside))
    return results
