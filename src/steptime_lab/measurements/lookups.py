"""Measured lookups as questions in columns with their answers, which of them a fit may see, and the index streams they drew.

A row of the set `lookups` names its streams by generator, seed and batch. Millions of lookups take minutes to draw again, and
what models read of them is small: their statistics are drawn once, and kept in a file beside the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from steptime._files import whole
from steptime._lookups.generators import Generator
from steptime._lookups.spectrum import HOTTEST
from steptime._lookups.statistics import QUANTILES, REUSE_BINS
from steptime._lookups.table import WINDOWS, Floats, TableColumns, table_statistics
from steptime._measurements.store import small_encoding
from steptime._models.engine.splits import split_of
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.question import DTYPES, OPTIMIZERS, Lookups, Pool
from steptime.errors import InputError

FILE_NAME = "lookup_streams.parquet"
_LEVEL = 19  # of compression

Stream = tuple[str, int]
"""JSON of a generator, and samples in the batch."""

# Locality is a share, in steps that no model can tell apart.
_STEPS = 255
# A task's worth of lookups: processes get some of these at a time.
_TASK = 4_000_000

_KEYS = pa.field("stream", pa.binary(8))
_SCHEMA = pa.schema(
    [
        _KEYS,
        pa.field("rows", pa.int64()),
        pa.field("batch", pa.int32()),
        pa.field("spread", pa.float32()),
        pa.field("lengths", pa.list_(pa.float32(), len(QUANTILES))),
        pa.field("hottest", pa.list_(pa.int32(), len(HOTTEST))),
        pa.field("bin_rows", pa.list_(pa.int32(), REUSE_BINS)),
        pa.field("bin_lookups", pa.list_(pa.int32(), REUSE_BINS)),
        pa.field("locality", pa.list_(pa.uint8(), len(WINDOWS))),
    ]
)

_COLUMNS = (
    "implementation", "direction", "optimizer", "dtype", "weighted", "batch", "series", "rows", "dims", "generators", "cache",
    "share", "others", "time_ns", "times_ns", "spread", "kernel_names", "kernel_ns",
)  # fmt: skip


class Streams:
    """Statistics by stream."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._places = {key: index for index, key in enumerate(table["stream"].to_pylist())}
        self._columns = _columns(table)

    def __len__(self) -> int:
        return len(self._places)

    def missing(self, streams: Iterable[Stream]) -> list[Stream]:
        """Those that are not here, each once."""
        return [stream for stream in dict.fromkeys(streams) if key_of(stream) not in self._places]

    def columns(self, streams: Sequence[Stream], dims: Sequence[int]) -> TableColumns:
        """Statistics of tables with rows of so many elements."""
        result = self._columns.take(np.array([self._places[key_of(stream)] for stream in streams], dtype=np.intp))
        result.dim[:] = dims
        return result

    def with_more(self, more: pa.Table) -> Streams:
        """These and others."""
        return Streams(pa.concat_tables([self.table, more]))

    def save(self, file: Path) -> None:
        """Sorted, so that the same streams give the same bytes."""
        with whole(file) as unfinished:
            pq.write_table(
                self.table.sort_by("stream"), unfinished, row_group_size=1 << 20, **small_encoding(self.table.schema, _LEVEL)
            )

    @classmethod
    def load(cls, file: Path) -> Streams:
        """What `save` wrote; none where there is no file."""
        if not file.exists():
            return cls(_SCHEMA.empty_table())
        try:
            table = pq.read_table(file)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{file}: not a readable Parquet file ({error}); remove it, and it is made anew") from error
        if table.schema.names != _SCHEMA.names:
            raise InputError(f"{file}: has the columns {table.schema.names}; remove it, and it is made anew")
        return cls(table)


def key_of(stream: Stream) -> bytes:
    """Of a stream, the same everywhere."""
    return hashlib.sha256(f"{stream[0]} {stream[1]}".encode()).digest()[:8]


def streams_of(lookups: pa.Table) -> list[Stream]:
    """The streams of measured lookups, each once."""
    rows = zip(lookups["generators"].to_pylist(), lookups["batch"].to_pylist(), strict=True)
    return list(dict.fromkeys((text, batch) for texts, batch in rows for text in texts))


def summarised(streams: Sequence[Stream], executor: Executor | None = None) -> pa.Table:
    """Draws streams and counts what they look up, side by side where there is an executor."""
    tasks = _tasks(streams)
    parts = map(_summarised, tasks) if executor is None else executor.map(_summarised, tasks)
    return pa.concat_tables([_SCHEMA.empty_table(), *parts])


def _tasks(streams: Sequence[Stream]) -> list[list[Stream]]:
    """Heavy ones first, few of them at a time."""
    sized = sorted(((float(json.loads(text)["pooling"]) * batch, text, batch) for text, batch in streams), reverse=True)
    tasks: list[list[Stream]] = []
    size = float(_TASK)
    for lookups, text, batch in sized:
        if size + lookups > _TASK:
            tasks.append([])
            size = 0.0
        tasks[-1].append((text, batch))
        size += lookups + 20_000  # what a stream of few lookups takes as well
    return tasks


def _summarised(streams: Sequence[Stream]) -> pa.Table:
    tables = []
    for text, batch in streams:
        generator = Generator.from_dict(json.loads(text))
        bags = generator.bags(batch)
        tables.append(table_statistics(bags.indices, bags.offsets, generator.rows))
    columns = TableColumns.of(tables)
    keys = pa.array([key_of(stream) for stream in streams], pa.binary(8))
    values: dict[str, npt.NDArray[Any]] = {name: getattr(columns, name) for name in _SCHEMA.names if name != _KEYS.name}
    values["locality"] = np.rint(values["locality"] * _STEPS)
    arrays = [keys if field.name == _KEYS.name else _array(values[field.name], field.type) for field in _SCHEMA]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _array(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values).cast(kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()).cast(kind.value_type), kind.list_size)


def _columns(table: pa.Table) -> TableColumns:
    def column(name: str) -> npt.NDArray[np.float64]:
        result = table[name].combine_chunks()
        if not pa.types.is_fixed_size_list(result.type):
            return np.asarray(result.to_numpy(zero_copy_only=False), dtype=np.float64)
        return np.asarray(result.values.to_numpy(zero_copy_only=False), dtype=np.float64).reshape(-1, result.type.list_size)

    names = ("rows", "batch", "spread", "lengths", "hottest", "bin_rows", "bin_lookups")
    return TableColumns(
        dim=np.ones(table.num_rows), locality=column("locality") / _STEPS, **{name: column(name) for name in names}
    )


@dataclass(frozen=True)
class MeasuredLookups:
    """Lookups of one implementation and direction, and what was measured of each."""

    lookups: Lookups
    time_ns: Floats  # [lookups]
    spread: Floats  # [lookups] (90th - 10th percentile) / median of its repeats
    split: npt.NDArray[np.str_]  # [lookups] fit | validation | test
    series: npt.NDArray[np.str_]  # [lookups] those of one series differ in which rows are looked up alone; "" for none
    kernel_names: list[tuple[str, ...]]  # [lookups] in launch order
    kernel_ns: list[tuple[float, ...]]  # [lookups]
    times_ns: list[tuple[float, ...]]  # [lookups] repeats

    def __len__(self) -> int:
        return len(self.time_ns)

    def take(self, places: npt.NDArray[Any]) -> MeasuredLookups:
        """Some of them; `places` may be a mask."""
        chosen = np.arange(len(self))[places]
        arrays = (self.time_ns, self.spread, self.split, self.series)
        lists: Any = ([column[index] for index in chosen] for column in (self.kernel_names, self.kernel_ns, self.times_ns))
        return MeasuredLookups(self.lookups.take(chosen), *(column[chosen] for column in arrays), *lists)

    def of(self, *splits: str) -> MeasuredLookups:
        """Those of some splits."""
        return self.take(np.isin(self.split, splits))


def measured_lookups(table: pa.Table, streams: Streams) -> dict[tuple[str, str], MeasuredLookups]:
    """The rows of the measured set `lookups`, by implementation and direction; of several that ask the same, the latest."""
    latest = dict(zip(table["key"].to_pylist(), table.select(_COLUMNS).to_pylist(), strict=True))
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in latest.values():
        groups.setdefault((row["implementation"], row["direction"]), []).append(row)
    return {kind: _measured(kind, rows, streams) for kind, rows in sorted(groups.items())}


def _measured(kind: tuple[str, str], rows: Sequence[dict[str, Any]], streams: Streams) -> MeasuredLookups:
    places: dict[tuple[str, int, int, int], int] = {}
    member = [
        places.setdefault((text, row["batch"], dim, DTYPES.index(row["dtype"])), len(places))
        for row in rows
        for text, dim in zip(row["generators"], row["dims"], strict=True)
    ]
    columns = streams.columns([(text, batch) for text, batch, _, _ in places], [dim for _, _, dim, _ in places])
    lookups = Lookups(
        *kind,
        pool=Pool(columns, np.array([dtype for *_, dtype in places], dtype=np.intp)),
        member=np.array(member, dtype=np.intp),
        starts=np.concatenate([[0], np.cumsum([len(row["dims"]) for row in rows])]).astype(np.intp),
        optimizer=np.array([OPTIMIZERS.index(row["optimizer"] or "none") for row in rows], dtype=np.intp),
        dtype=np.array([DTYPES.index(row["dtype"]) for row in rows], dtype=np.intp),
        weighted=np.array([row["weighted"] for row in rows], dtype=np.bool_),
        warm=np.array([row["cache"] == "warm" for row in rows], dtype=np.bool_),
        share=np.array([float(row["share"]) for row in rows]),
        others=np.array([OTHERS.index(row["others"]) for row in rows], dtype=np.intp),
    )
    return MeasuredLookups(
        lookups,
        np.array([row["time_ns"] for row in rows]),
        np.array([row["spread"] for row in rows]),
        np.array([split_of(question_of(row)) for row in rows]),
        np.array([row["series"] or "" for row in rows]),
        [tuple(row["kernel_names"]) for row in rows],
        [tuple(row["kernel_ns"]) for row in rows],
        [tuple(row["times_ns"]) for row in rows],
    )


def question_of(row: dict[str, Any]) -> str:
    """What keeps rows on one side of the split: caches, directions, optimisers and parts of a GPU stay together."""
    return json.dumps([row[name] for name in ("implementation", "dtype", "weighted", "batch", "dims", "generators")])
