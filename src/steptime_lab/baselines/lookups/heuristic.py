"""Rules: bytes of each kind that a lookup moves, and few constants that make a time of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.table import Floats
from steptime._models.engine.stored import Arrays, pack, unpack
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.forms import LookupTimes
from steptime._models.lookups.question import BACKWARD, OPTIMIZERS
from steptime.errors import InputError
from steptime_lab.baselines.lookups.conditions import Factors, Seen
from steptime_lab.measurements.lookups import MeasuredLookups

# Memory is moved in sectors of so many bytes.
_SECTOR = 32
# What a sample of a table reads besides indices and rows in the published rules: the table's place, and two offsets.
PLACE_BYTES, OFFSET_BYTES = 32.0, 64.0
_INDEX_BYTES, _FLOAT_BYTES = 8, 4
# Where constants begin: 3 us whatever is moved, 4 TB/s of memory, 6 TB/s of the L2 cache.
START_NS, START_MEMORY, START_CACHE = np.log(3e3), np.log(4e3), np.log(6e3)
# Rows further off than this, in logarithms, count as if they were less far off.
_FAR = 0.2


@dataclass(frozen=True)
class Rule:
    """A published rule. Constants are logarithms, so that times are positive whatever is fitted."""

    moved: Callable[[Lookups], Floats]  # [lookups, kinds of bytes and sizes]
    time_ns: Callable[[Floats, Floats], Floats]  # of what is moved, with constants
    start: tuple[float, ...]

    def fit(self, measured: MeasuredLookups, _seed: int = 0, /) -> Heuristic:
        """Constants from whole GPUs (from all rows where there are none), then factors of conditions."""
        rows = measured.of("fit")
        whole = rows.take(rows.lookups.share == 1)
        used = whole if len(whole) else rows
        moved = self.moved(used.lookups)
        constants = _fitted(lambda guess: np.log(self.time_ns(moved, guess) / used.time_ns), self.start)
        logs = np.log(rows.time_ns / self.time_ns(self.moved(rows.lookups), constants))
        return Heuristic(self, RuleConstants(constants, Factors.fit(rows.lookups, logs), Seen.of(rows)))

    def load(self, arrays: Arrays) -> Heuristic:
        """The form that `arrays` were taken from."""
        return Heuristic(self, unpack(RuleConstants, arrays))


@dataclass(frozen=True)
class RuleConstants:
    """What was fitted of a rule."""

    constants: Floats
    factors: Factors
    seen: Seen


@dataclass(frozen=True)
class Heuristic:
    """A rule with its constants."""

    rule: Rule
    fitted: RuleConstants

    def times(self, lookups: Lookups) -> LookupTimes:
        """The whole lookup as one part."""
        fitted = self.fitted
        time_ns = self.rule.time_ns(self.rule.moved(lookups), fitted.constants) * np.exp(fitted.factors.logs(lookups))
        return fitted.seen.times(lookups, time_ns)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What the rule loads the same from."""
        return pack(self.fitted)


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


def _fitted(off: Callable[[Floats], Floats], start: tuple[float, ...]) -> Floats:
    """Constants with the least errors, of which large ones count less than their square."""
    try:
        optimize: Any = import_module("scipy.optimize")
    except ImportError as error:
        raise InputError("fitting lookup models needs SciPy: install steptime[fit]") from error
    result: Floats = optimize.least_squares(off, np.array(start), loss="soft_l1", f_scale=_FAR).x
    return result
