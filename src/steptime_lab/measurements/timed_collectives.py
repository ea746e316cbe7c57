"""Tables of timed collectives, such as others publish: a CSV file with a row for each, as points like those of nccl-tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from steptime._measurements.nccl_tests import Point, TestRun, TimedPoints, kind_of, timed_point
from steptime.errors import InputError
from steptime_lab.measurements.published_rows import TableRow, made_of, rows_of_csv

COLUMNS = ("gpu", "nodes", "ranks", "op", "bytes", "us", "nccl")
_MOST_NODES = 1 << 17


def read_timed_collectives(file: Path) -> TimedPoints:
    """Bytes as nccl-tests counts them, microseconds; rows that are damaged or of no kind that is modelled are counted."""
    rows = rows_of_csv(file, "collectives", COLUMNS)
    points, _ = made_of(rows, _point)
    result = TimedPoints.of([*points, *[None] * (len(rows) - len(points))])
    if not result.points:
        raise InputError(f"{file}: {result.skipped} rows, none of a collective that is modelled")
    return result


def _point(row: TableRow) -> Point | None:
    ranks, nodes = row.whole("ranks"), row.whole("nodes", most=_MOST_NODES)
    if nodes > ranks or ranks % nodes:
        return None
    run = TestRun(kind_of(row.text("op")), ranks, device=row.text("gpu"), nccl=row.text("nccl"))
    result = timed_point(run, row.text("bytes"), row.text("us"))
    return result and replace(result, nodes=nodes, source=row.text("source"))
