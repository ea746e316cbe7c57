"""`measure collectives`: how long collectives take on the fabrics of this machine."""

from __future__ import annotations

import gc
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from steptime._calibrate.collectives.cases import MAIN, OTHERS, CollectiveCase, Place, cost_ns
from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import RanksError, run_ranks
from steptime._calibrate.harness.session import Budget, Session
from steptime._measurements.sets import COLLECTIVES
from steptime_lab.measure.collectives.cases import few, layout_of, places, tiers
from steptime_lab.measure.collectives.choices import learn

# Importing torch, joining the group, connecting.
_STARTING_S = 8.0
# Longer than any pass, and than processes take to start and to end; a group that hangs is ended then.
_GRACE_S = 25.0
# What asking NCCL for its choices takes where all places are asked.
_ASKING_S = 30.0
CHOICES = "choices"


def run(session: Session, options: Options) -> None:
    """One group of processes per number of ranks and fabric; each gets its share of the time that is left.

    NCCL's choices come first where there is time for everything, or where nothing else is asked for.
    """
    only, done = [name for name in options.only if name != CHOICES], session.store.done(COLLECTIVES)
    every = {
        place: cases_of(place, seed=options.seed, small=options.small, only=only)
        for place in places(options, session.recipe.gpus)
    }
    wanted = {place: left for place, cases in every.items() if any(left := _left(done, place, cases))}
    alone = options.only == (CHOICES,)
    if alone and options.device != "cuda":
        session.warn(f"--only {CHOICES} asks NCCL, which needs GPUs; nothing is asked on {options.device}")
    needed_s = sum(_needs_s(place, cases)[1] for place, cases in wanted.items())
    if options.device == "cuda" and (alone or session.budget.left_s() > needed_s + _ASKING_S):
        learn(session, {place: [case for tier in cases for case in tier] for place, cases in every.items()}, options.device)
    for number, place in enumerate({} if alone else wanted):
        if session.budget.left_s() < _STARTING_S:
            without = ", ".join(f"{later.ranks} ranks, {later.fabric}" for later in list(wanted)[number:])
            session.warn(f"no time left for collectives on {without}")
            return
        needs = [_needs_s(other, cases) for other, cases in list(wanted.items())[number:]]
        _measure(session, options, place, share_s(needs, session.budget.left_s()))


def names(_: Options) -> tuple[str, ...]:
    """What `--only` may name: collectives, or what NCCL chooses for them, which is not timed."""
    return (*MAIN, *OTHERS, "barrier", CHOICES)


def share_s(needs_s: Sequence[tuple[float, float]], left_s: float) -> float:
    """What the first of several places gets: what it has to have before any of them gets more.

    Of each place, what it takes to start and to measure the essential cases, and everything.
    """
    essential_s, full_s = sum(first for first, _ in needs_s), sum(full for _, full in needs_s)
    few_s, all_s = needs_s[0]
    if left_s <= essential_s or full_s == essential_s:
        return left_s * few_s / essential_s
    return few_s + (left_s - essential_s) * (all_s - few_s) / (full_s - essential_s)


def _measure(session: Session, options: Options, place: Place, seconds: float) -> None:
    part = Budget.of_minutes(seconds / 60)
    plan = session.to_plan(
        ends_at=part.ends_at, place=asdict(place), done=sorted(session.store.done(COLLECTIVES)),
        seed=options.seed, small=options.small, only=list(options.only),
    )  # fmt: skip
    try:
        run_ranks(
            __name__, layout_of(place, options.device), plan,
            limit_s=part.left_s() + _GRACE_S, environment=place.settings,
        )  # fmt: skip
    except RanksError as error:
        session.warn(f"{error} ({place.fabric}); what it had flushed is kept")


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank's part: the same cases in the same order on every rank; those at the plan's place that are not yet there."""
    from steptime._calibrate.collectives.sweep import Sweep
    from steptime_lab.measure.collectives.circumstances import CircumstancesBench

    place = Place(**plan["place"])
    wanted = cases_of(place, seed=int(plan["seed"]), small=bool(plan["small"]), only=plan["only"])
    left = _left(set(plan["done"]), place, wanted)
    every = [case for tier in left for case in tier]
    if not every:
        return
    progress = session.progress(f"collectives, {place.ranks} ranks, {place.fabric}", len(every))
    result = Sweep(group, session, place, every, CircumstancesBench)
    able = result.supported(every)
    gc.collect()
    gc.disable()
    for number, tier in enumerate(left):
        for name in {case.collective for case in tier} - able:
            progress.skip(f"no {name} here", sum(case.collective == name for case in tier))
        result.measure([case for case in tier if case.collective in able], progress, int(plan["seed"]) + 1000 * number)
    gc.enable()
    progress.close()


def cases_of(place: Place, *, seed: int, small: bool, only: Sequence[str]) -> list[list[CollectiveCase]]:
    """Everything to measure at a place, in lists of falling worth."""
    if small:
        return few(place.ranks, seed=seed, only=only)
    return tiers(place.ranks, dense=place.dense, seed=seed, only=only)


def _left(done: Container[str], place: Place, tiered: Sequence[Sequence[CollectiveCase]]) -> list[list[CollectiveCase]]:
    """The tiers without what is measured."""
    return [[case for case in tier if case.key(place) not in done] for tier in tiered]


def _needs_s(place: Place, tiered: Sequence[Sequence[CollectiveCase]]) -> tuple[float, float]:
    """With the start: the first tier, and all of them."""
    costs = [sum(cost_ns(case, place) for case in tier) / 1e9 for tier in tiered]
    return _STARTING_S + costs[0], _STARTING_S + sum(costs)
