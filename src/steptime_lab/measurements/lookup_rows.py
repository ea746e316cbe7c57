"""Measured lookups as questions in columns with their answers, and which of them a fit may see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from steptime._lookups.columns import Floats
from steptime._models.engine.splits import split_of
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.batch import DTYPES, Lookups, Pool
from steptime._models.lookups.question import OPTIMIZERS
from steptime_lab.measurements.streams import Streams

_COLUMNS = (
    "implementation", "direction", "optimizer", "dtype", "weighted", "batch", "series", "rows", "dims", "generators", "cache",
    "share", "others", "time_ns", "times_ns", "spread", "kernel_names", "kernel_ns",
)  # fmt: skip


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
        """How many there are."""
        return len(self.time_ns)

    def take(self, places: npt.NDArray[Any]) -> MeasuredLookups:
        """Some of them; `places` may be a mask."""
        chosen = np.arange(len(self))[places]
        return MeasuredLookups(
            self.lookups.take(chosen),
            self.time_ns[chosen],
            self.spread[chosen],
            self.split[chosen],
            self.series[chosen],
            [self.kernel_names[index] for index in chosen],
            [self.kernel_ns[index] for index in chosen],
            [self.times_ns[index] for index in chosen],
        )

    def of(self, *splits: str) -> MeasuredLookups:
        """Those of some splits."""
        return self.take(np.isin(self.split, splits))


def measured_lookups(table: pa.Table, streams: Streams) -> dict[tuple[str, str], MeasuredLookups]:
    """The rows of the measured set `lookups`, by implementation and direction; of several that ask the same, the latest."""
    latest: dict[str, dict[str, Any]] = {}
    for key, row in zip(table["key"].to_pylist(), table.select(_COLUMNS).to_pylist(), strict=True):
        latest[key] = row
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
