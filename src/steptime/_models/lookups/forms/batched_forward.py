"""The forward pass of the table-batched lookup: one kernel, whose programs have several bags of one table each.

Physics, then what it leaves by trees and by a smooth function together, on a whole GPU. Shares of a GPU get powers of their
number in the physics and a correction of their own on top, so that they change nothing for a whole one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from steptime._lookups.table import Floats
from steptime._models.engine.regression import Trees
from steptime._models.engine.stored import stored
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.caches import LookupConstants, reference_lookups
from steptime._models.lookups.forms import LookupTimes, inside_of, total_only
from steptime._models.lookups.forms.forward_physics import Constants, ForwardLaunch, ForwardTables, SharePowers, launched
from steptime._models.lookups.question import Lookups

KERNEL = "table_batched_forward"
# More waves than these are as good as any number.
_MANY_WAVES = 12.0
# Rows that are evaluated at once: distances from all landmarks stay in a second-level cache.
_ROWS = 64


@dataclass(frozen=True)
class BatchedForward:
    """A fitted model."""

    constants: Floats  # of `Constants`, in order
    powers: Floats = field(metadata=stored(key="parts"))  # of `SharePowers`, one after the other
    sizes: Floats  # [2, sizes] smallest and largest of fitted launches
    whole: Residual
    shares: Residual = field(metadata=stored(prefix="divided."))
    device: LookupConstants = field(default_factory=reference_lookups)

    def times(self, lookups: Lookups) -> LookupTimes:
        """One kernel each."""
        tables = ForwardTables.of(lookups.pool, self.device)
        launch = self.launched(tables, lookups)
        features = features_of(launch, tables, lookups)
        logs = self.whole.values(features)
        shared = lookups.shares.divided
        if shared.any():
            logs = logs + np.where(shared, self.shares.values(share_features(features, logs, lookups)), 0.0)
        low, high = self.sizes
        return total_only(KERNEL, launch.time * np.exp(logs), 1.0, inside_of(low, high, sizes_of(tables, lookups)))

    def launched(self, tables: ForwardTables, lookups: Lookups) -> ForwardLaunch:
        """By physics alone."""
        return launched(Constants.of(self.constants), SharePowers.of(self.powers), tables, lookups)


def share_features(features: Floats, logs: Floats, lookups: Lookups) -> Floats:
    """What the correction of shares looks at: what that of a whole GPU does, and what it says."""
    others = lookups.others[:, None] == np.arange(1, len(OTHERS))
    return np.concatenate([features, logs[:, None], lookups.share[:, None], others.astype(np.float64)], axis=1)


def sizes_of(tables: ForwardTables, lookups: Lookups) -> Floats:
    """By which a launch is known to be like fitted ones, [lookups, sizes]."""
    sums = [lookups.sums(values) for values in (tables.lookups, tables.footprint, tables.programs.number)]
    high = [lookups.maxima(values) for values in (tables.batch, tables.dim, tables.programs.longest)]
    return np.stack([*sums, *high, lookups.counts, lookups.share], axis=1)


def features_of(launch: ForwardLaunch, tables: ForwardTables, lookups: Lookups) -> Floats:
    """[lookups, features] of the launch, of all tables together and of the table with the longest program."""
    columns = [*_of_launch(launch, lookups), *_of_tables(launch, tables, lookups), *_of_longest(launch, tables, lookups)]
    return np.stack(columns, axis=1)


def _log(values: Floats) -> Floats:
    result: Floats = np.log(np.maximum(values, 1e-3))
    return result


def _of_launch(launch: ForwardLaunch, lookups: Lookups) -> list[Floats]:
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


def _of_tables(launch: ForwardLaunch, tables: ForwardTables, lookups: Lookups) -> list[Floats]:
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


def _of_longest(launch: ForwardLaunch, tables: ForwardTables, lookups: Lookups) -> list[Floats]:
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


@dataclass(frozen=True)
class Landmarks:
    """A smooth function through rows: a sum of bumps at some of them (Matern kernels of smoothness 3/2)."""

    middle: Floats  # [features]
    scale: Floats  # [features] by which features are multiplied, once the middle is taken away
    far: Floats  # [features]
    places: Floats  # [landmarks, features]
    heights: Floats  # [landmarks]
    level: float  # far from all landmarks

    def placed(self, features: Floats) -> Floats:
        """Features in the units of the landmarks."""
        return np.clip((features - self.middle) * self.scale, -self.far, self.far)

    def values(self, features: Floats) -> Floats:
        """[rows]."""
        placed, result = self.placed(features), np.full(len(features), self.level)
        for first in range(0, len(placed), _ROWS):
            result[first : first + _ROWS] += bumps(placed[first : first + _ROWS], self.places) @ self.heights
        return result


def bumps(rows: Floats, places: Floats) -> Floats:
    """[rows, places]: 1 at a place, less with the distance from it."""
    distance: Floats = (-2 * rows) @ places.T
    distance += (rows**2).sum(axis=1)[:, None]
    distance += (places**2).sum(axis=1)
    np.sqrt(np.maximum(distance, 0.0, out=distance), out=distance)
    fallen = np.exp(-distance)
    distance += 1
    distance *= fallen
    return distance


@dataclass(frozen=True)
class Residual:
    """Within the range that fitted rows showed."""

    trees: Trees
    range: Floats  # [2] of logarithms
    smooth: Landmarks | None = None

    @classmethod
    def none(cls) -> Residual:
        """Where nothing is known: physics as it is."""
        return cls(Trees.constant(0.0), np.zeros(2))

    def values(self, features: Floats) -> Floats:
        """Logarithms to add to those of each row's physics."""
        logs = self.trees.values(features)
        if self.smooth is not None:
            logs = (logs + self.smooth.values(features)) / 2
        return np.clip(logs, *self.range)
