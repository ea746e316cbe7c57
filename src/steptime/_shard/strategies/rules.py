"""The usual rules' plans: what there is to beat."""

from __future__ import annotations

import numpy as np

from steptime._shard.rules import Machine, rules
from steptime._shard.search.state import FREE, Places, Search
from steptime._shard.strategies import Strategy
from steptime.errors import InputError


def plan_of_rule(search: Search, name: str) -> Places | None:
    """What a rule makes of the shards, pinned ones put back; None where it finds no room."""
    try:
        plan = rules()[name].place(search.shards, Machine(search.ranks, search.memory.room))
    except InputError:
        return None
    return np.where(search.pinned == FREE, np.array(plan.rank_of), search.pinned)


def _run(search: Search) -> None:
    plans = [plan for name in rules() if (plan := plan_of_rule(search, name)) is not None]
    if plans:
        search.ask(np.stack(plans))


STRATEGY = Strategy("rules", "the plans of the usual rules", 0, _run)
