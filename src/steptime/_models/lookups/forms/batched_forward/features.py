"""What the correction of a table-batched forward launch looks at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime._lookups.table import Floats
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.forms.batched_forward.physics import Launch
from steptime._models.lookups.forms.batched_forward.tables import ForwardTables

# More waves than these are as good as any number.
_MANY_WAVES = 12.0


def features_of(launch: Launch, tables: ForwardTables, lookups: Lookups) -> Floats:
    """[lookups, features] of the launch, of all tables together and of the table with the longest program."""
    columns = [*_of_launch(launch, lookups), *_of_tables(launch, tables, lookups), *_of_longest(launch, tables, lookups)]
    return np.stack(columns, axis=1)


def _log(values: Floats) -> Floats:
    result: Floats = np.log(np.maximum(values, 1e-3))
    return result


def _of_launch(launch: Launch, lookups: Lookups) -> list[Floats]:
    waves = launch.waves
    return [
        _log(launch.time),
        _log(launch.longest / launch.flow),
        launch.work / launch.flow,
        launch.waited / launch.time,
        launch.partial / launch.time,
        np.minimum(waves, _MANY_WAVES),
        np.ceil(waves) - waves,
        launch.uneven,
        launch.cold,
        lookups.warm.astype(np.float64),
        lookups.weighted.astype(np.float64),
    ]


def _of_tables(launch: Launch, tables: ForwardTables, lookups: Lookups) -> list[Floats]:
    rows = tables.lookups * tables.sector_bytes
    from_l2, missed = rows * tables.l1_missed, rows * tables.l2_missed
    values = (
        tables.lookups, rows, from_l2, missed, tables.footprint, tables.programs.number, tables.batch,
        tables.lookups * tables.dim, tables.lookups * tables.fixed, tables.lookups * tables.index_sectors,
        tables.lookups * tables.local, tables.out,
    )  # fmt: skip
    sums = [lookups.sums(column) for column in values]
    number, read, second, memory, footprint, programs, bags, dims, fixed, sectors, local, out = sums
    each, row_bytes = np.maximum(number, 1.0), np.maximum(read, 1.0)
    return [
        _log(read / launch.time),
        _log(second / launch.time),
        _log((memory * launch.cold + out) / launch.time),
        second / row_bytes,
        memory / row_bytes,
        _log(footprint),
        _log(programs),
        _log(bags / lookups.counts),
        _log(number / np.maximum(bags, 1.0)),
        dims / each,
        lookups.maxima(tables.dim),
        _log(lookups.maxima(rows) / row_bytes),
        fixed / each,
        sectors / each,
        local / each,
        _log(launch.long),
    ]


def _of_longest(launch: Launch, tables: ForwardTables, lookups: Lookups) -> list[Floats]:
    """Of the table with the longest program; of several with equally long ones their mean, so that order does not matter."""
    at = lookups.lookup
    result = np.flatnonzero(launch.member_longest >= launch.longest[at])
    starts = np.searchsorted(at[result], np.arange(len(lookups)))
    ties = np.diff(np.append(starts, len(result)))

    def mean(values: Floats) -> Floats:
        total: Floats = np.add.reduceat(values, starts) / ties
        return total

    programs, index = tables.programs, lookups.member[result]
    longest = np.maximum(programs.longest[index], 1.0)

    def of(values: npt.NDArray[np.float64]) -> Floats:
        return mean(values[index])

    return [
        of(tables.dim),
        of(tables.half),
        of(tables.l1_missed),
        of(tables.l2_missed) * launch.cold,
        of(tables.single),
        of(tables.index_sectors),
        of(tables.fixed),
        of(tables.local),
        _log(of(tables.footprint)),
        _log(of(tables.bytes)),
        _log(of(programs.number)),
        _log(of(programs.longest)),
        mean(programs.longest_log[index] / longest),
        mean(programs.steps[index] / longest),
        _log(of(programs.bag_steps / programs.bags)),
        mean(launch.member_flow[result]) / launch.flow,
    ]
