"""Lookup times of any subsets of a model's tables: as the lookup models of a device say, or by curves through what they say.

What a rank's tables cost nearly adds up. The rest follows a few sums and maxima over the tables: the logarithm of a time is
linear in that of what adds up, quadratic in those of the sums and maxima, and each table adds something. The coefficients are
found by asking the models about random subsets, from single tables to all of them; asking a model takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.workload import table_lookups
from steptime._lookups.table import TableColumns
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.fitted import LookupModels
from steptime._models.lookups.question import BACKWARD, DTYPES, OPTIMIZERS, TABLE_BATCHED, Lookup, Lookups, Pool
from steptime._platforms.device import Device
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Setting = tuple[str, str]
"""Direction, and what the other shares of the GPU do (`models.kernels.question.OTHERS`)."""

# Of so many tables all subsets are asked about: fewer than curves are put through.
_FEW_TABLES = 10
# Subsets that are asked about, and more of them for every table: with twice as many, times of random plans of the shipped tasks
# come 0.1 points closer to what the models say (0.7 % in the median).
_SUBSETS, _SUBSETS_PER_TABLE = 800, 4
# Of subsets, how many are ranks of random plans; the others have any share of the tables, small ones more often.
_OF_PLANS = 0.5
_SMALL = (1.0, 3.0)
# Against coefficients that random subsets leave open.
_RIDGE = 0.1
_SEED = 8


@dataclass(frozen=True, eq=False)
class ExactLookups:
    """What the lookup models of a device say of subsets of a model's tables, which are looked up together."""

    model: Dlrm
    device: Device
    pool: Pool
    settings: tuple[Setting, ...]

    @classmethod
    def of(cls, model: Dlrm, device: Device, settings: Sequence[Setting]) -> ExactLookups:
        """Of a model's tables, or of the shards that stand in their place."""
        known = [table_lookups(table, model.batch) for table in model.tables]
        dtype = DTYPES.index(model.tables[0].dtype)
        pool = Pool(TableColumns.of(known), np.full(len(known), dtype, dtype=np.intp))
        return cls(model, device, pool, tuple(settings))

    def times(self, rank_of: npt.NDArray[np.integer], ranks: int) -> dict[Setting, Floats]:
        """Per setting [plans, ranks], ns; 0 where a rank has no table. Each distinct subset is asked about once."""
        chosen = (rank_of[:, None, :] == np.arange(ranks)[None, :, None]).reshape(-1, rank_of.shape[1])
        distinct, index = np.unique(chosen, axis=0, return_inverse=True)
        some = distinct.any(axis=1)
        result = {}
        for setting, times in self.of_settings(distinct[some]).items():
            each = np.zeros(len(distinct))
            each[some] = times
            result[setting] = each[index.reshape(-1)].reshape(len(rank_of), ranks)
        return result

    def for_many_plans(self, ranks: int) -> LookupCurves | SubsetTimes:
        """The same for thousands of plans: from all subsets of few tables, else by curves through some."""
        count = len(self.model.tables)
        if count > _FEW_TABLES:
            return LookupCurves.fit(self, ranks)
        chosen = (np.arange(1, 1 << count)[:, None] >> np.arange(count) & 1).astype(np.bool_)
        return SubsetTimes({setting: np.append(0.0, ns) for setting, ns in self.of_settings(chosen).items()})

    def of_settings(self, chosen: Flags) -> dict[Setting, Floats]:
        """Of subsets, [subsets, tables], none of them empty, in every setting: each model is asked once; ns."""
        result: dict[Setting, Floats] = {}
        for direction in dict.fromkeys(direction for direction, _ in self.settings):
            others = [other for item, other in self.settings if item == direction]
            times = self.of_subsets(np.tile(chosen, (len(others), 1)), direction, np.repeat(others, len(chosen)).tolist())
            result |= {(direction, other): ns for other, ns in zip(others, np.split(times, len(others)), strict=True)}
        return result

    def of_subsets(self, chosen: Flags, direction: str, others: Sequence[str]) -> Floats:
        """Of subsets, [subsets, tables], none of them empty, each beside what others do; ns."""
        optimizer = self.model.optimizer if direction == BACKWARD else "none"
        like, known = self.model.tables[0], [table_lookups(table, self.model.batch) for table in self.model.tables]
        every = Lookup(self.model.lookup, direction, tuple(known), optimizer, like.dtype, weighted=like.weighted)
        if not self.device.measured(every):  # then it is asked question by question
            questions = [
                replace(every, tables=tuple(known[at] for at in np.flatnonzero(item)), others=other)
                for item, other in zip(chosen, others, strict=True)
            ]
            return np.array([item.estimate.time_ns for item in self.device.lookup_estimates(questions)])
        count, share = len(chosen), self.device.limits.share
        lookups = Lookups(
            TABLE_BATCHED,
            direction,
            self.pool,
            member=np.nonzero(chosen)[1],
            starts=np.append(0, np.cumsum(chosen.sum(axis=1))),
            optimizer=np.full(count, OPTIMIZERS.index(optimizer), dtype=np.intp),
            dtype=np.full(count, DTYPES.index(like.dtype), dtype=np.intp),
            weighted=np.full(count, like.weighted),
            warm=np.zeros(count, dtype=np.bool_),
            share=np.full(count, float(share)),
            others=np.array([OTHERS.index(other if share > 1 else "none") for other in others], dtype=np.intp),
        )
        return _models(self.device).form(TABLE_BATCHED, direction).times(lookups).time_ns


def _models(device: Device) -> LookupModels:
    if isinstance(device.lookups, LookupModels):
        return device.lookups
    if device.lookups is None:
        raise InputError(f"{device.limits.name} has no fitted lookup models; `steptime fit` writes them")
    return _read(device.lookups)


@cache
def _read(file: Path) -> LookupModels:
    return LookupModels.load(file)


@dataclass(frozen=True, eq=False)
class SubsetTimes:
    """What the lookup models say of every subset of a few tables; a subset's number has a bit for every table."""

    ns: Mapping[Setting, Floats]  # [subsets]

    def times(self, rank_of: npt.NDArray[np.integer], ranks: int) -> dict[Setting, Floats]:
        """As `ExactLookups.times`."""
        bits = 1 << np.arange(rank_of.shape[1])
        numbers = ((rank_of[:, None, :] == np.arange(ranks)[None, :, None]) * bits).sum(axis=2)
        return {item: ns[numbers] for item, ns in self.ns.items()}


@dataclass(frozen=True, eq=False)
class SubsetSums:
    """What is summed and maximised over the tables of a subset."""

    sums: Floats  # [tables, sums]
    maxima: Floats  # [tables, maxima], above 0

    @classmethod
    def of(cls, model: Dlrm) -> SubsetSums:
        """Lookups, distinct rows, their elements, outputs and tables are summed; dims, bags and the hottest rows maximised."""
        known = [table_lookups(table, model.batch) for table in model.tables]
        dim, lookups, unique = (
            np.array([float(getattr(item, name)) for item in known]) for name in ("dim", "lookups", "unique")
        )
        longest = np.array([item.lengths.quantiles[-1] for item in known])
        hottest = np.array([float(item.hottest[0]) for item in known])
        return cls(
            np.stack([lookups, unique, lookups * dim, unique * dim, model.batch * dim, np.ones(len(known))], axis=1),
            np.stack([dim, longest + 1.0, hottest + 1.0], axis=1),
        )

    def by_rank(self, rank_of: npt.NDArray[np.integer], ranks: int, further: Floats) -> tuple[Floats, Floats, Floats]:
        """Sums and maxima over the tables of every rank of every plan, and sums of `further`: [plans * ranks, ...]."""
        plans, count = len(rank_of), len(rank_of) * ranks
        cell = (rank_of + ranks * np.arange(plans)[:, None]).ravel()
        columns = np.concatenate([self.sums, further], axis=1)
        sums = np.stack([np.bincount(cell, np.tile(column, plans), count) for column in columns.T], axis=1).astype(np.float64)
        maxima = np.ones((self.maxima.shape[1], count))
        for most, column in zip(maxima, self.maxima.T, strict=True):
            np.maximum.at(most, cell, np.tile(column, plans))
        return sums[:, : self.sums.shape[1]], maxima.T, sums[:, self.sums.shape[1] :]

    def of_subsets(self, chosen: Flags) -> tuple[Floats, Floats]:
        """Sums and maxima over subsets, [subsets, tables]."""
        maxima = [np.where(chosen, column, 1.0).max(axis=1) for column in self.maxima.T]
        return chosen @ self.sums, np.stack(maxima, axis=1)


def _features(sums: Floats, maxima: Floats) -> Floats:
    """[subsets, features]"""
    lookups = np.maximum(sums[:, 0], 1.0)
    shares = np.stack([sums[:, 2] / lookups / maxima[:, 0], sums[:, 1] / lookups], axis=1)
    return np.concatenate([np.log(sums + 1.0), np.log(maxima), shares], axis=1)


@dataclass(frozen=True, eq=False)
class LookupCurves:
    """Times of subsets, a column for each of several settings (direction, what other shares of the GPU do)."""

    tables: SubsetSums
    settings: tuple[Setting, ...]
    middle: Floats  # [features]
    scale: Floats  # [features]
    low: Floats  # [features] of the subsets that were asked about
    high: Floats  # [features]
    weights: Floats  # [products of features, settings]
    of_table: Floats  # [tables, settings] what each table adds to the logarithm
    added: Floats  # [tables, settings] ns that add up
    least: Floats  # [settings] ns: what adds up is no less
    power: Floats  # [settings] of what adds up

    def times(self, rank_of: npt.NDArray[np.integer], ranks: int) -> dict[Setting, Floats]:
        """As `ExactLookups.times`."""
        columns = np.concatenate([self.of_table, self.added], axis=1)
        sums, maxima, summed = self.tables.by_rank(rank_of, ranks, columns)
        features = (np.clip(_features(sums, maxima), self.low, self.high) - self.middle) / self.scale
        of_tables, added = summed[:, : len(self.settings)], summed[:, len(self.settings) :]
        result = np.exp(_quadratic(features) @ self.weights + of_tables + self.power * np.log(np.maximum(added, self.least)))
        result[sums[:, -1] == 0] = 0.0
        return {setting: result[:, index].reshape(len(rank_of), ranks) for index, setting in enumerate(self.settings)}

    @classmethod
    def fit(cls, exact: ExactLookups, ranks: int) -> LookupCurves:
        """Through what a device's models say of random subsets."""
        tables, count = SubsetSums.of(exact.model), len(exact.model.tables)
        chosen = _subsets(count, ranks)
        times = np.stack(list(exact.of_settings(chosen).values()), axis=1)
        features = _features(*tables.of_subsets(chosen))
        middle, scale = features.mean(axis=0), features.std(axis=0) + 1e-9
        products = np.concatenate([_quadratic((features - middle) / scale), chosen], axis=1)
        added = np.stack([_adding_up(chosen, column) for column in times.T], axis=1)
        least = times.min(axis=0) / 2
        width, columns = products.shape[1] - count, []
        for index, column in enumerate(times.T):
            total = np.log(np.maximum(chosen @ added[:, index], least[index]))
            columns.append(_ridge(np.concatenate([products, total[:, None]], axis=1), np.log(column)))
        result = np.stack(columns, axis=1)
        low, high = features.min(axis=0), features.max(axis=0)
        return cls(
            tables, exact.settings, middle, scale, low, high, result[:width], result[width:-1], added, least, result[-1]
        )  # fmt: skip


def _ridge(columns: Floats, target: Floats) -> Floats:
    normal = columns.T @ columns + _RIDGE * np.eye(columns.shape[1])
    return np.asarray(np.linalg.solve(normal, columns.T @ target), dtype=np.float64)


def _adding_up(chosen: Flags, times: Floats) -> Floats:
    """What each table adds to the times of subsets, by the least relative squares; the first subsets are single tables."""
    alone = times[: chosen.shape[1]]
    weighted = chosen * (alone / times[:, None])
    return alone * np.asarray(np.linalg.solve(weighted.T @ weighted, weighted.sum(axis=0)), dtype=np.float64)


def _quadratic(values: Floats) -> Floats:
    """One, the values, and their products by twos."""
    first, second = np.triu_indices(values.shape[1])
    return np.concatenate([np.ones((len(values), 1)), values, values[:, first] * values[:, second]], axis=1)


def _subsets(tables: int, ranks: int) -> Flags:
    """Random subsets, [subsets, tables]: every table alone, all together, ranks of plans, and any others; none is empty."""
    draws = np.random.default_rng(_SEED)
    count = _SUBSETS + _SUBSETS_PER_TABLE * tables
    of_plans = draws.integers(0, ranks, (int(count * _OF_PLANS), tables)) == 0
    others = draws.random((count - len(of_plans), tables)) < draws.beta(*_SMALL, (count - len(of_plans), 1))
    result = np.concatenate([np.eye(tables, dtype=np.bool_), np.ones((1, tables), dtype=np.bool_), of_plans, others])
    return result[result.any(axis=1)]
