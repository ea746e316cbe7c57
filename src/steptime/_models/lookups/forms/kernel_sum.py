"""Forms that are a sum of kernels by kind: how many of each kind a lookup launches, and how long they take together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.engine.stored import stored
from steptime._models.lookups.caches import LookupConstants, reference_lookups
from steptime._models.lookups.forms import LookupTimes, inside_of
from steptime._models.lookups.forms.one_table import (
    RATE,
    SPLIT_BYTES,
    KernelTerms,
    OneTable,
    Timed,
    Traffic,
    over,
    sizes_of,
    traffic_of,
)
from steptime._models.lookups.question import OPTIMIZERS, Lookups

KINDS = (
    "gather", "weights", "add", "sort", "unique", "coalesce", "update", "fill", "offsets", "segments", "scatter", "features",
)  # fmt: skip
"""Of kernels, over all implementations."""

# A kernel of a kind that no fitted row had: about what the shortest kernels of these lists take.
_UNKNOWN_NS = 2e3

Columns = list[Floats]


@dataclass(frozen=True)
class KernelSizes:
    """What kernels of the backward pass depend on, all [lookups]; tables without lookups count as one lookup."""

    one: OneTable
    traffic: Traffic
    bag: bool  # whether gradients are of bags, not of lookups
    adagrad: Floats
    lookups: Floats
    unique: Floats
    dim: Floats
    row: Floats  # bytes
    gradients: Floats  # bytes of a gradient for every lookup
    updated: Floats  # bytes of the distinct rows
    hot: Floats  # [lookups, places]
    cold: Floats
    half: Floats
    full: Floats  # of float32
    share: Floats  # equal shares of the GPU, of which the lookup has one
    crowded: Floats
    streaming: Floats
    fixed: Floats  # a microsecond

    @classmethod
    def of(cls, lookups: Lookups, device: LookupConstants) -> KernelSizes:
        """Of lookups of one implementation."""
        item = OneTable.of(lookups, device)
        total, unique = np.maximum(item.lookups, 1.0), np.maximum(item.unique, 1.0)
        return cls(
            one=item,
            traffic=traffic_of(item),
            bag=lookups.implementation.startswith("embedding_bag"),
            adagrad=(lookups.optimizer > OPTIMIZERS.index("sgd")).astype(np.float64),
            lookups=total,
            unique=unique,
            dim=item.dim,
            row=item.row,
            gradients=total * item.row,
            updated=unique * item.row,
            hot=np.maximum(item.tables.hottest, 1.0),
            cold=1.0 - item.warm,
            half=item.half,
            full=1.0 - item.half,
            share=item.shares.count,
            crowded=item.shares.crowded,
            streaming=item.shares.streaming.astype(np.float64),
            fixed=np.full(len(total), 1e3),
        )

    @property
    def device(self) -> LookupConstants:
        """What is taken for granted of the GPU."""
        return self.one.device

    @property
    def l2_kept(self) -> float:
        """Bytes of what a kernel before wrote that the GPU's cache still holds, about."""
        return self.device.l2_kept_bytes

    def features(self) -> Floats:
        """For corrections."""
        item, tables = self.one, self.one.tables
        counts = (tables.bin_lookups**2 / np.maximum(tables.bin_rows, 1.0)).sum(axis=1)
        columns = [
            np.log(self.lookups), np.log(item.batch), self.dim, item.item, np.log(self.gradients), np.log(self.unique),
            self.unique / self.lookups, np.log(self.updated), np.log(item.batch * self.row), item.warm, item.weighted,
            item.bfloat,
            np.log(self.hot + 1), self.hot[:, 0] / self.lookups, self.hot[:, 3] / self.lookups, np.log(tables.rows * self.row),
            np.log(self.lookups / item.batch), self.traffic.first, self.traffic.second, self.row % 128, self.row % 512,
            self.row,
            tables.bin_lookups[:, -3:].sum(axis=1) / self.lookups, tables.bin_lookups[:, 8:-3].sum(axis=1) / self.lookups,
            np.log(np.maximum(counts / self.lookups, 1e-3)), tables.locality[:, [6, 10, 14, 18]],
            tables.spread / np.maximum(tables.pooling, 1e-3), np.log(tables.longest + 1),
        ]  # fmt: skip
        return np.column_stack(columns)


@dataclass(frozen=True)
class Kind:
    """Kernels of one kind: their number, and their terms (and those of shares of a GPU)."""

    number: Callable[[KernelSizes], Floats]
    terms: Callable[[KernelSizes], tuple[Columns, Columns]]
    serial: Callable[[KernelSizes], Floats] | None = None  # nanoseconds of what happens one after the other
    moved: Callable[[KernelSizes], Floats] | None = None  # bytes that memory moves in any case
    spread: bool = True  # whether all SMs share the work, rather than wait for one of them

    def of(self, sizes: KernelSizes, features: Floats) -> KernelTerms:
        """What the time of these kernels is made of."""
        terms, more = self.terms(sizes)
        device, least = sizes.device, None
        if self.moved is not None:
            least = np.maximum(self.moved(sizes) - device.l2_bytes, 0.0) / device.peak_bytes_per_ns
        return KernelTerms.of(
            sizes.one,
            (np.column_stack(terms), np.column_stack(more)),
            features,
            serial=self.serial(sizes) if self.serial else None,
            least=least,
            spread=self.spread,
        )


@dataclass(frozen=True)
class KernelSum:
    """A fitted form: a `Timed` for each kind that fitted rows had. Implementations declare their kinds."""

    KERNELS: ClassVar[Mapping[str, Kind]]

    timed: Mapping[str, Timed] = field(metadata=stored(prefix="", names=KINDS))
    low: Floats
    high: Floats
    device: LookupConstants = field(default_factory=reference_lookups)

    def times(self, lookups: Lookups) -> LookupTimes:
        """By kind."""
        sizes = KernelSizes.of(lookups, self.device)
        features = sizes.features()
        number = np.column_stack([kind.number(sizes) for kind in self.KERNELS.values()])
        times = number * _UNKNOWN_NS
        inside = inside_of(self.low, self.high, sizes_of(sizes.one))
        for column, (name, kind) in enumerate(self.KERNELS.items()):
            has = number[:, column] > 0
            if name not in self.timed:
                inside &= ~has
            elif has.any():
                times[has, column] = self.timed[name].ns(kind.of(sizes, features).take(has))
        return LookupTimes(tuple(self.KERNELS), number, times, inside)


def gradient_bytes(sizes: KernelSizes) -> Floats:
    """That a kernel writes which makes a gradient, or copies a row, for every lookup."""
    return sizes.gradients


def _gather(sizes: KernelSizes) -> tuple[Columns, Columns]:
    """A block copies a row, 512 bytes at a time; rows come from memory where caches do not have them."""
    some, moved = sizes.lookups / 10, sizes.gradients / RATE
    beyond = over(sizes.gradients, sizes.l2_kept) / RATE
    sectors = sizes.one.sectors / RATE * sizes.lookups
    met, cold = sectors * sizes.traffic.met, sizes.fixed * sizes.cold
    pieces = some * np.ceil(sizes.row / 512)
    crowd, stream = sizes.share * sizes.crowded, sizes.share * sizes.streaming
    return (
        [sizes.fixed, cold, some, moved, beyond, met, pieces, cold * sizes.traffic.second],
        [some * sizes.share, moved * crowd, beyond * crowd, met * crowd, met * stream, pieces * sizes.share],
    )


@dataclass(frozen=True)
class RowsForward(KernelSum):
    """One kernel, or two where the result is large."""

    KERNELS: ClassVar[Mapping[str, Kind]] = {
        "gather": Kind(lambda sizes: np.ceil(sizes.gradients / SPLIT_BYTES), _gather, moved=gradient_bytes)
    }
