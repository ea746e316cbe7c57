"""Starts a group of ranks again when it dies: without the calls that ended a process, or behind the case that was running."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steptime._calibrate.harness.budget import Budget
from steptime._calibrate.harness.ranks import Layout, RanksError, run_ranks
from steptime._calibrate.harness.session import Session
from steptime_lab.measure.crash_marker import AvoidList, CrashMarker
from steptime_lab.measure.shared_mps import SharedMps

# How often a group that died is started again.
RESTARTS = 4


def run_avoiding(
    session: Session,
    module: str,
    layout: Layout,
    plan: Mapping[str, Any],
    avoid: AvoidList,
    *,
    attempts: int,
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs a group until it ends well, each time without the calls that ended it before; what was measured is kept."""
    avoid.forget_markers()
    for _ in range(attempts):
        left_s = session.budget.left_s()
        if left_s <= 0:
            return
        try:
            run_ranks(module, layout, plan, limit_s=min(limit_s or left_s, left_s) + 30.0, environment=environment)
            return
        except RanksError as error:
            session.warn(f"{error}; what it had measured is kept")
            if not avoid.add_crashed():
                return


@dataclass(frozen=True)
class CaseGroup:
    """Ranks that go through named cases together; rank 0 marks the case they are at."""

    session: Session
    module: str
    layout: Layout
    daemon: SharedMps
    marker: CrashMarker
    environment: Mapping[str, str]
    grace_s: float  # the last case may begin just before the end

    def run(
        self,
        budget: Budget,
        due: Callable[[], Sequence[str]],
        plan: Callable[[Sequence[str], int], Mapping[str, Any]],
        skipped: set[str],
        names: Callable[[str], Collection[str]] = lambda case: (case,),
    ) -> None:
        """Until nothing is due or time is up. A case that was running when the group died joins those skipped this time.

        `plan` gets the names that are due and how often the group was started; `names` are those of a marked case.
        """
        for start in range(1 + RESTARTS):
            crashed = self.marker.take()
            if crashed:
                self.session.warn(f"{self.marker.group}: {crashed} was running when its ranks ended; it is skipped this time")
                skipped.update(names(crashed))
            waiting = [name for name in due() if name not in skipped]
            if not waiting or budget.left_s() <= 0:
                return
            try:
                run_ranks(
                    self.module, self.layout, plan(waiting, start), limit_s=budget.left_s() + self.grace_s,
                    environment=self.environment, daemon=self.daemon.environment(self.layout.ranks),
                )  # fmt: skip
                return
            except RanksError as error:
                self.session.warn(str(error))
                self.daemon.renew()
            except KeyboardInterrupt:
                # The case did nothing wrong: the next run begins with it.
                self.marker.end()
                raise
