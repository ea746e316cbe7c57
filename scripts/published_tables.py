"""Published tables of timed collectives, as points like those of nccl-tests."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from steptime._measurements.nccl_tests import Point, TestRun, TimedPoints, dotted, kind_of, timed_point
from steptime.errors import InputError


def read_single_node_table(file: Path) -> TimedPoints:
    """Published columns gpu, nccl, collective, dtype, num_gpus, nbytes, us: one node each."""

    def point(row: Mapping[str, str]) -> Point | None:
        run = TestRun(kind_of(row["collective"]), int(row["num_gpus"]), frozenset({""}), row["gpu"], row["nccl"])
        return timed_point(run, row["nbytes"], row["us"])

    return _table(file, point, ("gpu", "nccl", "collective", "num_gpus", "nbytes", "us"))


def read_multi_node_table(file: Path) -> TimedPoints:
    """Published columns of nccl-tests logs: source, collective, device, n_ranks, n_nodes, nccl, size_bytes, time_us_oop."""

    def point(row: Mapping[str, str]) -> Point | None:
        kind, ranks, nodes = kind_of(row["collective"]), int(float(row["n_ranks"])), int(float(row["n_nodes"]))
        result = timed_point(TestRun(kind, ranks), row["size_bytes"], row["time_us_oop"])
        nccl = dotted(row["nccl"]) if row["nccl"].isdigit() else row["nccl"]
        return result and Point(result.kind, ranks, nodes, result.bytes, result.ns, nccl, row["device"], row["source"])

    return _table(file, point, ("source", "collective", "device", "n_ranks", "n_nodes", "nccl", "size_bytes", "time_us_oop"))


def read_profiled_table(file: Path) -> TimedPoints:
    """Published columns of one collective, milliseconds: size, num_workers, devices_per_node, time_stats.KIND.median."""
    kind = kind_of(file.name.split(".")[0])

    def point(row: Mapping[str, str]) -> Point | None:
        ranks, per_node = int(row["num_workers"]), int(row["devices_per_node"])
        result = timed_point(TestRun(kind, ranks), row["size"], 1e3 * float(row[f"time_stats.{kind}.median"]))
        return result and Point(result.kind, ranks, -(-ranks // per_node), result.bytes, result.ns)

    return _table(file, point, ("size", "num_workers", "devices_per_node", f"time_stats.{kind}.median"))


def _table(file: Path, point: Callable[[Mapping[str, str]], Point | None], columns: Sequence[str]) -> TimedPoints:
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise InputError(f"{file}: not readable as a compressed table ({error})") from error
    if not rows or not set(columns) <= set(rows[0]):
        raise InputError(
            f"{file}: expected columns {', '.join(columns)}; there are {', '.join(rows[0]) if rows else 'no rows'}"
        )
    results: list[Point | None] = []
    for row in rows:
        try:
            results.append(point(row))
        except (ValueError, TypeError):
            results.append(None)
    return TimedPoints.of(results)
