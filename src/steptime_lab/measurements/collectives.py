"""What NCCL chooses per collective and size, joined onto measured rows; and published tables of timed collectives as points.

NCCL is asked apart from the times. DIR/nccl_choices/<place>.json: `nccl` (its version), `ranks`, `fabric`, and `choices`, a
list of [collective, bytes, algorithm, protocol, channels or null].
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from steptime._files import write_whole
from steptime._measurements.nccl_tests import Point, TestRun, TimedPoints, dotted, kind_of, timed_point
from steptime.errors import InputError

FOLDER_NAME = "nccl_choices"


class Asked(NamedTuple):
    """What NCCL was asked, and which NCCL."""

    nccl: str
    ranks: int
    fabric: str
    collective: str
    size_bytes: int


class Choice(NamedTuple):
    """What NCCL said it would do; empty where it did not say."""

    algorithm: str = ""
    protocol: str = ""
    channels: int | None = None


def write_choices(file: Path, choices: Mapping[Asked, Choice], *, nccl: str, ranks: int, fabric: str) -> None:
    """The choices at one place, whole or not at all."""
    content = {
        "nccl": nccl, "ranks": ranks, "fabric": fabric,
        "choices": [[item.collective, item.size_bytes, *choice] for item, choice in choices.items()],
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(content))


def choices_in(file: Path) -> dict[Asked, Choice]:
    """The choices at one place; none where nobody asked."""
    if not file.exists():
        return {}
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
        where = str(text["nccl"]), int(text["ranks"]), str(text["fabric"])
        return {
            Asked(*where, str(collective), int(size)): Choice(str(algorithm), str(protocol), channels)
            for collective, size, algorithm, protocol, channels in text["choices"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: not a list of NCCL's choices ({error}); remove it and ask again") from error


def choices_of(folders: Iterable[Path]) -> dict[Asked, Choice]:
    """All choices that were asked into some folders."""
    files = [file for folder in folders for file in sorted((folder / FOLDER_NAME).glob("*.json"))]
    return {item: choice for file in files for item, choice in choices_in(file).items()}


def with_choices(table: pa.Table, choices: Mapping[Asked, Choice]) -> pa.Table:
    """Rows of `collectives` with what NCCL chose, by collective, bytes, ranks, fabric and NCCL; rows that know it keep it.

    Uneven splits are not joined: NCCL makes them of sends and receives, of which it says nothing.
    """
    rows = zip(
        *(table[name].to_pylist() for name in ("nccl", "ranks", "fabric", "collective", "bytes", "splits", "algorithm")),
        *(table[name].to_pylist() for name in ("protocol", "channels")),
        strict=True,
    )
    results = [
        Choice(algorithm, protocol, channels)
        if algorithm or splits
        else choices.get(Asked(nccl, ranks, fabric, collective, size), Choice("", protocol, channels))
        for nccl, ranks, fabric, collective, size, splits, algorithm, protocol, channels in rows
    ]
    for index, name in enumerate(Choice._fields):
        field = table.schema.field(name)
        plain = pa.array([choice[index] for choice in results], pa.int16() if name == "channels" else pa.string())
        table = table.set_column(table.schema.get_field_index(name), field, plain.cast(field.type))
    return table


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
