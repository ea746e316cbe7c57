"""Measured rows as a table of launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.family import launches_of
from steptime._models.kernels.forms.launched.columns import LaunchColumns, Numbers
from steptime._models.kernels.forms.launched.groups import groups_of
from steptime._models.kernels.forms.launched.shares import others_code
from steptime._models.kernels.launches import Gpu, Launch
from steptime._models.kernels.launches.facts import FACTS
from steptime._models.kernels.launches.names import short_name
from steptime.errors import InputError
from steptime_lab.measurements.kernels import Row


@dataclass(frozen=True)
class LaunchTable:
    """Launches of measured questions, those whose rules agree with what was seen."""

    columns: LaunchColumns
    numbers: Numbers  # launches x columns
    groups: list[tuple[str, ...]]
    row: npt.NDArray[np.int64]  # of which measured row
    share: Numbers
    others: npt.NDArray[np.int64]
    time_ns: Numbers  # of the launch


def table_of(rows: Sequence[Row], gpu: Gpu) -> LaunchTable:
    """The launches of measured rows; rows whose launches are not those of the rules are left out."""
    agreed = [(index, row, launched) for index, row in enumerate(rows) if (launched := _agreeing(row, gpu)) is not None]
    extra = sorted({name for _, _, launched in agreed for launch in launched for name in launch.facts} - set(FACTS))
    columns = LaunchColumns((*FACTS, *extra))
    numbers: list[list[float]] = []
    groups: list[tuple[str, ...]] = []
    places: list[tuple[int, int, int]] = []
    time_ns: list[float] = []
    for index, row, launched in agreed:
        question = row.question
        numbers += columns.rows(question.call, launched, question.warm)
        groups += [groups_of(question.call.op, launch) for launch in launched]
        places += [(index, question.share, others_code(question))] * len(launched)
        time_ns += row.kernel_ns
    where = np.asarray(places, dtype=np.int64).reshape(-1, 3)
    return LaunchTable(
        columns,
        np.asarray(numbers).reshape(-1, columns.width),
        groups,
        where[:, 0],
        where[:, 1].astype(np.float64),
        where[:, 2],
        np.asarray(time_ns),
    )


def _agreeing(row: Row, gpu: Gpu) -> tuple[Launch, ...] | None:
    try:
        launched = launches_of(row.question.call, gpu)
    except InputError:
        return None
    return launched if [launch.kernel for launch in launched] == [short_name(name) for name in row.kernel_names] else None
