"""A few seconds of collectives: the fabric as it is on this machine, now, beside what it is to predict."""

from __future__ import annotations

import gc
from dataclasses import replace

from steptime._calibrate.collectives.cases import MAIN, CollectiveCase, fitting
from steptime._calibrate.collectives.fabrics import Place
from steptime._calibrate.collectives.sweep import Sweep
from steptime._calibrate.harness.budget import Budget, Progress
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Session
from steptime._units import MIB

# The largest is DDP's bucket.
SIZES = (1024, 64 * 1024, 512 * 1024, 2 * MIB, 8 * MIB, 25 * MIB)


def sample(group: Group, session: Session, fabric: str, *, seconds: float = 3.0, largest_bytes: int = SIZES[-1]) -> int:
    """Adds rows of all_reduce and all_to_all at a few sizes; how many. Every rank calls it; one rank alone adds none.

    `fabric` names the settings the group was started with. Takes no longer than `seconds`, nor than the session has left.
    """
    if group.ranks == 1:
        return 0
    place = Place(group.ranks, fabric, group.share)
    cases = [CollectiveCase(name, fitting(name, size, group.ranks)) for size in SIZES for name in MAIN if size <= largest_bytes]
    budget = Budget(min(session.budget.ends_at, Budget.of_minutes(seconds / 60).ends_at + 1.0))
    result = Sweep(group, replace(session, budget=budget), place, cases)
    result.supported(cases)
    collecting = gc.isenabled()
    gc.disable()
    try:
        return result.measure(cases, Progress("collectives, a sample", len(cases), budget, quiet=True), seed=0)
    finally:
        if collecting:
            gc.enable()
