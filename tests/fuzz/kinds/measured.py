"""Damaged measurements: Parquet sets that fabrics and models are made of."""

from __future__ import annotations

import io
import random
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.fuzz.case import Case, Kind
from tests.program.mutations import BYTES

from steptime._measurements.sets import HOST
from steptime._measurements.store import read
from steptime._models.host.model import HostModel
from steptime.errors import SteptimeError
from steptime_lab.fit.host import fit
from steptime_lab.measurements.shipped import shipped

_VERSION = {b"steptime_measurements": b"1"}
_ODD: tuple[Any, ...] = (
    None,
    0,
    -1,
    1,
    3,
    2**31,
    2**62,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\0",
    "{",
    '{"a": 1}',
    [],
    [0],
    [1, -1],
)


@cache
def _rows(name: str) -> pa.Table:
    """A few rows of a shipped set, of all sorts."""
    table = shipped(name)
    if name == "collectives":
        table = table.filter(pa.compute.equal(table["fabric"], "loopback"))
        return table.take(list(range(0, table.num_rows, max(1, table.num_rows // 150)))).combine_chunks()
    table = table.filter(pa.compute.and_(pa.compute.is_valid(table["reference_cpu_ns"]), pa.compute.equal(table["share"], 1)))
    table = table.filter(pa.compute.not_equal(table["source"], "calibration"))
    seen: Counter[tuple[str, str]] = Counter()
    rows = []
    for row, key in enumerate(zip(table["kind"].to_pylist(), table["profiler"].to_pylist(), strict=True)):
        seen[key] += 1
        if seen[key] <= 4:
            rows.append(row)
    return table.take(rows).combine_chunks()


def _damaged(draw: random.Random, name: str) -> bytes:
    """The rows with a column of another type, a value nobody expects, rows or columns lost; or bytes changed."""
    table = _rows(name)
    for _ in range(draw.choice((1, 1, 2))):
        table = _changed(draw, table)
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(_VERSION if draw.random() < 0.95 else {}), sink)
    data = sink.getvalue()
    return draw.choice(BYTES)(draw, data) if draw.random() < 0.15 else data


def _changed(draw: random.Random, table: pa.Table) -> pa.Table:
    kind, at = draw.random(), draw.randrange(table.num_columns)
    column = table.schema.field(at)
    if kind < 0.08:
        return table.remove_column(at) if table.num_columns > 1 else table
    if kind < 0.16:
        return table.slice(draw.randrange(table.num_rows + 1), draw.choice((0, 1, 2, 10)))
    if kind < 0.3:
        return table.set_column(at, column.name, pa.array([draw.choice(_ODD[:6])] * table.num_rows))
    values = table[at].to_pylist()
    odd = draw.choice(_ODD)
    for row in range(len(values)) if kind < 0.6 else draw.sample(range(len(values)), min(len(values), draw.choice((1, 5)))):
        values[row] = [odd] if isinstance(values[row], list) and not isinstance(odd, list) else odd
    for typed in (column.type, None):
        try:
            return table.set_column(at, column.name, pa.array(values, type=typed))
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            continue
    return table


def measured_fabric(draw: random.Random) -> Case:
    """A fabric of one's own from timed collectives."""
    words = ("fabric", "rows", "--name", "mine", "--of", "loopback", "--json")
    return Case(words, {"rows/collectives/a-0-0000.parquet": _damaged(draw, "collectives")}, ("mine.toml", "mine.json"))


def _fitted(words: list[str]) -> int:
    """As `fit --only host` does, without the training steps that PyTorch captures for it afterwards."""
    try:
        HostModel.check(model := fit(read(Path(words[0]).parent, HOST).to_pylist()), "fitted")
        model.save(Path(words[1]))
    except SteptimeError as error:
        sys.stderr.write(f"steptime: error: {error}\n")
        return 2
    print(words[1])
    return 0


def fitted_host(draw: random.Random) -> Case:
    return Case(
        ("rows/host.parquet", "mine.json"), {"rows/host.parquet": _damaged(draw, "host")}, ("mine.json",), command=_fitted
    )


KINDS: dict[str, Kind] = {"measured-fabric": measured_fabric, "fitted-host": fitted_host}
