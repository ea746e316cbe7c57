"""The calibration that `steptime calibrate` would have given a shipped run: from the rows that it measured before its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from steptime._platforms.calibration import Calibration
from steptime._platforms.machine_costs import MachineCosts
from steptime._platforms.platform import Platform
from steptime_lab.fit.host import CALIBRATION
from steptime_lab.measurements.shipped import shipped

Row = Mapping[str, Any]

# Ranks of a shipped case share one GPU: one of so many parts for each.
PLATFORMS = {
    1: "1xh200",
    2: "2xh200-half-loopback",
    4: "4xh200-quarter-loopback",
    8: "8xh200-eighth-loopback",
}


class RunCalibrations:
    """Of the runs that are shipped, each on the platform that its ranks were on."""

    def __init__(self) -> None:
        self._host = _by_run(row for row in shipped("host").to_pylist() if row["source"] == CALIBRATION)
        self._collectives = _by_run(shipped("collectives").to_pylist())
        self._known: dict[tuple[str, str, int], Calibration] = {}

    def of_step(self, row: Row) -> Calibration:
        """What the processes measured that timed a row of `steps`, before they did."""
        first, ranks = int(row["process"].lstrip("p")), int(row["ranks"])
        return self._of(row["run"], tuple(f"p{first + rank}" for rank in range(ranks)), ranks)

    def of_run(self, run: str, ranks: int) -> Calibration:
        """What all processes of a run measured."""
        return self._of(run, (), ranks)

    def _of(self, run: str, processes: tuple[str, ...], ranks: int) -> Calibration:
        key = (run, ",".join(processes), ranks)
        if key not in self._known:
            host, collectives = (_before(rows[run], processes) for rows in (self._host, self._collectives))
            self._known[key] = Calibration.of(MachineCosts.of_rows(host, collectives), platform_of(ranks))
        return self._known[key]


@cache
def platform_of(ranks: int) -> Platform:
    """The shipped platform that cases of so many ranks were timed on."""
    return Platform.load(PLATFORMS[ranks])


def _before(rows: Sequence[Row], processes: tuple[str, ...]) -> list[Row]:
    """Of these processes, or of all, the rows of the first calibration: some measured another one after their steps."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        if not processes or row["process"] in processes:
            first.setdefault((row["process"], row["key"]), row)
    return list(first.values())


def _by_run(rows: Iterable[Row]) -> dict[str, list[Row]]:
    runs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        runs[row["run"]].append(row)
    return runs
