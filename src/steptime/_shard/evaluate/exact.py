"""What the lookup models of a device say of any subsets of a model's tables: of the ranks of plans, each distinct one once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.table_lookups import table_lookups
from steptime._lookups.table import TableColumns
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.batch import DTYPES, Lookups, Pool
from steptime._models.lookups.fitted import LookupModels
from steptime._models.lookups.question import BACKWARD, OPTIMIZERS, TABLE_BATCHED, Lookup
from steptime._platforms.device import Device
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Setting = tuple[str, str]
"""Direction, and what the other parts of the GPU do (`models.kernels.question.OTHERS`)."""

_DTYPE = "float32"


@dataclass(frozen=True, eq=False)
class ExactLookups:
    """What the lookup models of a device say of subsets of a model's tables."""

    model: Dlrm
    device: Device
    pool: Pool
    settings: tuple[Setting, ...]

    @classmethod
    def of(cls, model: Dlrm, device: Device, settings: Sequence[Setting]) -> ExactLookups:
        """Of table-batched lookups of a model."""
        known = [table_lookups(table, model.batch) for table in model.tables]
        pool = Pool(TableColumns.of(known), np.full(len(known), DTYPES.index(_DTYPE), dtype=np.intp))
        return cls(model, device, pool, tuple(settings))

    def times(self, rank_of: npt.NDArray[np.integer], ranks: int) -> dict[Setting, Floats]:
        """Per setting [plans, ranks], ns; 0 where a rank has no table."""
        chosen = (rank_of[:, None, :] == np.arange(ranks)[None, :, None]).reshape(-1, rank_of.shape[1])
        distinct, index = np.unique(chosen, axis=0, return_inverse=True)
        some = distinct.any(axis=1)
        result = {}
        for setting, asked in self.of_settings(distinct[some]).items():
            each = np.zeros(len(distinct))
            each[some] = asked
            result[setting] = each[index.reshape(-1)].reshape(len(rank_of), ranks)
        return result

    def every_subset(self) -> SubsetTimes:
        """All of them, of few tables."""
        count = len(self.model.tables)
        chosen = (np.arange(1, 1 << count)[:, None] >> np.arange(count) & 1).astype(np.bool_)
        return SubsetTimes(self.settings, {setting: np.append(0.0, ns) for setting, ns in self.of_settings(chosen).items()})

    def of_settings(self, chosen: Flags) -> dict[Setting, Floats]:
        """Of subsets, [subsets, tables], none of them empty, in every setting: each model is asked once; ns."""
        result: dict[Setting, Floats] = {}
        for direction in dict.fromkeys(direction for direction, _ in self.settings):
            others = [other for item, other in self.settings if item == direction]
            asked = self._asked(np.tile(chosen, (len(others), 1)), direction, np.repeat(others, len(chosen)).tolist())
            result |= {(direction, other): ns for other, ns in zip(others, np.split(asked, len(others)), strict=True)}
        return result

    def of_subsets(self, chosen: Flags, direction: str, others: str) -> Floats:
        """Of subsets, [subsets, tables], none of them empty; ns."""
        return self._asked(chosen, direction, [others] * len(chosen))

    def _asked(self, chosen: Flags, direction: str, others: Sequence[str]) -> Floats:
        if self.device.transfer is not None:
            return self._carried_over(chosen, direction, others)
        count, share = len(chosen), self.device.limits.share
        lookups = Lookups(
            TABLE_BATCHED,
            direction,
            self.pool,
            member=np.nonzero(chosen)[1],
            starts=np.append(0, np.cumsum(chosen.sum(axis=1))),
            optimizer=np.full(count, OPTIMIZERS.index(self._optimizer(direction)), dtype=np.intp),
            dtype=np.full(count, DTYPES.index(_DTYPE), dtype=np.intp),
            weighted=np.zeros(count, dtype=np.bool_),
            warm=np.zeros(count, dtype=np.bool_),
            share=np.full(count, float(share)),
            others=np.array([OTHERS.index(other if share > 1 else "none") for other in others], dtype=np.intp),
        )
        return _models(self.device).form(TABLE_BATCHED, direction).times(lookups).time_ns

    def _carried_over(self, chosen: Flags, direction: str, others: Sequence[str]) -> Floats:
        """On a device whose models are another's: question by question."""
        known = [table_lookups(table, self.model.batch) for table in self.model.tables]
        asked = [
            Lookup(
                TABLE_BATCHED,
                direction,
                tuple(known[at] for at in np.flatnonzero(item)),
                self._optimizer(direction),
                others=other,
            )
            for item, other in zip(chosen, others, strict=True)
        ]
        return np.array([item.estimate.time_ns for item in self.device.lookup_estimates(asked)])

    def _optimizer(self, direction: str) -> str:
        return self.model.optimizer if direction == BACKWARD else "none"


@dataclass(frozen=True, eq=False)
class SubsetTimes:
    """What the lookup models say of every subset of a few tables; a subset's number has a bit for every table."""

    settings: tuple[Setting, ...]
    ns: Mapping[Setting, Floats]  # [subsets]

    def times(self, rank_of: npt.NDArray[np.integer], ranks: int) -> dict[Setting, Floats]:
        """As `ExactLookups.times`."""
        bits = 1 << np.arange(rank_of.shape[1])
        numbers = ((rank_of[:, None, :] == np.arange(ranks)[None, :, None]) * bits).sum(axis=2)
        return {item: ns[numbers] for item, ns in self.ns.items()}


def _models(device: Device) -> LookupModels:
    if isinstance(device.lookups, LookupModels):
        return device.lookups
    if device.lookups is None:
        raise InputError(f"{device.limits.name} has no fitted lookup models; `steptime fit` writes them")
    return _read(device.lookups)


@cache
def _read(file: Path) -> LookupModels:
    return LookupModels.load(file)
