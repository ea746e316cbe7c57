"""`measure collectives`: how long collectives take on the fabrics of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steptime.measure.collectives.cases import MAIN, OTHERS, Case, cost_ns, few, tiers
from steptime.measure.collectives.choices import Table, learn
from steptime.measure.collectives.fabrics import Place, layout_of, places
from steptime.measure.group import Group
from steptime.measure.options import Options
from steptime.measure.ranks import RanksError, run_ranks
from steptime.measure.session import Session

# Importing torch, joining the group, connecting.
_STARTING_S = 8.0
# Longer than any block, and than processes take to start and to end; a group that hangs is ended then.
_GRACE_S = 25.0
# Asking NCCL for its choices takes about 25 s; a shorter run is better spent on times.
_WORTH_ASKING_S = 100.0


def run(session: Session, options: Options) -> None:
    """One group of processes per number of ranks and fabric; each gets its share of the time that is left."""
    wanted = {place: _left(session, place, options) for place in places(options, session.recipe.gpus)}
    wanted = {place: cases for place, cases in wanted.items() if cases}
    choices: dict[Place, Table] = {}
    if options.device == "cuda" and (options.small or session.budget.left_s() > _WORTH_ASKING_S):
        choices = learn(session, wanted, options.device)
    for number, place in enumerate(wanted):
        if session.budget.left_s() < _STARTING_S:
            session.warn(f"no time left for collectives on {', '.join(map(_said, list(wanted)[number:]))}")
            return
        _measure(session, options, place, _share(wanted, number), choices.get(place, {}))


def names(_: Options) -> tuple[str, ...]:
    """What `--only` may name."""
    return (*MAIN, *OTHERS, "barrier")


def _measure(session: Session, options: Options, place: Place, share: float, choices: Table) -> None:
    part = session.budget.part(share)
    plan = session.to_plan(
        ends_at=part.ends_at, place=place.to_dict(), choices=dict(choices), done=_done(session, place, options),
        seed=options.seed, small=options.small, only=list(options.only),
    )  # fmt: skip
    try:
        run_ranks(
            "collectives", layout_of(place, options.device), plan,
            limit_s=part.left_s() + _GRACE_S, environment=place.settings,
        )  # fmt: skip
    except RanksError as error:
        session.warn(f"{error} ({place.fabric}); what it had flushed is kept")


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank's part: the same cases in the same order on every rank."""
    from steptime.measure.collectives.sweep import sweep

    wanted = cases_of(Place.from_dict(plan["place"]), seed=int(plan["seed"]), small=bool(plan["small"]), only=plan["only"])
    sweep(group, session, plan, wanted)


def cases_of(place: Place, *, seed: int, small: bool, only: Sequence[str]) -> list[list[Case]]:
    """Everything to measure at a place, in lists of falling worth."""
    if small:
        return few(place.ranks, seed=seed, only=only)
    return tiers(place.ranks, dense=place.dense, seed=seed, only=only)


def _every(place: Place, options: Options) -> list[Case]:
    tiered = cases_of(place, seed=options.seed, small=options.small, only=options.only)
    return [case for tier in tiered for case in tier]


def _done(session: Session, place: Place, options: Options) -> list[str]:
    measured = session.store.done("collectives")
    return [key for case in _every(place, options) if (key := case.key(place)) in measured]


def _left(session: Session, place: Place, options: Options) -> list[Case]:
    done = set(_done(session, place, options))
    return [case for case in _every(place, options) if case.key(place) not in done]


def _share(wanted: Mapping[Place, Sequence[Case]], number: int) -> float:
    """The part of the time left that the place of that number should have, by what it and its followers would take."""
    needs = [_STARTING_S + sum(cost_ns(case, place.ranks) for case in cases) / 1e9 for place, cases in wanted.items()]
    return needs[number] / sum(needs[number:])


def _said(place: Place) -> str:
    return f"{place.ranks} ranks, {place.fabric}"
