"""Tables of timed collectives, such as others publish: a CSV file with a row for each, as points like those of nccl-tests."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from steptime._measurements.nccl_tests import Point, TestRun, TimedPoints, kind_of, timed_point
from steptime.errors import InputError

COLUMNS = ("gpu", "nodes", "ranks", "op", "bytes", "us", "nccl")
_MOST_NODES = 1 << 17


def read_timed_collectives(file: Path) -> TimedPoints:
    """Bytes as nccl-tests counts them, microseconds; rows that are damaged or of no kind that is modelled are counted."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: not readable as a table of collectives ({error})") from error
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise InputError(f"{file}: no column {missing[0]!r}; a table of collectives has {', '.join(COLUMNS)}")
    result = TimedPoints.of([_point(row) for row in rows])
    if not result.points:
        raise InputError(f"{file}: {result.skipped} rows, none of a collective that is modelled")
    return result


def _point(row: Mapping[str, str | None]) -> Point | None:
    try:
        ranks, nodes = int(row["ranks"] or ""), int(row["nodes"] or "")
    except ValueError:
        return None
    if not 1 <= nodes <= min(ranks, _MOST_NODES) or ranks % nodes:
        return None
    run = TestRun(kind_of(row["op"] or ""), ranks, device=row["gpu"] or "", nccl=row["nccl"] or "")
    result = timed_point(run, row["bytes"], row["us"])
    return result and replace(result, nodes=nodes, source=row.get("source") or "")
