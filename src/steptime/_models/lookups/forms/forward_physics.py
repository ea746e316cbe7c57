"""What a table-batched forward launch takes by physics: step latencies of its programs, and what caches and memory deliver.

A program has as many bags of one table as fit its lanes. It takes a step for four lookups of each bag, until its longest bag
ends. Bags are taken as drawn independently, so what a program's bags need are order statistics of the lengths. Programs run
side by side until work runs out; then the longest one is waited for. Times are in nanoseconds.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.statistics import QUANTILES
from steptime._lookups.table import Floats, TableColumns
from steptime._models.lookups.caches import LookupConstants, misses
from steptime._models.lookups.question import Lookups, Pool

# Of the kernel: quads (four elements) of a program, and lookups of a bag that a step takes.
_QUADS, _AT_ONCE = 128, 4

# Lengths are read at points that lie this close: between quantiles, and per octave of rarity beyond the last but one.
_PER_QUANTILE, _PER_OCTAVE, _OCTAVES = 4, 2, 12
_LINE, _SECTOR = 128.0, 32.0
_INDEX_BYTES, _OUT_BYTES = 8.0, 4.0
# Locality is read at windows of 2^14 lookups: about what runs on the GPU at once.
_WINDOW = 14
# Programs that an SM runs at once, of four-byte and two-byte rows. Fit rows with one table of equal bags: 8,192 programs of
# four-byte rows take three times as long as 2,048 (six waves, two), and of two-byte rows 2,048 programs are one wave.
_RESIDENT = (12.0, 16.0)
# A miss of one of four rows delays a step as a whole.
_ROWS_OF_STEP = 4.0


@dataclass(frozen=True)
class Programs:
    """Of each table: its programs, the mean one and the longest one. `bag_steps` adds up over the bags of a program."""

    bags: Floats  # of a program
    number: Floats
    steps: Floats  # mean over programs: while any bag runs
    log_steps: Floats  # mean over programs: sum over steps of log2 of the bags that still run
    bag_steps: Floats  # mean over programs
    spread: Floats  # standard deviation of `steps` over programs
    longest: Floats  # steps of the program with the longest bag
    longest_log: Floats
    longest_bags: Floats

    @classmethod
    def of(cls, tables: TableColumns) -> Programs:
        """From the tables' dims, batches and quantiles of lengths."""
        wide = np.maximum(np.ceil(tables.dim / 4), 1.0)
        bags = np.minimum(np.maximum(_QUADS // wide, 1.0), np.maximum(tables.batch, 1.0))
        steps = np.ceil(np.rint(_lengths(tables)) / _AT_ONCE)
        first, others, behind, square = (np.zeros(len(tables)) for _ in range(4))
        for number in np.unique(bags):
            here = bags == number
            longest, rest, after = _weights(int(number))
            first[here], others[here], behind[here] = steps[here] @ longest, steps[here] @ rest, steps[here] @ after
            square[here] = steps[here] ** 2 @ longest
        mean = steps @ _widths()
        most = np.ceil(tables.longest / _AT_ONCE)
        return cls(
            bags=bags,
            number=np.ceil(tables.batch / bags) * np.ceil(wide / _QUADS),
            steps=first,
            log_steps=others,
            bag_steps=bags * mean,
            spread=np.sqrt(np.maximum(square - first**2, 0.0)),
            longest=most,
            longest_log=np.minimum(behind, most * np.log2(bags)),
            longest_bags=most + (bags - 1) * mean,
        )


@cache
def _edges() -> Floats:
    """Shares of bags between which lengths are read once, from 0 to 1."""
    knots = np.array((0.0, *QUANTILES[:-1]))
    inner = [np.linspace(low, high, _PER_QUANTILE, endpoint=False) for low, high in pairwise(knots)]
    rare = (1 - knots[-1]) * 2.0 ** -(np.arange(_PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)
    return np.concatenate([*inner, 1 - rare, [1.0]])


def _widths() -> Floats:
    return np.diff(_edges())


@cache
def _points() -> Floats:
    """Where between the edges lengths are read: the middle; the geometric middle of rarities beyond the last quantile."""
    low, high = _edges()[:-1], _edges()[1:]
    rarest = (1 - low[-1]) / 3
    tail = 1 - np.sqrt((1 - low) * np.maximum(1 - high, rarest**2 / (1 - low)))
    return np.where(low < QUANTILES[-2], (low + high) / 2, tail)


def _lengths(tables: TableColumns) -> Floats:
    """Lengths of bags at the points, [tables, points]: linear between quantiles, an exponential tail up to the longest bag."""
    points, knots = _points(), np.array((0.0, *QUANTILES[:-1]))
    lowest = np.maximum(2 * tables.lengths[:, :1] - tables.lengths[:, 1:2], 0.0)
    known = np.concatenate([lowest, tables.lengths[:, :-1]], axis=1)
    inner = points[points < knots[-1]]
    low = np.searchsorted(knots, inner, side="right") - 1
    part = (inner - knots[low]) / (knots[low + 1] - knots[low])
    between = known[:, low] * (1 - part) + known[:, low + 1] * part
    # The median of the longest of so many bags: 1 - ln(2) / batch, about.
    begin, tail = -math.log(1 - knots[-1]), -np.log(1 - points[len(inner) :])
    end = np.maximum(np.log(np.maximum(tables.batch, 1.0) / math.log(2)), begin + 0.3)[:, None]
    part = np.clip((tail - begin) / (end - begin), 0.0, 1.0)
    beyond = known[:, -1:] * (1 - part) + tables.longest[:, None] * part
    return np.concatenate([between, beyond], axis=1)


@cache
def _weights(bags: int) -> tuple[Floats, Floats, Floats]:
    """Weights of the points in the longest of so many bags, in the others by log2, and in those others if the first is given.

    While n bags run a step counts log2(n): the n-th longest bag adds log2(n / (n - 1)) for each of its steps.
    """
    logs = np.diff(np.log2(np.arange(1, bags + 1)))
    longest = np.diff(_edges() ** bags)
    if bags == 1:
        return longest, np.zeros_like(longest), np.zeros_like(longest)
    return longest, logs @ np.diff(_below(bags)[1:], axis=1), logs @ np.diff(_below(bags - 1), axis=1)


def _below(bags: int) -> Floats:
    """Chance that the n-th longest of so many bags is within each edge, [bags, edges]: at most n - 1 bags lie beyond it."""
    beyond, number = 1 - _edges(), np.arange(bags)[:, None]
    ways = np.array([float(math.comb(bags, int(n))) for n in range(bags)])[:, None]
    return np.cumsum(ways * beyond**number * (1 - beyond) ** (bags - number), axis=0)


@dataclass(frozen=True)
class ForwardTables:
    """Of each table of a pool, [tables]."""

    programs: Programs
    lookups: Floats
    dim: Floats
    batch: Floats
    half: Floats  # 1 where elements have two bytes
    row_bytes: Floats
    sector_bytes: Floats  # of a row
    bytes: Floats  # of the table
    l1_missed: Floats  # share of lookups
    l2_missed: Floats  # share of lookups, the first ones of rows included
    single: Floats  # share of lookups that are the only ones of their row
    footprint: Floats  # bytes of cache lines that are touched
    fixed: Floats  # 1 where all bags are equally long
    index_sectors: Floats  # that four indices of a bag lie in
    out: Floats  # bytes of the output
    local: Floats  # distinct rows at once, over those of a random order
    device: LookupConstants

    @classmethod
    def of(cls, pool: Pool, device: LookupConstants) -> ForwardTables:
        """From a pool's statistics."""
        tables, row = pool.tables, pool.row_bytes
        lookups, unique = tables.lookups, tables.unique
        each = np.maximum(lookups, 1.0)
        sectors = np.ceil(row / _SECTOR) * _SECTOR
        footprint = _lines(tables, row)
        return cls(
            programs=Programs.of(tables),
            lookups=lookups,
            dim=tables.dim,
            batch=tables.batch,
            half=(pool.item < _OUT_BYTES).astype(np.float64),
            row_bytes=row,
            sector_bytes=sectors,
            bytes=tables.rows * row,
            l1_missed=misses(tables, device.l1_kept_bytes / sectors, 1 / device.sms) / each,
            l2_missed=misses(tables, device.l2_kept_bytes * np.maximum(unique, 1.0) / np.maximum(footprint, 1.0)) / each,
            single=tables.bin_rows[:, 0] / each,
            footprint=footprint + _INDEX_BYTES * lookups + _OUT_BYTES * tables.batch * tables.dim,
            fixed=_fixed(tables).astype(np.float64),
            index_sectors=_index_sectors(tables),
            out=_OUT_BYTES * tables.batch * tables.dim,
            local=tables.locality[:, _WINDOW],
            device=device,
        )

    def take(self, places: npt.NDArray[Any]) -> ForwardTables:
        """Some of the tables."""
        programs = Programs(*(getattr(self.programs, column.name)[places] for column in fields(Programs)))
        columns = {name: value[places] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return ForwardTables(programs=programs, device=self.device, **columns)

    @property
    def index_bytes(self) -> Floats:
        """Of the indices."""
        return _INDEX_BYTES * self.lookups


def _lines(tables: TableColumns, row: Floats) -> Floats:
    """Bytes of cache lines that the rows touch: short rows share lines with others, which are looked up or not."""
    shared = np.maximum(_LINE / row, 1.0)
    density = np.clip(tables.unique / np.maximum(tables.rows, 1.0), 0.0, 1.0 - 1e-12)
    short = np.maximum(tables.rows, 1.0) / shared * -np.expm1(shared * np.log1p(-density)) * _LINE
    long = tables.unique * (np.ceil(row / _SECTOR) * _SECTOR + np.where(row % _LINE > 0, _SECTOR, 0.0))
    return np.where(row < _LINE, np.minimum(short, tables.unique * _LINE), long)


def _fixed(tables: TableColumns) -> npt.NDArray[np.bool_]:
    fixed: npt.NDArray[np.bool_] = (tables.spread < 1e-3) & (tables.lookups > 0)
    return fixed


def _index_sectors(tables: TableColumns) -> Floats:
    """A sector has four indices. Bags of a fixed length that four divides begin with a sector, others anywhere."""
    rest = np.rint(tables.pooling) % 4
    result: Floats = np.where(_fixed(tables), np.select([rest == 0, rest == 2], [1.0, 1.5], 1.75), 1.75)
    return result


@dataclass(frozen=True)
class Constants:
    """All positive, fitted."""

    launch: float
    program: float  # until its first step
    step: float  # of one bag, all rows in the first-level cache
    step_cold: float  # more where indices come from memory
    step_memory: float  # more where rows do
    step_l2: float  # more where rows come from the second-level cache
    bags: float  # a step more for each doubling of the running bags; likewise below
    bags_cold: float
    bags_memory: float
    bags_l2: float
    bags_unaligned: float  # for each sector of indices beyond one
    bag_unaligned: float  # the same for each running bag
    bag_unaligned_cold: float
    missing: float  # how fast misses come to delay every step
    l1_rate: float  # bytes per ns
    l2_rate: float
    memory_rate: float
    line_rate: float  # cache lines per ns that are asked for
    index_lines: float  # lines that an index's sector counts as
    row_least: float  # bytes of memory traffic that even a short row costs, the root of squares with its own
    kept: float  # bytes of a warm launch that the second-level cache still holds half of
    kept_slope: float
    weights: float  # share that per-sample weights add to steps
    half_step: float  # factors of two-byte elements
    half_bags: float
    half_rate: float  # of what the same number of four-byte elements takes from the first-level cache
    overlap: float  # part of the work that runs while the longest program does
    softness: float
    wave: float  # part of a wave of equal programs that its last one wastes
    uneven: float  # how fast unequal programs fill that waste
    late: float  # of the work, when the last of many longest programs begins
    early: float  # waves that begin at once

    @classmethod
    def of(cls, values: Floats) -> Constants:
        """From values in order."""
        return cls(*(float(value) for value in values))

    def values(self) -> Floats:
        """In order."""
        return np.array(astuple(self))


@dataclass(frozen=True)
class SharePowers:
    """Powers of the number of equal shares that a GPU is divided into, by what the other shares do. Not negative, fitted."""

    memory: Floats  # [others] on the time of memory traffic
    l2: Floats  # [others] on the time of second-level traffic
    steps: Floats  # [others] on step latencies
    kept: Floats  # [others] on what a warm launch needs of the second-level cache

    @classmethod
    def of(cls, values: Floats) -> SharePowers:
        """From values, what belongs to one power after the other; a whole GPU has none."""
        return cls(*np.concatenate([np.zeros((len(fields(cls)), 1)), values.reshape(len(fields(cls)), -1)], axis=1))

    def values(self) -> Floats:
        """The inverse of `of`."""
        return np.concatenate([getattr(self, field.name)[1:] for field in fields(self)])


@dataclass(frozen=True)
class Costs:
    """Of each table, warm and what is added where nothing is in the caches; times of a whole GPU."""

    longest: tuple[Floats, Floats]  # the longest program
    work: tuple[Floats, Floats]  # all programs one after the other
    own: Floats  # cube of the time that SMs take to read all rows from their own caches
    l2: Floats  # cube of the time that the second-level cache takes
    memory: tuple[Floats, Floats]  # time of memory traffic

    @classmethod
    def of(cls, constants: Constants, tables: ForwardTables) -> Costs:
        """Of all tables of a pool."""
        known, programs = constants, tables.programs
        by_first = -np.expm1(-_ROWS_OF_STEP * tables.l1_missed)
        all_rows = tables.lookups * tables.sector_bytes
        elements = 4 * tables.lookups * tables.dim * np.where(tables.half > 0, known.half_rate, 1.0)
        lines = tables.lookups * (np.maximum(tables.sector_bytes / 128, 1.0) + known.index_lines * tables.index_sectors)
        traffic = tables.lookups * np.hypot(tables.row_bytes, known.row_least) * tables.l2_missed + tables.index_bytes
        return cls(
            # The longest bag goes on when others have ended: fewer of its rows were fetched before.
            longest=_steps(
                known, tables, by_first, (tables.single + tables.l2_missed) / 2,
                (programs.longest, programs.longest_log, programs.longest_bags, np.ones_like(all_rows)),
            ),
            work=_steps(
                known, tables, by_first, tables.l2_missed,
                (
                    programs.number * programs.steps, programs.number * programs.log_steps,
                    programs.number * programs.bag_steps, programs.number,
                ),
            ),
            own=(elements / known.l1_rate) ** 3 + (lines / known.line_rate) ** 3,
            l2=(all_rows * tables.l1_missed / known.l2_rate) ** 3,
            memory=(tables.out / known.memory_rate, traffic / known.memory_rate),
        )  # fmt: skip


def _steps(
    known: Constants, tables: ForwardTables, l2: Floats, missed: Floats, counts: tuple[Floats, Floats, Floats, Floats]
) -> tuple[Floats, Floats]:
    """Time of so many steps, log2 of bags, bags and programs: warm, and what is added where caches are cold."""
    steps, logs, bags, programs = counts
    memory = -np.expm1(-known.missing * missed)
    unaligned = tables.index_sectors - 1
    by_step = np.where(tables.half > 0, known.half_step, 1.0)
    by_bags = np.where(tables.half > 0, known.half_bags, 1.0)
    warm = (
        steps * by_step * (known.step + known.step_l2 * l2)
        + logs * by_bags * (known.bags + known.bags_l2 * l2 + known.bags_unaligned * unaligned)
        + bags * by_bags * known.bag_unaligned * unaligned
        + programs * known.program
    )
    cold = (
        steps * by_step * (known.step_cold + known.step_memory * memory)
        + logs * by_bags * (known.bags_cold + known.bags_memory * memory)
        + bags * by_bags * known.bag_unaligned_cold * unaligned
    )
    return warm, cold


@dataclass(frozen=True)
class ForwardLaunch:
    """A launch by physics. [lookups], but for those of members."""

    time: Floats
    longest: Floats  # time of the longest program
    long: Floats  # tables with about as long programs
    work: Floats  # of all programs, on all places for programs
    flow: Floats  # the same, or longer where caches or memory limit it
    waited: Floats  # beyond the flow
    partial: Floats  # of it, what a last wave wastes
    waves: Floats
    uneven: Floats  # squared variation of programs
    cold: Floats  # share of what a warm launch would find that is not there
    member_longest: Floats  # [members]
    member_flow: Floats  # [members]


def launched(
    constants: Constants, powers: SharePowers, tables: ForwardTables, lookups: Lookups, costs: Costs | None = None
) -> ForwardLaunch:
    """Launches of tables of the pool; `costs` are those of the tables, where they are known already."""
    costs = costs or Costs.of(constants, tables)
    member, at = lookups.member, lookups.lookup
    share, others = lookups.share, lookups.others
    places = tables.device.sms * np.where(lookups.dtype > 0, _RESIDENT[1], _RESIDENT[0]) / share
    needed = lookups.sums(tables.footprint) * share ** powers.kept[others]
    cold = 1 - lookups.warm / (1 + (needed / constants.kept) ** constants.kept_slope)
    slower = np.where(lookups.weighted, 1 + constants.weights, 1.0) * share ** powers.steps[others]
    here = cold[at]
    longest = (costs.longest[0][member] + here * costs.longest[1][member]) * slower[at]
    work = (costs.work[0][member] + here * costs.work[1][member]) * (slower / places)[at]
    memory = (costs.memory[0][member] + here * costs.memory[1][member]) * (share ** powers.memory[others])[at]
    own, l2 = costs.own[member] * (share**3)[at], costs.l2[member] * (share ** (3 * powers.l2[others]))[at]
    flow = np.cbrt(own + l2 + memory * memory * memory + work * work * work)
    most, all_work, all_flow = lookups.member_maxima(longest), lookups.member_sums(work), lookups.member_sums(flow)
    number = tables.programs.number
    programs = np.maximum(lookups.sums(number), 1.0)
    waves = programs / places
    mean = all_work / waves
    square = (1 + (tables.programs.spread / np.maximum(tables.programs.steps, 1.0)) ** 2) / np.maximum(number, 1.0)
    uneven = np.maximum(lookups.member_sums(square[member] * work * work) * programs / all_work**2 - 1, 0.0)
    partial = constants.wave * np.exp(-constants.uneven * uneven) * (np.ceil(waves - 1e-9) - waves) * mean
    # Where in the launch the longest programs are is not known. Of n places the last is at n / (n + 1), on average.
    long = lookups.member_sums(_eighth(longest / most[at]))
    late = constants.late * all_work * np.maximum(1 - constants.early / waves, 0.0) ** 2 * long / (long + 1)
    alone = most + late - constants.overlap * all_work
    waited = np.where(waves > 1, np.maximum(alone, partial), alone)
    soft = constants.softness * np.minimum(most, all_flow)
    time = constants.launch + all_flow + (waited + np.sqrt(waited * waited + soft * soft)) / 2
    return ForwardLaunch(time, most, long, all_work, all_flow, waited, partial, waves, uneven, cold, longest, flow)


def _eighth(values: Floats) -> Floats:
    square = values * values
    fourth = square * square
    return fourth * fourth
