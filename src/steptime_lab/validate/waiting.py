"""Collectives of profiled steps on each rank: waiting and the fabric's estimate against what the rank's kernel took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError
from steptime_lab.fit.waiting import Waited
from steptime_lab.validate.summary import Case, Part, Validation, summary

Floats = npt.NDArray[np.float64]

_WAITERS = 0.1  # the last to arrive tell nothing of waiting; those who waited so much of the time are shown apart


def case_factors(waited: Sequence[Waited]) -> dict[tuple[str, str], float]:
    """Per case and kind, how many times its estimate a collective took in the middle: the wire's speed on that day."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in waited:
        ratios[one.collective.case, one.kind].append(one.free_ns / one.alone_ns)
    return {key: float(np.median(some)) for key, some in ratios.items()}


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
    chosen, *_ = rules

    def cases(some: Sequence[Waited], rule: str, least: float = 0.0) -> list[Case]:
        return [case for one in some for case in _cases(one, rules[rule](one), least)]

    def part(some: Sequence[Waited], least: float = 0.0) -> Part:
        found = {rule: summary(cases(some, rule, least)) for rule in rules}
        return Part(found.pop(chosen), found)

    lots: dict[str, list[Waited]] = defaultdict(list)
    for one in sorted(waited, key=lambda one: (one.kind, one.ranks)):
        lots[f"{one.kind}, {one.ranks} ranks"].append(one)
    parts = {name: part(some) for name, some in lots.items()}
    if cases(waited, chosen, _WAITERS):
        parts[f"ranks that waited {_WAITERS:.0%} of the time or more"] = part(waited, _WAITERS)
    facts = {"waiting": waiting_share(waited)}
    for name, some in lots.items():
        facts[f"waiting, {name}"] = waiting_share(some)
        facts[f"ends_apart_us, {name}"] = float(np.median([one.apart_ns for one in some])) / 1e3
    return Validation(
        name="waiting",
        title="collectives of profiled steps on each rank: waiting + wait-free time",
        cases=cases(waited, chosen),
        whole=part(waited),
        parts=parts,
        facts=facts,
        notes=("arrivals are those of the profile; broadcasts are left out, because ranks do not leave them together",),
    )


def waiting_share(waited: Sequence[Waited]) -> float:
    """Of the time of collectives, what was waiting."""
    return float(sum(one.waited_ns.sum() for one in waited) / sum(one.collective.ran_ns.sum() for one in waited))


def _cases(one: Waited, predicted_ns: Floats, least: float) -> list[Case]:
    """One per rank that waited at least this share of the time."""
    name = f"{one.collective.case}, {one.kind} of {one.collective.message.bytes} bytes"
    times = zip(predicted_ns.tolist(), one.collective.ran_ns.tolist(), strict=True)
    enough = one.waited_ns >= least * one.collective.ran_ns
    return [Case(f"{name}, rank {rank}", said, ran) for rank, (said, ran) in enumerate(times) if enough[rank]]
