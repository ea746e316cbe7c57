"""The measured set `lookups` as `MeasuredLookups`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from steptime._models.engine.splits import split_of
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.batch import DTYPES, Lookups, Pool
from steptime._models.lookups.question import OPTIMIZERS
from steptime._models.lookups.rows import MeasuredLookups
from steptime_lab.measurements.streams import Streams

_COLUMNS = (
    "implementation", "direction", "optimizer", "dtype", "weighted", "batch", "series", "rows", "dims", "generators", "cache",
    "share", "others", "time_ns", "times_ns", "spread", "kernel_names", "kernel_ns",
)  # fmt: skip


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
