"""Rules: bytes of each kind that a lookup moves, few constants that make a time of them, and factors for its conditions.

`BytesOverBandwidth` is what planners use: every lookup reads its row from memory. The two others have a hit rate of the L2
cache, from sizes and uniformly drawn rows: both versions of the published rule (Lin et al.). Of the later one the curves of
bandwidth over bytes are a constant and a bandwidth each, as in the earlier. Multiplications of the backward pass are left out
of both: on this GPU they take a hundredth of what the rows' bytes take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from steptime._hardware.device import reference_device
from steptime._lookups.table import Floats, Places
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.forms import LookupTimes, inside_of, total_only
from steptime._models.lookups.question import BACKWARD, OPTIMIZERS, Lookups
from steptime_lab.fit.engine import fitting_library
from steptime_lab.measurements.lookups import MeasuredLookups

# Parts of a GPU that were measured are a half, a quarter and an eighth: 2 to the power of these places.
_SHARES = 4
# Medians of one condition after the other; they stop moving after two or three rounds.
_ROUNDS = 4
# Memory is moved in sectors of so many bytes.
_SECTOR = 32
# What a sample of a table reads besides indices and rows in the published rules: the table's place, and two offsets.
PLACE_BYTES, OFFSET_BYTES = 32.0, 64.0
_INDEX_BYTES, _FLOAT_BYTES = 8, 4
# Where constants begin: 3 us whatever is moved, 4 TB/s of memory, 6 TB/s of the L2 cache.
START_NS, START_MEMORY, START_CACHE = np.log(3e3), np.log(4e3), np.log(6e3)
# Rows further off than this, in logarithms, count as if they were less far off.
_FAR = 0.2
# Of the later version: warps of an SM (64 at 71 % occupancy), and the part of L2 that is taken to hold rows.
_WARPS, _L2_USED = 45.0, 0.9
# Rows of one block in the kernel of the earlier version: so many elements.
_BLOCK_ELEMENTS = 256.0
# Rows up to so wide have factors of their own in the later version: published 1.1 and 1.55, where the fit begins.
_NARROW, _NARROWEST = 64.0, 32.0
_NEVER = -50.0


@dataclass(frozen=True)
class Factors:
    """Logarithms of factors on a rule's time: for rows in cache, for optimisers, and for parts of a GPU by their company."""

    warm: Floats  # [2]
    optimizer: Floats  # [optimisers]
    part: Floats  # [shares, others]

    @classmethod
    def fit(cls, lookups: Lookups, logs: Floats) -> Factors:
        """Medians of ln(measured / the rule's time) of fitted rows. A part that was not measured is as slow as it is small."""
        parts = np.repeat(np.log(2.0) * np.arange(_SHARES)[:, None], len(OTHERS), axis=1)
        result = cls(np.zeros(2), np.zeros(len(OPTIMIZERS)), parts)
        unmeasured = np.isin(np.arange(parts.size), _places(lookups)[2], invert=True).reshape(parts.shape)
        for _ in range(_ROUNDS):
            for factors, places in zip(result._all(), _places(lookups), strict=True):
                without = logs - result.logs(lookups) + factors[places]
                for index in np.unique(places):
                    factors[index] = np.median(without[places == index])
        result.part[unmeasured] += result.part[0, 0]
        return result

    def logs(self, lookups: Lookups) -> Floats:
        """What is added to the logarithm of a rule's time, [lookups]."""
        result: Floats = np.sum(
            [factors[places] for factors, places in zip(self._all(), _places(lookups), strict=True)], axis=0
        )
        return result

    def _all(self) -> tuple[Floats, Floats, Floats]:
        return self.warm, self.optimizer, self.part.reshape(-1)


def _places(lookups: Lookups) -> tuple[Places, Places, Places]:
    """Where each lookup stands in each kind of factors."""
    share = np.clip(np.rint(np.log2(lookups.share)), 0, _SHARES - 1).astype(np.intp)
    return lookups.warm.astype(np.intp), lookups.optimizer, share * len(OTHERS) + lookups.others


@dataclass(frozen=True)
class Seen:
    """What fitted rows were like: their sizes, and how many kernels they launched."""

    low: Floats  # [sizes]
    high: Floats  # [sizes]
    kernels: float

    @classmethod
    def of(cls, measured: MeasuredLookups) -> Seen:
        """From fitted rows."""
        sizes = _sizes(measured.lookups)
        return cls(sizes.min(axis=0), sizes.max(axis=0), float(np.median([len(names) for names in measured.kernel_names])))

    def times(self, lookups: Lookups, time_ns: Floats) -> LookupTimes:
        """The answer of a form that knows no kernels."""
        return total_only("lookup", time_ns, self.kernels, inside_of(self.low, self.high, _sizes(lookups)))


def _sizes(lookups: Lookups) -> Floats:
    """Tables, samples, lookups and the widest row."""
    tables = lookups.pool.tables
    most = lookups.maxima(np.column_stack([tables.batch, tables.dim]))
    return np.column_stack([lookups.counts, most[:, 0], 1.0 + lookups.sums(tables.lookups), most[:, 1]])


@dataclass(frozen=True)
class Rule(ABC):
    """A published rule with what was fitted of it. Constants are logarithms, so that times are positive whatever is fitted."""

    START: ClassVar[tuple[float, ...]]  # where constants begin

    constants: Floats
    factors: Factors
    seen: Seen

    @staticmethod
    @abstractmethod
    def moved(lookups: Lookups) -> Floats:
        """What lookups move, [lookups, kinds of bytes and sizes]."""

    @staticmethod
    @abstractmethod
    def moved_ns(moved: Floats, constants: Floats) -> Floats:
        """The time of what is moved."""

    @classmethod
    def fit(cls, measured: MeasuredLookups, _seed: int = 0, /) -> Self:
        """Constants from whole GPUs (from all rows where there are none), then factors of conditions."""
        rows = measured.of("fit")
        whole = rows.take(rows.lookups.share == 1)
        used = whole if len(whole) else rows
        moved = cls.moved(used.lookups)
        constants = _fitted(lambda guess: np.log(cls.moved_ns(moved, guess) / used.time_ns), cls.START)
        logs = np.log(rows.time_ns / cls.moved_ns(cls.moved(rows.lookups), constants))
        return cls(constants, Factors.fit(rows.lookups, logs), Seen.of(rows))

    def times(self, lookups: Lookups) -> LookupTimes:
        """The whole lookup as one part."""
        time_ns = self.moved_ns(self.moved(lookups), self.constants) * np.exp(self.factors.logs(lookups))
        return self.seen.times(lookups, time_ns)


def _fitted(off: Callable[[Floats], Floats], start: tuple[float, ...]) -> Floats:
    """Constants with the least errors, of which large ones count less than their square."""
    optimize = fitting_library("scipy.optimize")
    result: Floats = optimize.least_squares(off, np.array(start), loss="soft_l1", f_scale=_FAR).x
    return result


@dataclass(frozen=True)
class SampleBytes:
    """Bytes that one sample moves in a table, on average, [tables of the pool]."""

    indices: Floats
    rows: Floats  # read, and backward written as well
    output: Floats


def sample_bytes(lookups: Lookups) -> SampleBytes:
    """As the published rules count them, with 8-byte indices and the measured output of 4-byte elements."""
    pool = lookups.pool
    passes = 2.0 if lookups.direction == BACKWARD else 1.0
    return SampleBytes(
        indices=sectors(_INDEX_BYTES * pool.tables.pooling),
        rows=passes * pool.tables.pooling * sectors(pool.row_bytes),
        output=sectors(_FLOAT_BYTES * pool.tables.dim),
    )


def state_bytes(lookups: Lookups) -> Floats:
    """Bytes of the optimiser's state that lookups read and write, [lookups]."""
    tables = lookups.pool.tables
    state = np.zeros(len(lookups))
    for name, each in (("adagrad", sectors(_FLOAT_BYTES * tables.dim)), ("rowwise_adagrad", np.full(len(tables), _SECTOR))):
        state += np.where(lookups.optimizer == OPTIMIZERS.index(name), 2.0 * lookups.sums(tables.lookups * each), 0.0)
    return state


def sectors(nbytes: Floats) -> Floats:
    """Bytes that are moved for so many."""
    moved: Floats = _SECTOR * np.ceil(nbytes / _SECTOR)
    return moved


class BytesOverBandwidth(Rule):
    """A constant and a bandwidth; indices, offsets, rows (backward: read and written) and outputs, in whole sectors."""

    START = (START_NS, START_MEMORY)

    @staticmethod
    def moved(lookups: Lookups) -> Floats:
        """Bytes."""
        each = sample_bytes(lookups)
        samples = lookups.pool.tables.batch
        all_bytes = samples * (PLACE_BYTES + OFFSET_BYTES + each.indices + each.rows + each.output)
        return (lookups.sums(all_bytes) + state_bytes(lookups))[:, None]

    @staticmethod
    def moved_ns(moved: Floats, constants: Floats) -> Floats:
        """The constant and the bytes over the bandwidth."""
        result: Floats = np.exp(constants[0]) + moved[:, 0] / np.exp(constants[1])
        return result


def _live(lookups: Lookups, warps: Floats | float) -> Floats:
    """Tables that are in work at once, [tables of the pool]: as many as give every SM its warps."""
    return np.ceil(reference_device().sms.value * warps / np.maximum(lookups.pool.tables.batch, 1.0))


class HitRateOfBags(Rule):
    """The earlier version: a bag hits if all of its rows are resident, C(resident, L) / C(rows, L)."""

    START = (START_NS, START_MEMORY, START_CACHE)

    @staticmethod
    def moved(lookups: Lookups) -> Floats:
        """Bytes from memory and from L2."""
        pool, each = lookups.pool, sample_bytes(lookups)
        tables = pool.tables
        l2_bytes = reference_device().cache_bytes.value
        cached = np.minimum(
            l2_bytes / _live(lookups, np.maximum(_BLOCK_ELEMENTS / tables.dim, 1.0)), pool.row_bytes * tables.rows
        )
        resident = cached / pool.row_bytes
        possible = (tables.pooling <= resident) & (tables.lookups > 0)
        bag = np.where(possible, tables.pooling, 0.0)
        logs = _ln_falling(resident, bag) - _ln_falling(tables.rows, bag)
        hits = np.where(possible, np.exp(np.clip(logs, _NEVER, 0.0)), 0.0)
        rows = tables.batch * each.rows
        again = np.maximum(rows - cached, 0.0)
        cache = tables.batch * (PLACE_BYTES + OFFSET_BYTES) + hits * again
        memory = tables.batch * (each.indices + each.output) + (1 - hits) * again + np.minimum(cached, rows)
        return np.column_stack([lookups.sums(memory) + state_bytes(lookups), lookups.sums(cache)])

    @staticmethod
    def moved_ns(moved: Floats, constants: Floats) -> Floats:
        """A constant, and the slower of memory and cache."""
        slower = np.maximum(moved[:, 0] / np.exp(constants[1]), moved[:, 1] / np.exp(constants[2]))
        result: Floats = np.exp(constants[0]) + slower
        return result


class HitRateOfRows(Rule):
    """The later version: each row hits by its chance of being resident, and narrow rows have factors."""

    START = (START_NS, START_MEMORY, START_CACHE, np.log(1.1), np.log(1.55))

    @staticmethod
    def moved(lookups: Lookups) -> Floats:
        """Bytes from memory and from L2, and the mean width of rows."""
        pool, each = lookups.pool, sample_bytes(lookups)
        tables = pool.tables
        looked_up = np.maximum(tables.lookups, 1e-9)
        l2_bytes = _L2_USED * reference_device().cache_bytes.value
        resident = np.minimum(l2_bytes / (_live(lookups, _WARPS) * pool.row_bytes), np.minimum(tables.rows, looked_up))
        distinct = -tables.rows * np.expm1(looked_up * np.log1p(-1 / np.maximum(tables.rows, 2.0)))
        missed = np.where(distinct > resident, resident + (looked_up - resident) * (1 - resident / tables.rows), distinct)
        hits = np.clip(1 - missed / looked_up, 0.0, 1.0)
        memory = tables.batch * (PLACE_BYTES + OFFSET_BYTES + each.indices + each.output + (1 - hits) * each.rows)
        return np.column_stack(
            [
                lookups.sums(memory) + state_bytes(lookups),
                lookups.sums(tables.batch * hits * each.rows),
                lookups.sums(tables.dim) / lookups.counts,
            ]
        )

    @staticmethod
    def moved_ns(moved: Floats, constants: Floats) -> Floats:
        """As in the earlier version, with factors for narrow rows."""
        width = moved[:, 2]
        factor = np.where(width > _NARROW, 0.0, np.where(width > _NARROWEST, constants[3], constants[4]))
        return HitRateOfBags.moved_ns(moved * np.exp(factor)[:, None], constants)


def _ln_falling(top: Floats, terms: Floats) -> Floats:
    """ln(top * (top - 1) * ... ) of so many terms, also of broken numbers."""
    return _ln_gamma(top + 1) - _ln_gamma(np.maximum(top - terms, 0.0) + 1)


def _ln_gamma(number: Floats) -> Floats:
    """Of numbers of at least 1, to nine digits: Stirling's series from 8 on, reached by multiplication."""
    up = number + 7
    series = 1 / (12 * up) - 1 / (360 * up**3) + 1 / (1260 * up**5)
    result: Floats = (up - 0.5) * np.log(up) - up + 0.5 * np.log(2 * np.pi) + series
    for step in range(7):
        result = result - np.log(number + step)
    return result
